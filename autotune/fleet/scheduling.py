"""Gang scheduling: which queued jobs get which nodes now. A pure choice, and the thin act that carries it out.

- All or nothing: a job gets all its nodes at once, nodes of one environment and device, in the order of the network's
  topology, or none.
- Fair: health probes first (they bring nodes back), then the principal who used the fewest GPU-seconds lately, then the
  oldest job.
- Nobody starves: a job that could run on the pool's nodes but must wait for some of them reserves those that are free.
  One that could not run even on an idle pool reserves nothing.
- Warm: of equal choices the ranks that live already.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from autotune.fleet.eligibility import obstacle_for
from autotune.ports.fleet import FleetStore, Queue
from autotune.specs import Job, JobPurpose, MemberState, Node, StepRequest

START_LEASES = 2.0
"""A member that has not begun after so many times the silence that makes its node lost, is. More than once: its message
may have to be sent again."""

FAIRNESS_WINDOW = timedelta(hours=1)
NOMINAL_JOB_S = 30.0
"""GPU-seconds that a job counts for its principal when it is granted, before it has used any."""

MAX_QUEUED_EACH = 200
"""How many of a principal's oldest jobs are looked at; behind so many the newest would wait anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A job, its nodes in the order of ranks, the ranks to form, whether they live already, and until when to begin."""

    job: Job
    nodes: tuple[str, ...]
    world_id: str
    warm: bool
    lease_s: float


def choose(
    queued: Sequence[Job],
    nodes: Sequence[Node],
    leased: Mapping[str, str],
    usage: Mapping[str, float],
    now: datetime,
) -> list[Grant]:
    """The jobs to grant now, each with all its nodes; no node twice.

    Args:
        queued: jobs that wait.
        nodes: of any pool.
        leased: node -> id of the job that holds it.
        usage: principal -> GPU-seconds of late, running jobs included.
        now: the database's clock.
    """
    taken = set(leased)
    turns = _Turns(queued, usage)
    hopeless: set[tuple[object, ...]] = set()
    grants = []
    while any(node.name not in taken for node in nodes) and (job := turns.next()) is not None:
        if _shape(job) in hopeless:
            continue
        free = _free_alike(job, nodes, taken, now)
        if len(free) < job.cluster.nodes:
            taken.update(node.name for node in free)  # reserved until the others are free too
            hopeless.add(_shape(job))  # nodes only ever become fewer here
            continue
        grant = _grant(job, free, nodes)
        taken.update(grant.nodes)
        turns.promise(job)
        grants.append(grant)
    return grants


def schedule(store: FleetStore, queue: Queue, pool: str) -> Sequence[Job]:
    """Grants what can run in a pool now, and tells the nodes. Returns the jobs granted.

    Two of these at once are harmless: a grant whose nodes were leased meanwhile is refused by the store.
    """
    nodes, leased = store.nodes(pool), store.leased_nodes(pool)
    if len(leased) >= len(nodes):
        return ()
    queued = store.queued_jobs(pool, most_each=MAX_QUEUED_EACH)
    if not queued:
        return ()
    now = store.now()
    return carry_out(store, queue, choose(queued, nodes, leased, store.gpu_s_by_principal(now - FAIRNESS_WINDOW), now))


def carry_out(store: FleetStore, queue: Queue, grants: Sequence[Grant]) -> Sequence[Job]:
    """Leases the nodes of each grant and tells them. Returns the jobs granted."""
    granted = []
    for grant in grants:
        job = store.grant(grant.job.id, grant.nodes, lease_s=grant.lease_s, world_id=grant.world_id, warm=grant.warm)
        if job is not None:
            send(queue, job)
            granted.append(job)
    return granted


def send(queue: Queue, job: Job) -> None:
    """Tells each member that has not begun to run its share."""
    for member in job.members:
        if member.state is MemberState.LEASED:
            queue.run(member.node, job.id, job.token)


class _Turns:
    """Whose job is looked at next."""

    def __init__(self, queued: Sequence[Job], usage: Mapping[str, float]) -> None:
        self._used = defaultdict(float, usage)
        oldest = sorted(queued, key=lambda job: (job.created_at, job.id))
        self._health = deque(job for job in oldest if job.purpose is JobPurpose.HEALTH)
        self._queues: dict[str, deque[Job]] = {}
        for job in oldest:
            if job.purpose is not JobPurpose.HEALTH:
                self._queues.setdefault(job.principal, deque()).append(job)

    def next(self) -> Job | None:
        """The next job; None when all were looked at."""
        if self._health:
            return self._health.popleft()
        if not self._queues:
            return None
        heads = {principal: jobs[0] for principal, jobs in self._queues.items()}
        least = min(heads, key=lambda each: (self._used[each], heads[each].created_at, heads[each].id))
        job = self._queues[least].popleft()
        if not self._queues[least]:
            del self._queues[least]
        return job

    def promise(self, job: Job) -> None:
        """Counts a job that was granted now as used, so that its principal's next one comes later."""
        self._used[job.principal] += job.cluster.devices * NOMINAL_JOB_S


def _shape(job: Job) -> tuple[object, ...]:
    """Jobs of one shape can run on the same nodes."""
    cluster = job.cluster
    return (cluster.nodes, cluster.gpus_per_node, cluster.device.name, job.environment_key, job.avoid, job.only_node)


def _free_alike(job: Job, nodes: Sequence[Node], taken: Collection[str], now: datetime) -> Sequence[Node]:
    """The free ones among alike nodes that could run the job if all were free; none where there are too few in all."""
    able = [node for node in nodes if node.pool == job.pool and not obstacle_for(job, node, now)]
    groups = [_unavoided(job, group) for group in _alike(able) if len(group) >= job.cluster.nodes]
    return max(([node for node in group if node.name not in taken] for group in groups), key=len, default=[])


def _grant(job: Job, free: Sequence[Node], nodes: Sequence[Node]) -> Grant:
    count, request = job.cluster.nodes, job.request
    cold = isinstance(request, StepRequest) and (request.cold or bool(request.workload.command))
    world = () if cold else _living_world(free, count, nodes)
    gang = world or _neighbours(free, count)
    world_id = world[0].world_id if world else job.id
    lease_s = START_LEASES * max(node.lost_after_s for node in gang)
    names = tuple(node.name for node in gang)
    return Grant(job=job, nodes=names, world_id=world_id, warm=bool(world), lease_s=lease_s)


def _alike(nodes: Sequence[Node]) -> Sequence[list[Node]]:
    """The nodes by environment and device, those of one in the order of the topology; the largest group first."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in sorted(nodes, key=lambda each: (each.topology, each.name)):
        key = (node.environment_key, node.device.name, node.device.memory_bytes)
        groups.setdefault(key, []).append(node)
    return sorted(groups.values(), key=len, reverse=True)


def _unavoided(job: Job, group: list[Node]) -> list[Node]:
    """The group without the nodes that an earlier attempt failed on; of these no more than are needed, oldest first."""
    names = {node.name for node in group}
    avoided = [name for name in job.avoid if name in names]
    spared = set(avoided[max(job.cluster.nodes - (len(group) - len(avoided)), 0) :])
    return [node for node in group if node.name not in spared]


def _neighbours(free: Sequence[Node], count: int) -> Sequence[Node]:
    """`count` neighbours of the free nodes: of the fewest places in the topology, then with the fewest worlds."""
    windows = [free[i : i + count] for i in range(len(free) - count + 1)]
    return min(windows, key=lambda window: (len({n.topology for n in window}), sum(bool(n.world_id) for n in window)))


def _living_world(free: Sequence[Node], count: int, nodes: Sequence[Node]) -> Sequence[Node]:
    """Free nodes that together hold one whole living world of that size; empty if there is none."""
    sizes = Counter(node.world_id for node in nodes)
    for world in sorted({node.world_id for node in free if node.world_id}):
        members = [node for node in free if node.world_id == world]
        if len(members) == count == sizes[world]:
            return members
    return ()
