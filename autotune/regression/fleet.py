"""The nightly regression of a fleet: checks whose measurements are jobs, one in flight each. It never waits.

A job's id is made of its check's and the measurement's number, and what it measured is read back from its members'
reports: after a crash at any line, whoever advances the check next finds out from the store what was done, and a
message or step that is done twice changes nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from autotune.errors import AutotuneError, StoreAwayError, StoreConflictError, UnknownNameError
from autotune.fleet.eligibility import common_environment, gang_fingerprint, obstacle
from autotune.fleet.finishing import Merge
from autotune.fleet.scheduling import schedule
from autotune.fleet.service import FleetService, submission_of
from autotune.ports.fleet import Queue
from autotune.ports.regression import FleetRegressionStore
from autotune.regression.alerts import Outbox
from autotune.regression.lifecycle import Stand, deadline_s, end, stand_of
from autotune.regression.protocol import Wanted, is_interrupted, measured
from autotune.regression.selection import Selection, on_turn, retune_budget, select
from autotune.specs import BestEntry, Budget, ClusterSpec, Job, JobPurpose, JobState, Node
from autotune.specs.regression import (
    CHECK_JOB,
    AlertChannel,
    Check,
    CheckCandidate,
    CheckMeasurement,
    CheckState,
    StepTrace,
)

log = logging.getLogger("autotune.regression")

OnMeasured = Callable[[Check, Wanted, CheckMeasurement], None]

PRINCIPAL = "regression"
"""Who the jobs are for: fairness counts them together, and lets people's tunings go first when they used less."""

RECENT = 20
"""Ended checks that are looked at for a tuning that a crash kept from being submitted."""


class FleetRegression:
    """What a fleet's tuners do for its checks.

    Args:
        store: keeps everything.
        queue: carries ids.
        merge: what the reports of a job's members amount to.
        service: submits the tunings that follow.
        outbox: tells incidents.
    """

    def __init__(
        self,
        store: FleetRegressionStore,
        queue: Queue,
        merge: Merge,
        service: FleetService,
        outbox: Outbox,
    ) -> None:
        self._store, self._queue, self._merge, self._service = store, queue, merge, service
        self._outbox = outbox

    def begin(self, budget_gpu_s: float | None) -> None:
        """Begins a night's checks; those that are under way are not begun twice."""
        start_regression(self._store, budget_gpu_s=budget_gpu_s)

    def sweep(self) -> None:
        """Moves all checks on, and has alerts sent, for which it does not wait."""
        self._outbox.send()
        channels = self._outbox.channels
        advance_regression(self._store, self._queue, self._merge, service=self._service, channels=channels)

    def advance(self, job_id: str) -> None:
        """Moves the check on that a job measured for."""
        channels = self._outbox.channels
        advance_after(self._store, self._queue, self._merge, job_id, service=self._service, channels=channels)


def start_regression(
    store: FleetRegressionStore, *, budget_gpu_s: float | None, pools: Collection[str] | None = None
) -> Selection:
    """Chooses what to check tonight and begins every chosen check. Calling it twice begins none twice.

    The next sweep has them measured.

    Args:
        store: keeps everything.
        budget_gpu_s: to spend at most on all checks and the tunings that follow from them; None is no limit.
        pools: whose plans are checked; None are all pools with nodes.
    """
    ready = {name: _environment(store, name) for name in sorted({node.pool for node in store.nodes()})}
    environments = {name: key for name, key in ready.items() if key and (pools is None or name in pools)}
    candidates = [item for item in store.check_candidates() if item.cluster_name in environments]
    chosen = select(candidates, budget_gpu_s=budget_gpu_s, environments=environments, now=store.now())
    spare = None if budget_gpu_s is None else budget_gpu_s - sum(item.gpu_s for item in chosen.chosen)
    for item in chosen.chosen:
        share = None if spare is None else item.gpu_s + spare / len(chosen.chosen)
        _begin(store, item.candidate, environments[item.candidate.cluster_name], share)
    return chosen


def advance_regression(
    store: FleetRegressionStore,
    queue: Queue,
    merge: Merge,
    *,
    service: FleetService | None = None,
    channels: Collection[AlertChannel] = (),
) -> Sequence[Check]:
    """Moves every check of the fleet on, as far as it goes without waiting; returns those that ended now.

    Args:
        store: keeps everything.
        queue: carries ids.
        merge: what the reports of a job's members amount to.
        service: submits the tunings that follow; None submits none.
        channels: where incidents are told.
    """
    ended = []
    running = [check for check in store.checks(state=CheckState.RUNNING, limit=1000) if check.pool]
    measuring = {check.id for check in _on_turn(store, running)}
    for check in running:
        try:
            if check.id in measuring:
                found = advance_check(store, queue, merge, check, channels=channels)
            else:
                found = _abandoned(store, check, stand_of(store, check))
        except StoreAwayError:
            raise
        except Exception:
            log.exception("check %s could not be advanced", check.id)
            continue
        if found is not None:
            ended.append(found)
    if service is not None:
        for check in store.checks(state=CheckState.DONE, limit=RECENT):
            _retune(store, service, check)
    return ended


def advance_after(
    store: FleetRegressionStore,
    queue: Queue,
    merge: Merge,
    job_id: str,
    *,
    service: FleetService | None = None,
    channels: Collection[AlertChannel] = (),
) -> Check | None:
    """Moves on the check that a job measured for; if it ended now, those that waited for their turn too.

    Takes what `advance_regression` takes. Raises UnknownNameError where no check has such a job.
    """
    check = store.check(job_id.removeprefix(CHECK_JOB).rpartition("-")[0])
    if check.state is not CheckState.RUNNING:
        return None
    ended = advance_check(store, queue, merge, check, channels=channels)
    if ended is not None:
        advance_regression(store, queue, merge, service=service, channels=channels)
    return ended


def advance_check(
    store: FleetRegressionStore,
    queue: Queue,
    merge: Merge,
    check: Check,
    *,
    pool: str = "",
    channels: Collection[AlertChannel] = (),
    on_measured: OnMeasured = lambda check, wanted, measurement: None,
) -> Check | None:
    """Moves one check on; returns it if it ended now, with a result or, as `_is_over` says, without.

    Args:
        store: keeps everything.
        queue: carries ids.
        merge: what the reports of a job's members amount to.
        check: as it is stored.
        pool: of a single process that measures for it on its own machine; else the check's.
        channels: where incidents are told.
        on_measured: told of every measurement.
    """
    while (stand := stand_of(store, check)).wanted is not None:
        if (over := _abandoned(store, check, stand)) is not None:
            return over
        job = _job(store, check, stand.wanted)
        if job is None:
            _dispatch(store, check, pool or check.pool, stand.background.entry, stand.wanted)
            schedule(store, queue, pool or check.pool)
            return None
        if job.state is not JobState.ENDED:
            return None
        found = measured(stand.wanted, merge(job).outcome, job.ended_at or store.now())
        named = found if found.trace is None or pool else _on_nodes(found, found.trace, job)
        if store.add_measurement(check.id, named):
            on_measured(check, stand.wanted, named)
        elif store.check(check.id).state is not CheckState.RUNNING:
            return None  # somebody has ended it meanwhile
    return end(store, check, stand, channels=channels, now=store.now())


def _on_nodes(measurement: CheckMeasurement, trace: StepTrace, job: Job) -> CheckMeasurement:
    """With the names that a fleet's nodes have, which a machine's own name need not be; ranks go node by node."""
    names, size = [member.node for member in job.members], job.cluster.gpus_per_node
    ranks = tuple(rank.model_copy(update={"hostname": names[rank.rank // size]}) for rank in trace.ranks)
    return measurement.model_copy(update={"trace": trace.model_copy(update={"ranks": ranks})})


def _on_turn(store: FleetRegressionStore, running: Sequence[Check]) -> Sequence[Check]:
    """Checks of the fleet that measure now; see regression.selection."""
    ready = Counter[tuple[str, str]]()
    for pool in {check.pool for check in running}:
        nodes = _ready(store, pool)
        ready.update((pool, node.environment_key) for node in nodes)
        ready[pool, ""] = len(nodes)
    return on_turn(running, lambda check: store.best_entry(check.entry_id).cluster.nodes, ready)


def _abandoned(store: FleetRegressionStore, check: Check, stand: Stand) -> Check | None:
    """Ends a check without a result if what it waits for cannot come or has taken too long; None where it goes on.

    Its job is cancelled first: whoever dies in between leaves one that tells the next one so.
    """
    if stand.wanted is None:
        return None
    job = _job(store, check, stand.wanted)
    if job is not None and job.state is JobState.QUEUED and _is_over(store, check, stand, store.now()):
        store.cancel_job(job.id)
        job = store.job(job.id)
    cancelled = job is not None and job.cancelled
    late = job is not None and job.granted_at is not None and _paused(store, check, stand, job.granted_at)
    if cancelled or late or (job is None and _is_over(store, check, stand, store.now())):
        store.abandon_check(check.id)
        return store.check(check.id)
    return None


def _is_over(store: FleetRegressionStore, check: Check, stand: Stand, now: datetime) -> bool:
    """Whether what a check measures next would be of another time than what it has, or its environment has gone."""
    if _paused(store, check, stand, now):
        return True
    ready = _ready(store, check.pool)
    alike = sum(node.environment_key == check.environment_key for node in ready)
    gone = common_environment(ready) not in {"", check.environment_key}
    return gone and alike < stand.background.entry.cluster.nodes


def _paused(store: FleetRegressionStore, check: Check, stand: Stand, until: datetime) -> bool:
    """Whether what would be measured at that moment is of another time than what the check has."""
    assert stand.wanted is not None
    return bool(stand.wanted.number) and is_interrupted(store.measurements(check.id), check.started_at, until)


def _environment(store: FleetRegressionStore, pool: str) -> str:
    """The environment of most ready nodes; empty where the pool is unknown or has none."""
    return common_environment(_ready(store, pool))


def _ready(store: FleetRegressionStore, pool: str) -> Sequence[Node]:
    """The nodes of a pool that may get jobs; none where it is unknown."""
    try:
        cluster = store.cluster(pool)
    except UnknownNameError:
        return ()
    now = store.now()
    return [node for node in store.nodes(pool) if not obstacle(node, now, cluster.gpus_per_node)]


def _begin(
    store: FleetRegressionStore, candidate: CheckCandidate, environment_key: str, budget_gpu_s: float | None
) -> None:
    entry = store.best_entry(candidate.entry_id)
    fingerprint_key = gang_fingerprint(store, candidate.cluster_name, environment_key)
    if fingerprint_key is None or not _is_of(store.cluster(candidate.cluster_name), entry.cluster):
        return
    store.create_check(
        Check(
            id=uuid.uuid4().hex[:16],
            entry_id=entry.id,
            series=candidate.series,
            cluster_key=entry.cluster.key,
            pool=candidate.cluster_name,
            fingerprint_key=fingerprint_key,
            environment_key=environment_key,
            budget_gpu_s=budget_gpu_s,
            started_at=store.now(),
        )
    )


def _is_of(pool: ClusterSpec, cluster: ClusterSpec) -> bool:
    """Whether the pool's nodes are those that the entry was measured on, whatever their number."""
    return pool.model_copy(update={"nodes": cluster.nodes, "inter": cluster.inter}).key == cluster.key


def _job(store: FleetRegressionStore, check: Check, wanted: Wanted) -> Job | None:
    try:
        return store.job(_job_id(check, wanted))
    except UnknownNameError:
        return None


def _job_id(check: Check, wanted: Wanted) -> str:
    return f"{CHECK_JOB}{check.id}-{wanted.number}"


def _dispatch(store: FleetRegressionStore, check: Check, pool: str, entry: BestEntry, wanted: Wanted) -> None:
    """Creates the measurement's job, on the nodes of the one before where there was one and they are ready."""
    nodes = store.nodes(pool)
    gang = _gang(store, check, wanted.number)
    now = store.now()
    ready = {node.name for node in nodes if not obstacle(node, now, entry.cluster.gpus_per_node)}
    avoid = [node.name for node in nodes if node.name not in gang] if gang and gang <= ready else []
    job = Job(
        id=_job_id(check, wanted),
        purpose=JobPurpose.REGRESSION,
        pool=pool,
        cluster=entry.cluster,
        request=wanted.request,
        principal=PRINCIPAL,
        environment_key=check.environment_key,
        avoid=tuple(avoid),
        deadline_s=deadline_s(entry, wanted.request),
        created_at=now,
    )
    try:
        store.create_job(job)
    except StoreConflictError:
        log.info("job %s is there already", job.id)


def _gang(store: FleetRegressionStore, check: Check, number: int) -> set[str]:
    """The nodes of the measurement before; of the last check of the plan for the first one."""
    if number:
        before = f"{CHECK_JOB}{check.id}-{number - 1}"
    else:
        last = store.checks(series=check.series, state=CheckState.DONE, limit=1)
        before = f"{CHECK_JOB}{last[0].id}-0" if last else ""
    try:
        return {member.node for member in store.job(before).members} if before else set()
    except UnknownNameError:
        return set()


def _retune(store: FleetRegressionStore, service: FleetService, check: Check) -> None:
    """Submits the tuning that follows from a check, once, with what is left of its budget."""
    if not check.pool or check.tuning_id or check.result is None or not check.result.retune_reason:
        return
    entry = store.best_entry(check.entry_id)
    left = None if check.budget_gpu_s is None else check.budget_gpu_s - check.gpu_s
    budget: Budget | None = retune_budget(check, entry, left)
    if budget is None:
        return
    cluster = entry.cluster.model_copy(update={"name": check.pool})
    try:
        submission = submission_of(
            entry.model,
            cluster,
            entry.workload,
            budget=budget,
            principal=PRINCIPAL,
            idempotency_key=f"check-{check.id}",
        )
        tuning, _ = service.submit(submission)
        store.set_check_tuning(check.id, tuning.id)
    except AutotuneError as error:
        log.error("check %s: no tuning follows: %s", check.id, error)
