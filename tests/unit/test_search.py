"""Search and study on a machine that does not exist: measured throughput is a known distortion of the estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from scipy.special import ndtr

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.estimate import BytesColumns, EstimateTable, estimate, estimate_table
from autotune.cost.memory import BYTE_PARTS
from autotune.cost.table import PlanTable
from autotune.errors import InputError
from autotune.search.acquisition import choose, expected_gain, gain_left, verdict
from autotune.search.core import Search
from autotune.search.peaks import Peaks, peaks
from autotune.search.physics import PARAMETERS, Assumed
from autotune.search.posterior import Observation, Posterior, TransferObservation, calibrated
from autotune.search.ranking import observation
from autotune.search.residual import Learning
from autotune.search.sampler import alternative, distributions
from autotune.search.study import Asked, PlanStudy
from autotune.specs import (
    Budget,
    ComputeFit,
    Failure,
    FailureKind,
    Plan,
    Profile,
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
    assert 3 <= trials < search.legal
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
                trials[number - 1] = stored(number - 1, before, 100.0 + before.micro_batch - before.zero_stage)
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


def test_the_interval_of_a_measured_plan_is_what_its_next_run_may_take() -> None:
    """2048 * 64 tokens a step at 1000 a second on 8 GPUs are 16.384 s; runs differ by 2 %, and 1.645 standard
    deviations on either side hold 90 %."""
    search = Search(MODEL, CLUSTER, WORKLOAD, plans=[Plan(dp=8), Plan(tp=2, dp=4)])
    search.tell(Plan(dp=8), reading(Plan(dp=8), 1000.0))
    found = search.estimate_of(Plan(dp=8))
    assert found is not None
    assert found.step_time_interval_s == pytest.approx((16.384 / np.exp(0.0329), 16.384 * np.exp(0.0329)))


def test_the_interval_of_a_plan_that_nothing_is_learned_of_is_its_own_spread() -> None:
    nothing = Learning(calibration=False, residual=False)
    search = Search(MODEL, CLUSTER, WORKLOAD, plans=[Plan(dp=8)], learning=nothing)
    found = search.estimate_of(Plan(dp=8))
    assert found is not None
    middle, spread = found.step_time_s, np.exp(1.645 * 0.05)
    assert found.step_time_interval_s == pytest.approx((middle / spread, middle * spread))


@pytest.mark.parametrize(("measured", "stop"), [(2, False), (3, True)])
def test_a_search_ends_on_a_small_gain_once_three_plans_were_measured(measured: int, *, stop: bool) -> None:
    """One plan left, P(fits) 1, its throughput half of the best: z = ln 0.5 / 0.1, and the gain is next to nothing."""
    posterior = posterior_of(log_mean=np.log(50.0), log_sd=0.1, best=100.0, trial_gpu_s=40.0, measured=measured)
    found = verdict(posterior, Budget(min_gain=0.01), trials=9, gpu_s_spent=0.0)
    assert (found.stop, found.gpu_s) == (stop, 40.0)
    assert found.expected_gain == pytest.approx(0.0, abs=1e-9)
    assert found.reason == ("no plan left is expected to gain 1.0% (best 0.00% for 40 GPU-seconds)" if stop else "")


def test_a_search_goes_on_for_what_two_suppositions_promise_of_two_plans() -> None:
    """Each of two plans is 1.2 times the best under a supposition of 4 %, so that no trial gains 1 % on average; who
    finds out which of them holds gains 1.6 %."""
    sd, ones = np.full(2, 1e-3), np.ones(2)
    one = posterior_of(log_mean=np.log(50.0), log_sd=0.01, best=100.0, measured=3)
    both = replace(one, log_mean=np.log(50.0) * ones, p_pays=ones, trial_gpu_s=ones, barred=np.zeros(2, dtype=np.bool_))
    usual = (0.92, np.log([50.0, 50.0]), sd)
    other = [(0.04, np.log(speeds), sd) for speeds in ([120.0, 50.0], [50.0, 120.0])]
    found = replace(both, suppositions=[usual, *other])
    assert expected_gain(found) == pytest.approx([0.008, 0.008], rel=1e-3)
    assert gain_left(found) == pytest.approx(0.016, rel=1e-3)
    assert not verdict(found, Budget(min_gain=0.01), trials=9, gpu_s_spent=0.0).stop
    assert verdict(found, Budget(min_gain=0.017), trials=9, gpu_s_spent=0.0).stop


def test_the_expected_gain_is_the_mean_of_what_lies_above_the_best() -> None:
    """As good as the best in the median, sd 0.2: exp(0.02) * Phi(0.2) - Phi(0) = 1.020201 * 0.579260 - 0.5 = 0.090961.
    A hundredth above the median, sd 0.1: exp(0.015) * Phi(0.2) - Phi(0.1) = 1.015113 * 0.579260 - 0.539828."""
    even = posterior_of(log_mean=np.log(100.0), log_sd=0.2, best=100.0, p_fits=0.5)
    assert expected_gain(even) == pytest.approx([0.5 * 0.090961], abs=1e-6)
    ahead = posterior_of(log_mean=np.log(100.0) + 0.01, log_sd=0.1, best=100.0)
    assert expected_gain(ahead) == pytest.approx([0.048187], abs=1e-6)
    assert not verdict(ahead, Budget(min_gain=0.048), trials=8, gpu_s_spent=0.0).stop
    assert verdict(ahead, Budget(min_gain=0.049), trials=8, gpu_s_spent=0.0).stop
    hopeless = posterior_of(log_mean=-1000.0, log_sd=0.1, best=100.0)
    assert not verdict(hopeless, Budget(min_gain=0.0), trials=8, gpu_s_spent=0.0).stop  # no gain is too small then


def test_a_budget_ends_a_search_where_the_next_trial_would_go_over_it() -> None:
    posterior = posterior_of(log_mean=np.log(100.0), log_sd=0.2, best=100.0, trial_gpu_s=40.0)
    assert not verdict(posterior, Budget(gpu_s=100.0), trials=1, gpu_s_spent=60.0).stop
    over = verdict(posterior, Budget(gpu_s=100.0), trials=1, gpu_s_spent=60.5)
    assert over.stop
    assert over.reason == "60 of the 100 GPU-seconds that the search may use are spent; another trial needs about 40"
    assert not verdict(posterior, Budget(max_trials=5), trials=4, gpu_s_spent=0.0).stop
    counted = verdict(posterior, Budget(max_trials=5), trials=5, gpu_s_spent=0.0)
    assert (counted.stop, counted.reason) == (True, "5 trials were run, the most allowed")


def posterior_of(
    *, log_mean: float, log_sd: float, best: float, p_fits: float = 1.0, trial_gpu_s: float = 1.0, measured: int = 8
) -> Posterior:
    """Of one plan that nobody ran, and a best one that is not in the table."""
    return Posterior(
        log_mean=np.array([log_mean]), log_sd=np.array([log_sd]), peak_bytes=np.ones(1), p_fits=np.array([p_fits]),
        p_pays=np.array([p_fits]), trial_gpu_s=np.array([trial_gpu_s]), barred=np.zeros(1, dtype=np.bool_),
        best_plan=Plan(), best=best, measured=measured, calibration={},
    )  # fmt: skip


LIMIT_BYTES = 100e9
"""Where plans run out of memory as often as not if 100e9 bytes can be used."""


def reserved(part: str, size_bytes: Sequence[float], memory_sd: float = 0.06) -> EstimateTable:
    """Estimates whose bytes are all of one part, on devices of 100e9 bytes that lose none; of a framework whose memory
    is known so well."""
    plans = [Plan(dp=8, micro_batch=2**i) for i in range(len(size_bytes))]
    made = estimate_table(MODEL, CLUSTER, WORKLOAD, PlanTable.of(plans))
    parts = {name: np.array(size_bytes) * (name == part) for name in BYTE_PARTS}
    return replace(
        made, bytes=BytesColumns(**parts), device_memory_bytes=100 * 10**9, overhead_bytes=0.0, memory_sd=memory_sd
    )  # fmt: skip


def believed_peaks(
    estimates: EstimateTable,
    *,
    measured: Sequence[tuple[int, float]] = (),
    out_of_memory: Sequence[int] = (),
    shares: Sequence[Sequence[float]] = (),
    log_peaks: Sequence[float] = (),
    residual: bool = False,
) -> Peaks:
    return peaks(
        np.zeros((len(estimates), 1)), estimates, measured=measured, out_of_memory=out_of_memory,
        shares=np.array(shares, dtype=np.float64), log_peaks=np.array(log_peaks, dtype=np.float64),
        learning=Learning(residual=residual),
    )  # fmt: skip


def test_p_fits_falls_from_sure_to_none_within_some_six_per_cent_each() -> None:
    """The normal distribution's shares below -1, 0, 1 and 2 standard deviations of 0.06."""
    below = np.array([-1.0, 0.0, 1.0, 2.0])
    found = believed_peaks(reserved("parameters", LIMIT_BYTES * np.exp(-0.06 * below)))
    assert found.p_fits == pytest.approx([0.158655, 0.5, 0.841345, 0.977250], abs=1e-6)
    assert found.reserved_bytes == pytest.approx(LIMIT_BYTES * np.exp(-0.06 * below))


@pytest.mark.parametrize(
    ("part", "residual", "shift"),
    [
        ("parameters", False, 9e-4 / 73e-4 * 0.1),
        ("activations", False, 45e-4 / 109e-4 * 0.1),
        ("logits", False, 45e-4 / 109e-4 * 0.1),
        ("gathered", False, 909e-4 / 973e-4 * 0.1),
        ("fragmentation", False, 909e-4 / 973e-4 * 0.1),
        ("optimizer", False, 109e-4 / 173e-4 * 0.1),
        ("parameters", True, 109e-4 / 173e-4 * 0.1),
    ],
)
def test_a_measured_peak_moves_what_it_is_made_of(part: str, *, residual: bool, shift: float) -> None:
    """A peak 0.1 (ln) above its prediction, with noise of 0.08² = 64e-4. The variance of what it may be off by is
    0.03² = 9e-4 for all plans, and in addition for activations 0.06², for gathered parameters and fragmentation 0.3²,
    for optimizer state 0.1², for what plans alike share 0.1². Of the shift a half is cache that does no harm; and so
    is a half of what is kept gathered, and all of fragmentation."""
    found = believed_peaks(reserved(part, [LIMIT_BYTES]), measured=[(0, LIMIT_BYTES * np.exp(0.1))], residual=residual)
    assert found.reserved_bytes == pytest.approx([LIMIT_BYTES * np.exp(shift)], rel=1e-6)
    given_back = {"gathered": np.log(2.0), "fragmentation": np.inf}.get(part, 0.0)
    assert found.p_fits == pytest.approx(ndtr([(given_back - shift / 2.0) / 0.06]), rel=1e-5)


def test_doubt_about_a_framework_shrinks_with_the_peaks_that_were_measured() -> None:
    """Before any the probability is the estimate's own, wide; a peak as predicted leaves less doubt of all plans."""
    estimates = reserved("parameters", [0.8 * LIMIT_BYTES, 0.7 * LIMIT_BYTES], memory_sd=0.15)
    before = believed_peaks(estimates).p_fits
    assert before == pytest.approx(ndtr(np.log(1 / np.array([0.8, 0.7])) / 0.15))
    assert before == pytest.approx(estimates.p_fits)
    after = believed_peaks(estimates, measured=[(1, 0.7 * LIMIT_BYTES)]).p_fits
    doubt = 0.15**2 - 0.06**2 + 9e-4  # of which the noise of 64e-4 leaves its share
    left = 0.06**2 + (0.15**2 - 0.06**2) * 64e-4 / (doubt + 64e-4)
    assert after[0] == pytest.approx(ndtr(np.log(1 / 0.8) / np.sqrt(left)), rel=1e-3)
    assert after[0] > before[0]


def test_an_oom_places_a_peak_just_above_the_limit() -> None:
    """Predicted 0.1 (ln) below it, so 0.15 below where it is put; noise 0.05² = 25e-4. One that was expected to fail
    teaches nothing."""
    estimates = reserved("parameters", [LIMIT_BYTES * np.exp(-0.1)])
    found = believed_peaks(estimates, out_of_memory=[0])
    assert np.log(found.reserved_bytes / LIMIT_BYTES) == pytest.approx([-0.1 + 9e-4 / 34e-4 * 0.15], rel=1e-5)
    expected = reserved("parameters", [LIMIT_BYTES * np.exp(0.051)])
    assert np.log(believed_peaks(expected, out_of_memory=[0]).reserved_bytes / LIMIT_BYTES) == pytest.approx([0.051])


def test_a_lesson_of_memory_weighs_less_than_a_measurement() -> None:
    """Noise of 0.1² = 100e-4 against 9e-4."""
    found = believed_peaks(reserved("parameters", [1e9]), shares=[[1.0, 0.0, 0.0, 0.0, 0.0]], log_peaks=[0.1])
    assert np.log(found.reserved_bytes / 1e9) == pytest.approx([9e-4 / 109e-4 * 0.1])


def only_computing() -> EstimateTable:
    """Of one plan on one device whose step is nothing but computation: ln step = all + compute + what is assumed."""
    fit = ComputeFit(flops_per_s=1e12, launch_s=0.0, bytes_per_s=None, relative_error=0.0, readings=9)
    profile = Profile(cluster_key="c", fingerprint_key="f", compute=fit)
    alone = cluster_from_shorthand("a100-80gb-sxm:1x1")
    return estimate_table(MODEL, alone, WORKLOAD, PlanTable.of([Plan()]), profile)


def test_trials_go_on_from_where_lessons_led() -> None:
    """A lesson 0.2 (ln) slower, noise 0.1² = 0.01, on "all", whose variance is 0.3² = 0.09: mean 0.09 / 0.1 * 0.2 =
    0.18, variance 0.009 and a fourth of 0.09 = 0.0315. "compute" keeps its 0.15² = 0.0225 and a fourth of it: 0.028125.
    Then a trial 0.5 slower than assumed, 0.32 than that lesson; noise 0.02² + 0.05² = 0.0029, ZeRO-0 as
    "compute"; 0.09065 in all."""
    estimates = only_computing()
    tokens = float(estimates.tokens_per_s_per_gpu[0]) * np.exp(-0.5)
    found = calibrated(
        np.zeros((1, 1)), Assumed(estimates), [(0, Observation(plan=Plan(), tokens_per_s_per_gpu=tokens))],
        [TransferObservation(plan=Plan(dp=8), log_speed=-0.2)], Learning(residual=False),
    )  # fmt: skip
    moved = dict(zip(PARAMETERS, found.parameters, strict=True))
    assert moved["all"] == pytest.approx(0.18 + 0.0315 / 0.09065 * 0.32, rel=1e-5)
    assert moved["compute"] == pytest.approx(0.028125 / 0.09065 * 0.32, rel=1e-5)
    assert moved["exchange"] == moved["host"] == moved["gradients"] == 0.0


def test_what_a_reading_teaches_of_speed_and_of_how_sure_it_is() -> None:
    """990 to 1010 around 1000: a hundredth on either side."""
    found = observation(Plan(dp=8), reading(Plan(dp=8), 1000.0, peak_bytes=7, pruned=True), CLUSTER, 3.0)
    assert found.relative_noise == pytest.approx(0.01)
    assert (found.tokens_per_s_per_gpu, found.peak_bytes, found.pruned, found.gpu_s) == (1000.0, 7.0, True, 3.0)
    nothing = reading(Plan(dp=8), 1.0).model_copy(update={"tokens_per_s_per_gpu": 0.0})
    assert observation(Plan(dp=8), nothing, CLUSTER).relative_noise == 0.0
