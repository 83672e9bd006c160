"""Health probes: whether a quarantined node may come back, judged by what it does and by what its pool does.

A check is one probe after another on the node alone: an all-reduce at two sizes where it has several devices, then a
layer. Each must pass, and be no slower than SLOW_SHARE of the median of the pool's other nodes. Where fewer than two
others were ever measured, they are measured first.

A check that failed doubles the time to the next one. A probe that was cut off (its worker or ranks were killed) says
nothing about the node: the next one comes after FIRST_BACK_OFF_S, however often that happens.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median

from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    DType,
    Job,
    JobPurpose,
    LayerPart,
    LayerReading,
    LayerRequest,
    ModelSpec,
    Node,
    Norm,
    ProbeOutcome,
    Workload,
)
from autotune.tuning.fleet.failures import QUARANTINE_AT
from autotune.tuning.fleet_ports import FleetStore

SLOW_SHARE = 0.7
PEERS = 2
"""Other nodes whose measurements a node is compared with, at least (where the pool has them)."""

HEALTH_DEADLINE_S = 120.0
FIRST_BACK_OFF_S, MOST_BACK_OFF_S = 30.0, 900.0

MODEL = ModelSpec(
    name="health", layers=2, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=1024, gated=False, vocab=1024,
    tied=False, norm=Norm.RMSNORM, source="ours: small enough for any device",
)  # fmt: skip
WORKLOAD = Workload(seq_len=256, global_batch=8, dtype=DType.FP32)
SIZES_BYTES = (64 * 1024, 4 * 2**20)

HealthRequest = CollectiveRequest | LayerRequest
Speeds = Mapping[str, float]
"""What a probe measured, by what it is called -> the higher the faster."""


def health_requests(cluster: ClusterSpec) -> Sequence[HealthRequest]:
    """The probes of one check, in order.

    Args:
        cluster: of the pool.
    """
    layer = LayerRequest(model=MODEL, workload=WORKLOAD, part=LayerPart.LAYER, micro_batch=4)
    if cluster.gpus_per_node == 1:
        return (layer,)
    size = cluster.gpus_per_node
    sizes = tuple(each - each % (4 * size) for each in SIZES_BYTES)
    return (CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=size, sizes_bytes=sizes), layer)


def health_job(node: Node, cluster: ClusterSpec, request: HealthRequest, now: datetime) -> Job:
    """A probe of a check, bound to its node. Its readings are stored under the node's own fingerprint."""
    return Job(
        id=uuid.uuid4().hex,
        purpose=JobPurpose.HEALTH,
        pool=node.pool,
        cluster=alone(cluster),
        request=request,
        only_node=node.name,
        deadline_s=HEALTH_DEADLINE_S,
        created_at=now,
    )


def alone(cluster: ClusterSpec) -> ClusterSpec:
    """One node of a cluster."""
    return cluster.model_copy(update={"nodes": 1})


def following(job: Job) -> HealthRequest | None:
    """The probe after this one in its check; None after the last."""
    requests = list(health_requests(job.cluster))
    after = requests.index(job.request) + 1 if job.request in requests else len(requests)
    return requests[after] if after < len(requests) else None


def back_off_s(failures: int) -> float:
    """How long after its last incident a quarantined node is checked: doubled with every check that it failed."""
    doubled = max(failures - QUARANTINE_AT, 0)
    return min(FIRST_BACK_OFF_S * 2.0 ** min(doubled - 1, 30), MOST_BACK_OFF_S) if doubled else 0.0


def slowness(mine: Speeds, others: Sequence[Speeds]) -> str:
    """In what a node is too slow, in words; empty if it is not, or where no other node was measured."""
    found = []
    for name, speed in mine.items():
        theirs = [speeds[name] for speeds in others if name in speeds]
        if theirs and speed < SLOW_SHARE * median(theirs):
            share = speed / median(theirs)
            found.append(f"{name} at {share:.2f} of the pool's median ({len(theirs)} other nodes)")
    return "; ".join(found)


def speeds_of(outcome: ProbeOutcome) -> Speeds:
    """The speeds of an outcome's readings."""
    return _speeds(outcome.readings)


def known_speeds(store: FleetStore, node: Node, cluster: ClusterSpec, request: HealthRequest) -> Speeds:
    """A node's newest speeds in the same probe; empty if it never ran it."""
    key = alone(cluster).key
    if not node.fingerprint_key:
        return {}
    if isinstance(request, LayerRequest):
        layers = store.layer_readings(key, node.fingerprint_key, MODEL.key, WORKLOAD.key)
        return _speeds(layers)
    same = [
        reading
        for reading in store.collective_readings(key, node.fingerprint_key)
        if (reading.op, reading.group_size, reading.stride) == (request.op, request.group_size, request.stride)
        and reading.size_bytes in request.sizes_bytes
    ]
    return _speeds(same)


def _speeds(readings: Sequence[object]) -> Speeds:
    """By name, the last of each; readings come oldest first."""
    found = {}
    for reading in readings:
        if isinstance(reading, CollectiveReading) and reading.busbw_bytes_per_s > 0:
            found[f"{reading.op} of {reading.size_bytes} bytes"] = reading.busbw_bytes_per_s
        elif isinstance(reading, LayerReading) and reading.forward_s + reading.backward_s > 0:
            found[f"{reading.part}"] = 1.0 / (reading.forward_s + reading.backward_s)
    return found
