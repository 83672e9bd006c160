"""The scaling curve: its identities, its interval, and where more GPUs stop paying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.explain.scaling import ScalingCurve, scaling_curve
from autotune.explain.whatif import Setting
from autotune.search.offline import rank
from autotune.specs import Space, Workload

SETTING = Setting(
    model=preset("llama2-7b"),
    cluster=cluster_from_shorthand("a100-80gb-sxm:2x8"),
    workload=Workload(seq_len=4096, global_batch=64),
)


@pytest.fixture(scope="module")
def curve() -> ScalingCurve:
    return scaling_curve(SETTING)


def test_efficiency_and_marginal_by_their_definitions(curve: ScalingCurve) -> None:
    first = curve.points[0]
    assert (first.efficiency, first.interval, first.marginal) == (1.0, (1.0, 1.0), None)
    for before, point in zip(curve.points, curve.points[1:], strict=False):
        assert point.efficiency == pytest.approx(point.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu)
        gained = point.devices * point.efficiency - before.devices * before.efficiency
        assert point.marginal == pytest.approx(gained / (point.devices - before.devices))
        low, high = point.interval
        assert low < point.efficiency < high
        assert low * high == pytest.approx(point.efficiency**2)


def test_each_point_is_the_best_plan_of_its_cluster(curve: ScalingCurve) -> None:
    point = next(item for item in curve.points if item.devices == 16)
    best = rank(SETTING.model, SETTING.cluster, SETTING.workload, limit=1).plans[0]
    assert point.tokens_per_s_per_gpu == pytest.approx(best.estimate.tokens_per_s_per_gpu)
    assert [item.devices for item in curve.points][:4] == [2, 4, 8, 16]
    assert curve.left_out[0] == 1  # 7e9 parameters of 16 bytes fit on no single GPU


def test_it_goes_on_beyond_the_cluster_until_more_gpus_do_not_pay(curve: ScalingCurve) -> None:
    """64 sequences feed 64 GPUs at most by themselves."""
    assert curve.pays_up_to is not None
    assert 16 < curve.pays_up_to < 1024
    for point in curve.points:
        if point.marginal is not None and point.devices <= curve.pays_up_to:
            assert point.marginal >= 0.5
    if not curve.at_the_end:
        marginal = curve.points[-1].marginal
        assert marginal is not None
        assert marginal < 0.5
        assert f"beyond {curve.pays_up_to} GPUs" in curve.text


def test_nodes_without_a_usable_link_between_them_do_not_pay() -> None:
    inter = SETTING.cluster.inter
    assert inter is not None
    slow = SETTING.cluster.model_copy(update={"inter": inter.model_copy(update={"bytes_per_s": 1e6})})
    found = scaling_curve(replace(SETTING, cluster=slow))
    assert found.pays_up_to == 8
    assert not found.at_the_end


def test_one_node_without_a_link_ends_at_its_devices() -> None:
    node = SETTING.cluster.model_copy(update={"nodes": 1, "inter": None})
    found = scaling_curve(replace(SETTING, cluster=node))
    assert [item.devices for item in found.points] == [2, 4, 8]
    assert found.at_the_end
    assert "up to 8, the most that was estimated" in found.text


def test_where_nothing_fits_it_says_so() -> None:
    found = scaling_curve(replace(SETTING, space=Space(tp=(3,))))
    assert (found.points, found.pays_up_to) == ([], None)
    assert "no plan fits" in found.text
    assert found.to_data()["points"] == []
