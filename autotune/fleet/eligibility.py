"""Eligibility: whether a node may get a job, and if not, why in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from autotune.errors import InputError, UnknownNameError
from autotune.ports.fleet import FleetStore
from autotune.specs import Job, JobPurpose, Node, NodeState, StepRequest
from autotune.specs.command import CommandOffer
from autotune.specs.fleet import LOCAL


def obstacle(node: Node, now: datetime, gpus_per_node: int) -> str:
    """Why a node may not get jobs; empty if it may. A lease is no obstacle: it ends.

    A node whose heartbeat is older than it says itself (`lost_after_s`) is lost.

    Args:
        node: as stored.
        now: the database's clock, which heartbeats are written by.
        gpus_per_node: devices that a job needs of each node.
    """
    if not node.session:
        return "its worker has ended"
    own = node.pool.startswith(LOCAL)  # it is the process that asks, however long that was stopped
    if not own and (now - node.heartbeat_at).total_seconds() > node.lost_after_s:
        return f"lost: no heartbeat for over {node.lost_after_s:g} s"
    if node.slots < gpus_per_node:
        return f"came up with {node.slots} of {gpus_per_node} devices" + (f" ({node.reason})" if node.reason else "")
    if node.state is NodeState.QUARANTINED:
        return f"quarantined: {node.reason}" if node.reason else "quarantined"
    return ""


def obstacle_for(job: Job, node: Node, now: datetime) -> str:
    """Why a node may not get this very job; empty if it may. A health probe runs on the one node that it judges."""
    if job.only_node and node.name != job.only_node:
        return f"the probe is for node {job.only_node}"
    judged = node
    if job.purpose is JobPurpose.HEALTH and job.only_node:
        judged = node.model_copy(update={"state": NodeState.READY})
    found = obstacle(judged, now, job.cluster.gpus_per_node)
    if found:
        return found
    if node.device.kind is not job.cluster.device.kind or node.device.name != job.cluster.device.name:
        return f"has {node.device.name}, not {job.cluster.device.name}"
    if missing := lacks_command(node, command_of(job)):
        return missing
    if job.environment_key and node.environment_key != job.environment_key:
        return "has another environment (driver, libraries or settings)"
    return ""


def command_of(job: Job) -> str:
    """The program that a job runs, by name and digest; empty for our own probes."""
    return job.request.workload.command if isinstance(job.request, StepRequest) else ""


def lacks_command(node: Node, ref: str) -> str:
    """Why a node may not run a program; empty if it may, or there is none. One process of its own asks its user."""
    if not ref or node.pool.startswith(LOCAL) or any(offer.ref == ref for offer in node.commands):
        return ""
    name = ref.partition("@")[0]
    has = any(offer.name == name for offer in node.commands)
    return f"has another command {name} than {ref}" if has else f"has no command {name}"


def offer_in(nodes: Sequence[Node], name: str, needed: int) -> CommandOffer:
    """The program of that name that the most of these nodes offer with the same content.

    Raises:
        UnknownNameError: none of them offers one.
        InputError: too few offer the same.
    """
    offers = [offer for node in nodes if node.session for offer in node.commands]
    refs = Counter(offer.ref for offer in offers if offer.name == name)
    if not refs:
        raise UnknownNameError("command", name, {offer.name for offer in offers})
    ref, count = min(refs.items(), key=lambda item: (-item[1], item[0]))
    if count < needed:
        raise InputError("command", name, f"{needed} nodes that offer the same of that name; {count} do")
    return next(offer for offer in offers if offer.ref == ref)


def why_waiting(job: Job, nodes: Sequence[Node], leased: Mapping[str, str], now: datetime) -> str:
    """Why a queued job does not run yet, in one line for people: what it needs, and what each node does instead.

    Args:
        job: queued.
        nodes: of any pool.
        leased: node -> id of the job that holds it.
        now: the database's clock.
    """
    pool = [node for node in nodes if node.pool == job.pool]
    obstacles = {node.name: obstacle_for(job, node, now) for node in pool}
    able = [node for node in pool if not obstacles[node.name]]
    busy = [node.name for node in able if node.name in leased]
    needed = f"needs {_counted(job.cluster.nodes, 'node')} of pool {job.pool}"
    if not pool:
        return f"{needed}, and no node of it has registered"
    parts = [f"{needed}: {len(able) - len(busy)} free"]
    if busy:
        parts.append(f"{len(busy)} busy ({_listed(busy)})")
    return "; ".join([*parts, *_told(obstacles)])


def too_few(pool: str, needed: int, nodes: Sequence[Node], obstacles: Mapping[str, str]) -> str:
    """What a tuning waits for that cannot get all its nodes, in one line for people.

    Args:
        pool: its pool.
        needed: how many nodes it takes at once.
        nodes: of the pool.
        obstacles: of each node, empty for one that is ready.
    """
    ready = sum(not obstacles[node.name] for node in nodes)
    text = f"waiting for nodes: pool {pool} has {ready} of the {_counted(needed, 'node')} that this needs ready"
    return "; ".join([text, *_told(obstacles)]) if nodes else f"{text}; none has registered"


MAX_LISTED = 8


def _told(obstacles: Mapping[str, str]) -> list[str]:
    """The nodes with an obstacle; of many only the first, and how many more there are."""
    found = [f"node {name} {text}" for name, text in sorted(obstacles.items()) if text]
    more = len(found) - MAX_LISTED
    return found[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(sorted(names)[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def common_environment(ready: Sequence[Node]) -> str:
    """The environment that most of these nodes have; empty without nodes."""
    counts = Counter(node.environment_key for node in ready)
    return min(counts, key=lambda key: (-counts[key], key), default="")


def gang_fingerprint(store: FleetStore, pool: str, environment_key: str) -> str | None:
    """The key of the fingerprint that all gangs of one environment share, so that they share a profile.

    It is that of one of the pool's nodes, with the pool's name as hostname. None if no node has that environment.
    """
    nodes = store.nodes(pool)
    node = next((each for each in nodes if each.environment_key == environment_key and each.fingerprint_key), None)
    if node is None or pool.startswith(LOCAL):
        return None if node is None else node.fingerprint_key
    return store.put_fingerprint(store.fingerprint(node.fingerprint_key).model_copy(update={"hostname": pool}))
