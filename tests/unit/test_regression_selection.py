"""What a night's budget goes to, and how verdicts and noises come about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from autotune.regression.selection import expected_gpu_s, importance, select
from autotune.regression.verdict import MIN_EFFECT, judge
from autotune.regression.windows import PRIOR_BETWEEN, PRIOR_VISITS, PRIOR_WITHIN, Window, noise_of
from autotune.specs.regression import CheckCandidate, VerdictKind

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


def window(visit: str, *logs: float) -> Window:
    return Window(visit=visit, logs=logs)


def test_a_window_is_not_moved_by_one_outlier() -> None:
    assert window("v", 0.0, 0.0, 0.0, 0.0, -1.0).centre == 0.0


def test_noise_starts_from_a_prior_and_is_learned_in_its_three_parts() -> None:
    prior = noise_of([])
    assert (prior.within, prior.between, prior.visits) == pytest.approx(
        (PRIOR_WITHIN, PRIOR_BETWEEN, max(PRIOR_BETWEEN, PRIOR_VISITS))
    )
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
    assert judge(BASELINE, shifted(-0.5 * MIN_EFFECT, 3), noise_of([BASELINE])).kind is VerdictKind.UNCHANGED
