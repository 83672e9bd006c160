"""Runs that something held up, and plans that crash: neither decides on its own."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.framework import FRAMEWORKS, framework_of
from autotune.cost.table import PlanTable
from autotune.search.core import Measurement, Search
from autotune.search.failures import crash_features, p_runs
from autotune.search.posterior import Observation, repeat_noise
from autotune.search.ranking import contenders, ranking
from autotune.search.repeats import believed, pooled, scatter
from autotune.specs import Failure, FailureKind, Plan, Workload

MODEL, CLUSTER = preset("gpt3-1.3b"), cluster_from_shorthand("a100-80gb-sxm:1x8")
WORK = Workload(seq_len=2048, global_batch=64)
PLANS = [Plan(dp=8), Plan(tp=2, dp=4), Plan(pp=2, dp=4), Plan(dp=8, zero_stage=1), Plan(pp=4, dp=2), Plan(tp=4, dp=2)]


def told(*runs: tuple[Plan, float]) -> list[Observation]:
    return [Observation(plan=plan, tokens_per_s_per_gpu=speed) for plan, speed in runs]


def test_one_run_that_was_held_up_does_not_lose_a_plan_its_place() -> None:
    """Of 100, 100 and 33 the last is no measurement; the plan wins over one of 90."""
    assert believed([100.0, 100.0, 33.0]) == [100.0, 100.0]
    slow = [(Plan(dp=8), 100.0), (Plan(dp=8), 100.0), (Plan(dp=8), 33.0)]
    found = ranking(told(*slow, *[(Plan(tp=2, dp=4), 90.0)] * 3))
    assert [(item.plan.tp, item.tokens_per_s_per_gpu) for item in found] == [(1, 100.0), (2, 90.0)]
    assert found[0].repeats == 3


def test_usual_differences_between_runs_all_count() -> None:
    assert pooled([100.0, 110.0, 90.0]) == pytest.approx(100.0)
    assert pooled([100.0, 33.0]) == pytest.approx(66.5)  # two runs do not say which of them is the plan's
    assert scatter([[100.0], [50.0]]) is None
    assert scatter([[100.0, 100.0, 33.0]]) == pytest.approx(0.0)
    assert scatter([[1.0, np.exp(0.2)], [1.0, np.exp(0.2)]]) == pytest.approx(0.2 / 2**0.5)


def test_of_two_runs_that_disagree_the_faster_may_yet_win() -> None:
    found = ranking(told((Plan(dp=8), 100.0), (Plan(dp=8), 33.0), (Plan(tp=2, dp=4), 90.0)))
    assert {item.plan.tp for item in contenders(found)} == {1, 2}


def test_noise_is_learned_from_repeats() -> None:
    """Two runs 0.2 apart have a variance of 0.02; four times 0.02² beside it: (0.0016 + 0.02) / 5."""
    assert repeat_noise([[100.0], [90.0]]) == 0.02
    assert repeat_noise([[1.0, float(np.exp(0.2))]]) == pytest.approx((0.0216 / 5) ** 0.5)


def test_a_single_run_far_slower_than_believed_is_tried_again_and_a_second_one_is_believed() -> None:
    search = Search(MODEL, CLUSTER, WORK, plans=PLANS, framework=framework_of("megatron_sc21"))
    speeds = search.estimates.tokens_per_s_per_gpu
    best = int(np.argmax(speeds))
    for row in sorted(range(len(PLANS)), key=lambda row: row == best):
        factor = 1.0 / 3.0 if row == best else 1.0
        search.tell(PLANS[row], Measurement(tokens_per_s_per_gpu=float(speeds[row]) * factor))
    assert search.ask() == PLANS[best]
    search.tell(PLANS[best], Measurement(tokens_per_s_per_gpu=float(speeds[best]) / 3.0))
    assert search.ask() is None


def test_a_crash_leaves_a_plan_worth_another_try_and_two_do_not() -> None:
    """0.2 * 9.7 / (0.2 * 9.7 + 0.8) = 0.708 that it is broken: a run of it ends well with (1 - 0.97 * 0.708) * 0.9."""
    table = PlanTable.of(PLANS)
    assert p_runs(table, [], [0]) == pytest.approx(np.ones(len(PLANS)))
    found = p_runs(table, [0], [1, 2, 3, 4, 5])
    assert found[0] == pytest.approx((1.0 - 0.97 * 0.708) * 0.9, abs=1e-3)
    assert found[1:].min() > 0.95
    search = Search(MODEL, CLUSTER, WORK, plans=PLANS[:1])
    for again in (PLANS[0], None):
        search.tell(PLANS[0], Failure(kind=FailureKind.CRASH, message="a rank died"))
        assert search.ask() == again


def test_what_crashes_with_a_feature_and_never_without_is_the_feature() -> None:
    table = PlanTable.of(PLANS)
    found = p_runs(table, [2, 2, 4], [0, 1, 3])  # pipelines
    pipeline = crash_features(table)[:, 1]
    assert found[pipeline].max() < 0.1
    assert found[~pipeline].min() > 0.9
    acquitted = p_runs(table, [2, 2], [4, 0, 1, 3])
    assert acquitted[4] > 0.9


def test_trials_tell_which_framework_runs_the_plans() -> None:
    """Nobody said which: after three plans as fast as one framework's estimate has them its estimate is believed."""
    truth = FRAMEWORKS["megatron-2021"]
    alone = Search(MODEL, CLUSTER, WORK, plans=PLANS, framework=truth).estimates.tokens_per_s_per_gpu
    search = Search(MODEL, CLUSTER, WORK, plans=PLANS, framework=[FRAMEWORKS["torch"], truth, FRAMEWORKS["jax"]])

    def error() -> float:
        return float(np.abs(search.posterior().log_mean - np.log(alone))[3:].mean())

    before = error()
    for row in range(3):
        search.tell(PLANS[row], Measurement(tokens_per_s_per_gpu=float(alone[row])))
    assert error() < 0.25 * before
