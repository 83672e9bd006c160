"""The pure choice of the next step, state by state."""

from autotune.search.acquisition import StopVerdict
from autotune.search.ranking import RankedPlan
from autotune.specs import Budget, CollectiveOp, CollectiveRequest, Plan, TuningState
from autotune.tuning.lifecycle import Facts, StepKind, next_step, search_budget

GO_ON = StopVerdict(stop=False, reason="", expected_gain=0.2, gpu_s=1.0)
STOP = StopVerdict(stop=True, reason="nothing left", expected_gain=0.0, gpu_s=1.0)
BUDGET = Budget(max_trials=24)
PROBE = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(4096,))


def ranked(tp: int, *speeds: float, last: int = 0) -> RankedPlan:
    mean = sum(speeds) / len(speeds)
    return RankedPlan(
        plan=Plan(tp=tp),
        tokens_per_s_per_gpu=mean,
        interval=(mean - 1, mean + 1),
        speeds=speeds,
        last=last,
        peak_bytes=1.0,
    )


def searching(*ranking: RankedPlan, verdict: StopVerdict = STOP, trials: int = 0, affordable: bool = True) -> Facts:
    return Facts(
        state=TuningState.SEARCHING,
        verdict=verdict,
        ranking=ranking,
        trials=trials,
        affordable=affordable,
        budget=BUDGET,
    )


def test_queued_starts_profiling() -> None:
    assert next_step(Facts(state=TuningState.QUEUED, budget=BUDGET)).kind is StepKind.START


def test_profiling_probes_what_is_missing_then_calibrates() -> None:
    step = next_step(Facts(state=TuningState.PROFILING, missing_probes=[PROBE], budget=BUDGET))
    assert (step.kind, step.probe) == (StepKind.PROBE, PROBE)
    assert next_step(Facts(state=TuningState.PROFILING, budget=BUDGET)).kind is StepKind.CALIBRATE


def test_searching_runs_trials_until_the_verdict_stops() -> None:
    assert next_step(searching(ranked(1, 100.0), verdict=GO_ON)).kind is StepKind.TRIAL


def test_contenders_are_measured_again_fewest_repeats_first_then_the_one_measured_longest_ago() -> None:
    step = next_step(searching(ranked(1, 100.0, 100.0), ranked(2, 95.0), ranked(4, 50.0)))
    assert (step.kind, step.plan) == (StepKind.CONFIRM, Plan(tp=2))
    step = next_step(searching(ranked(1, 100.0, last=7), ranked(2, 95.0, last=3)))
    assert step.plan == Plan(tp=2)


def test_a_contender_that_is_clearly_worse_is_not_measured_again() -> None:
    """After three repeats each, 8 % apart with half a per cent of noise: decided. 0.2 % apart: not, up to five."""
    first = ranked(1, 100.0, 100.5, 99.5)
    assert next_step(searching(first, ranked(2, 92.0, 92.4, 91.6))).kind is StepKind.FINISH
    close = ranked(2, 99.8, 100.2, 99.4)
    assert next_step(searching(first, close)).kind is StepKind.CONFIRM
    most = ranked(1, *first.speeds, 100.0, 100.2), ranked(2, *close.speeds, 99.8, 100.0)
    assert next_step(searching(*most)).kind is StepKind.FINISH


def test_a_clear_winner_is_confirmed_until_it_has_an_interval_and_then_the_tuning_finishes() -> None:
    assert next_step(searching(ranked(1, 100.0), ranked(2, 50.0))).kind is StepKind.CONFIRM
    done = next_step(searching(ranked(1, 100.0, 101.0, 99.0), ranked(2, 50.0)))
    assert (done.kind, done.reason) == (StepKind.FINISH, "nothing left")


def test_a_narrow_new_best_has_the_old_one_measured_beside_it() -> None:
    new, old = ranked(2, 102.0, last=9), ranked(1, 100.0, last=4)
    step = next_step(searching(new, old, verdict=GO_ON))
    assert (step.kind, step.plan) == (StepKind.CONFIRM, Plan(tp=1))


def test_no_old_best_is_measured_again_without_need() -> None:
    old = ranked(1, 100.0, last=4)
    unneeded = {
        "clearly ahead": (ranked(2, 106.0, last=9), old),
        "measured in the same window": (ranked(2, 102.0, last=7), old),
        "no new best": (ranked(2, 102.0, 102.0, last=9), old),
        "no old best": (ranked(2, 102.0, last=9),),
    }
    for why, ranking in unneeded.items():
        assert next_step(searching(*ranking, verdict=GO_ON)).kind is StepKind.TRIAL, why
    spent = searching(ranked(2, 102.0, last=9), old, verdict=GO_ON, trials=24)
    assert next_step(spent).kind is StepKind.TRIAL


def test_no_confirmation_beyond_the_allowed_trials() -> None:
    close = ranked(1, 100.0), ranked(2, 95.0)
    assert next_step(searching(*close, trials=24)).kind is StepKind.FINISH
    assert next_step(searching(*close, affordable=False)).kind is StepKind.FINISH


def test_nothing_measured_is_a_failure_with_the_reason() -> None:
    step = next_step(searching())
    assert step.kind is StepKind.FAIL
    assert "nothing left" in step.reason


def test_ended_states_have_no_next_step() -> None:
    for state in (TuningState.DONE, TuningState.FAILED, TuningState.CANCELLED):
        assert next_step(Facts(state=state, budget=BUDGET)).kind is StepKind.NOTHING


def test_the_reserve_comes_out_of_the_budget() -> None:
    """Three contenders with one trial each may want twelve more; a clear winner wants two; a quarter is the most."""
    close = [ranked(1, 100.0), ranked(2, 99.0), ranked(4, 98.0)]
    assert search_budget(Budget(max_trials=24), close).max_trials == 18
    assert search_budget(Budget(max_trials=60), close).max_trials == 48
    assert search_budget(Budget(max_trials=24), close[:1]).max_trials == 22
    assert search_budget(Budget(max_trials=3), close).max_trials == 3
    assert search_budget(Budget(gpu_s=100.0), close[:1], trial_gpu_s=2.0).gpu_s == 96.0
    assert search_budget(Budget(gpu_s=100.0), close, trial_gpu_s=20.0).gpu_s == 75.0
    assert search_budget(Budget(gpu_s=5.0), close).max_trials is None


def flying(
    *plans: Plan, slots: int, verdict: StopVerdict, ranking: tuple[RankedPlan, ...] = (), trials: int = 0
) -> Facts:
    return Facts(
        state=TuningState.SEARCHING,
        verdict=verdict,
        ranking=ranking,
        trials=trials,
        budget=BUDGET,
        in_flight=len(plans),
        flying=plans,
        slots=slots,
    )


def test_probes_fill_the_slots_and_calibration_waits_for_all_of_them() -> None:
    def profiling(missing: int, in_flight: int) -> StepKind:
        facts = Facts(
            state=TuningState.PROFILING, missing_probes=[PROBE] * missing, budget=BUDGET, in_flight=in_flight, slots=2
        )
        return next_step(facts).kind

    assert profiling(1, 1) is StepKind.PROBE
    assert profiling(1, 2) is StepKind.WAIT
    assert profiling(0, 1) is StepKind.WAIT
    assert profiling(0, 0) is StepKind.CALIBRATE


def test_trials_fill_the_slots() -> None:
    assert next_step(flying(Plan(), slots=2, verdict=GO_ON)).kind is StepKind.TRIAL
    assert next_step(flying(Plan(), Plan(tp=2), slots=2, verdict=GO_ON)).kind is StepKind.WAIT


def test_finalists_are_confirmed_once_no_new_plan_is_in_flight() -> None:
    close = ranked(1, 100.0), ranked(2, 95.0)
    assert next_step(flying(Plan(tp=4), slots=3, verdict=STOP, ranking=close)).kind is StepKind.WAIT
    step = next_step(flying(slots=3, verdict=STOP, ranking=close))
    assert (step.kind, step.plan) == (StepKind.CONFIRM, Plan(tp=1))


def test_confirmations_in_flight_count_as_repeats_so_that_contenders_take_turns() -> None:
    close = ranked(1, 100.0), ranked(2, 99.0)
    seen: list[Plan] = []
    while (step := next_step(flying(*seen, slots=9, verdict=STOP, ranking=close))).plan is not None:
        seen.append(step.plan)
    assert seen == [Plan(tp=1), Plan(tp=2)] * 2  # three of each in all: enough to look
    assert step.kind is StepKind.WAIT


def test_beyond_three_repeats_each_look_may_decide() -> None:
    close = ranked(1, 100.0, 100.5, 99.5), ranked(2, 99.8, 100.2, 99.4)
    step = next_step(flying(slots=9, verdict=STOP, ranking=close))
    assert step.plan == Plan(tp=1)
    more = next_step(flying(Plan(tp=1), slots=9, verdict=STOP, ranking=close))
    assert more.plan == Plan(tp=2)
    assert next_step(flying(Plan(tp=1), Plan(tp=2), slots=9, verdict=STOP, ranking=close)).kind is StepKind.WAIT


def test_trials_in_flight_count_against_the_budget() -> None:
    close = ranked(1, 100.0), ranked(2, 99.0)
    assert next_step(flying(Plan(tp=1), slots=9, verdict=STOP, ranking=close, trials=23)).kind is StepKind.WAIT
    assert next_step(flying(slots=9, verdict=STOP, ranking=close, trials=23)).kind is StepKind.CONFIRM


def test_an_old_best_is_not_measured_twice_at_once() -> None:
    new, old = ranked(2, 102.0, last=9), ranked(1, 100.0, last=4)
    assert next_step(flying(slots=2, verdict=GO_ON, ranking=(new, old))).plan == Plan(tp=1)
    step = next_step(flying(Plan(tp=1), slots=2, verdict=GO_ON, ranking=(new, old)))
    assert (step.kind, step.plan) == (StepKind.TRIAL, None)


def test_nothing_ends_while_a_trial_is_in_flight() -> None:
    sure = ranked(1, 100.0, 101.0, 99.0), ranked(2, 50.0)
    assert next_step(flying(Plan(tp=1), slots=1, verdict=STOP, ranking=sure)).kind is StepKind.WAIT
    assert next_step(flying(Plan(tp=4), slots=9, verdict=STOP)).kind is StepKind.WAIT


def test_trials_lost_in_a_row_end_a_tuning() -> None:
    facts = Facts(state=TuningState.SEARCHING, verdict=GO_ON, budget=BUDGET, lost_in_a_row=5)
    step = next_step(facts)
    assert step.kind is StepKind.FAIL
    assert "5 trials were lost with their nodes" in step.reason


def profiling(
    limit: float, *probes_gpu_s: float, missing: int = 6, catalog: bool = False, spent: float | None = None
) -> Facts:
    return Facts(
        state=TuningState.PROFILING,
        devices=4,
        spent_gpu_s=sum(probes_gpu_s) if spent is None else spent,
        missing_probes=[PROBE] * missing,
        probes_gpu_s=probes_gpu_s,
        catalog=catalog,
        budget=Budget(gpu_s=limit),
    )


def test_a_budget_that_is_too_small_by_far_is_refused_before_anything_runs() -> None:
    """Four devices: 10 s to start and 6 probes of 2 s are taken to need 4 * 22 = 88, and a fifth of it to be possible.
    With a catalog only the start is needed: 40."""
    step = next_step(profiling(10.0))
    assert step.kind is StepKind.FAIL
    assert step.reason == (
        "10 GPU-seconds are too few: to start ranks and for 6 probes 4 devices need about 88 (assumed), and trials "
        "come on top; nothing was run"
    )
    assert next_step(profiling(18.0)).kind is StepKind.PROBE
    assert next_step(profiling(10.0, catalog=True)).kind is StepKind.PROBE
    assert next_step(profiling(7.0, catalog=True)).kind is StepKind.FAIL


def test_profiling_ends_when_the_budget_does_not_reach_for_the_rest_and_a_trial() -> None:
    """The first probe started the ranks; 5 more like the others and a trial need 6 times their median."""
    assert next_step(profiling(100.0, 30.0, missing=5)).kind is StepKind.PROBE
    assert next_step(profiling(100.0, 30.0, 9.0, missing=5)).kind is StepKind.PROBE  # 39 and 54
    step = next_step(profiling(100.0, 30.0, 12.0, missing=5))
    assert step.kind is StepKind.FAIL
    assert step.reason == "42 of the 100 GPU-seconds are spent, and 5 more probes and a trial need about 72"
    over = next_step(profiling(100.0, 103.0, missing=5))
    assert over.reason == "103 of the 100 GPU-seconds are spent, and 5 more probes are to come before any trial"
    assert next_step(profiling(100.0, 30.0, 12.0, 12.0, missing=0)).kind is StepKind.CALIBRATE


def test_where_the_catalog_stands_in_probes_leave_half_of_the_budget_to_trials() -> None:
    assert next_step(profiling(100.0, 30.0, 9.0, catalog=True)).kind is StepKind.PROBE
    assert next_step(profiling(100.0, 30.0, 12.0, catalog=True)).kind is StepKind.CALIBRATE
