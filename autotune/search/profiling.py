"""Which probes a tuning needs before it searches: what its plans will do and the profile does not know yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from autotune.cost.parameters import total_parameters
from autotune.cost.table import PlanTable
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    DeviceKind,
    LayerPart,
    LayerReading,
    LayerRequest,
    ModelSpec,
    ProbeRequest,
    Workload,
)

# A sweep starts where latency rules and ends at the largest message of the plans, but not beyond this.
SMALLEST_BYTES = 4 * 1024
LARGEST_BYTES = {kind: (8 if kind is DeviceKind.CPU else 256) * 2**20 for kind in DeviceKind}
SWEEP_POINTS = 5
# On a large cluster the layouts of the groups are many and alike: the first ones of each axis stand for the rest.
MAX_LAYOUTS_AN_AXIS = 4

Layout = tuple[CollectiveOp, int, int]
LayerKey = tuple[LayerPart, int, int, str, bool]


def needed_probes(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, table: PlanTable
) -> Sequence[CollectiveRequest | LayerRequest]:
    """The probes for the plans of `table`: layers at each tp and micro-batch, collectives over each group layout."""
    # One layer at each tp and at the smallest, middle and largest micro-batch; embedding and head at the largest.
    batches = sorted({int(value) for value in np.unique(table.micro_batch)})
    chosen = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    parts = [(LayerPart.LAYER, each) for each in chosen]
    parts += [(part, chosen[-1]) for part in (LayerPart.EMBEDDING, LayerPart.HEAD)]
    layers = [
        LayerRequest(model=model, workload=workload, part=part, tp=int(tp), micro_batch=micro_batch)
        for tp in np.unique(table.tp)
        for part, micro_batch in parts
    ]
    # Geometric sizes up to the fp32 gradients of the whole model, multiples of 4 KiB so that all groups divide.
    largest = min(LARGEST_BYTES[cluster.device.kind], max(4 * total_parameters(model), 16 * SMALLEST_BYTES))
    sweep = np.geomspace(SMALLEST_BYTES, largest, SWEEP_POINTS)
    sizes = tuple(sorted({round(size / SMALLEST_BYTES) * SMALLEST_BYTES for size in sweep}))
    collectives = [
        CollectiveRequest(op=op, group_size=size, stride=stride, sizes_bytes=sizes)
        for op, size, stride in _layouts(table)
    ]
    return [*layers, *collectives]


def missing_probes(
    needed: Sequence[CollectiveRequest | LayerRequest],
    collective_readings: Sequence[CollectiveReading],
    layer_readings: Sequence[LayerReading],
    attempted: Collection[ProbeRequest],
) -> Sequence[CollectiveRequest | LayerRequest]:
    """Those of `needed` without a reading, less those that were attempted (and failed) already."""
    layouts = {(reading.op, reading.group_size, reading.stride) for reading in collective_readings}
    layers = {_layer_key(reading) for reading in layer_readings}
    return [
        request
        for request in needed
        if request not in attempted
        and (
            (request.op, request.group_size, request.stride) not in layouts
            if isinstance(request, CollectiveRequest)
            else _layer_key(request) not in layers
        )
    ]


def _layer_key(item: LayerRequest | LayerReading) -> LayerKey:
    return (item.part, item.tp, item.micro_batch, item.recompute.value, item.sequence_parallel)


def _layouts(table: PlanTable) -> Iterator[Layout]:
    """(operation, group size, stride) of the axes that the plans have, without repeats, small groups first."""
    yield from _axis(table.tp, np.ones_like(table.tp), (CollectiveOp.ALL_REDUCE,))
    sharded = table.sequence_parallel.astype(bool)
    gathers = (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)
    yield from _axis(table.tp[sharded], np.ones_like(table.tp[sharded]), gathers)
    yield from _axis(table.dp, table.tp * table.cp, (CollectiveOp.ALL_REDUCE,))
    zero = table.zero_stage > 0
    yield from _axis(table.dp[zero], (table.tp * table.cp)[zero], gathers)
    expert = table.ep > 1
    yield from _axis(table.ep[expert], table.tp[expert], (CollectiveOp.ALL_TO_ALL,))  # ep takes ranks of dp and cp
    staged = table.pp > 1
    stride = (table.tp * table.cp * table.dp)[staged]
    yield from _axis(np.full(len(stride), 2), stride, (CollectiveOp.SEND_RECV,))


def _axis(sizes: np.ndarray, strides: np.ndarray, ops: Sequence[CollectiveOp]) -> Iterator[Layout]:
    pairs = sorted({(int(size), int(stride)) for size, stride in zip(sizes, strides, strict=True) if size > 1})
    for size, stride in pairs[:MAX_LAYOUTS_AN_AXIS]:
        for op in ops:
            yield op, size, stride
