"""Search and study on a machine that does not exist: measured throughput is a known distortion of the estimate."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.estimate import estimate
from autotune.errors import InputError
from autotune.search.acquisition import choose
from autotune.search.core import Search
from autotune.search.posterior import Posterior
from autotune.search.residual import Learning
from autotune.search.sampler import alternative, distributions
from autotune.search.study import Asked, PlanStudy
from autotune.specs import (
    Budget,
    Failure,
    FailureKind,
    Plan,
    Recompute,
    SamplerName,
    StepReading,
    Trial,
    TrialState,
    Workload,
)

MODEL = preset("gpt3-1.3b")
CLUSTER = cluster_from_shorthand("a100-80gb-sxm:1x8")
WORKLOAD = Workload(seq_len=2048, global_batch=64)


def reading(plan: Plan, tokens: float, *, peak_bytes: int = 10 * 2**30, pruned: bool = False) -> StepReading:
    step_s = WORKLOAD.tokens_per_step / (tokens * CLUSTER.devices)
    return StepReading(
        tokens_per_s_per_gpu=tokens,
        interval_tokens_per_s_per_gpu=(0.99 * tokens, 1.01 * tokens),
        step_time_s=step_s,
        step_times_s=(step_s,) * 3,
        warmup_times_s=(),
        steady=True,
        traced_step_s=None,
        t_calc_s=None,
        t_comm_s=None,
        t_comm_exposed_s=None,
        mu=None,
        mfu=None,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_bytes,
        memory_source="test",
        losses=(),
        pruned=pruned,
        setup_s=1.0,
        ranks=(),
    )


def distorted(plan: Plan) -> float:
    """A truth that the estimate does not know: tensor parallelism costs more, larger micro-batches gain."""
    base = estimate(MODEL, CLUSTER, WORKLOAD, plan).tokens_per_s_per_gpu
    return 0.6 * base * 0.85 ** float(np.log2(plan.tp)) * 1.1 ** float(np.log2(plan.micro_batch))


def run(search: Search, truth: Callable[[Plan], float], trials: int) -> list[Plan]:
    asked = []
    for _ in range(trials):
        plan = search.ask()
        assert plan is not None
        asked.append(plan)
        search.tell(plan, reading(plan, truth(plan)))
    return asked


def test_it_finds_the_best_plan_of_a_distorted_estimate_in_a_few_trials() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD)
    table, estimates = search.table, search.estimates
    bent = 0.6 * 0.85 ** np.log2(table.tp) * 1.1 ** np.log2(table.micro_batch)
    truths = (estimates.tokens_per_s_per_gpu * bent)[estimates.fits]
    run(search, distorted, 12)
    assert search.best is not None
    assert search.best.tokens_per_s_per_gpu >= 0.98 * truths.max()


def test_asks_are_distinct_and_repeatable() -> None:
    first = run(Search(MODEL, CLUSTER, WORKLOAD), distorted, 6)
    assert len(set(first)) == 6
    assert run(Search(MODEL, CLUSTER, WORKLOAD), distorted, 6) == first


def test_plans_in_flight_are_not_asked_twice() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD)
    assert search.ask() != search.ask()


def test_plans_in_flight_are_believed_to_do_what_is_expected() -> None:
    """Beside one of them little is left to gain; and nothing of the lie stays in what is believed."""
    search = Search(MODEL, CLUSTER, WORKLOAD)
    run(search, distorted, 6)
    before = search.posterior()
    asked = [search.ask()]
    for _ in range(3):
        barred_only, spread = choose(search.posterior()), search.next()
        assert barred_only is not None
        assert spread is not None
        assert spread.expected_gain / spread.gpu_s < 1.05 * barred_only.expected_gain / barred_only.gpu_s
        asked.append(search.ask())
    assert len(set(asked)) == 4
    after = search.posterior()
    assert (after.best, after.best_plan) == (before.best, before.best_plan)
    assert np.array_equal(after.log_mean, before.log_mean)


def test_only_an_oom_teaches_memory() -> None:
    for kind, taught in ((FailureKind.OOM, True), (FailureKind.HANG, False), (FailureKind.CRASH, False)):
        search = Search(MODEL, CLUSTER, WORKLOAD)
        before = search.posterior().p_fits
        plan = search.ask()
        assert plan is not None
        search.tell(plan, Failure(kind=kind, message="test"))
        after = search.posterior().p_fits
        assert bool(np.any(after < before - 1e-6)) is taught, kind


def test_a_peak_below_its_estimate_makes_plans_that_fit_surer() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD)
    plan = search.ask()
    assert plan is not None
    found = search.estimate_of(plan)
    assert found is not None
    fits = search.estimates.fits
    before = search.posterior().p_fits[fits]
    search.tell(plan, reading(plan, 1000.0, peak_bytes=int(0.9 * found.peak_memory_bytes)))
    after = search.posterior().p_fits[fits]
    assert np.all(after >= before)
    assert np.any(after > before)


def test_a_failure_that_is_not_the_plans_own_leaves_it_open() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD)
    plan = search.ask()
    assert plan is not None
    search.tell(plan, Failure(kind=FailureKind.LOST, message="test"))
    assert search.trials == 0
    assert search.ask() == plan


def test_a_pruned_trial_is_never_the_best() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD, plans=[Plan(dp=8), Plan(tp=2, dp=4)])
    search.tell(Plan(dp=8), reading(Plan(dp=8), 500.0))
    search.tell(Plan(tp=2, dp=4), reading(Plan(tp=2, dp=4), 900.0, pruned=True))
    assert search.best is not None
    assert search.best.plan == Plan(dp=8)


def test_repeats_are_pooled() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD, plans=[Plan(dp=8)])
    for tokens in (100.0, 110.0):
        search.tell(Plan(dp=8), reading(Plan(dp=8), tokens))
    assert search.best is not None
    assert (search.best.tokens_per_s_per_gpu, search.best.repeats) == (105.0, 2)


def test_no_legal_plan_is_an_input_error() -> None:
    with pytest.raises(InputError, match="at least one legal plan"):
        Search(MODEL, CLUSTER, WORKLOAD, plans=[])


def test_the_search_stops_when_every_plan_was_tried_and_within_the_budget() -> None:
    plans = [Plan(dp=8), Plan(tp=2, dp=4)]
    search = Search(MODEL, CLUSTER, WORKLOAD, plans=plans)
    assert not search.verdict(Budget()).stop
    assert search.verdict(Budget(gpu_s=0.5)).stop
    run(search, distorted, 2)
    assert search.verdict(Budget()).reason == "every legal plan was tried"
    assert search.ask() is None


def test_a_small_expected_gain_ends_the_search_after_enough_trials() -> None:
    search = Search(MODEL, CLUSTER, WORKLOAD)
    trials = 0
    while not search.verdict(Budget(min_gain=0.05)).stop:
        run(search, distorted, 1)
        trials += 1
    assert 8 <= trials < search.legal
    assert "expected to gain" in search.verdict(Budget(min_gain=0.05)).reason


def test_a_study_follows_from_the_stored_trials_alone() -> None:
    """The process died after asking for three: one is stored as measured, one as running, one not at all."""
    study = PlanStudy(Search(MODEL, CLUSTER, WORKLOAD), first=[Plan(tp=2, dp=4)])
    told, running, lost = study.ask(), study.ask(), study.ask()
    assert [each.number for each in (told, running, lost)] == [0, 1, 2]
    assert told.plan == Plan(tp=2, dp=4)
    search = Search(MODEL, CLUSTER, WORKLOAD)
    again = PlanStudy(search, first=[Plan(tp=2, dp=4)])
    trials = [stored(told.number, told.plan, 10.0), stored(running.number, running.plan, None)]
    for _ in range(2):  # again changes nothing
        again.resume(trials)
    assert search.best is not None
    assert (search.best.plan, search.trials) == (told.plan, 1)
    barred = search.posterior().barred
    assert barred[search.table.find(running.plan)]  # in flight
    assert not barred[search.table.find(lost.plan)]  # never measured
    assert again.ask().number == 2  # no trial has that number
    again.resume([trials[0], stored(running.number, running.plan, 20.0), stored(7, Plan(dp=8), 5.0)])
    assert (search.best.plan, search.trials) == (running.plan, 3)
    assert again.ask().number == 8


def test_the_first_plans_come_first_and_once_whatever_process_asks() -> None:
    first = [Plan(tp=4, dp=2), Plan(tp=2, dp=4), Plan(dp=8)]
    trials: list[Trial] = []

    def ask() -> Asked:
        study = PlanStudy(Search(MODEL, CLUSTER, WORKLOAD), first=[first[0], *first])
        study.resume(trials)
        return study.ask()

    for number, plan in enumerate(first):
        assert ask() == Asked(number=number, plan=plan)
        trials.append(stored(number, plan, 10.0 + number))
    other = ask().plan
    assert other not in first
    # A plan that the search chose was measured before all of them were: the list has grown since then.
    trials = [stored(0, first[0], 10.0), stored(1, other, 11.0)]
    assert ask().plan not in first[:1]
    unlisted = PlanStudy(Search(MODEL, CLUSTER, WORKLOAD))
    unlisted.resume(trials)
    assert ask() == unlisted.ask()


@pytest.mark.parametrize("name", [SamplerName.TPE, SamplerName.RANDOM, SamplerName.GRID])
def test_an_alternative_asks_the_same_whether_or_not_its_process_lives(name: SamplerName) -> None:
    """Legal plans only, each once; two are in flight at any time; the search learns too; a repeat disturbs nothing."""
    plans = [
        Plan(dp=8, micro_batch=2**i, zero_stage=zero, recompute=recompute)
        for i in range(4) for zero in (0, 1, 2) for recompute in (Recompute.NONE, Recompute.FULL)
    ]  # fmt: skip

    def study() -> tuple[Search, PlanStudy]:
        search = Search(MODEL, CLUSTER, WORKLOAD, plans=plans)
        return search, PlanStudy(search, alternative=alternative(name, plans, seed=1))

    def asked(*, lives: bool) -> list[Plan]:
        search, going = study()
        trials: list[Trial] = []
        for number in range(len(plans)):
            if not lives:
                search, going = study()
            going.resume(trials)
            asked = going.ask()
            assert asked.number == number
            trials.append(stored(number, asked.plan, None))
            if number:
                before = trials[number - 1].plan
                trials[number - 1] = stored(number - 1, before, 10.0 * before.micro_batch - before.zero_stage)
        going.resume([*trials[:-1], stored(number, asked.plan, 1.0)])
        assert search.verdict(Budget()).reason == "every legal plan was tried"
        again = going.repeat(plans[0])
        assert (again.plan, again.number, search.trials) == (plans[0], len(plans), len(plans))
        return [trial.plan for trial in trials]

    uninterrupted = asked(lives=True)
    assert sorted(uninterrupted, key=plans.index) == plans
    assert asked(lives=False) == uninterrupted


def stored(number: int, plan: Plan, tokens: float | None) -> Trial:
    """A trial as stored: complete, or running without a speed."""
    return Trial(
        id=str(number), tuning_id="t", number=number, plan=plan,
        state=TrialState.RUNNING if tokens is None else TrialState.COMPLETE,
        reading=None if tokens is None else reading(plan, tokens), started_at=datetime.now(UTC),
    )  # fmt: skip


def test_every_field_of_a_plan_is_a_parameter_with_the_values_of_the_table() -> None:
    found = distributions(Search(MODEL, CLUSTER, WORKLOAD, plans=[Plan(dp=8), Plan(tp=2, dp=4)]).table)
    assert set(found) == set(Plan.model_fields)
    assert found["tp"].choices == (1, 2)
    assert found["schedule"].choices == ("1f1b",)


def test_what_does_not_learn_stays_as_assumed() -> None:
    """A part switched off: no parameter moves, only parameters move, everything fits. Both off: nothing moves."""

    def told(learning: Learning) -> tuple[Posterior, Posterior]:
        search = Search(MODEL, CLUSTER, WORKLOAD, learning=learning)
        before = search.posterior()
        for plan in (Plan(dp=8), Plan(tp=2, dp=4)):
            search.tell(plan, reading(plan, distorted(plan)))
        return before, search.posterior()

    def moved(learning: Learning) -> bool:
        before, after = told(learning)
        return bool(np.any(np.abs(after.log_mean - before.log_mean)[~after.barred] > 0.01))

    uncalibrated = told(Learning(calibration=False))[1]
    assert {mean for mean, _ in uncalibrated.calibration.values()} == {0.0}
    assert moved(Learning(calibration=False))
    assert any(abs(mean) > 0.01 for mean, _ in told(Learning(residual=False))[1].calibration.values())
    assert moved(Learning(residual=False))
    assert not moved(Learning(calibration=False, residual=False))
    assert told(Learning(p_fits=False))[1].p_fits.min() == 1.0
    assert told(Learning())[1].p_fits.min() < 0.5
