"""The end of a job: stored once, tried again or not, and what follows for its nodes and its tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from autotune.fleet.eligibility import gang_fingerprint
from autotune.fleet.failures import QUARANTINE_AT, SLOW_RATIO, STRAGGLER, STRAGGLES_AT, Judgement, judge, same_work
from autotune.fleet.health import after_health_probe
from autotune.fleet.scheduling import schedule
from autotune.fleet.spending import cut_short, retried_within
from autotune.ports.fleet import FleetStore, Queue
from autotune.specs import FailureKind, Job, JobPurpose, JobState, NodeIncident, NodeState, ProbeOutcome
from autotune.specs.fleet import LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the reports of a job's members amount to.

    Args:
        outcome: readings or a failure.
        blamed: the node that holds the cause of a failure, where it is known.
        calc_s: seconds that each rank computed, by its number, where it told.
    """

    outcome: ProbeOutcome
    blamed: str | None = None
    calc_s: Mapping[int, float] = field(default_factory=dict)


Merge = Callable[[Job], Ending]


def finish(store: FleetStore, queue: Queue, job: Job, merge: Merge) -> Job | None:
    """Ends a REPORTED job; a second call changes nothing and gets None. `merge` tells what its members reported.

    The result and the retry are one transaction. What follows it (blame, messages, grants of the nodes that are
    free now) may be lost in a crash: a node is then blamed once too little, and a sweep does the rest.
    """
    ending = merge(job)
    if job.purpose is JobPurpose.HEALTH:
        return _finish_health(store, queue, job, ending)
    verdict = _judge(store, job, ending, merge)
    ended = store.end_job(
        job.id,
        job.token,
        ending.outcome,
        failure=verdict.failure,
        retry=verdict.retry,
        fingerprint_key=_fingerprint_key(store, job),
        warm_nodes=warm_nodes(job),
    )
    if ended is not None:
        _hold_to_account(store, verdict)
        if ended.tuning_id is not None:
            queue.advance(ended.tuning_id)
        elif ended.purpose is JobPurpose.REGRESSION:
            queue.advance(ended.id)
        schedule(store, queue, ended.pool)
    return ended


def _finish_health(store: FleetStore, queue: Queue, job: Job, ending: Ending) -> Job | None:
    node = store.node(job.only_node)
    key = node.fingerprint_key
    ended = store.end_job(
        job.id, job.token, ending.outcome, failure=None, fingerprint_key=key, warm_nodes=warm_nodes(job)
    )
    if ended is not None:
        after_health_probe(store, queue, ended, ending.outcome)
        schedule(store, queue, ended.pool)
    return ended


def warm_nodes(job: Job) -> Sequence[str]:
    """The nodes whose ranks live on: all of them or none, because half a world is of no use."""
    warm = all(member.report is not None and member.report.kept_warm for member in job.members)
    return [member.node for member in job.members] if warm else ()


def _judge(store: FleetStore, job: Job, ending: Ending, merge: Merge) -> Judgement:
    tuning = store.tuning(job.tuning_id) if job.tuning_id is not None else None
    if tuning is not None and (cut := cut_short(tuning, job, ending.outcome)) is not None:
        return Judgement(failure=cut, retry=None, incidents=(), cleared=())
    if job.pool.startswith(LOCAL):  # with one machine there is nobody else to try it or to blame
        return Judgement(failure=ending.outcome.failure, retry=None, incidents=(), cleared=())
    # A check of an old winner takes its measurements again itself.
    wanted, earlier = job.purpose is not JobPurpose.REGRESSION, []
    if tuning is not None:
        wanted = not tuning.state.ended
        if job.attempt > 1:
            ended = store.jobs(tuning_id=tuning.id, states={JobState.ENDED}, limit=MAX_JOBS)
            earlier = [each for each in ended if same_work(job, each)]
    others_s: Mapping[str, float] = {}
    if job.cluster.nodes == 1 and ending.calc_s and ending.outcome.failure is None:
        others_s = _of_other_nodes(store, job, ending, earlier, merge)
    verdict = judge(
        job,
        ending.outcome,
        ending.blamed,
        earlier=earlier,
        wanted=wanted,
        now=store.now(),
        calc_s=ending.calc_s,
        others_s=others_s,
    )
    if tuning is not None:
        verdict = replace(verdict, retry=retried_within(store, tuning, ending.outcome, verdict.retry))
    if job.purpose is not JobPurpose.REGRESSION:
        return verdict
    # Ranks that straggle are what the check is about: it names them itself, and needs the same nodes to its end.
    measured = {STRAGGLER, FailureKind.SLOW.value}
    return replace(verdict, incidents=[each for each in verdict.incidents if each.kind not in measured])


MAX_ALIKE, LEAST_ALIKE = 12, 2
"""How many jobs of other nodes a job on one node is compared with: the newest, and no fewer than so many."""


def _of_other_nodes(
    store: FleetStore, job: Job, ending: Ending, earlier: Sequence[Job], merge: Merge
) -> Mapping[str, float]:
    """What other nodes computed for the like, in seconds: the median of each node's ranks and jobs.

    Empty where too little is known, or where an earlier attempt was as slow on another node: then it is the plan.
    """
    node, found = job.members[0].node, dict[str, list[float]]()
    for attempt in earlier:
        if attempt.failure is FailureKind.SLOW and attempt.members[0].node != node:
            before_s = merge(attempt).calc_s
            if before_s and median(before_s.values()) < SLOW_RATIO * median(ending.calc_s.values()):
                return {}
    for other in store.alike_jobs(job, limit=MAX_ALIKE):
        if other.members[0].node != node and (calc_s := merge(other).calc_s):
            found.setdefault(other.members[0].node, []).append(median(calc_s.values()))
    if sum(map(len, found.values())) < LEAST_ALIKE:
        return {}
    return {name: median(times) for name, times in found.items()}


MAX_JOBS = 100_000
"""All jobs of a tuning: each is a probe that ran for seconds, so there are never that many."""


def _fingerprint_key(store: FleetStore, job: Job) -> str:
    """That of the gangs of the job's environment; of one of its nodes if that environment has gone meanwhile."""
    found = gang_fingerprint(store, job.pool, job.environment_key)
    return found if found is not None else store.node(job.members[0].node).fingerprint_key


def _hold_to_account(store: FleetStore, verdict: Judgement) -> None:
    states = {node.name: node.state for node in store.nodes()}  # those of an earlier attempt may be forgotten by now
    for incident in verdict.incidents:
        if incident.node in states:
            _blame(store, incident)
    ready = [name for name in verdict.cleared if states.get(name) is NodeState.READY]
    if ready:  # a quarantined node has to pass its health probes
        store.clear_blame(ready)


def _blame(store: FleetStore, incident: NodeIncident) -> None:
    at = {STRAGGLER: STRAGGLES_AT, FailureKind.SLOW.value: 1}
    store.blame_node(incident, quarantine_at=at.get(incident.kind, QUARANTINE_AT))
