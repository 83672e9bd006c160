"""Health checks under way: which nodes are checked now, and what follows from a probe of a check."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from autotune.errors import UnknownNameError
from autotune.specs import (
    ClusterSpec,
    Failure,
    FailureKind,
    Job,
    JobPurpose,
    Node,
    NodeIncident,
    NodeState,
    ProbeOutcome,
    StepRequest,
)
from autotune.tuning.fleet.eligibility import obstacle_for
from autotune.tuning.fleet.failures import QUARANTINE_AT, was_cut_off
from autotune.tuning.fleet.health import (
    FIRST_BACK_OFF_S,
    PEERS,
    HealthRequest,
    back_off_s,
    following,
    health_job,
    health_requests,
    known_speeds,
    slowness,
    speeds_of,
)
from autotune.tuning.fleet.scheduling import carry_out, choose
from autotune.tuning.fleet_ports import FleetStore, Queue

HEALTH = "health"
"""The kind of incident that a failed or slow health probe is."""

UNDECIDED = "health_undecided"
"""The kind of incident that a health probe is which was cut off: it says nothing of what the node can do."""


def check_quarantined(store: FleetStore, queue: Queue, pool: str) -> Sequence[str]:
    """Starts what is due: a check of each quarantined node that is idle, or first of the peers that it is held against.

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
        for each in idle or [node]:
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
    """A node that is out is asked again after a moment, as if it had not been asked. One that is in has failed once."""
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
