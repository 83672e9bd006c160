"""What a failure means: whether it is tried again, and whose fault it was. Pure; the policy is the table below.

| kind          | tried again                                    | blamed                  |
|---------------|------------------------------------------------|-------------------------|
| OOM           | never: it is the plan's (and teaches memory)   | nobody                  |
| ILLEGAL       | never: it is the plan's                        | nobody                  |
| CANCELLED     | never: nobody wants it any more                | nobody                  |
| CRASH         | twice                                          | the node of the cause   |
| ... exception | once the same: then it is final                | see below               |
| HANG          | twice                                          | the node of the cause   |
| COMMUNICATION | twice                                          | the node of the cause   |
| LOST          | twice                                          | the node, unless all of |
|               |                                                | a gang were lost        |
| UNAVAILABLE   | twice                                          | the node without ranks  |
| SLOW          | twice; then what was measured is the result    | the slow node, at once  |
| ... alone     | once; the same elsewhere, and it is the plan's | the slow node, at once  |

A process that dies tells little, but an exception may be the plan's or the node's, and the next attempt tells which:
the same one elsewhere, and it is the plan's; the same one on that node again, where the pool has no other, and the
node is blamed, so that its health is looked at; no failure elsewhere, and the node was to blame.

Another attempt avoids the node of the cause where the pool allows. Health probes have rules of their own
(autotune.fleet.health). What a failure teaches the search is in search.core: only an OOM teaches memory. Which node
holds the cause is found before this, from what the ranks saw; it may be unknown, and then nobody is blamed.

A node that computes SLOW_RATIO times as long as the others do the same work makes a figure of its own of what the plan
does. It is quarantined with both figures, so that its health is looked at, and the work is measured again on others.
A gang of one node has no others: it is compared with what other nodes of its pool computed of late for the same model
and workload. Plans differ in that by less than SLOW_RATIO; one that does not is as slow on the next node, too.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from types import MappingProxyType

from autotune.specs import (
    Failure,
    FailureKind,
    Job,
    JobState,
    NodeIncident,
    ProbeOutcome,
    RankReading,
    StepReading,
    StepRequest,
)

MAX_ATTEMPTS = 3
QUARANTINE_AT = 2
"""Failures in a row by a node's fault, after which it is quarantined."""

STRAGGLES_AT = 3
"""Like QUARANTINE_AT, but of ranks that straggle: one traced step is weaker evidence than a failure."""

STRAGGLER_RATIO = 1.3
STRAGGLER = "straggler"

SLOW_RATIO, SLOW_LEAST_S = 3.0, 0.005
"""A node is slow that computes so many times as long as the others, and so many seconds longer: less may be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Whether a kind of failure is tried again, and whether a node may be at fault."""

    retried: bool
    blames: bool


POLICY: dict[FailureKind, Policy] = {
    FailureKind.OOM: Policy(retried=False, blames=False),
    FailureKind.ILLEGAL: Policy(retried=False, blames=False),
    FailureKind.CANCELLED: Policy(retried=False, blames=False),
    FailureKind.CRASH: Policy(retried=True, blames=True),
    FailureKind.HANG: Policy(retried=True, blames=True),
    FailureKind.COMMUNICATION: Policy(retried=True, blames=True),
    FailureKind.LOST: Policy(retried=True, blames=True),
    FailureKind.UNAVAILABLE: Policy(retried=True, blames=True),
    FailureKind.SLOW: Policy(retried=True, blames=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What becomes of a job that has ended.

    Args:
        failure: of the job; None if it went well.
        retry: the next attempt; None if this was the last word.
        incidents: what nodes are blamed for.
        cleared: nodes that proved well, or were blamed for what the plan did.
    """

    failure: Failure | None
    retry: Job | None
    incidents: Sequence[NodeIncident]
    cleared: Sequence[str]


def judge(
    job: Job,
    outcome: ProbeOutcome,
    blamed: str | None,
    *,
    earlier: Sequence[Job],
    wanted: bool,
    now: datetime,
    calc_s: Mapping[int, float] = MappingProxyType({}),
    others_s: Mapping[str, float] = MappingProxyType({}),
) -> Judgement:
    """What becomes of a job.

    Args:
        job: with its members.
        outcome: readings or a failure.
        blamed: the node that holds the cause, if one is known.
        earlier: the ended attempts before this one.
        wanted: whether its tuning goes on.
        now: the database's clock.
        calc_s: seconds that each rank computed, where it told.
        others_s: what other nodes of the pool computed for the like, by node; of a job on one node.
    """
    failure = outcome.failure
    if failure is None:
        slow = slow_nodes(job, calc_s, now) or slow_alone(job, calc_s, others_s, now)
        if slow and wanted and not job.cancelled and job.attempt < MAX_ATTEMPTS:
            failure = Failure(kind=FailureKind.SLOW, message="; ".join(f"node {i.node}: {i.message}" for i in slow))
            retry = _retry(job, [incident.node for incident in slow], now)
            return Judgement(failure=failure, retry=retry, incidents=slow, cleared=())
        return _went_well(job, outcome, earlier, slow, now)
    raised = _exception(failure)
    same = next((attempt for attempt in earlier if raised and _raised(attempt) == raised), None)
    if same is not None and not _suspects(job, same) <= {member.node for member in job.members}:
        return Judgement(failure=failure, retry=None, incidents=(), cleared=job.avoid)
    guilty = POLICY[failure.kind].blames and (same is not None or raised is None)
    incidents = _incidents([blamed] if blamed and guilty else [], failure.kind.value, failure.message, job, now)
    again = POLICY[failure.kind].retried and wanted and not job.cancelled
    if again and same is None and job.attempt < MAX_ATTEMPTS:
        retry = _retry(job, [blamed] if blamed else [], now)
        return Judgement(failure=failure, retry=retry, incidents=incidents, cleared=())
    if job.attempt > 1:
        failure = failure.model_copy(update={"message": f"{failure.message} (attempt {job.attempt})"})
    return Judgement(failure=failure, retry=None, incidents=incidents, cleared=())


def _went_well(
    job: Job, outcome: ProbeOutcome, earlier: Sequence[Job], slow: Sequence[NodeIncident], now: datetime
) -> Judgement:
    raised = any(_raised(attempt) for attempt in earlier)
    members = [member.node for member in job.members]
    suspects = [node for node in job.avoid if raised and node not in members]
    message = "a probe that failed on it went well elsewhere"
    known = {incident.node for incident in slow}
    lagging = [incident for incident in straggles(job, outcome, now) if incident.node not in known]
    incidents = [*slow, *lagging, *_incidents(suspects, FailureKind.CRASH.value, message, job, now)]
    to_blame = {incident.node for incident in incidents}
    cleared = [node for node in members if node not in to_blame]
    return Judgement(failure=None, retry=None, incidents=incidents, cleared=cleared)


def _incidents(nodes: Sequence[str], kind: str, message: str, job: Job, now: datetime) -> Sequence[NodeIncident]:
    return [NodeIncident(node=node, at=now, kind=kind, message=message, job_id=job.id) for node in nodes]


def _retry(job: Job, blamed: Sequence[str], now: datetime) -> Job:
    """The next attempt at the same work; it avoids the nodes that are blamed for this one."""
    avoid = dict.fromkeys((*job.avoid, *blamed))
    return Job(
        id=uuid.uuid4().hex,
        purpose=job.purpose,
        pool=job.pool,
        cluster=job.cluster,
        request=job.request,
        tuning_id=job.tuning_id,
        trial_id=job.trial_id,
        principal=job.principal,
        environment_key=job.environment_key,
        only_node=job.only_node,
        avoid=tuple(avoid),
        attempt=job.attempt + 1,
        deadline_s=job.deadline_s,
        state=JobState.QUEUED,
        created_at=now,
    )


_EXCEPTION = re.compile(r"\b([A-Z]\w*(?:Error|Exception)): ")


def _exception(failure: Failure) -> str | None:
    """The class of the exception behind a crash; None for a process that was killed."""
    found = _EXCEPTION.search(failure.message) if failure.kind is FailureKind.CRASH else None
    return found[1] if found else None


def _raised(attempt: Job) -> str | None:
    """The class of the exception that an attempt crashed with."""
    return _exception(Failure(kind=attempt.failure, message=attempt.message)) if attempt.failure else None


_KILLED = re.compile(r"\bwas killed by SIG(KILL|TERM)\b")


def was_cut_off(failure: Failure) -> bool:
    """Whether somebody ended the ranks or their worker from outside: what they would have done is not known then."""
    return failure.kind is FailureKind.LOST or _KILLED.search(failure.message) is not None


def _suspects(job: Job, earlier: Job) -> set[str]:
    """The nodes that the earlier failure may have been the fault of."""
    return set(job.avoid) or {member.node for member in earlier.members}


def slow_nodes(job: Job, calc_s: Mapping[int, float], now: datetime) -> Sequence[NodeIncident]:
    """An incident for each node with a rank that is SLOW beside the ranks of other nodes that do the same work.

    None where ranks share cores, as in `straggles`.

    Args:
        job: with its members.
        calc_s: seconds that each rank computed, where it told.
        now: the database's clock.
    """
    if _shares_cores(job):
        return []
    size = job.cluster.gpus_per_node
    stages = job.request.plan.pp if isinstance(job.request, StepRequest) else 1
    stage = {rank: rank * stages // job.cluster.devices for rank in calc_s}
    found: dict[str, NodeIncident] = {}
    for rank, mine_s in sorted(calc_s.items()):
        others = [each for each in calc_s if stage[each] == stage[rank] and each // size != rank // size]
        theirs_s = [calc_s[each] for each in others]
        node = next((member.node for member in job.members if member.index == rank // size), None)
        if not theirs_s or node is None or node in found:
            continue
        middle_s = median(theirs_s)
        if mine_s > SLOW_RATIO * middle_s > 0.0 and mine_s - middle_s > SLOW_LEAST_S:
            message = (
                f"rank {rank} computed {mine_s:.3g} s for what took the other nodes {middle_s:.3g} s, "
                f"{mine_s / middle_s:.1f} x as long"
            )
            found[node] = NodeIncident(node=node, at=now, kind=FailureKind.SLOW.value, message=message, job_id=job.id)
    return list(found.values())


def slow_alone(
    job: Job, calc_s: Mapping[int, float], others_s: Mapping[str, float], now: datetime
) -> Sequence[NodeIncident]:
    """An incident where the only node of a job is SLOW beside what other nodes computed for the like.

    Args:
        job: with its member.
        calc_s: seconds that each rank computed, where it told.
        others_s: the same of other nodes, by node.
        now: the database's clock.
    """
    if job.cluster.nodes > 1 or not calc_s or not others_s:
        return []
    mine_s, middle_s, node = median(calc_s.values()), median(others_s.values()), job.members[0].node
    if not (mine_s > SLOW_RATIO * middle_s > 0.0 and mine_s - middle_s > SLOW_LEAST_S):
        return []
    message = (
        f"computed {mine_s:.3g} s for what takes {len(others_s)} other node{'s' if len(others_s) > 1 else ''} of the "
        f"pool {middle_s:.3g} s, {mine_s / middle_s:.1f} x as long"
    )
    return [NodeIncident(node=node, at=now, kind=FailureKind.SLOW.value, message=message, job_id=job.id)]


def _shares_cores(job: Job) -> bool:
    cluster = job.cluster
    return cluster.node_cores is not None and cluster.node_cores < cluster.gpus_per_node


def straggles(job: Job, outcome: ProbeOutcome, now: datetime) -> Sequence[NodeIncident]:
    """An incident for each node with a rank that computed STRAGGLER_RATIO longer than the median of its stage.

    None where ranks share cores: there each waits for the others' time slices, and no node is at fault.
    """
    if _shares_cores(job):
        return []
    incidents: dict[str, NodeIncident] = {}
    for reading in outcome.readings:
        if not isinstance(reading, StepReading):
            continue
        for rank, ratio in _slow_ranks(reading.ranks):
            index = rank.rank // job.cluster.gpus_per_node
            node = next((member.node for member in job.members if member.index == index), None)
            if node is not None and node not in incidents:
                message = f"rank {rank.rank} computed {ratio:.1f} x as long as the median of its stage {rank.stage}"
                incidents[node] = NodeIncident(node=node, at=now, kind=STRAGGLER, message=message, job_id=job.id)
    return list(incidents.values())


def _slow_ranks(ranks: Sequence[RankReading]) -> Sequence[tuple[RankReading, float]]:
    stages: dict[int, list[float]] = {}
    for rank in ranks:
        if rank.t_calc_s is not None:
            stages.setdefault(rank.stage, []).append(rank.t_calc_s)
    middle = {stage: median(times) for stage, times in stages.items()}
    return [
        (rank, rank.t_calc_s / middle[rank.stage])
        for rank in ranks
        if rank.t_calc_s is not None and rank.t_calc_s > STRAGGLER_RATIO * middle[rank.stage] > 0.0
    ]


def same_work(job: Job, other: Job) -> bool:
    """Whether two jobs of a tuning are attempts at the same trial or probe."""
    return job.purpose is other.purpose and job.trial_id == other.trial_id and job.request == other.request
