"""The answer of a tuning as plain data and sentences: the winner, its evidence, and why it won."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.search.explanation import Explanation
from autotune.search.standing import peak_memory_bytes
from autotune.specs import Profile, Trial, Tuning
from autotune.tuning.explanation import explain_best
from autotune.tuning.service import Best, best_of


def tuning_data(tuning: Tuning, trials: Sequence[Trial], profile: Profile | None = None) -> dict[str, Any]:
    """The object of `tune --json`: tuning, state, best, explanation, trials, gpu_s_spent (others script against it).

    Args:
        tuning: as it stands.
        trials: its trials.
        profile: of the cluster, for the estimates that the explanation needs beside the measurements.
    """
    best = best_of(trials, tuning.cluster)
    explanation = explain_best(best, tuning, profile) if best else None
    return {
        "tuning": tuning.id,
        "state": tuning.state.value,
        "stop_reason": tuning.stop_reason,
        "sampler": tuning.sampler.value,
        "best": best_data(best, explanation, tuning) if best and explanation else None,
        "explanation": explanation.to_data() if explanation else None,
        "trials": [trial_data(trial) for trial in trials],
        "gpu_s_spent": tuning.gpu_s_spent,
    }


def best_data(best: Best, explanation: Explanation, tuning: Tuning) -> dict[str, Any]:
    """The winner: medians over its repeats, the worst peak of memory, and whether another plan may be as fast."""
    readings = [trial.reading for trial in best.trials if trial.reading is not None]
    return {
        "plan": best.standing.plan.to_data(),
        "tokens_per_s_per_gpu": best.standing.tokens_per_s_per_gpu,
        "t_comm_s": _median([item.t_comm_s for item in readings]),
        "t_comm_exposed_s": _median([item.t_comm_exposed_s for item in readings]),
        "t_calc_s": _median([item.t_calc_s for item in readings]),
        "mu": _median([item.mu for item in readings]),
        "mfu": _median([item.mfu for item in readings]),
        "step_time_s": _median([item.step_time_s for item in readings]),
        "peak_memory_bytes": max(peak_memory_bytes(item, tuning.cluster) for item in readings),
        "memory_source": readings[0].memory_source,
        "repeats": best.standing.repeats,
        "interval": list(best.standing.interval),
        "too_close_to_call": [plan.to_data() for plan in best.too_close],
        "preferred_because": best.reason or None,
        "why": [item.text for item in explanation.losses],
    }


def trial_data(trial: Trial) -> dict[str, Any]:
    """One trial: measured beside estimated."""
    reading = trial.reading
    return {
        "number": trial.number,
        "plan": trial.plan.to_data(),
        "state": trial.state.value,
        "failure": trial.failure.to_data() if trial.failure else None,
        "tokens_per_s_per_gpu": reading.tokens_per_s_per_gpu if reading else None,
        "interval": list(reading.interval_tokens_per_s_per_gpu) if reading else None,
        "step_time_s": reading.step_time_s if reading else None,
        "t_calc_s": reading.t_calc_s if reading else None,
        "t_comm_s": reading.t_comm_s if reading else None,
        "t_comm_exposed_s": reading.t_comm_exposed_s if reading else None,
        "mu": reading.mu if reading else None,
        "peak_allocated_bytes": reading.peak_allocated_bytes if reading else None,
        "peak_reserved_bytes": reading.peak_reserved_bytes if reading else None,
        "estimate": trial.estimate.to_data() if trial.estimate else None,
        "gpu_s": trial.gpu_s,
        "setup_s": trial.setup_s,
        "fingerprint": trial.fingerprint_key,
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
