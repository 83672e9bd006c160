"""Recording: what the end of a tuning adds to what is known of its question, as a best-known entry."""

from __future__ import annotations

from datetime import datetime

from autotune.cost.parameters import total_parameters
from autotune.ports.store import KnowledgeStore
from autotune.search.ranking import Best, best_of, undecided
from autotune.specs import BestEntry, Fingerprint, RunnerUp, Trial, Tuning

ALL_TRIALS = 100_000
"""More than any question has."""


def remember(store: KnowledgeStore, tuning: Tuning) -> BestEntry | None:
    """Stores what is known of a tuning's question once it ended; None if it measured nothing.

    The runs of a plan are pooled over all tunings of the question in the same environment, so that one lucky run does
    not outlive what was measured after it. Doing it again changes nothing.
    """
    own = best_of(store.trials(tuning.id), tuning.cluster)
    if own is None:
        return None
    environment = _environment(store, _newest(own).fingerprint_key)
    trials = store.best_trials(tuning.model, tuning.cluster, tuning.workload, ALL_TRIALS)
    environments = {key: _environment(store, key) for key in {trial.fingerprint_key for trial in trials}}
    same = [trial for trial in trials if environments[trial.fingerprint_key] == environment]
    best = best_of(sorted(same, key=_ended), tuning.cluster) or own
    newest = _newest(best)
    fingerprint = store.fingerprint(newest.fingerprint_key) if newest.fingerprint_key else None
    return store.put_best(entry_of(tuning, best, fingerprint), pooled=True)


def _ended(trial: Trial) -> datetime:
    return trial.finished_at or trial.started_at


def _newest(best: Best) -> Trial:
    return max(best.trials, key=_ended)


def _environment(store: KnowledgeStore, fingerprint_key: str) -> str:
    return store.fingerprint(fingerprint_key).environment_key if fingerprint_key else ""


def entry_of(tuning: Tuning, best: Best, fingerprint: Fingerprint | None) -> BestEntry:
    """The entry of the best plan for a tuning's question.

    Args:
        tuning: the request.
        best: the winner.
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
    newest = _newest(best)
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
        tuning_id=newest.tuning_id,
        fingerprint_key=fingerprint.key if fingerprint else "",
        environment_key=fingerprint.environment_key if fingerprint else "",
        measured_at=_ended(newest),
    )
