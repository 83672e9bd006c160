"""Health probes: whether a quarantined node may come back, judged by what it does and by what its peers do.

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

from autotune.errors import UnknownNameError
from autotune.fleet.eligibility import obstacle_for
from autotune.fleet.failures import QUARANTINE_AT, was_cut_off
from autotune.fleet.scheduling import carry_out, choose
from autotune.ports.fleet import FleetStore, Queue
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    DType,
    Failure,
    FailureKind,
    Job,
    JobPurpose,
    LayerPart,
    LayerReading,
    LayerRequest,
    ModelSpec,
    Node,
    NodeIncident,
    NodeState,
    Norm,
    ProbeOutcome,
    StepRequest,
    Workload,
)

SLOW_SHARE = 0.7
PEERS = 2
"""Other nodes whose measurements a node is compared with, at least (where the pool has them)."""

HEALTH_DEADLINE_S = 120.0
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 30.0, 900.0
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
    return min(FIRST_BACK_OFF_S * 2.0 ** min(doubled - 1, 30), MAX_BACK_OFF_S) if doubled else 0.0


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


HEALTH = "health"
"""The kind of incident that a failed or slow health probe is."""

UNDECIDED = "health_undecided"
"""The kind of incident for a health probe that was cut off, which says nothing about what the node can do."""


def check_quarantined(store: FleetStore, queue: Queue, pool: str) -> Sequence[str]:
    """Starts what is due: a check of each quarantined node that is idle, or first of the peers to compare it with.

    A node that was quarantined by hand (it has no failures) waits for a hand. Returns the nodes now checked.
    """
    nodes, leased, now = store.nodes(pool), store.leased_nodes(pool), store.now()
    due = [node for node in nodes if node.name not in leased and _is_due(store, node, now)]
    if not due:
        return ()
    try:
        cluster = store.cluster(pool)
    except UnknownNameError:  # nothing was ever measured on this pool
        return ()
    waiting = {job.only_node for job in store.queued_jobs(pool, most_each=len(nodes))}
    checked = []
    for node in due:
        unmeasured = _unmeasured_peers(store, node, nodes, cluster)
        idle = [peer for peer in unmeasured if peer.name not in leased and _able(peer, cluster, now)]
        if not idle and any(_is_checked(store, leased.get(peer.name)) for peer in unmeasured):
            continue  # its peers are being measured
        for each in idle or unmeasured or [node]:
            if each.name not in waiting and each.name not in checked and _able(each, cluster, now):
                _start(store, queue, each, cluster, health_requests(cluster)[0])
                checked.append(each.name)
    return checked


def after_health_probe(store: FleetStore, queue: Queue, job: Job, outcome: ProbeOutcome) -> None:
    """What follows from a health probe that has ended: the next one of its check, the node's release, or its blame."""
    node = store.node(job.only_node)
    if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
        return
    if outcome.failure is not None and was_cut_off(outcome.failure):
        _note_undecided(store, node, job, outcome.failure)
        return
    problem = _problem(store, node, job, outcome)
    if problem:
        incident = NodeIncident(node=node.name, at=store.now(), kind=HEALTH, message=problem, job_id=job.id)
        store.blame_node(incident, quarantine_at=1)
        store.set_node_state(node.name, NodeState.QUARANTINED, problem)
        return
    request = following(job)
    if request is not None:
        _start(store, queue, node, job.cluster, request)
    elif node.state is NodeState.QUARANTINED and node.failures:
        store.set_node_state(node.name, NodeState.READY, "")


def _note_undecided(store: FleetStore, node: Node, job: Job, failure: Failure) -> None:
    """A quarantined node is probed again after a moment, as if it had not been. Any other one has failed once."""
    message = f"its health probe was cut off: {failure.message}"
    incident = NodeIncident(node=node.name, at=store.now(), kind=UNDECIDED, message=message, job_id=job.id)
    if node.state is NodeState.QUARANTINED:
        store.record_incident(incident)
    else:
        store.blame_node(incident, quarantine_at=QUARANTINE_AT)


def _problem(store: FleetStore, node: Node, job: Job, outcome: ProbeOutcome) -> str:
    """What is wrong with the node; empty if nothing is."""
    if outcome.failure is not None:
        return f"its health probe failed: {outcome.failure.message}"
    assert not isinstance(job.request, StepRequest)
    others = [known_speeds(store, peer, job.cluster, job.request) for peer in _peers(node, store.nodes(job.pool))]
    slow = slowness(speeds_of(outcome), others)
    return f"slow in its health probe: {slow}" if slow else ""


def _is_due(store: FleetStore, node: Node, now: datetime) -> bool:
    if node.state is not NodeState.QUARANTINED or not node.failures:
        return False
    for last in store.incidents(node.name, limit=1):
        wait_s = FIRST_BACK_OFF_S if last.kind == UNDECIDED else back_off_s(node.failures)
        return (now - last.at).total_seconds() >= wait_s
    return True


def _peers(node: Node, nodes: Sequence[Node]) -> Sequence[Node]:
    """The nodes that it is compared with."""
    return [
        other
        for other in nodes
        if other.name != node.name
        and other.pool == node.pool
        and other.state is NodeState.READY
        and other.environment_key == node.environment_key
        and other.fingerprint_key
    ]


def _unmeasured_peers(store: FleetStore, node: Node, nodes: Sequence[Node], cluster: ClusterSpec) -> Sequence[Node]:
    """Peers to measure first; none where PEERS of them were measured."""
    peers = _peers(node, nodes)
    requests = health_requests(cluster)
    unmeasured = [peer for peer in peers if not all(known_speeds(store, peer, cluster, each) for each in requests)]
    return unmeasured[: max(PEERS - (len(peers) - len(unmeasured)), 0)]


def _is_checked(store: FleetStore, job_id: str | None) -> bool:
    return job_id is not None and store.job(job_id).purpose is JobPurpose.HEALTH


def _able(node: Node, cluster: ClusterSpec, now: datetime) -> bool:
    return not obstacle_for(health_job(node, cluster, health_requests(cluster)[0], now), node, now)


def _start(store: FleetStore, queue: Queue, node: Node, cluster: ClusterSpec, request: HealthRequest) -> None:
    """Creates a probe and grants it at once if the node is free: however many jobs are queued, it comes first."""
    now = store.now()
    job = health_job(node, cluster, request, now)
    store.create_job(job)
    nodes = store.nodes(node.pool)
    carry_out(store, queue, choose([job], nodes, store.leased_nodes(node.pool), {}, now))
