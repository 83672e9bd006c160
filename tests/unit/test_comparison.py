"""Which measured plan is the fastest: Welch's interval by hand, how often equal plans are told apart, and ties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from autotune.search.acquisition import StopVerdict
from autotune.search.posterior import Observation
from autotune.search.ranking import RankedPlan, contenders, decide, difference, ranking, undecided
from autotune.specs import Budget, Plan, TuningState
from autotune.tuning.lifecycle import Facts, next_confirmation

GIB = 2**30
speed_lists = st.lists(st.floats(900.0, 1100.0), min_size=3, max_size=6)


def ranked(tp: int, *speeds: float, peak_bytes: float = GIB) -> RankedPlan:
    mean = float(np.mean(speeds))
    return RankedPlan(
        plan=Plan(tp=tp), tokens_per_s_per_gpu=mean, interval=(mean, mean), speeds=speeds, peak_bytes=peak_bytes
    )


@given(speed_lists, speed_lists)
def test_the_interval_is_that_of_scipys_welch_test(one: list[float], other: list[float]) -> None:
    assume(min(np.ptp(one), np.ptp(other)) > 0.01)  # scipy warns of equal values
    found = difference(ranked(1, *one), ranked(2, *other))
    expected = stats.ttest_ind(np.log(one), np.log(other), equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(np.expm1([expected.low, expected.high]), rel=1e-6, abs=1e-9)


@given(speed_lists, speed_lists)
def test_a_difference_seen_from_the_other_side_is_its_inverse(one: list[float], other: list[float]) -> None:
    there, back = (difference(ranked(1, *a), ranked(2, *b)) for a, b in ((one, other), (other, one)))
    assert (1.0 + there.low) * (1.0 + back.high) == pytest.approx(1.0)
    assert there.decided is back.decided
    assert there.low <= there.faster <= there.high


def test_few_repeats_decide_nothing_and_equal_ones_everything() -> None:
    assert not difference(ranked(1, 100.0, 100.1), ranked(2, 50.0, 50.1, 50.2)).decided
    assert difference(ranked(1, 100.0, 100.0, 100.0), ranked(2, 99.0, 99.0, 99.0)).decided
    assert not difference(ranked(1, 100.0, 100.0, 100.0), ranked(2, 100.0, 100.0, 100.0)).decided


def confirmed(rng: np.random.Generator, speeds: dict[int, float], noise: float) -> list[RankedPlan]:
    """Ranking after the lifecycle has measured as often as it wants to; `speeds` are the truths by tp."""

    def measure(tp: int) -> Observation:
        value = speeds[tp] * float(np.exp(noise * rng.standard_normal()))
        return Observation(plan=Plan(tp=tp), tokens_per_s_per_gpu=value)

    told = [measure(tp) for tp in speeds]
    verdict = StopVerdict(stop=True, reason="", expected_gain=None, gpu_s=None)
    while True:
        found = ranking(told)
        facts = Facts(state=TuningState.SEARCHING, verdict=verdict, ranking=found, budget=Budget())
        plan = next_confirmation(facts)
        if plan is None:
            return found
        told.append(measure(plan.tp))


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0.0005, 0.02), plans=st.integers(2, 3))
def test_equal_plans_are_told_apart_in_at_most_one_of_twenty_tunings(seed: int, noise: float, plans: int) -> None:
    """The whole procedure with a look after every repeat; 3.1 standard deviations of 200 tunings allowed."""
    rng = np.random.default_rng(seed)
    equal = {2**i: 1000.0 for i in range(plans)}
    tunings = 200
    false = sum(
        len(undecided(found)) < len(contenders(found)) - 1
        for found in (confirmed(rng, equal, noise) for _ in range(tunings))
    )
    assert false / tunings <= 0.05 + 3.1 * float(np.sqrt(0.05 * 0.95 / tunings))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), ahead=st.floats(0.03, 0.08))
def test_the_slower_plan_is_never_declared_the_faster_one(seed: int, ahead: float) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        found = confirmed(rng, {1: 1000.0 * (1.0 + ahead), 2: 1000.0}, 0.003)
        assert found[0].plan == Plan(tp=1)


def test_clear_differences_need_three_repeats_and_close_ones_all() -> None:
    rng = np.random.default_rng(1)
    clear = confirmed(rng, {1: 1080.0, 2: 1000.0}, 0.002)
    assert [item.repeats for item in clear] == [3, 3]
    close = confirmed(rng, {1: 1000.0, 2: 1000.0}, 0.02)
    assert [item.repeats for item in close] == [5, 5]


def test_contenders_are_three_at_most_and_within_a_tenth() -> None:
    found = [ranked(1, 100.0), ranked(2, 99.0), ranked(4, 91.0), ranked(8, 90.5), ranked(16, 80.0)]
    assert [item.plan.tp for item in contenders(found)] == [1, 2, 4]
    assert contenders([]) == ()


def test_of_plans_that_cannot_be_told_apart_the_one_with_more_free_memory_is_used() -> None:
    fast = ranked(1, 1000.0, 1010.0, 1005.0, peak_bytes=70 * GIB)
    lean = ranked(2, 1002.0, 998.0, 1006.0, peak_bytes=50 * GIB)
    found = decide([fast, lean])
    assert (found.best, found.tied) == (lean, [fast])
    assert "29% lower than that of tp1" in found.reason


def test_memory_is_no_reason_where_speed_decides_or_would_be_given_up() -> None:
    fast = ranked(1, 1000.0, 1010.0, 1005.0, peak_bytes=70 * GIB)
    slower = ranked(2, 952.0, 950.0, 948.0, peak_bytes=50 * GIB)
    assert (decide([fast, slower]).best, decide([fast, slower]).tied) == (fast, [])
    unsure = ranked(2, 940.0, peak_bytes=50 * GIB)
    assert (decide([fast, unsure]).best, decide([fast, unsure]).tied) == (fast, [unsure])
    same = ranked(2, 1004.0, 1000.0, 1008.0, peak_bytes=69.9 * GIB)
    assert decide([fast, same]).best is fast
    assert decide([fast]).tied == []


def test_repeats_widen_the_interval_by_students_factor() -> None:
    """Runs of 1000 and 1020: s of ln is 0.0140, t(1, 0.975) = 12.706, so a factor exp(12.706 * 0.0140 / sqrt 2)."""
    told = [Observation(plan=Plan(), tokens_per_s_per_gpu=value, relative_noise=0.001) for value in (1000.0, 1020.0)]
    (found,) = ranking(told)
    assert found.interval == pytest.approx((1010.0 / 1.13406, 1010.0 * 1.13406), rel=1e-4)
    assert (found.speeds, found.last) == ((1000.0, 1020.0), 1)
    wild = ranking([*told, Observation(plan=Plan(), tokens_per_s_per_gpu=10.0)])
    assert wild[0].interval[0] > 0.0
    assert ranking(told[:1])[0].interval == pytest.approx((999.0, 1001.0), rel=1e-5)


def apart(standard_errors: float, plans: int = 2) -> list[int]:
    """Plans whose three speeds deviate by 1 %; the second is so many standard errors behind; tp of those undecided."""
    behind = [0.0, standard_errors * 0.01 * (2 / 3) ** 0.5, *[0.09] * (plans - 2)]
    ranking_ = [ranked(i + 1, *(100.0 * np.exp(-d + np.array([-0.01, 0.0, 0.01])))) for i, d in enumerate(behind)]
    return [item.plan.tp for item in undecided(sorted(ranking_, key=lambda item: -item.tokens_per_s_per_gpu))]


def test_each_look_may_err_by_two_per_cent_shared_among_the_challengers() -> None:
    """Student's t with 4 degrees of freedom is 3.747 at 1 % on each side, and 4.604 at half of that for two of them."""
    assert (apart(3.74), apart(3.76)) == ([2], [])
    assert (apart(4.60, plans=3), apart(4.61, plans=3)) == ([2], [])


def test_contenders_are_within_a_tenth_of_the_fastest_and_three_at_most() -> None:
    found = contenders([ranked(tp, speed) for tp, speed in ((1, 100.0), (2, 90.0), (3, 89.9))])
    assert [item.plan.tp for item in found] == [1, 2]
    assert len(contenders([ranked(tp, 100.0) for tp in range(1, 6)])) == 3
    assert contenders([]) == ()


@pytest.mark.parametrize(
    ("behind", "peak", "best"),
    [(0.0195, 0.98, 2), (0.0205, 0.98, 1), (0.01, 0.9899, 2), (0.01, 0.9901, 1)],
)
def test_memory_decides_between_ties_within_two_per_cent_of_speed(behind: float, peak: float, best: int) -> None:
    """If a peak is lower by a hundredth at least."""
    noisy = [ranked(1, 900.0, 1000.0, 1100.0), ranked(2, *((1.0 - behind) * np.array([900.0, 1000.0, 1100.0])))]
    noisy[1] = ranked(2, *noisy[1].speeds, peak_bytes=peak * GIB)
    found = decide(noisy)
    assert found.best.plan.tp == best
    assert [item.plan.tp for item in found.tied] == [3 - best]
    assert bool(found.reason) is (best == 2)
