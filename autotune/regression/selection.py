"""Selection: which entries a night's budget of GPU-seconds goes to. Pure.

An entry's weight is its importance times the days since its last check; one that is stale (its environment is no more)
or that has an open incident counts for more, because there the answer is likely to be another one. Weights grow with
every night that an entry is left out, so each comes up, unless one check of it costs more than the whole budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from autotune.regression.protocol import MORE_STEPS, ORDER, WARMUP_STEPS, least_steps
from autotune.regression.verdict import BASELINE_WINDOWS
from autotune.specs import BestEntry, Budget
from autotune.specs.regression import Check, CheckCandidate

NEVER_CHECKED_DAYS = 60.0
MIN_DAYS = 0.5
"""A plan counts as unchecked for at least this long, so that what is left of a budget is used."""

STALE_FACTOR, INCIDENT_FACTOR = 4.0, 3.0
START_S, PROBE_S = 10.0, 2.0
"""Seconds until ranks are ready, and of what a probe takes beside its steps. Assumed until a check was measured."""

USUAL_WINDOWS = 1.5
"""Windows of a check as a rule: one where nothing changed, two where something did."""

CONTROLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An entry to check, what that is expected to cost, and why it was chosen."""

    candidate: CheckCandidate
    gpu_s: float
    weight: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is checked, in order, and what is left out: `too_costly` never fits in this budget."""

    chosen: Sequence[Chosen]
    left_out: Sequence[Chosen]
    too_costly: Sequence[Chosen]


def select(
    candidates: Sequence[CheckCandidate],
    *,
    budget_gpu_s: float | None,
    environments: Mapping[str, str],
    now: datetime,
) -> Selection:
    """Chooses entries, weightiest first, as long as they fit.

    Args:
        candidates: current entries, one a plan.
        budget_gpu_s: to spend at most; None is no limit.
        environments: the present environment by cluster name, where it is known.
        now: the moment.
    """
    ranked = sorted(
        (_chosen(item, environments.get(item.cluster_name), now) for item in candidates),
        key=lambda item: (-item.weight, item.candidate.entry_id),
    )
    chosen, left_out, too_costly = [], [], []
    left = math.inf if budget_gpu_s is None else budget_gpu_s
    for item in ranked:
        if budget_gpu_s is not None and item.gpu_s > budget_gpu_s:
            too_costly.append(item)
        elif item.gpu_s > left:
            left_out.append(item)
        else:
            chosen.append(item)
            left -= item.gpu_s
    return Selection(chosen=chosen, left_out=left_out, too_costly=too_costly)


def importance(candidate: CheckCandidate) -> float:
    """By how often its question was tuned, and how many devices a training under it takes."""
    return (1.0 + math.log2(1.0 + candidate.tuned)) * (1.0 + math.log2(candidate.devices))


def expected_gpu_s(candidate: CheckCandidate) -> float:
    """What a check costs: as much as its last one, or by its steps (an estimate) where there was none."""
    if candidate.check_gpu_s:
        return candidate.check_gpu_s
    steps, rounds = ORDER.count("S"), ORDER.count("C")
    timed = WARMUP_STEPS + least_steps(candidate.step_s) + MORE_STEPS + 1
    step_s = steps * (PROBE_S + timed * candidate.step_s)
    windows = BASELINE_WINDOWS if candidate.checked_at is None else USUAL_WINDOWS
    return candidate.devices * (START_S + windows * (step_s + rounds * CONTROLS * PROBE_S))


def _chosen(candidate: CheckCandidate, environment: str | None, now: datetime) -> Chosen:
    days = NEVER_CHECKED_DAYS
    reasons = ["never checked"]
    if candidate.checked_at is not None:
        days = max((now - candidate.checked_at).total_seconds() / 86400.0, MIN_DAYS)
        reasons = [f"last checked {days:.1f} days ago"]
    weight = importance(candidate) * days
    if environment is not None and environment != candidate.environment_key:
        weight *= STALE_FACTOR
        reasons.append("the environment has changed")
    if candidate.open_incident:
        weight *= INCIDENT_FACTOR
        reasons.append("it has an open incident")
    return Chosen(candidate=candidate, gpu_s=expected_gpu_s(candidate), weight=weight, reason="; ".join(reasons))


# Turns: which of a fleet's checks measure now. Pure.
#
# A check takes all its windows before the next one on its nodes begins. If all of a night's checks went on at once,
# each would wait for the others between two measurements: windows would be of hours, not of one short stretch of time.


def on_turn(
    running: Sequence[Check], nodes_of: Callable[[Check], int], ready: Mapping[tuple[str, str], int]
) -> list[Check]:
    """The checks that measure now: as many as the ready nodes of their pools and environments hold side by side.

    Those that have begun come first, then those that were chosen first.

    Args:
        running: checks of any pools.
        nodes_of: how many nodes a check needs.
        ready: how many there are of each pool and environment key; under an empty key, of any environment.
    """
    left, found = dict(ready), []
    for check in sorted(running, key=lambda each: (each.gpu_s == 0.0, each.started_at, each.id)):
        where = (check.pool, check.environment_key)
        if (nodes := nodes_of(check)) <= left.get(where, 0):
            left[where] -= nodes
            found.append(check)
    return found


MIN_TRIALS = 4
"""A budget for fewer trials than this finds nothing: it is not begun."""

TRIALS_WITHOUT_BUDGET = 12
TUNING_START_S, TRIAL_S, STEPS = 10.0, 3.0, 14
"""Assumed of a trial: seconds until ranks are ready, seconds beside its steps, and steps."""


def retune_budget(check: Check, entry: BestEntry, left_gpu_s: float | None) -> Budget | None:
    """The budget of the tuning that follows from a check; None if none does, or too little is left.

    Args:
        check: ended.
        entry: that was checked.
        left_gpu_s: GPU-seconds that are left of the night's; None is no limit.
    """
    if check.result is None or not check.result.retune_reason or check.tuning_id is not None:
        return None
    if left_gpu_s is None:
        return Budget(max_trials=TRIALS_WITHOUT_BUDGET)
    step_s = entry.workload.tokens_per_step / (entry.tokens_per_s_per_gpu * entry.cluster.devices)
    needed = entry.cluster.devices * (TUNING_START_S + MIN_TRIALS * (TRIAL_S + STEPS * step_s))
    return Budget(gpu_s=left_gpu_s) if left_gpu_s >= needed else None
