"""Answers as plain data: what the API sends and what the command line prints are made here, by the same functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autotune.errors import InputError
from autotune.explain.explanation import Explanation, explain_best
from autotune.explain.findings import findings
from autotune.explain.whatif import Setting
from autotune.frameworks import launch_arguments
from autotune.knowledge.answer import Answer, best_known
from autotune.knowledge.recording import ALL_TRIALS
from autotune.ports.store import KnowledgeStore, Store
from autotune.search.offline import Ranking
from autotune.search.ranking import Best, best_of, peak_memory_bytes
from autotune.specs import ClusterSpec, ModelSpec, Plan, Profile, Trial, Tuning, Workload
from autotune.tuning.targets import frameworks_of, refusal, runnable

NEWEST = 50
"""Among so many tunings the newest that measured something is looked for, where none is named."""


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
        "frameworks": _frameworks(best, tuning) if best and tuning.state.ended else [],
        "findings": _findings(best, tuning, profile) if best else [],
    }


def _findings(best: Best, tuning: Tuning, profile: Profile | None) -> list[dict[str, Any]]:
    """What is doubtful about the winner, by its estimate."""
    estimate = next((trial.estimate for trial in best.trials if trial.estimate is not None), None)
    if estimate is None:
        return []
    setting = Setting(model=tuning.model, cluster=tuning.cluster, workload=tuning.workload, profile=profile)
    return [each.to_data() for each in findings(setting, best.ranked.plan, estimate)]


def _frameworks(best: Best, tuning: Tuning) -> list[dict[str, Any]]:
    ranked = [best.ranked, *best.runners_up]
    plans, speeds = [each.plan for each in ranked], [each.tokens_per_s_per_gpu for each in ranked]
    return frameworks_of(tuning.model, tuning.cluster, tuning.workload, plans, speeds)


def tuning_answer(store: Store, tuning: Tuning, place: int | None = None) -> dict[str, Any]:
    """A tuning as it is shown: its request, where it stands, all its trials, the best plan and why it is the best.

    `place` is the one that it has among what the same principal has queued; None where it is not queued.
    """
    data = tuning_data(tuning, store.trials(tuning.id), store.profile(tuning.cluster.key))
    return data | {"place": place, "request": tuning.to_data()}


def queue_text(place: int) -> str:
    """Where a queued tuning stands, in words."""
    return f"number {place} of what is queued for the same principal in its pool"


def submitted_answer(tuning: Tuning, *, created: bool, place: int | None = None) -> dict[str, Any]:
    """What became of a request for a tuning, or of one that was taken back; `place` is that of a queued one."""
    return {
        "tuning": tuning.id,
        "created": created,
        "state": tuning.state.value,
        "message": tuning.message,
        "place": place,
        "request": tuning.to_data(),
    }


def tuning_row(tuning: Tuning, trials: Sequence[Trial], place: int | None = None) -> dict[str, Any]:
    """A tuning as one row of a list: its request by name, where it stands, and its best plan so far."""
    found = best_of(trials, tuning.cluster)
    return {
        "tuning": tuning.id,
        "created_at": tuning.created_at.isoformat(),
        "model": tuning.model.name,
        "cluster": tuning.cluster.name,
        "state": tuning.state.value,
        "message": tuning.message,
        "place": place,
        "trials": len(trials),
        "gpu_s_spent": tuning.gpu_s_spent,
        "plan": found.ranked.plan.to_data() if found else None,
        "tokens_per_s_per_gpu": found.ranked.tokens_per_s_per_gpu if found else None,
        "pool": tuning.pool,
        "principal": tuning.principal,
    }


def newest_measured(store: Store) -> Tuning | None:
    """The newest tuning with a complete trial; None where none of the newest has one."""
    return next((each for each in store.tunings(NEWEST) if best_of(store.trials(each.id), each.cluster)), None)


def fastest_measured(store: Store, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Tuning | None:
    """The newest tuning that measured the best plan of exactly that, runs of a plan pooled over all tunings; None where
    nothing was measured for it.
    """
    best = best_of(store.best_trials(model, cluster, workload, ALL_TRIALS), cluster)
    if best is None:
        return None
    return store.tuning(max(best.trials, key=lambda trial: trial.finished_at or trial.started_at).tuning_id)


def best_answer(store: Store, tuning: Tuning, target: str | None = None) -> dict[str, Any]:
    """The best plan of a tuning: the winner, its evidence, the runner-up; which frameworks run it; for one of them the
    launch of the fastest measured plan that it runs.

    Raises:
        InputError: it has no complete trial yet; no such framework or version.
        IllegalPlanError: the framework runs none of its measured plans.
    """
    data = measured_answer(store, tuning)
    if target is None:
        return data
    return data | {"launch": _launch_of(data, store, tuning, target)}


def _launch_of(data: dict[str, Any], store: Store, tuning: Tuning, target: str) -> dict[str, Any]:
    """The launch of the fastest plan that the framework runs, with what it is instead of the winner."""
    question = tuning.model, tuning.cluster, tuning.workload
    best = best_of(store.trials(tuning.id), tuning.cluster)
    assert best is not None, "it was answered"
    plan = runnable(target, *question, [best.ranked, *best.runners_up])
    launch = launch_arguments(target, *question, plan).to_data()
    if plan != best.ranked.plan:
        why = refusal(target, *question, best.ranked.plan)
        told = f"This is {plan.key}, the fastest measured plan that {target} runs. It does not run the winner: {why}."
        launch["notes"] = [told, *launch["notes"]]
    return launch


def measured_answer(store: Store, tuning: Tuning) -> dict[str, Any]:
    """The best plan of a tuning without a launch. Raises InputError where it has no complete trial yet."""
    best = best_of(store.trials(tuning.id), tuning.cluster)
    if best is None:
        raise InputError("tuning", tuning.id, "it has no complete trial yet: show it for where it stands")
    profile = store.profile(tuning.cluster.key)
    explanation = explain_best(best, tuning, profile)
    newest = max(best.trials, key=lambda trial: trial.finished_at or trial.started_at)
    fingerprint = store.fingerprint(newest.fingerprint_key) if newest.fingerprint_key else None
    return {
        "tuning": tuning.id,
        "state": tuning.state.value,
        **_named(tuning.model, tuning.cluster),
        "workload": tuning.workload.to_data(),
        "best": best_data(best, explanation, tuning),
        "measured_at": (newest.finished_at or newest.started_at).isoformat(),
        "fingerprint_key": newest.fingerprint_key,
        "fingerprint": fingerprint.to_data() if fingerprint else None,
        "runner_up": _runner_up(best),
        "frameworks": _frameworks(best, tuning),
        "findings": _findings(best, tuning, profile),
        "launch": None,
    }


def known_answer(
    store: KnowledgeStore,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    target: str | None,
    look_up: Callable[[Workload], Answer] | None = None,
) -> dict[str, Any]:
    """What is known for a model, a cluster and a workload.

    Where nothing is known of the workload with its target, what is known of it in any framework counts, if the target
    runs it.

    Args:
        store: where it is kept.
        model, cluster, workload: the question.
        target: the framework whose launch is wanted.
        look_up: finds the best-known entry, or the nearest and what they imply; by default `best_known`.
    """
    look_up = look_up or (lambda asked: best_known(store, model, cluster, asked))
    found = None
    if workload.target and not store.best_exact(model, cluster, workload):
        plain = workload.of_any_software()
        other = look_up(plain) if store.best_exact(model, cluster, plain) else None
        if other and other.known and refusal(workload.target, model, cluster, plain, other.known.plan) is None:
            found = other
    found = found or look_up(workload)
    fastest = fastest_measured(store, model, cluster, found.workload)
    measured = None if fastest is None else measured_answer(store, fastest)
    data = found.to_data() | {"tuning": measured, "launch": None}
    sources = (data["known"], measured and measured["best"], data["carried"])
    plan = next((source["plan"] for source in sources if source), None)
    if plan is None or target is None:
        return data
    return data | {"launch": launch_arguments(target, model, cluster, found.workload, Plan.from_data(plan)).to_data()}


def request_data(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> dict[str, Any]:
    """What was asked for, by name and number: the head of every answer that is an estimate."""
    return {**_named(model, cluster), "devices": cluster.devices, "workload": workload.to_data()}


def ranking_data(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, ranking: Ranking, profile: Profile | None = None
) -> dict[str, Any]:
    """The object of `plan --json`; `profile` is that of the estimates."""
    first = ranking.plans[0]
    setting = Setting(model=model, cluster=cluster, workload=workload, profile=profile)
    return {
        **request_data(model, cluster, workload),
        "legal": ranking.legal,
        "fitting": ranking.fitting,
        "seconds": ranking.seconds,
        "estimates_per_s": ranking.estimates_per_s,
        "basis": ranking.plans[0].estimate.basis.value,
        "frameworks": frameworks_of(model, cluster, workload, [first.plan]),
        "findings": [each.to_data() for each in findings(setting, first.plan, first.estimate)],
        "plans": [
            {"plan": each.plan.to_data(), "estimate": each.estimate.to_data(), "alike": each.alike}
            for each in ranking.plans
        ],
    }


def best_data(best: Best, explanation: Explanation, tuning: Tuning) -> dict[str, Any]:
    """The winner: medians over its repeats, the worst peak of memory, and whether another plan may be as fast."""
    readings = [trial.reading for trial in best.trials if trial.reading is not None]
    return {
        "plan": best.ranked.plan.to_data(),
        "tokens_per_s_per_gpu": best.ranked.tokens_per_s_per_gpu,
        "t_comm_s": _median([item.t_comm_s for item in readings]),
        "t_comm_exposed_s": _median([item.t_comm_exposed_s for item in readings]),
        "t_calc_s": _median([item.t_calc_s for item in readings]),
        "mu": _median([item.mu for item in readings]),
        "mfu": _median([item.mfu for item in readings]),
        "step_time_s": _median([item.step_time_s for item in readings]),
        "peak_memory_bytes": max(peak_memory_bytes(item, tuning.cluster) for item in readings) or None,
        "memory_source": readings[0].memory_source,
        "repeats": best.ranked.repeats,
        "interval": list(best.ranked.interval),
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
        "peak_allocated_bytes": (reading.peak_allocated_bytes or None) if reading else None,
        "peak_reserved_bytes": (reading.peak_reserved_bytes or None) if reading else None,
        "estimate": trial.estimate.to_data() if trial.estimate else None,
        "gpu_s": trial.gpu_s,
        "setup_s": trial.setup_s,
        "fingerprint": trial.fingerprint_key,
    }


def _named(model: ModelSpec, cluster: ClusterSpec) -> dict[str, Any]:
    return {"model": model.name, "cluster": cluster.name}


def _runner_up(best: Best) -> dict[str, Any] | None:
    if not best.runners_up:
        return None
    second = best.runners_up[0]
    return {
        "plan": second.plan.to_data(),
        "tokens_per_s_per_gpu": second.tokens_per_s_per_gpu,
        "interval": list(second.interval),
        "repeats": second.repeats,
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
