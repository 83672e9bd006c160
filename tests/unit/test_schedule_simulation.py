"""Simulated schedules against the closed forms, and against what the estimate makes of unequal stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost.pipeline import idle_1f1b, order, simulated_s
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


def closed_s(stages: list[float], m: int) -> float:
    """What the estimate makes of 1F1B: the stage with the most work and waiting."""
    own = np.array(stages)
    before = np.cumsum(own) - own
    behind = np.arange(len(own))[::-1].astype(np.float64)
    return float((m * own + idle_1f1b(np.float64(m), behind, own, own / 3.0, before, own.sum())).max())


# Seconds of stages as nanotron and Megatron-LM cut 16, 28 and 80 layers with a heavy head.
CUTS = [[10, 10], [5, 5, 5, 5], [16, 15.6], [8, 8, 8, 7.6], [4, 4, 4, 4, 4, 4, 4, 3.5], [3, 3, 2, 3, 2, 3, 0.5, 3.5],
        [20, 20, 20, 21.1], [2, 2, 2, 2, 2, 2, 2, 4]]  # fmt: skip


@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("m", [1, 3, 8, 32])
def test_the_estimate_takes_1f1b_as_simulated(stages: list[float], m: int) -> None:
    found = simulated_s(Schedule.ONE_F_ONE_B, [[t / 3] for t in stages], [[2 * t / 3] for t in stages], m)
    assert closed_s(stages, m) == pytest.approx(found, rel=0.02)


@settings(max_examples=50, deadline=None)
@given(stages=st.lists(st.floats(0.2, 2.0), min_size=2, max_size=8), m=st.integers(1, 32))
def test_any_unequal_stages_take_about_what_the_estimate_says(stages: list[float], m: int) -> None:
    """No stage can be faster than its own work, its way there and back, and the waits that its order leaves."""
    found = simulated_s(Schedule.ONE_F_ONE_B, [[t / 3] for t in stages], [[2 * t / 3] for t in stages], m)
    assert found >= m * max(stages) * (1.0 - 1e-12)
    assert closed_s(stages, m) == pytest.approx(found, rel=0.15)


@settings(max_examples=50, deadline=None)
@given(stages=st.lists(st.floats(0.2, 2.0), min_size=2, max_size=8), m=st.integers(1, 32))
def test_gpipe_is_the_slowest_stage_and_one_pass_through_the_others(stages: list[float], m: int) -> None:
    found = simulated_s(Schedule.GPIPE, [[t / 3] for t in stages], [[2 * t / 3] for t in stages], m)
    assert found == pytest.approx((m - 1) * max(stages) + sum(stages))


def test_messages_lengthen_filling_and_draining() -> None:
    quiet, loud = (simulated_s(Schedule.GPIPE, [[1.0]] * 4, [[2.0]] * 4, 8, message_s=t) for t in (0.0, 0.5))
    assert loud == pytest.approx(quiet + 2 * 3 * 0.5)
