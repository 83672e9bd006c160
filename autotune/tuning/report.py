"""The answer of a tuning as plain data and sentences: the winner, its evidence, and why it won."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.search.standing import Standing, peak_memory_bytes
from autotune.specs import Plan, Trial, TrialState, Tuning
from autotune.tuning.service import Best, best_of

Parts = dict[str, float]


def tuning_data(tuning: Tuning, trials: Sequence[Trial]) -> dict[str, Any]:
    """The object of `tune --json`: tuning, state, best, trials, gpu_s_spent (others script against these names)."""
    best = best_of(trials, tuning.cluster)
    return {
        "tuning": tuning.id,
        "state": tuning.state.value,
        "stop_reason": tuning.stop_reason,
        "best": best_data(best, tuning) if best else None,
        "trials": [trial_data(trial) for trial in trials],
        "gpu_s_spent": tuning.gpu_s_spent,
    }


def best_data(best: Best, tuning: Tuning) -> dict[str, Any]:
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
        "why": why(best, tuning),
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


def why(best: Best, tuning: Tuning) -> list[str]:
    """One sentence for each of the three next plans of other degrees: where a step of it goes that ours does not."""
    own = _parts(best.trials)
    lines = []
    for rival in _rivals(best):
        parts = rival_parts(rival, best)
        behind = 1.0 - rival.tokens_per_s_per_gpu / best.standing.tokens_per_s_per_gpu
        lines.append(f"{rival.plan.key} is {behind:.1%} slower: {_difference(own, parts)}")
    return lines


def _rivals(best: Best) -> Sequence[Standing]:
    """The fastest plan of each other (tp, pp, dp), at most three."""
    seen = {_degrees(best.standing.plan)}
    found = []
    for standing in best.runners_up:
        if _degrees(standing.plan) not in seen:
            seen.add(_degrees(standing.plan))
            found.append(standing)
    return found[:3]


def _degrees(plan: Plan) -> tuple[int, int, int]:
    return (plan.tp, plan.pp, plan.dp)


def rival_parts(rival: Standing, best: Best) -> Parts:
    """The measured parts of a runner-up's step."""
    return _parts([trial for trial in best.all_trials if trial.plan == rival.plan])


def _parts(trials: Sequence[Trial]) -> Parts:
    """Measured seconds of a step: computing, exposed communication, and the rest (bubble, launch gaps, waiting)."""
    readings = [trial.reading for trial in trials if trial.reading is not None and trial.state is TrialState.COMPLETE]
    step_s = _median([item.step_time_s for item in readings]) or 0.0
    calc_s = _median([item.t_calc_s for item in readings])
    exposed_s = _median([item.t_comm_exposed_s for item in readings])
    if calc_s is None or exposed_s is None:
        return {"step": step_s}
    traced_s = _median([item.traced_step_s for item in readings]) or step_s
    return {
        "step": step_s,
        "computing": calc_s,
        "exposed communication": exposed_s,
        "idle": _idle(traced_s, calc_s, exposed_s),
    }


def _idle(traced_s: float, calc_s: float, exposed_s: float) -> float:
    return max(traced_s - calc_s - exposed_s, 0.0)


def _difference(own: Parts, other: Parts) -> str:
    """The parts of the rival's step that are longer, largest first; shares of our step."""
    if set(own) != set(other) or len(own) == 1:
        return "its step was not traced"
    deltas = {name: other[name] - own[name] for name in own if name != "step"}
    longer = sorted((name for name in deltas if deltas[name] > 0.01 * own["step"]), key=lambda name: -deltas[name])
    if not longer:
        return "no single part explains it"
    return ", ".join(f"{name} {other[name] * 1e3:.0f} ms a step instead of {own[name] * 1e3:.0f} ms" for name in longer)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
