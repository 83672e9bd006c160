"""Which probes a tuning asks for, and that it asks only once."""

from __future__ import annotations

from autotune.catalog import smallest
from autotune.cost.table import PlanTable
from autotune.search.profiling import missing_probes, needed_probes
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    Device,
    DeviceKind,
    DType,
    LayerPart,
    LayerRequest,
    Link,
    Plan,
    Workload,
)

CLUSTER = ClusterSpec(
    name="box",
    nodes=1,
    gpus_per_node=4,
    device=Device(name="cpu", kind=DeviceKind.CPU, memory_bytes=2**30),
    intra=Link(name="loopback"),
)
WORKLOAD = Workload(seq_len=128, global_batch=16, dtype=DType.FP32)
PLANS = PlanTable.of(
    [Plan(dp=4, micro_batch=2), Plan(tp=2, dp=2, zero_stage=1), Plan(tp=2, pp=2, sequence_parallel=True)]
)


def test_collectives_cover_the_groups_that_the_plans_use() -> None:
    """dp 4 alone; dp 2 beside tp 2 lies 2 apart; tp 2 is adjacent; the pipeline's neighbours are tp * dp apart."""
    needed = needed_probes(smallest(), CLUSTER, WORKLOAD, PLANS)
    layouts = {(item.op, item.group_size, item.stride) for item in needed if isinstance(item, CollectiveRequest)}
    assert layouts == {
        (CollectiveOp.ALL_REDUCE, 2, 1),
        (CollectiveOp.ALL_GATHER, 2, 1),
        (CollectiveOp.REDUCE_SCATTER, 2, 1),
        (CollectiveOp.ALL_REDUCE, 4, 1),
        (CollectiveOp.ALL_REDUCE, 2, 2),
        (CollectiveOp.ALL_GATHER, 2, 2),
        (CollectiveOp.REDUCE_SCATTER, 2, 2),
        (CollectiveOp.SEND_RECV, 2, 2),
    }


def test_layers_are_probed_at_each_tp_and_micro_batch() -> None:
    needed = needed_probes(smallest(), CLUSTER, WORKLOAD, PLANS)
    layers = {(item.part, item.tp, item.micro_batch) for item in needed if isinstance(item, LayerRequest)}
    assert {(LayerPart.LAYER, tp, batch) for tp in (1, 2) for batch in (1, 2)} <= layers
    assert {(LayerPart.HEAD, 1, 2), (LayerPart.EMBEDDING, 2, 2)} <= layers


def test_what_was_read_or_attempted_is_not_missing() -> None:
    needed = needed_probes(smallest(), CLUSTER, WORKLOAD, PLANS)
    first = next(item for item in needed if isinstance(item, CollectiveRequest))
    reading = CollectiveReading(
        op=first.op, group_size=first.group_size, stride=first.stride, size_bytes=4096, iterations=1, time_s=1.0,
        time_p10_s=1.0, time_p90_s=1.0, algbw_bytes_per_s=4096.0, busbw_bytes_per_s=4096.0,
    )  # fmt: skip
    failed = needed[0]
    missing = missing_probes(needed, [reading], [], [failed])
    assert set(needed) - set(missing) == {first, failed}


def test_sweep_sizes_divide_over_every_group() -> None:
    for item in needed_probes(smallest(), CLUSTER, WORKLOAD, PLANS):
        if isinstance(item, CollectiveRequest):
            assert all(size % 4096 == 0 for size in item.sizes_bytes)
