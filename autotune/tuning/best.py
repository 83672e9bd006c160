"""The best plan of a tuning so far, with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.search.comparison import decide
from autotune.search.standing import Standing, standings_of
from autotune.specs import ClusterSpec, Plan, Trial, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The measured plan to use and its evidence.

    Args:
        standing: of the plan: the fastest, or one as fast with more free memory (search.comparison).
        trials: its complete trials.
        all_trials: those of all plans.
        runners_up: the other measured plans, fastest first.
        too_close: plans that cannot be told from the fastest, the fastest itself included where it is not this one.
        reason: why this plan and not the fastest; empty where it is the fastest.
    """

    standing: Standing
    trials: Sequence[Trial]
    all_trials: Sequence[Trial]
    runners_up: Sequence[Standing]
    too_close: Sequence[Plan]
    reason: str


def best_of(trials: Sequence[Trial], cluster: ClusterSpec) -> Best | None:
    """Pools the repeats of each plan and decides; None when no trial is complete."""
    standings = standings_of(trials, cluster)
    if not standings:
        return None
    decision = decide(standings)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return Best(
        standing=decision.best,
        trials=[trial for trial in complete if trial.plan == decision.best.plan],
        all_trials=complete,
        runners_up=[item for item in standings if item is not decision.best],
        too_close=[item.plan for item in decision.tied],
        reason=decision.reason,
    )
