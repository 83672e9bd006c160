"""Simulated schedules against the closed forms, and against what the estimate makes of unequal stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost.schedule_simulation import order, simulated_s
from autotune.specs import Schedule


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (4, 8), (8, 8), (8, 32)])
def test_equal_stages_idle_for_p_minus_one_micro_batches(schedule: Schedule, pp: int, m: int) -> None:
    """(m + p - 1)(f + b), for GPipe and 1F1B alike (Narayanan et al. 2021, section 2.2)."""
    found = simulated_s(schedule, [[1.0]] * pp, [[2.0]] * pp, m)
    assert found == pytest.approx((m + pp - 1) * 3.0)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 16)])
def test_interleaving_divides_the_bubble(pp: int, vpp: int, m: int) -> None:
    """m(f + b) + (p - 1)(f + b)/v (arXiv:2104.04473, section 2.2)."""
    found = simulated_s(Schedule.INTERLEAVED, [[1.0 / vpp] * vpp] * pp, [[2.0 / vpp] * vpp] * pp, m)
    assert found == pytest.approx(3.0 * m + (pp - 1) * 3.0 / vpp)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_stage_does_all_its_work_once(schedule: Schedule) -> None:
    vpp = 2 if schedule is Schedule.INTERLEAVED else 1
    for stage in range(4):
        tasks = order(schedule, stage, 4, vpp, 8)
        assert len(tasks) == len(set(tasks)) == 2 * 8 * vpp


@settings(max_examples=50, deadline=None)
@given(
    stages=st.lists(st.floats(0.2, 2.0), min_size=2, max_size=8),
    m=st.integers(8, 32),
    schedule=st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B]),
)
def test_unequal_stages_take_what_the_estimate_says(stages: list[float], m: int, schedule: Schedule) -> None:
    """m times the slowest stage and one pass through the others, within a tenth: less, where part of that pass runs
    beside the slowest stage's own work; more, where a slow stage in the middle delays what waits for its backward."""
    found = simulated_s(schedule, [[t] for t in stages], [[2 * t] for t in stages], m)
    assert found >= 3.0 * m * max(stages) * (1.0 - 1e-12)
    assert found == pytest.approx(3.0 * ((m - 1) * max(stages) + sum(stages)), rel=0.15)


def test_messages_lengthen_filling_and_draining() -> None:
    quiet, loud = (simulated_s(Schedule.GPIPE, [[1.0]] * 4, [[2.0]] * 4, 8, message_s=t) for t in (0.0, 0.5))
    assert loud == pytest.approx(quiet + 2 * 3 * 0.5)
