"""The states of a tuning and the pure choice of its next step. No database, no clock, no ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from autotune.knowledge.settling import PROBE_S, START_S
from autotune.search.acquisition import StopVerdict
from autotune.search.ranking import MIN_REPEATS, RankedPlan, contenders, most_repeats, undecided
from autotune.specs import Budget, Plan, ProbeRequest, TuningState

# A winner without a rival is measured again too: one run gives no interval.
WINNER_REPEATS = 3
# A new best that is ahead by less than this, of one that was measured more than so many trials ago, may owe it to
# what changed on the machine since: the old best is measured again beside it.
CLOSE_WIN = 0.05
STALE_TRIALS = 3
# The share of the budget that the search leaves for measuring contenders again.
RESERVE_SHARE = 0.25
# The share of a budget of GPU-seconds that probes may take where the catalog's figures can stand in for them.
PROBES_SHARE = 0.5
# A budget is refused before anything runs if it is under this share of what ranks and probes are assumed to take:
# a quiet machine that has little to measure needs about as little.
QUICKEST = 0.2
# So many trials in a row that all attempts of were lost with their nodes: it is the nodes, or what the model does to
# them, and another trial would cost another node.
MAX_LOST_IN_A_ROW = 5
# So many first trials of a program that failed in the same words: it is the program.
MAX_FAILED_ALIKE = 3


class StepKind(StrEnum):
    """What `advance` does next."""

    START = "start"  # queued -> profiling
    PROBE = "probe"
    CALIBRATE = "calibrate"  # profiling -> searching
    TRIAL = "trial"
    CONFIRM = "confirm"  # a further trial of a finalist
    FINISH = "finish"  # searching -> done
    FAIL = "fail"
    WAIT = "wait"  # for what is in flight
    NOTHING = "nothing"  # the tuning has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """One step of the lifecycle and what it needs."""

    kind: StepKind
    probe: ProbeRequest | None = None
    plan: Plan | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the choice depends on.

    Args:
        state: of the tuning.
        devices: that each job holds.
        spent_gpu_s: GPU-seconds of all jobs that ended.
        missing_probes: what the profile still lacks, most important first.
        probes_gpu_s: GPU-seconds of each probe that ended, in order; the first one started the ranks.
        catalog: whether figures of the catalog can stand in for missing probes.
        verdict: of the search (None before it began).
        ranking: measured plans, fastest first.
        trials: trials that ended, repeats included.
        affordable: whether another trial fits in the budget of GPU-seconds, beside those in flight.
        budget: the user's limits.
        in_flight: probes or trials that are under way.
        flying: the plans of the trials in flight.
        slots: how many may be in flight at once.
        lost_in_a_row: the last trials that were lost with their nodes whatever was tried.
        same_failure: in which words every trial of a program failed, if they are enough to blame the program.
    """

    state: TuningState
    devices: int = 1
    spent_gpu_s: float = 0.0
    missing_probes: Sequence[ProbeRequest] = ()
    probes_gpu_s: Sequence[float] = ()
    catalog: bool = False
    verdict: StopVerdict | None = None
    ranking: Sequence[RankedPlan] = ()
    trials: int = 0
    affordable: bool = True
    budget: Budget
    in_flight: int = 0
    flying: Sequence[Plan] = ()
    slots: int = 1
    lost_in_a_row: int = 0
    same_failure: str = ""


def search_budget(budget: Budget, ranking: Sequence[RankedPlan], *, trial_gpu_s: float = 0.0) -> Budget:
    """The budget less what measuring the present contenders again needs: a quarter of it at most.

    Args:
        budget: the user's.
        ranking: measured plans, fastest first.
        trial_gpu_s: GPU-seconds of one more trial of them.
    """
    wanted = sum(item.wanted - item.ranked.repeats for item in _due(ranking))
    changes: dict[str, float] = {}
    if budget.max_trials is not None:
        changes["max_trials"] = budget.max_trials - min(wanted, int(RESERVE_SHARE * budget.max_trials))
    if budget.gpu_s is not None:
        changes["gpu_s"] = budget.gpu_s - min(wanted * trial_gpu_s, RESERVE_SHARE * budget.gpu_s)
    return budget.model_copy(update=changes)


def next_step(facts: Facts) -> NextStep:
    """The next step from the facts alone; the same facts give the same step.

    What is in flight is never disturbed: a state is left when nothing is.
    """
    if facts.state.ended:
        return NextStep(kind=StepKind.NOTHING)
    if facts.state is TuningState.QUEUED:
        return NextStep(kind=StepKind.START)
    wanted = _profiling(facts) if facts.state is TuningState.PROFILING else _searching(facts)
    measures = wanted.kind in {StepKind.PROBE, StepKind.TRIAL, StepKind.CONFIRM}
    if facts.in_flight >= (facts.slots if measures else 1):
        return NextStep(kind=StepKind.WAIT)
    return wanted


def _profiling(facts: Facts) -> NextStep:
    if not facts.missing_probes:
        return NextStep(kind=StepKind.CALIBRATE)
    probe = NextStep(kind=StepKind.PROBE, probe=facts.missing_probes[0])
    return probe if facts.budget.gpu_s is None else _within_budget(facts, facts.budget.gpu_s, probe)


def _within_budget(facts: Facts, limit: float, probe: NextStep) -> NextStep:
    """The probe, if the budget reaches for those that are missing and a trial; as far as can be told by now."""
    number = len(facts.missing_probes)
    if not facts.probes_gpu_s and not facts.in_flight:
        needed = facts.devices * (START_S + PROBE_S * (0 if facts.catalog else number))
        if limit < QUICKEST * needed:
            what = "to start ranks" if facts.catalog else f"to start ranks and for {number} probes"
            reason = (
                f"{limit:g} GPU-seconds are too few: {what} {facts.devices} devices need about {needed:.0f} (assumed), "
                "and trials come on top; nothing was run"
            )
            return NextStep(kind=StepKind.FAIL, reason=reason)
    spent = f"{facts.spent_gpu_s:.0f} of the {limit:g} GPU-seconds are spent"
    if facts.spent_gpu_s >= limit:
        return NextStep(kind=StepKind.FAIL, reason=f"{spent}, and {number} more probes are to come before any trial")
    if len(facts.probes_gpu_s) < 2:  # the first says more of the start than of probes
        return probe
    usual = median(facts.probes_gpu_s[1:])
    if facts.catalog:
        return probe if facts.spent_gpu_s + usual <= PROBES_SHARE * limit else NextStep(kind=StepKind.CALIBRATE)
    needed = usual * (number + 1)
    if facts.spent_gpu_s + needed <= limit:
        return probe
    reason = f"{spent}, and {number} more probes and a trial need about {needed:.0f}"
    return NextStep(kind=StepKind.FAIL, reason=reason)


def _searching(facts: Facts) -> NextStep:
    if facts.lost_in_a_row >= MAX_LOST_IN_A_ROW:
        reason = f"the last {facts.lost_in_a_row} trials were lost with their nodes, on every node that they ran on"
        return NextStep(kind=StepKind.FAIL, reason=reason)
    if facts.same_failure:
        reason = f"the first {facts.trials} trials failed in the same way: {facts.same_failure}"
        return NextStep(kind=StepKind.FAIL, reason=reason)
    if facts.verdict is None or not facts.verdict.stop:
        old = stale_incumbent(facts)
        return NextStep(kind=StepKind.TRIAL) if old is None else NextStep(kind=StepKind.CONFIRM, plan=old)
    measured = {item.plan for item in facts.ranking}
    if any(plan not in measured for plan in facts.flying):
        return NextStep(kind=StepKind.WAIT)  # it may be a finalist itself
    finalist = next_confirmation(facts)
    if finalist is not None:
        return NextStep(kind=StepKind.CONFIRM, plan=finalist)
    if not facts.ranking:
        return NextStep(kind=StepKind.FAIL, reason=f"no plan could be measured: {facts.verdict.reason}")
    return NextStep(kind=StepKind.FINISH, reason=facts.verdict.reason)


def stale_incumbent(facts: Facts) -> Plan | None:
    """The former best plan, if the plan that has just beaten it did so narrowly and long after it was measured.

    Both then stand in one window of time, so that a drift of the machine does not decide between them.
    """
    if len(facts.ranking) < 2 or not _may_repeat(facts):
        return None
    best, former = facts.ranking[0], facts.ranking[1]
    if former.plan in facts.flying:
        return None
    narrow = best.tokens_per_s_per_gpu < (1.0 + CLOSE_WIN) * former.tokens_per_s_per_gpu
    return former.plan if best.repeats == 1 and narrow and best.last - former.last > STALE_TRIALS else None


def next_confirmation(facts: Facts) -> Plan | None:
    """The contender that wants another trial: of those with the fewest repeats the one measured longest ago.

    Trials in flight count as repeats, so that several gangs take turns at the contenders; but nothing is decided before
    each has MIN_REPEATS, and from there on every repeat may decide.
    """
    flying = Counter(facts.flying)
    due = [
        (item.ranked.repeats + flying[item.ranked.plan], item.ranked.last, item.ranked.plan)
        for item in (_due(facts.ranking) if _may_repeat(facts) else ())
    ]
    unlooked = [item for item in due if item[0] < MIN_REPEATS or not flying[item[2]]]
    return min(unlooked, key=lambda item: item[:2])[2] if unlooked else None


def _may_repeat(facts: Facts) -> bool:
    most = facts.budget.max_trials
    return facts.affordable and (most is None or facts.trials + len(facts.flying) < most)


@dataclass(frozen=True, slots=True)
class _Due:
    ranked: RankedPlan
    wanted: int


def _due(ranking: Sequence[RankedPlan]) -> Sequence[_Due]:
    """The plans that want more trials, and how many in all: until every challenger is told from the fastest."""
    close, still_open = contenders(ranking), undecided(ranking)
    wanted = most_repeats(ranking) if still_open else WINNER_REPEATS
    return [_Due(item, wanted) for item in (*close[:1], *still_open) if item.repeats < wanted]
