"""The pure choice of the next step, state by state."""

from autotune.search.standing import Standing
from autotune.search.stopping import Verdict
from autotune.specs import Budget, CollectiveOp, CollectiveRequest, Plan, TuningState
from autotune.tuning.lifecycle import (
    Facts,
    StepKind,
    finalists,
    next_step,
    search_budget,
    too_close_to_call,
)

GO_ON = Verdict(stop=False, reason="", expected_gain=0.2, gpu_s=1.0)
STOP = Verdict(stop=True, reason="nothing left", expected_gain=0.0, gpu_s=1.0)
BUDGET = Budget(max_trials=24)
PROBE = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(4096,))


def standing(tp: int, tokens: float, repeats: int = 1, half: float = 1.0) -> Standing:
    interval = (tokens - half, tokens + half)
    return Standing(plan=Plan(tp=tp), tokens_per_s_per_gpu=tokens, interval=interval, repeats=repeats, peak_bytes=1.0)


def test_queued_starts_profiling() -> None:
    assert next_step(Facts(state=TuningState.QUEUED, budget=BUDGET)).kind is StepKind.START


def test_profiling_probes_what_is_missing_then_calibrates() -> None:
    step = next_step(Facts(state=TuningState.PROFILING, missing_probes=[PROBE], budget=BUDGET))
    assert (step.kind, step.probe) == (StepKind.PROBE, PROBE)
    assert next_step(Facts(state=TuningState.PROFILING, budget=BUDGET)).kind is StepKind.CALIBRATE


def test_searching_runs_trials_until_the_verdict_stops() -> None:
    facts = Facts(state=TuningState.SEARCHING, verdict=GO_ON, standings=[standing(1, 100.0)], budget=BUDGET)
    assert next_step(facts).kind is StepKind.TRIAL


def test_finalists_are_measured_again_fewest_repeats_first() -> None:
    standings = [standing(1, 100.0, repeats=2), standing(2, 95.0, repeats=1), standing(4, 50.0)]
    step = next_step(Facts(state=TuningState.SEARCHING, verdict=STOP, standings=standings, budget=BUDGET))
    assert (step.kind, step.plan) == (StepKind.CONFIRM, Plan(tp=2))


def test_a_clear_winner_is_confirmed_once_and_then_the_tuning_finishes() -> None:
    once = Facts(
        state=TuningState.SEARCHING, verdict=STOP, standings=[standing(1, 100.0), standing(2, 50.0)], budget=BUDGET
    )
    assert next_step(once).kind is StepKind.CONFIRM
    twice = Facts(state=TuningState.SEARCHING, verdict=STOP, standings=[standing(1, 100.0, repeats=2)], budget=BUDGET)
    assert (next_step(twice).kind, next_step(twice).reason) == (StepKind.FINISH, "nothing left")


def test_no_confirmation_beyond_the_allowed_trials() -> None:
    close = [standing(1, 100.0), standing(2, 95.0)]
    spent = Facts(state=TuningState.SEARCHING, verdict=STOP, standings=close, trials=24, budget=BUDGET)
    assert next_step(spent).kind is StepKind.FINISH
    broke = Facts(state=TuningState.SEARCHING, verdict=STOP, standings=close, affordable=False, budget=BUDGET)
    assert next_step(broke).kind is StepKind.FINISH


def test_nothing_measured_is_a_failure_with_the_reason() -> None:
    step = next_step(Facts(state=TuningState.SEARCHING, verdict=STOP, budget=BUDGET))
    assert step.kind is StepKind.FAIL
    assert "nothing left" in step.reason


def test_ended_states_have_no_next_step() -> None:
    for state in (TuningState.DONE, TuningState.FAILED, TuningState.CANCELLED):
        assert next_step(Facts(state=state, budget=BUDGET)).kind is StepKind.NOTHING


def test_the_reserve_comes_out_of_the_allowed_trials() -> None:
    """Three finalists with one trial each want six more; a clear winner wants one; a quarter is the most."""
    close = [standing(1, 100.0), standing(2, 99.0), standing(4, 98.0)]
    assert search_budget(Budget(max_trials=24), close).max_trials == 18
    assert search_budget(Budget(max_trials=8), close).max_trials == 6
    assert search_budget(Budget(max_trials=24), close[:1]).max_trials == 23
    assert search_budget(Budget(max_trials=3), close).max_trials == 3
    assert search_budget(Budget(gpu_s=5.0), close).max_trials is None


def test_finalists_are_three_at_most_and_within_a_tenth() -> None:
    standings = [standing(1, 100.0), standing(2, 99.0), standing(4, 91.0), standing(8, 90.5), standing(16, 80.0)]
    assert [item.plan.tp for item in finalists(standings)] == [1, 2, 4]


def test_overlapping_intervals_are_too_close_to_call() -> None:
    standings = [standing(1, 100.0, half=2.0), standing(2, 97.0, half=1.5), standing(4, 90.0, half=1.0)]
    assert too_close_to_call(standings) == [Plan(tp=2)]
