"""What a night's budget goes to, and how verdicts and noises come about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from autotune.regression.selection import expected_gpu_s, importance, select
from autotune.regression.verdict import judge
from autotune.regression.windows import Noise, Window, baseline_of, noise_of, noise_of_role
from autotune.specs.regression import (
    Check,
    CheckCandidate,
    CheckResult,
    CheckRole,
    CheckState,
    CheckWindow,
    VerdictKind,
)

NOW = datetime(2026, 5, 4, tzinfo=UTC)


def candidate(entry_id: int, days: float | None = 1.0, **changes: object) -> CheckCandidate:
    made = CheckCandidate(
        entry_id=entry_id, series=f"s{entry_id}", model_name="m", cluster_name="here", fingerprint_key="f",
        environment_key="e", devices=2, step_s=0.5, measured_at=NOW, tuned=1,
        checked_at=None if days is None else NOW - timedelta(days=days), check_gpu_s=None if days is None else 100.0,
    )  # fmt: skip
    return made.model_copy(update=changes)


def order(*candidates: CheckCandidate, budget: float | None = None, environment: str = "e") -> list[int]:
    found = select(candidates, budget_gpu_s=budget, environments={"here": environment}, now=NOW)
    return [item.candidate.entry_id for item in found.chosen]


def test_the_longest_unchecked_comes_first_and_the_never_checked_before_it() -> None:
    assert order(candidate(1, 1.0), candidate(2, 9.0), candidate(3, None)) == [3, 2, 1]


def test_what_is_tuned_often_and_large_is_more_important() -> None:
    assert order(candidate(1), candidate(2, tuned=7), candidate(3, tuned=7, devices=64)) == [3, 2, 1]
    assert importance(candidate(1, tuned=0, devices=1)) == 1.0
    assert importance(candidate(1, tuned=7, devices=64)) == 28.0  # (1 + log2 8) * (1 + log2 64)


def test_a_stale_entry_and_one_in_trouble_are_looked_at_first() -> None:
    assert order(candidate(1, 2.0), candidate(2, 1.0, environment_key="old")) == [2, 1]
    assert order(candidate(1, 2.0), candidate(2, 1.0, open_incident=True)) == [2, 1]


def test_the_budget_is_kept_and_what_is_left_out_is_named() -> None:
    items = [candidate(1, 5.0), candidate(2, 4.0, check_gpu_s=900.0), candidate(3, 3.0), candidate(4, 2.0)]
    found = select(items, budget_gpu_s=250.0, environments={}, now=NOW)
    assert [item.candidate.entry_id for item in found.chosen] == [1, 3]
    assert [item.candidate.entry_id for item in found.left_out] == [4]
    assert [item.candidate.entry_id for item in found.too_costly] == [2]
    assert sum(item.gpu_s for item in found.chosen) <= 250.0


def test_every_entry_has_its_turn() -> None:
    checked = {number: NOW - timedelta(days=1) for number in range(6)}
    seen = set()
    for night in range(60):
        now = NOW + timedelta(days=night)
        items = [
            candidate(n, tuned=2 * n, devices=2 ** (n % 4)).model_copy(update={"checked_at": checked[n]})
            for n in checked
        ]
        for item in select(items, budget_gpu_s=100.0, environments={}, now=now).chosen:
            seen.add(item.candidate.entry_id)
            checked[item.candidate.entry_id] = now
    assert seen == set(checked)


def test_a_first_check_is_expected_to_cost_what_its_steps_do() -> None:
    slow, fast = candidate(1, None, step_s=10.0), candidate(2, None, step_s=0.1)
    assert expected_gpu_s(slow) > 5 * expected_gpu_s(fast)
    assert expected_gpu_s(candidate(3)) == 100.0
    assert expected_gpu_s(candidate(1, None, devices=8)) == 4 * expected_gpu_s(candidate(1, None))


@pytest.mark.parametrize(
    ("step_s", "days", "gpu_s"),
    [
        # Two devices. Ranks start in 10 s; a window has five step probes of 2 s and 2 + 3 + 3 + 1 steps each, and three
        # rounds of three controls of 2 s; a first check has four windows, a later one 1.5.
        (10.0, None, 2 * (10 + 4 * (5 * (2 + 90) + 18))),
        (10.0, 1.0, 2 * (10 + 1.5 * (5 * (2 + 90) + 18))),
        (0.1, None, 2 * (10 + 4 * (5 * (2 + 2.6) + 18))),  # 20 steps of 0.1 s are timed, not three
    ],
)
def test_what_a_check_is_expected_to_cost_by_hand(step_s: float, days: float | None, gpu_s: float) -> None:
    assert expected_gpu_s(candidate(1, days, step_s=step_s, check_gpu_s=None)) == pytest.approx(gpu_s)


@pytest.mark.parametrize(
    ("made", "weight", "reason"),
    [
        # Importance (1 + log2 2) * (1 + log2 2) = 4, times the days.
        (candidate(1, 2.0), 8.0, "last checked 2.0 days ago"),
        (candidate(1, 0.1), 2.0, "last checked 0.5 days ago"),
        (candidate(1, None), 240.0, "never checked"),
        (candidate(1, 2.0, environment_key="old"), 32.0, "last checked 2.0 days ago; the environment has changed"),
        (candidate(1, 2.0, open_incident=True), 24.0, "last checked 2.0 days ago; it has an open incident"),
    ],
)
def test_the_weight_of_an_entry_by_hand(made: CheckCandidate, weight: float, reason: str) -> None:
    (found,) = select([made], budget_gpu_s=None, environments={"here": "e"}, now=NOW).chosen
    assert (found.weight, found.reason) == (pytest.approx(weight), reason)


def test_a_budget_may_be_spent_to_the_last_second() -> None:
    assert order(candidate(1, 3.0), candidate(2, 2.0), budget=200.0) == [1, 2]
    assert order(candidate(1, 3.0), candidate(2, 2.0), budget=199.0) == [1]
    assert order(candidate(1, 3.0), budget=100.0) == [1]


def visit(number: int, verdict: VerdictKind, environment: str = "e", series: str = "s", speed: float = 1.0) -> Check:
    windows = (CheckWindow(at=NOW, speeds={CheckRole.WINNER: (speed, speed, speed)}),)
    return Check(
        id=f"c{number}", entry_id=1, series=series, cluster_key="k", state=CheckState.DONE,
        started_at=NOW + timedelta(days=number), environment_key=environment, fingerprint_key=f"f{number}",
        result=CheckResult(verdict=verdict, windows=windows),
    )  # fmt: skip


def test_a_baseline_is_the_first_ten_visits_of_its_environment() -> None:
    kinds = [VerdictKind.BASELINE, *[VerdictKind.UNCHANGED] * 5, VerdictKind.WORSE, *[VerdictKind.UNCHANGED] * 6]
    checks = [visit(number, kind) for number, kind in enumerate(kinds)]
    found = baseline_of(checks, "e")
    assert found is not None
    assert [check.id for check in found.visits] == [f"c{number}" for number in (0, 1, 2, 3, 4, 5, 7, 8, 9, 10)]
    assert (found.since, found.fingerprint_key, len(found.windows)) == (NOW, "f12", 10)
    assert [window.visit for window in found.of(CheckRole.WINNER)][:2] == ["c0", "c1"]
    assert found.of(CheckRole.KERNELS) == []
    better = baseline_of([*checks, visit(20, VerdictKind.BETTER)], "e")
    assert better is not None
    assert [check.id for check in better.visits] == ["c20"]


def test_the_baseline_of_another_environment_stands_in_the_newest_first() -> None:
    checks = [
        visit(0, VerdictKind.BASELINE, "a"),
        visit(1, VerdictKind.BASELINE, "b"),
        visit(2, VerdictKind.WORSE, "c"),
    ]
    assert baseline_of([], "a") is None
    assert baseline_of(checks[2:], "c") is None
    for wanted, found in (("a", "a"), ("b", "b"), ("c", "b")):
        baseline = baseline_of(checks, wanted)
        assert baseline is not None
        assert baseline.environment_key == found
    again = baseline_of([*checks, visit(3, VerdictKind.BETTER, "a")], "c")
    assert again is not None
    assert again.environment_key == "a"


def test_the_noise_of_a_cluster_is_that_of_visits_in_which_nothing_changed() -> None:
    """One step of ln 1.1 between visits, and none of ln 2 where a plan became better, was worse, or is another one."""
    checks = [
        visit(0, VerdictKind.BASELINE),
        visit(1, VerdictKind.UNCHANGED, speed=1.1),
        visit(2, VerdictKind.WORSE, speed=0.5),
        visit(3, VerdictKind.BETTER, speed=2.2),
        visit(4, VerdictKind.BASELINE, series="other", speed=9.0),
        visit(5, VerdictKind.BASELINE, environment="new", speed=5.0),
    ]
    step = [window("a", *[0.0] * 3), window("b", *[float(np.log(1.1))] * 3)]
    alone = [[window(name, 0.0, 0.0, 0.0)] for name in "cde"]
    found, expected = noise_of_role(checks, CheckRole.WINNER), noise_of([step, *alone])
    assert (found.within, found.between) == (pytest.approx(expected.within), pytest.approx(expected.between))
    assert (found.visits, found.freedom) == (pytest.approx(expected.visits), pytest.approx(expected.freedom))


def window(visit: str, *logs: float) -> Window:
    return Window(visit=visit, logs=logs)


def test_a_window_is_not_moved_by_one_outlier() -> None:
    assert window("v", 0.0, 0.0, 0.0, 0.0, -1.0).centre == 0.0


def test_noise_starts_from_a_prior_and_is_learned_in_its_three_parts() -> None:
    prior = noise_of([])
    assert (prior.within, prior.between, prior.visits) == pytest.approx((0.01, 0.006, 0.006))
    assert prior.freedom == pytest.approx(3.0 + 14.0 * (0.005 / 0.006) ** 2)
    random = np.random.default_rng(0)

    def visits(within: float, between: float, nights: float) -> list[Window]:
        found = []
        for night in range(60):
            level = nights * random.normal()
            for _ in range(3):
                centre = level + between * random.normal()
                found.append(window(str(night), *(centre + within * random.normal(size=5))))
        return found

    learned = noise_of([visits(0.03, 0.02, 0.04)])
    assert learned.within == pytest.approx(0.03, rel=0.2)
    assert learned.between == pytest.approx(0.02, rel=0.35)
    assert learned.visits == pytest.approx(0.04, rel=0.35)
    assert learned.freedom > 20


def test_one_terrible_night_does_not_hide_the_next_loss() -> None:
    random = np.random.default_rng(0)
    calm = [window(str(n), *(0.003 * random.normal(size=5))) for n in range(20)]
    wild = [*calm[:10], window("wild", *(1.0 + 0.003 * random.normal(size=5))), *calm[10:]]
    assert noise_of([wild]).visits < 4 * noise_of([calm]).visits


BASELINE = [window(str(n // 2), *np.linspace(-0.005, 0.005, 5)) for n in range(8)]


def shifted(by: float, count: int) -> list[Window]:
    return [window("now", *(by + np.linspace(-0.005, 0.005, 5))) for _ in range(count)]


def test_an_alarm_needs_two_windows() -> None:
    noise = noise_of([BASELINE])
    first = judge(BASELINE, shifted(-0.2, 1), noise)
    assert first.again
    assert first.kind is VerdictKind.CANNOT_TELL
    second = judge(BASELINE, shifted(-0.2, 2), noise)
    assert (second.kind, second.again) == (VerdictKind.WORSE, False)
    assert second.effect == pytest.approx(np.expm1(-0.2))
    assert second.interval[0] < second.effect < second.interval[1] < 0.0
    assert judge(BASELINE, shifted(0.2, 2), noise).kind is VerdictKind.BETTER


def test_a_change_too_small_to_matter_is_none() -> None:
    assert judge(BASELINE, shifted(-0.005, 3), noise_of([BASELINE])).kind is VerdictKind.UNCHANGED


def same(visit: str, by: float, count: int) -> list[Window]:
    """Windows whose five repeats are all alike."""
    return [window(visit, *[by] * 5) for _ in range(count)]


# Of the mean of windows of five repeats in one visit: 0.005² = 25e-6 of the visit; and of each window 0.006² = 36e-6,
# and of the median of its repeats (1.2 * 0.01)² / 5 = 28.8e-6.
NOISE = Noise(within=0.01, between=0.006, visits=0.005, freedom=17.0)
THEN = same("then", 0.0, 4)
"""A baseline of variance 25e-6 + 64.8e-6 / 4 = 41.2e-6."""


def test_visits_of_many_windows_weigh_more() -> None:
    """Two visits of two windows and one: (4 + 1) / 9 of the visits' variance; a third of the windows', whose repeats
    are five, five and two: a mean of 0.3 over their numbers."""
    windows = [*same("a", 0.0, 2), window("b", 0.0, 0.0)]
    assert NOISE.variance(windows) == pytest.approx(25e-6 * 5 / 9 + (36e-6 + 144e-6 * 0.3) / 3)


# Half widths: Student's t with 17 degrees of freedom is 4.89575 where an early look may err (0.003 * 0.5 / 11 on both
# sides), 3.73819 at the twelfth window (half of 0.003 more), 1.73961 at 5 % and 2.22385 at 2 % on one side.
LOOKS = [
    # of one window sqrt(41.2e-6 + 89.8e-6) = 0.0114455: never an alarm; sure of no loss of 5 % above ln 0.95 + 0.025453
    (-0.0195, 1, VerdictKind.UNCHANGED, False),
    (-0.0205, 1, VerdictKind.CANNOT_TELL, True),  # beyond 0.019911 something speaks for a change
    (-0.2, 1, VerdictKind.CANNOT_TELL, True),
    # of two sqrt(41.2e-6 + 57.4e-6) = 0.0099298, half 0.048614
    (-0.0485, 2, VerdictKind.CANNOT_TELL, True),
    (-0.0487, 2, VerdictKind.WORSE, False),
    (0.0487, 2, VerdictKind.BETTER, False),
    # of eleven sqrt(41.2e-6 + 30.891e-6) = 0.0084907, half 0.041568; of twelve 0.0084617, half 0.031632
    (-0.033, 11, VerdictKind.CANNOT_TELL, True),
    (-0.033, 12, VerdictKind.WORSE, False),
    (-0.031, 12, VerdictKind.CANNOT_TELL, False),
]


@pytest.mark.parametrize(("change", "count", "kind", "again"), LOOKS)
def test_a_verdict_is_reached_where_the_noise_allows_it(
    change: float, count: int, kind: VerdictKind, *, again: bool
) -> None:
    found = judge(THEN, same("now", change, count), NOISE)
    assert (found.kind, found.again) == (kind, again)


def test_the_interval_of_a_change_is_as_wide_as_one_look_may_err() -> None:
    found = judge(THEN, same("now", -0.03, 1), NOISE)
    half = 4.895752 * 131e-6**0.5
    assert found.effect == pytest.approx(np.exp(-0.03) - 1.0)
    assert found.interval == pytest.approx((np.exp(-0.03 - half) - 1.0, np.exp(-0.03 + half) - 1.0), rel=1e-5)


@pytest.mark.parametrize(
    ("scale", "change", "count", "kind"),
    [
        # A tenth of the noise: a change of 0.995 % is clear, and too small to matter; 1.005 % is not.
        (0.1, np.log1p(-0.00995), 2, VerdictKind.UNCHANGED),
        (0.1, np.log1p(-0.01005), 2, VerdictKind.WORSE),
        (0.1, np.log1p(0.00995), 2, VerdictKind.UNCHANGED),
        (0.1, np.log1p(0.01005), 2, VerdictKind.BETTER),
        # Twice the noise: 2.22385 * 0.022891 = 0.050906 of the 0.051293 that a loss of 5 % is.
        (2.0, -0.0003, 1, VerdictKind.UNCHANGED),
        (2.0, -0.0005, 1, VerdictKind.CANNOT_TELL),
    ],
)
def test_what_is_too_small_or_not_ruled_out(scale: float, change: float, count: int, kind: VerdictKind) -> None:
    noise = Noise(within=0.01 * scale, between=0.006 * scale, visits=0.005 * scale, freedom=17.0)
    assert judge(THEN, same("now", change, count), noise).kind is kind


def three(visit: str, centre: float, spread: float = 0.03) -> Window:
    """Three repeats of that standard deviation."""
    return window(visit, centre - spread, centre, centre + spread)


def test_noise_of_two_visits_of_two_windows_by_hand() -> None:
    """A prior counts as six values. Within: sqrt((6 * 0.01² + 4 * 0.03²) / 10). Of a window's median that leaves
    own = 1.2 * 0.0204939 / sqrt(3) = 0.0141986. Steps between windows are 0.02 / sqrt(2) both; with the prior
    0.0204939 / 2 beside own they give sqrt((6 * 3.066e-4 + 2 * 2e-4) / 8), and without own 0.0088515. One step between
    visits, 0.05 / sqrt(2), in the same way: sqrt((6 * 3.583e-4 + 12.5e-4) / 7), without what windows do 0.0143437."""
    found = noise_of([[three("a", 0.0), three("a", 0.02), three("b", 0.05), three("b", 0.07)]])
    assert found.within == pytest.approx(0.0204939, rel=1e-5)
    assert found.between == pytest.approx(0.0088515, rel=1e-4)
    assert found.visits == pytest.approx(0.0143437, rel=1e-4)
    assert found.freedom == pytest.approx(3.0 + 14.0 * (0.005 / 0.0143437) ** 2 + 1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("spreads", "squares"),
    [
        # A value counts at most as four times the median one, 1.4826 * 0.01, or a fourth of the prior.
        ([0.01, 0.01, 0.01, 0.01, 1.0], 4 * 0.01**2 + 0.059304**2),
        ([0.0, 0.0, 0.02], 0.01**2),
        ([0.01, 0.01, 0.02], 2 * 0.01**2 + 0.02**2),
    ],
)
def test_one_wild_window_does_not_make_all_noisy(spreads: list[float], squares: float) -> None:
    found = noise_of([[three("v", 0.0, spread)] for spread in spreads])
    assert found.within == pytest.approx(((6 * 0.01**2 + squares) / (6 + len(spreads))) ** 0.5)


@pytest.mark.parametrize(
    ("logs", "spread"),
    [
        ((-1.0, -0.01, 0.0, 0.01, 5.0), 0.01 * 1.88),  # of five the two ends do not count
        ((-0.03, -0.01, 0.01, 0.03), (20e-4 / 3) ** 0.5),
        ((0.0, 0.3), None),  # two values tell nothing
    ],
)
def test_the_noise_within_a_window_is_of_three_repeats_at_least(logs: tuple[float, ...], spread: float | None) -> None:
    found = noise_of([[window("v", *logs)]])
    squares, values = (6e-4, 6) if spread is None else (6e-4 + spread**2, 7)
    assert found.within == pytest.approx((squares / values) ** 0.5)
