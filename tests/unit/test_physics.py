"""Priors of the physical parameters: how far trials may move an estimate, and when a check no longer counts."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.estimate import EstimateTable, estimate, estimate_table
from autotune.cost.framework import FRAMEWORKS, MEGATRON_DEEPSPEED, TORCH, Framework, framework_of
from autotune.cost.table import PlanTable
from autotune.search.core import Measurement, Search
from autotune.search.physics import PARAMETERS, prior_covariance, with_network
from autotune.specs import CollectiveOp, LinkFit, Plan, Profile, Workload

MODEL = preset("gpt2-xl")
WORK = Workload(seq_len=1024, global_batch=256)
PLANS = [Plan(tp=tp, pp=pp, dp=16 // tp // pp, micro_batch=2) for tp in (1, 2, 4) for pp in (1, 2, 4)]


CHECKED = {"all": 0.01, "compute": 0.01, "exchange": 0.08, "host": 0.04, "messages": 0.12, "gradients": 0.2}
CHECKED |= {"optimizer": 0.12, **dict.fromkeys(("zero_0", "zero_1", "zero_2", "zero_3"), 0.02)}
UNCHECKED = {"all": 0.3, "compute": 0.15, "exchange": 0.5, "host": 0.6, "messages": 0.7, "gradients": 0.6}
UNCHECKED |= {"optimizer": 0.7, **dict.fromkeys(("zero_0", "zero_1", "zero_2", "zero_3"), 0.15)}


def estimates(framework: Framework, nodes: int = 2, profile: Profile | None = None) -> EstimateTable:
    cluster = cluster_from_shorthand(f"a100-80gb-sxm:{nodes}x{16 // nodes}")
    return estimate_table(MODEL, cluster, WORK, PlanTable.of(PLANS), profile, framework)


def spreads(table: EstimateTable, *errors: float) -> dict[str, float]:
    return dict(zip(PARAMETERS, np.sqrt(np.diag(prior_covariance(table, np.array(errors)))), strict=True))


def test_checked_constants_hold_until_most_of_three_errors_contradict_them() -> None:
    table = estimates(framework_of("vtrain_single"))
    assert spreads(table) == pytest.approx(CHECKED)
    assert spreads(table, 0.9, -0.1, 0.1) == pytest.approx(CHECKED)  # one wild run says nothing of the rest
    assert spreads(table, 0.9, 0.8) == pytest.approx(CHECKED)
    assert spreads(table, 0.9, 0.8, 0.1)["all"] == pytest.approx(0.3)
    assert spreads(table, 0.26, -0.26, 0.1)["all"] == pytest.approx(0.3)
    assert spreads(table, 0.24, -0.24, 0.9) == pytest.approx(CHECKED)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_was_fitted_to_one_sweep_is_not_everybodys(name: str) -> None:
    """By its name a framework has wide priors, and no constant of a network that its user does not have."""
    found = framework_of(name)
    assert found.name == name
    assert (found.sharded_penalty, found.crossing_penalty) == (1.0, 1.0)
    assert (found.node_step_s, found.rank_step_s, found.slow_step_host) == (0.0, 0.0, 0.0)
    assert spreads(estimates(found, nodes=1)) == pytest.approx(UNCHECKED)


def test_a_sweep_keeps_what_was_fitted_to_it() -> None:
    sweep, multi = framework_of("hf_ultrascale"), framework_of("vtrain_multi")
    assert (sweep.name, sweep.sharded_penalty, sweep.checked) == ("nanotron", 1.8, True)
    assert (multi.name, multi.crossing_penalty, multi.checked) == ("megatron-deepspeed", 2.8, True)
    assert not framework_of("bigscience_a100").checked  # the same framework on another cluster


def test_a_network_that_was_never_read_may_be_several_times_slower() -> None:
    read = LinkFit(
        op=CollectiveOp.ALL_REDUCE, group_size=16, stride=1, crosses_nodes=True, latency_s=1e-5, bytes_per_s=1e10,
        relative_error=0.0, readings=1,
    )  # fmt: skip
    profile = Profile(cluster_key="c", fingerprint_key="f", links=(read,))
    unread = UNCHECKED | {"messages": 2.74**0.5, "gradients": 2.61**0.5}  # 0.7² and 0.6², each with 1.5²
    assert spreads(estimates(TORCH)) == pytest.approx(unread)
    assert spreads(estimates(TORCH, profile=profile)) == pytest.approx(UNCHECKED)
    assert spreads(estimates(TORCH, nodes=1)) == pytest.approx(UNCHECKED)


def test_a_slower_network_is_the_slowest_level_alone() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x8")
    inside, across = (
        LinkFit(
            op=CollectiveOp.ALL_REDUCE, group_size=size, stride=1, crosses_nodes=size == 16, latency_s=1e-5,
            bytes_per_s=1e10, relative_error=0.0, readings=1,
        )
        for size in (8, 16)
    )  # fmt: skip
    found, profile = with_network(cluster, Profile(cluster_key="c", fingerprint_key="f", links=(inside, across)), 4.0)
    assert profile is not None
    assert [(fit.latency_s, fit.bytes_per_s) for fit in profile.links] == [(1e-5, 1e10), (4e-5, 2.5e9)]
    assert found.inter is not None
    assert cluster.inter is not None
    assert cluster.inter.bytes_per_s is not None
    assert found.inter.bytes_per_s == cluster.inter.bytes_per_s / 4.0
    assert found.intra == cluster.intra
    alone = cluster_from_shorthand("a100-80gb-sxm:1x8")
    assert alone.intra.bytes_per_s is not None
    assert with_network(alone, None, 4.0)[0].intra.bytes_per_s == alone.intra.bytes_per_s / 4.0


def test_a_checked_framework_learns_that_it_is_twice_as_slow_here() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x8")
    search = Search(MODEL, cluster, WORK, plans=PLANS, framework=framework_of("vtrain_single"))
    before = np.exp(search.posterior().log_mean)
    for plan in PLANS[:4]:
        row = search.table.find(plan)
        assert row is not None
        search.tell(plan, Measurement(tokens_per_s_per_gpu=float(before[row]) / 2.0))
    rest = [row for plan in PLANS[4:] if (row := search.table.find(plan)) is not None]
    assert np.exp(search.posterior().log_mean)[rest] == pytest.approx(before[rest] / 2.0, rel=0.15)


def test_deepspeed_sends_a_tp_th_of_a_pipeline_message() -> None:
    """An eighth of 2 * 1024 tokens of 1600 numbers of 2 bytes is 819,200 bytes: 40.96 us at the 20e9 of a NIC of its
    own, after 12 us of latency, beside 0.45 ms of the host's. There and back, 256 / 2 micro-batches and 3 to fill."""
    cluster = cluster_from_shorthand("a100-80gb-sxm:4x8")
    plan = Plan(tp=8, pp=4, dp=1, micro_batch=2)
    found = estimate(MODEL, cluster, WORK, plan, framework=MEGATRON_DEEPSPEED).seconds.pp_p2p
    assert found == pytest.approx(2 * 131 * (40.96e-6 + 12e-6 + 0.45e-3))


def test_a_tied_embedding_is_exchanged_as_gradients_are_kept() -> None:
    """2 bytes of each of 50,257 * 1600 numbers, a ring of two over a NIC at 20e9: 8 ms, and two hops of 12 us. On the
    network of one published sweep it took 2.8 times as long as on paper."""
    cluster, plan = cluster_from_shorthand("a100-80gb-sxm:2x8"), Plan(tp=1, pp=2, dp=8, micro_batch=2)
    tied = MODEL.model_copy(update={"tied": True})
    untied = MODEL.model_copy(update={"tied": False})

    def exposed(framework: Framework) -> float:
        return (
            estimate(tied, cluster, WORK, plan, framework=framework).seconds.dp_exposed
            - estimate(untied, cluster, WORK, plan, framework=framework).seconds.dp_exposed
        )

    assert exposed(MEGATRON_DEEPSPEED) == pytest.approx(160_822_400 / 20e9 + 24e-6, rel=1e-3)
    assert exposed(framework_of("vtrain_multi")) == pytest.approx(160_822_400 * 2.8 / 20e9 + 24e-6, rel=1e-3)
