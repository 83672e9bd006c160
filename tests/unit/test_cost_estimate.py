"""estimate: sums, one plan against a table, closed forms, profiles, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.capacity import device_bytes
from autotune.cost.estimate import EstimateTable, estimate, estimate_table
from autotune.cost.framework import NANOTRON, TORCH, Framework
from autotune.cost.table import COLUMNS, PlanTable
from autotune.cost.work import model_flops_per_token
from autotune.errors import IllegalPlanError, MissingMeasurementError
from autotune.search.space import legal_plans
from autotune.specs import (
    Basis,
    ClusterSpec,
    ComputeFit,
    DType,
    Link,
    Optimizer,
    Plan,
    Profile,
    Recompute,
    Schedule,
    SecondsByPart,
    Space,
    Workload,
)

LLAMA = model("llama2-7b")
CLUSTER = cluster_from_shorthand("a100-80gb-sxm:2x8")
WORK = Workload(seq_len=2048, global_batch=64)
CPU = ClusterSpec.from_data(
    {
        "name": "two cores", "nodes": 1, "gpus_per_node": 2, "intra": {"name": "loopback"},
        "device": {"name": "cpu", "kind": "cpu", "memory_bytes": 4 * 2**30},
    }
)  # fmt: skip


def compute_fit(flops_per_s: float) -> ComputeFit:
    return ComputeFit(flops_per_s=flops_per_s, launch_s=0.0, bytes_per_s=None, relative_error=0.0, readings=9)


def of(plan: Plan, profile: Profile | None = None, cluster: ClusterSpec = CLUSTER) -> dict[str, float]:
    return {**estimate(LLAMA, cluster, WORK, plan, profile).seconds.to_data()}


@pytest.fixture(scope="module")
def table() -> PlanTable:
    return legal_plans(LLAMA, CLUSTER, WORK)


@pytest.fixture(scope="module")
def estimates(table: PlanTable) -> EstimateTable:
    return estimate_table(LLAMA, CLUSTER, WORK, table)


def test_parts_sum_to_the_whole_exactly(table: PlanTable, estimates: EstimateTable) -> None:
    for i in range(0, len(table), 997):
        row = estimates.row(i)
        assert sum(row.seconds.to_data().values()) == row.step_time_s
        assert sum(row.bytes.to_data().values()) == row.peak_memory_bytes
        assert row.fits == (device_bytes(row.needed_bytes, estimates.overhead_bytes) <= CLUSTER.device.memory_bytes)


def test_no_part_is_negative(estimates: EstimateTable) -> None:
    for columns in (estimates.seconds, estimates.bytes):
        for name in columns.__dataclass_fields__:
            assert (getattr(columns, name) >= 0).all(), name


def test_one_plan_is_a_table_of_one(table: PlanTable, estimates: EstimateTable) -> None:
    for i in range(0, len(table), 1499):
        one, row = estimate(LLAMA, CLUSTER, WORK, table.plan(i)), estimates.row(i)
        assert one.step_time_s == pytest.approx(row.step_time_s, rel=1e-12)
        assert one.bytes.to_data() == pytest.approx(row.bytes.to_data(), rel=1e-12)
        assert one.worst_stage == row.worst_stage


def test_a_table_keeps_its_plans(table: PlanTable) -> None:
    rows = np.arange(0, len(table), 499)
    plans = [table.plan(int(i)) for i in rows]
    again = PlanTable.concat([PlanTable.of(plans[:5]), PlanTable.of(plans[5:])])
    for name in COLUMNS:
        assert (getattr(again, name) == getattr(table.take(rows), name)).all()
    assert len(PlanTable.concat([])) == 0


def test_an_empty_table_has_no_estimates() -> None:
    assert len(estimate_table(LLAMA, CLUSTER, WORK, PlanTable.of([]))) == 0


def test_throughput_and_mfu_follow_from_the_step_time() -> None:
    found = estimate(LLAMA, CLUSTER, WORK, Plan(tp=2, dp=8))
    assert found.tokens_per_s_per_gpu == pytest.approx(64 * 2048 / 16 / found.step_time_s)
    assert found.mfu is not None
    flops = model_flops_per_token(LLAMA, 2048) * 64 * 2048 / 16
    assert found.mfu == pytest.approx(flops / found.step_time_s / 312e12)
    assert 0.2 < found.mfu < 0.7


@pytest.mark.parametrize("m", [4, 8, 32])
def test_bubble_is_p_minus_one_over_m_of_ideal_and_interleaving_divides_it(m: int) -> None:
    """Equal stages: a model whose ends weigh nothing."""
    flat = LLAMA.model_copy(update={"vocab": 8})
    workload = Workload(seq_len=2048, global_batch=4 * m)
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x8")

    def share(plan: Plan) -> float:
        seconds = estimate(flat, cluster, workload, plan).seconds
        return seconds.bubble / (seconds.compute + seconds.tp + seconds.launch)

    plain = share(Plan(pp=4, dp=4))
    assert plain == pytest.approx(3 / m, rel=1e-2)
    assert share(Plan(pp=4, dp=4, schedule=Schedule.GPIPE)) == pytest.approx(plain)
    assert share(Plan(pp=4, dp=4, vpp=4, schedule=Schedule.INTERLEAVED)) == pytest.approx(plain / 4)


def test_ranks_that_share_cores_do_not_pay_for_idle_ones() -> None:
    """Two stages on one core, one micro-batch: the idle rank's core time goes to the other, so nothing is lost."""
    workload = Workload(seq_len=2048, global_batch=1, dtype=DType.FP32)
    profile = Profile(cluster_key="c", fingerprint_key="f", compute=compute_fit(20e9))
    plan = Plan(pp=2, schedule=Schedule.GPIPE)

    def seconds(cluster: ClusterSpec) -> SecondsByPart:
        return estimate(LLAMA, cluster, workload, plan, profile).seconds

    linked = CPU.model_copy(update={"intra": Link(name="loopback", bytes_per_s=1e9, latency_s=1e-5)})
    own, shared = seconds(linked), seconds(linked.model_copy(update={"node_cores": 1}))
    assert own.bubble > 0.8 * own.compute
    assert shared.compute + shared.bubble == pytest.approx((own.compute + own.bubble) / 2)
    assert seconds(linked.model_copy(update={"node_cores": 2})) == own


def test_a_head_on_the_last_stage_slows_every_micro_batch() -> None:
    heavy = LLAMA.model_copy(update={"vocab": 8 * LLAMA.vocab})
    light, slow = (estimate(spec, CLUSTER, WORK, Plan(pp=16)).seconds.compute for spec in (LLAMA, heavy))
    assert slow > 1.5 * light


def test_tp_across_nodes_loses_to_tp_inside_one() -> None:
    inside, across = of(Plan(tp=8, dp=2)), of(Plan(tp=16))
    assert across["tp"] > 2 * inside["tp"]


def test_full_recompute_pays_forward_again() -> None:
    none, full = of(Plan(tp=4, dp=4)), of(Plan(tp=4, dp=4, recompute=Recompute.FULL))
    assert 1.2 < full["compute"] / none["compute"] < 1.34
    assert full["tp"] / none["tp"] == pytest.approx(1.5, rel=0.03)


def test_zero_3_gathers_for_each_micro_batch() -> None:
    once = of(Plan(dp=16, micro_batch=4, zero_stage=3))["dp_exposed"]
    four_times = of(Plan(dp=16, micro_batch=1, zero_stage=3))["dp_exposed"]
    assert four_times == pytest.approx(4 * once, rel=1e-6)
    assert of(Plan(dp=16, micro_batch=1, zero_stage=1))["dp_exposed"] < once


def test_parts_are_zero_without_their_axis() -> None:
    seconds = of(Plan(), cluster=cluster_from_shorthand("a100-80gb-sxm:1x1"))
    for name in ("tp", "ep", "cp", "pp_p2p", "bubble", "dp_exposed"):
        assert seconds[name] == 0.0
    assert seconds["compute"] > 0
    assert seconds["optimizer"] > 0


def test_every_axis_has_its_part() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:4x8")
    plan = Plan(tp=2, pp=2, dp=4, cp=2, ep=4, sequence_parallel=True)
    workload = Workload(seq_len=2048, global_batch=64)
    seconds = estimate(model("mixtral-8x7b"), cluster, workload, plan).seconds.to_data()
    assert all(value > 0 for value in seconds.values()), seconds


def test_a_profile_drives_the_numbers_and_says_so() -> None:
    slow, fast = (Profile(cluster_key="c", fingerprint_key="f", compute=compute_fit(rate)) for rate in (50e12, 100e12))
    plan = Plan(tp=2, dp=8)
    assert of(plan, slow)["compute"] == pytest.approx(2 * of(plan, fast)["compute"])
    assert estimate(LLAMA, CLUSTER, WORK, plan, slow).basis is Basis.PROFILE
    assert estimate(LLAMA, CLUSTER, WORK, plan).basis is Basis.CATALOG


def test_scales_of_a_profile_act_on_every_part() -> None:
    plain = estimate(LLAMA, CLUSTER, WORK, Plan(tp=2, pp=2, dp=4))
    profile = Profile(
        cluster_key="c", fingerprint_key="f", step_scale=1.5, step_overhead_s=0.25, memory_scale=2.0,
        memory_overhead_bytes=1e9,
    )  # fmt: skip
    scaled = estimate(LLAMA, CLUSTER, WORK, Plan(tp=2, pp=2, dp=4), profile)
    assert scaled.step_time_s == pytest.approx(1.5 * plain.step_time_s + 0.25)
    assert sum(scaled.seconds.to_data().values()) == scaled.step_time_s
    assert scaled.bytes.activations == pytest.approx(2.0 * plain.bytes.activations)
    assert sum(scaled.bytes.to_data().values()) == scaled.peak_memory_bytes


def test_a_device_without_a_peak_needs_a_profile() -> None:
    workload = Workload(seq_len=64, global_batch=8)
    with pytest.raises(MissingMeasurementError, match=r"peak FLOPs in bf16 of device 'cpu'.*autotune probe layer"):
        estimate(model("tiny"), CPU, workload, Plan(dp=2))
    profile = Profile(cluster_key="c", fingerprint_key="f", compute=compute_fit(20e9))
    with pytest.raises(MissingMeasurementError, match=r"link 'loopback'"):
        estimate(model("tiny"), CPU, workload, Plan(dp=2), profile)
    alone = CPU.model_copy(update={"gpus_per_node": 1})
    found = estimate(model("tiny"), alone, workload, Plan(), profile)
    assert found.mfu is None
    assert found.step_time_s > 0


@pytest.mark.parametrize("plan", [Plan(dp=8), Plan(tp=2**31 - 1), Plan(pp=16, vpp=4)])
def test_plans_that_the_formulas_have_no_meaning_for_are_refused(plan: Plan) -> None:
    with pytest.raises(IllegalPlanError):
        estimate(LLAMA, CLUSTER, WORK, plan)


def test_estimates_cover_every_kind_of_model() -> None:
    """MoE, latent attention, tied, learned positions: finite and positive over their whole legal spaces."""
    cluster = cluster_from_shorthand("h100-80gb-sxm:1x8")
    workload = Workload(seq_len=1024, global_batch=16)
    for name in ("deepseek-v2-lite", "mixtral-8x7b", "gpt2", "qwen3-8b"):
        spec = model(name)
        plans = legal_plans(spec, cluster, workload, Space(micro_batch=(1, 2)))
        found = estimate_table(spec, cluster, workload, plans)
        assert np.isfinite(found.step_time_s).all()
        assert (found.step_time_s > 0).all()
        assert (found.peak_memory_bytes > 0).all()


def test_of_a_pipelines_hops_only_those_between_nodes_take_the_link_across() -> None:
    """4 stages on 2 nodes, 2 micro-batches: 2 of each a rank and 1 of the filling cross, 2 of the filling do not.

    A message is 4 * 2048 tokens of 4096 numbers of 2 bytes. Across nodes each rank that sends has two of the 8 NICs,
    but no more than one's 20e9, after 12 us. Inside, two ranks reach 300e9 * 0.77 * (1 - 0.44 / 2) = 180.18e9 of
    NVLink 3, after 28 + 1.7 us. The host adds 0.3 ms to each.
    """
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x8")
    work = Workload(seq_len=2048, global_batch=8)
    plan = Plan(tp=4, pp=4, micro_batch=4)
    found = estimate(LLAMA, cluster, work, plan, framework=TORCH)
    across, inner = 12e-6 + 67_108_864 / 20e9, 29.7e-6 + 67_108_864 / 180.18e9
    assert found.seconds.pp_p2p == pytest.approx(2 * (3 * across + 2 * inner + 5 * 0.3e-3))


OPTIMIZER = [
    # 6,738,415,616 parameters; an fp32 gradient is read, two fp32 moments and an fp32 master are read and written, a
    # bf16 parameter is written: 4 + 2 * 12 + 2 = 30 bytes each.
    ("llama2-7b", Plan(dp=16), WORK, TORCH, 6_738_415_616 * 30),
    ("llama2-7b", Plan(dp=16, zero_stage=1), WORK, TORCH, 6_738_415_616 * 30 / 16),
    ("llama2-7b", Plan(dp=16), WORK, NANOTRON, 6_738_415_616 * 30 * 1.5),
    # SGD has one moment; in fp32 there is no master copy: 4 + 2 * 4 + 4 = 16 bytes.
    ("llama2-7b", Plan(dp=16), WORK.model_copy(update={"optimizer": Optimizer.SGD, "dtype": DType.FP32}), TORCH,
     6_738_415_616 * 16),
    # Of 46,702,792,704 parameters 32 * 8 * 3 * 4096 * 14336 are experts', of which a rank has a fourth; ZeRO divides
    # those among the four ranks with the same experts, and the other 1,605,636,096 among all 16.
    ("mixtral-8x7b", Plan(dp=16, ep=4), WORK, TORCH, (1_605_636_096 + 45_097_156_608 / 4) * 30),
    ("mixtral-8x7b", Plan(dp=16, ep=4, zero_stage=1), WORK, TORCH, (1_605_636_096 / 16 + 45_097_156_608 / 16) * 30),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "work", "framework", "size_bytes"), OPTIMIZER)
def test_an_optimizer_step_moves_what_it_reads_and_writes(
    name: str, plan: Plan, work: Workload, framework: Framework, size_bytes: float
) -> None:
    fit = compute_fit(1e14).model_copy(update={"bytes_per_s": 1e12})
    profile = Profile(cluster_key="c", fingerprint_key="f", compute=fit)
    seconds = estimate(model(name), CLUSTER, work, plan, profile, framework=framework).seconds
    assert seconds.optimizer == pytest.approx(size_bytes / 1e12)
