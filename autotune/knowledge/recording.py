"""Recording: the end of a tuning as a best-known entry."""

from __future__ import annotations

from autotune.cost.parameters import total_parameters
from autotune.ports.store import KnowledgeStore
from autotune.search.ranking import Best, best_of, undecided
from autotune.specs import BestEntry, Fingerprint, RunnerUp, Tuning


def remember(store: KnowledgeStore, tuning: Tuning) -> BestEntry | None:
    """Stores what a tuning found; None if it measured nothing. Doing it again changes nothing."""
    best = best_of(store.trials(tuning.id), tuning.cluster)
    if best is None:
        return None
    newest = max(best.trials, key=lambda trial: trial.finished_at or trial.started_at)
    fingerprint = store.fingerprint(newest.fingerprint_key) if newest.fingerprint_key else None
    return store.put_best(entry_of(tuning, best, fingerprint))


def entry_of(tuning: Tuning, best: Best, fingerprint: Fingerprint | None) -> BestEntry:
    """The entry of a tuning's best plan.

    Args:
        tuning: the request.
        best: its winner.
        fingerprint: of the winner's newest trial.
    """
    ranked, runner_up = best.ranked, None
    if best.runners_up:
        second = best.runners_up[0]
        pair = sorted((ranked, second), key=lambda item: -item.tokens_per_s_per_gpu)
        runner_up = RunnerUp(
            plan=second.plan,
            tokens_per_s_per_gpu=second.tokens_per_s_per_gpu,
            interval=second.interval,
            repeats=second.repeats,
            too_close=second.plan in best.too_close or bool(undecided(pair)),
        )
    readings = [trial.reading for trial in best.trials if trial.reading is not None]
    moments = [trial.finished_at or trial.started_at for trial in best.trials]
    return BestEntry(
        model=tuning.model,
        parameters=float(total_parameters(tuning.model)),
        cluster=tuning.cluster,
        workload=tuning.workload,
        plan=ranked.plan,
        tokens_per_s_per_gpu=ranked.tokens_per_s_per_gpu,
        interval=ranked.interval,
        repeats=ranked.repeats,
        peak_bytes=round(ranked.peak_bytes) or None,
        memory_source=readings[0].memory_source if readings else "",
        runner_up=runner_up,
        reason=best.reason,
        tuning_id=tuning.id,
        fingerprint_key=fingerprint.key if fingerprint else "",
        environment_key=fingerprint.environment_key if fingerprint else "",
        measured_at=max(moments),
    )
