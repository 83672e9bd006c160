"""The states of a tuning and the pure choice of its next step. No database, no clock, no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.search.comparison import MOST_REPEATS, contenders, undecided
from autotune.search.standing import Standing
from autotune.search.stopping import Verdict
from autotune.specs import Budget, Plan, ProbeRequest, TuningState

# A winner without a rival is measured again too: one run gives no interval.
WINNER_REPEATS = 3
# A new best that is ahead by less than this, of one that was measured more than so many trials ago, may owe it to
# what changed on the machine since: the old best is measured again beside it.
CLOSE_WIN = 0.05
STALE_TRIALS = 3
# The share of the budget that the search leaves for measuring contenders again.
RESERVE_SHARE = 0.25


class StepKind(StrEnum):
    """What `advance` does next."""

    START = "start"  # queued -> profiling
    PROBE = "probe"
    CALIBRATE = "calibrate"  # profiling -> searching
    TRIAL = "trial"
    CONFIRM = "confirm"  # a further trial of a finalist
    FINISH = "finish"  # searching -> done
    FAIL = "fail"
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
        missing_probes: what the profile still lacks, most important first.
        verdict: of the search (None before it began).
        standings: measured plans, fastest first.
        trials: trials that ended, repeats included.
        affordable: whether another trial fits in the budget of GPU-seconds.
        budget: the user's limits.
    """

    state: TuningState
    missing_probes: Sequence[ProbeRequest] = ()
    verdict: Verdict | None = None
    standings: Sequence[Standing] = ()
    trials: int = 0
    affordable: bool = True
    budget: Budget


def search_budget(budget: Budget, standings: Sequence[Standing], *, trial_gpu_s: float = 0.0) -> Budget:
    """The budget less what measuring the present contenders again needs: a quarter of it at most.

    Args:
        budget: the user's.
        standings: measured plans, fastest first.
        trial_gpu_s: GPU-seconds of one more trial of them.
    """
    wanted = sum(item.wanted - item.standing.repeats for item in _due(standings))
    changes: dict[str, float] = {}
    if budget.max_trials is not None:
        changes["max_trials"] = budget.max_trials - min(wanted, int(RESERVE_SHARE * budget.max_trials))
    if budget.gpu_s is not None:
        changes["gpu_s"] = budget.gpu_s - min(wanted * trial_gpu_s, RESERVE_SHARE * budget.gpu_s)
    return budget.model_copy(update=changes)


def next_step(facts: Facts) -> NextStep:
    """The next step from the facts alone; the same facts give the same step."""
    if facts.state.ended:
        return NextStep(kind=StepKind.NOTHING)
    if facts.state is TuningState.QUEUED:
        return NextStep(kind=StepKind.START)
    if facts.state is TuningState.PROFILING:
        if facts.missing_probes:
            return NextStep(kind=StepKind.PROBE, probe=facts.missing_probes[0])
        return NextStep(kind=StepKind.CALIBRATE)
    if facts.verdict is None or not facts.verdict.stop:
        old = stale_incumbent(facts)
        return NextStep(kind=StepKind.TRIAL) if old is None else NextStep(kind=StepKind.CONFIRM, plan=old)
    finalist = next_confirmation(facts)
    if finalist is not None:
        return NextStep(kind=StepKind.CONFIRM, plan=finalist)
    if not facts.standings:
        return NextStep(kind=StepKind.FAIL, reason=f"no plan could be measured: {facts.verdict.reason}")
    return NextStep(kind=StepKind.FINISH, reason=facts.verdict.reason)


def stale_incumbent(facts: Facts) -> Plan | None:
    """The former best plan, if the plan that has just beaten it did so narrowly and long after it was measured.

    Both then stand in one window of time, so that a drift of the machine does not decide between them.
    """
    if len(facts.standings) < 2 or not _may_repeat(facts):
        return None
    best, former = facts.standings[0], facts.standings[1]
    narrow = best.tokens_per_s_per_gpu < (1.0 + CLOSE_WIN) * former.tokens_per_s_per_gpu
    return former.plan if best.repeats == 1 and narrow and best.last - former.last > STALE_TRIALS else None


def next_confirmation(facts: Facts) -> Plan | None:
    """The contender that wants another trial: of those with the fewest repeats the one measured longest ago."""
    due = _due(facts.standings) if _may_repeat(facts) else ()
    return min((item.standing for item in due), key=lambda item: (item.repeats, item.last)).plan if due else None


def _may_repeat(facts: Facts) -> bool:
    most = facts.budget.max_trials
    return facts.affordable and (most is None or facts.trials < most)


@dataclass(frozen=True, slots=True)
class _Due:
    standing: Standing
    wanted: int


def _due(standings: Sequence[Standing]) -> Sequence[_Due]:
    """The plans that want more trials, and how many in all: until every challenger is told from the fastest."""
    close, still_open = contenders(standings), undecided(standings)
    wanted = MOST_REPEATS if still_open else WINNER_REPEATS
    return [_Due(item, wanted) for item in (*close[:1], *still_open) if item.repeats < wanted]
