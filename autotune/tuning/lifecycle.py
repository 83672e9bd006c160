"""The states of a tuning and the pure choice of its next step. No database, no clock, no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.search.standing import Standing
from autotune.search.stopping import Verdict
from autotune.specs import Budget, Plan, ProbeRequest, TuningState

# Finalists are measured again in turn, so that the winner does not win by the luck of its only trial.
MOST_FINALISTS = 3
FINALIST_SHARE = 0.9
FINALIST_REPEATS = 3
WINNER_REPEATS = 2


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


def reserve(budget: Budget, standings: Sequence[Standing]) -> int:
    """Trials of `max_trials` kept for measuring the present finalists again: a quarter of them at most."""
    wanted = sum(max(0, item.wanted - item.standing.repeats) for item in _due(standings))
    return wanted if budget.max_trials is None else min(wanted, budget.max_trials // 4)


def search_budget(budget: Budget, standings: Sequence[Standing]) -> Budget:
    """The budget less the reserve for finalists."""
    if budget.max_trials is None:
        return budget
    return budget.model_copy(update={"max_trials": budget.max_trials - reserve(budget, standings)})


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
        return NextStep(kind=StepKind.TRIAL)
    finalist = next_confirmation(facts)
    if finalist is not None:
        return NextStep(kind=StepKind.CONFIRM, plan=finalist)
    if not facts.standings:
        return NextStep(kind=StepKind.FAIL, reason=f"no plan could be measured: {facts.verdict.reason}")
    return NextStep(kind=StepKind.FINISH, reason=facts.verdict.reason)


def next_confirmation(facts: Facts) -> Plan | None:
    """The finalist with the fewest repeats that wants more of them, while trials are left."""
    if not facts.affordable or (facts.budget.max_trials is not None and facts.trials >= facts.budget.max_trials):
        return None
    due = [item.standing for item in _due(facts.standings) if item.standing.repeats < item.wanted]
    return min(due, key=lambda standing: standing.repeats).plan if due else None


@dataclass(frozen=True, slots=True)
class _Due:
    standing: Standing
    wanted: int


def _due(standings: Sequence[Standing]) -> Sequence[_Due]:
    """The finalists and how many trials each should have: a clear winner is confirmed once."""
    found = finalists(standings)
    return [_Due(item, FINALIST_REPEATS if len(found) > 1 else WINNER_REPEATS) for item in found]


def finalists(standings: Sequence[Standing]) -> Sequence[Standing]:
    """The plans that may be the best one: within 10 % of the fastest, three at most."""
    if not standings:
        return ()
    least = FINALIST_SHARE * standings[0].tokens_per_s_per_gpu
    return [item for item in standings if item.tokens_per_s_per_gpu >= least][:MOST_FINALISTS]


def too_close_to_call(standings: Sequence[Standing]) -> Sequence[Plan]:
    """The plans whose interval overlaps the winner's."""
    if not standings:
        return ()
    low = standings[0].interval[0]
    return [item.plan for item in standings[1:] if item.interval[1] >= low]
