"""Leases: all nodes of a gang at once or none, under a token that nothing late can carry.

They end with their job, in the transaction that stores what it measured; or when they run out: their members are lost
then, unless for a while nobody could renew, or nobody looked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import case, delete, select
from sqlalchemy.orm import Session

from autotune.specs import (
    EventKind,
    Failure,
    FailureKind,
    Job,
    JobPurpose,
    JobState,
    MemberOrder,
    MemberReport,
    MemberState,
    NodeState,
    ProbeOutcome,
    ProbeProgress,
    StepReading,
    TuningState,
)
from storage.database.session import SessionStore, database_now, upsert
from storage.fleet.events import add_event, granted_data, retried_data
from storage.fleet.jobs import (
    BUSY,
    HOLDING,
    add_job,
    failure_kind,
    first_failure,
    has_measured,
    job_of,
    lock_job,
    lock_jobs,
    lose_members,
    member_of,
    settle,
    trial_runs,
)
from storage.fleet.nodes import forget_worlds, lock_gang, renew_session
from storage.fleet.tables import CounterRow, JobRow, LeaseRow, MemberRow, NodeRow, of_pool
from storage.tunings.measurements import add_probe
from storage.tunings.named import locked_tuning
from storage.tunings.tables import TuningRow
from storage.tunings.tunings import end_trial, spend

TOKEN = "token"
CANCELLED = MemberOrder(go_on=False, failure=FailureKind.CANCELLED, reason="the job was cancelled")
WITHDRAWN = Failure(kind=FailureKind.CANCELLED, message="the tuning was cancelled before another attempt")

SWEPT_AT = "swept_at_ms"
"""The counter that holds when somebody last looked: milliseconds since 1970 of the database's clock."""

JUST_GRACED = 0
"""Its value after a grace period. Two never follow each other, or lost nodes would go unnoticed if looks are late."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LeaseStore(SessionStore):
    """Grants, the life of a gang's members until each has reported or is lost, and the end of a job."""

    def grant(self, job_id: str, nodes: Sequence[str], *, lease_s: float, world_id: str, warm: bool) -> Job | None:
        """Leases all `nodes` to a QUEUED job or none: GRANTED under a new token, members in that order.

        None if the job is not queued any more, or a node is leased, gone, of another pool, not ready (unless the job
        is a health probe bound to it), or does not hold the `warm` world any more. Where the world is new, the nodes'
        earlier ones are forgotten, by the other nodes that shared them too.
        """
        with self.writing() as session:
            job = lock_job(session, job_id)
            locked = lock_gang(session, nodes)
            gang = [row for row in locked if row.name in nodes]
            if job.state != JobState.QUEUED.value or not _free(session, job, gang, nodes):
                return None
            if warm and any(row.world_id != world_id for row in gang):
                return None
            forget_worlds(locked, {row.world_id for row in gang} - {world_id})
            for row in gang:
                row.world_id = world_id
            job.world_id, job.warm = world_id, warm
            addresses = {row.name: row.address for row in gang}
            return _lease(session, job, [(name, addresses[name]) for name in nodes], lease_s)

    def start_member(self, job_id: str, token: int, node: str, session: str, *, lease_s: float) -> Job | None:
        """A member begins: LEASED -> RUNNING. None for a late, doubled or evicted delivery."""
        with self.writing() as transaction:
            job = lock_job(transaction, job_id)
            member = _current(transaction, job, token, node, session)
            if member is None or member.state != MemberState.LEASED.value:
                return None
            member.state = MemberState.RUNNING.value
            member.expires_at = _expiry(database_now(transaction), lease_s)
            transaction.flush()
            return job_of(job)

    def renew_member(
        self,
        job_id: str,
        token: int,
        node: str,
        session: str,
        *,
        lease_s: float,
        progress: ProbeProgress | None = None,
        endpoint: str | None = None,
    ) -> MemberOrder:
        """Renews the member's lease and the node's heartbeat; stores progress and, from the first node, the endpoint.

        The order says to stop when the token or session is not current, the member has reported or the job is cancelled
        (CANCELLED), this member's own lease ran out (LOST), or another member failed or was lost (with that failure's
        kind).
        """
        with self.writing() as transaction:
            job = lock_job(transaction, job_id)
            member = _current(transaction, job, token, node, session)
            if member is None or member.state == MemberState.REPORTED.value:
                return CANCELLED.model_copy(update={"reason": "this grant is over, or another session has the node"})
            if member.state == MemberState.LOST.value:
                return MemberOrder(go_on=False, failure=FailureKind.LOST, reason="the lease of this node ran out")
            member.expires_at = _expiry(database_now(transaction), lease_s)
            if progress is not None:
                job.progress_json = progress.to_json()
            if endpoint is not None and member.number == 0:
                job.endpoint = endpoint
            return _order(job, member)

    def report_member(self, job_id: str, token: int, node: str, session: str, report: MemberReport) -> Job | None:
        """Stores a member's report. Its node stays leased until the job ends. The job is REPORTED after the last one.

        Returns the job as it stands, also to a report that comes twice; None when the token or session is not current
        or the member was lost meanwhile (nothing is written).
        """
        with self.writing() as transaction:
            job = lock_job(transaction, job_id)
            member = _current(transaction, job, token, node, session)
            if member is None or member.state == MemberState.LOST.value:
                return None
            if member.state in BUSY:
                kind = failure_kind(report)
                member.state, member.report_json = MemberState.REPORTED.value, report.to_json()
                member.failure_kind = kind and kind.value
                settle(job)
            transaction.flush()
            return job_of(job)

    def expire_members(self, *, grace_s: float | None = None) -> Sequence[Job]:
        """Marks members whose lease ran out as LOST, in jobs not ended. Returns the jobs that became REPORTED so.

        With `grace_s`, which is to be the length of a lease: where nobody looked for longer than that, the database
        may have been away, and a lease could not be renewed. Nobody is lost then, and each has that much time from now.
        That is not done twice in a row.
        """
        with self.writing() as session:
            if grace_s is not None and _grace(session, timedelta(seconds=grace_s)):
                return []
            jobs = _granted_until(session, database_now(session))
            now = database_now(session)
            for job in jobs:
                lose_members([job], [member.node for member in job.members if member.expires_at <= now])
            session.flush()
            return [job_of(job) for job in jobs if job.state == JobState.REPORTED.value]

    def end_job(
        self,
        job_id: str,
        token: int,
        outcome: ProbeOutcome,
        *,
        failure: Failure | None,
        retry: Job | None = None,
        fingerprint_key: str = "",
        warm_nodes: Collection[str] = (),
    ) -> Job | None:
        """Ends a REPORTED job: releases its leases, stores what it measured, adds its GPU-seconds to the tuning.

        With `retry` that job is stored QUEUED instead of ending the trial; but not if the job or the tuning was
        cancelled meanwhile: then the trial ends as CANCELLED. Without, a trial ends as `Store.finish_trial` says, and a
        probe is stored as `Store.save_probe` says (readings or failure; health probes too). `failure`, where given,
        is what is stored instead of the outcome's. `warm_nodes` keep their world, other members forget theirs. None
        (and nothing written) if the token is not current or the job has ended: a result is stored once.
        """
        ended = outcome if failure is None else outcome.model_copy(update={"readings": (), "failure": failure})
        with self.writing() as session:
            job = lock_job(session, job_id)
            if job.state != JobState.REPORTED.value or job.token != token:
                return None
            _release(session, job, warm_nodes)
            tuning = locked_tuning(session, job.tuning_id) if job.tuning_id is not None else None
            job.state, job.ended_at = JobState.ENDED.value, database_now(session)
            if ended.failure is not None:
                job.failure_kind, job.message = ended.failure.kind.value, ended.failure.message
            session.flush()
            if retry is None:
                _store(session, job, ended, fingerprint_key)
            elif job.cancelled or (tuning is not None and TuningState(tuning.state).ended):
                withdrawn = ended.model_copy(update={"readings": (), "failure": WITHDRAWN})
                _store(session, job, withdrawn, fingerprint_key)
            else:
                _try_again(session, job, tuning, ended, retry)
            return job_of(job)


def _free(session: Session, job: JobRow, gang: Sequence[NodeRow], names: Sequence[str]) -> bool:
    """Whether the job may have these nodes now. They are locked, so that a free node stays free."""
    if len(gang) != len(names) or job.only_node not in {"", *names}:
        return False
    bound = job.purpose == JobPurpose.HEALTH.value and list(names) == [job.only_node]
    fit = all(row.pool == job.pool and row.session and (bound or row.state == NodeState.READY.value) for row in gang)
    return fit and session.scalar(select(LeaseRow.node).where(LeaseRow.node.in_(names)).limit(1)) is None


def _lease(session: Session, job: JobRow, gang: Sequence[tuple[str, str]], lease_s: float) -> Job:
    """Gives the job a new token and these nodes, each a name and an address."""
    job.granted_at = now = database_now(session)
    job.state, job.token = JobState.GRANTED.value, _next_token(session, now)
    session.add_all(LeaseRow(node=name, job_id=job.id, token=job.token) for name, _ in gang)
    leased, expires_at = MemberState.LEASED.value, _expiry(now, lease_s)
    job.members = [
        MemberRow(number=number, node=name, address=address, state=leased, expires_at=expires_at)
        for number, (name, address) in enumerate(gang)
    ]
    session.flush()
    granted = job_of(job)
    if job.tuning_id is not None:
        locked_tuning(session, job.tuning_id)
        add_event(session, job.tuning_id, EventKind.JOB_GRANTED, granted_data(granted), now)
    return granted


def _next_token(session: Session, now: datetime) -> int:
    """The next fencing token. A counter of its own: no deletion of jobs can make a token come again.

    Nor can a backup: the counter is never behind the microseconds since 1970. Tokens are not given as fast as those
    pass, so whatever a database that was lost has given is smaller than what the restored one gives.
    """
    moment = (now - EPOCH) // timedelta(microseconds=1)
    first = upsert(session)(CounterRow).values(name=TOKEN, value=moment)
    following = case((CounterRow.value < moment, moment), else_=CounterRow.value + 1)
    counting = first.on_conflict_do_update(index_elements=["name"], set_={"value": following})
    return int(session.execute(counting.returning(CounterRow.value)).scalar_one())


def _current(transaction: Session, job: JobRow, token: int, node: str, session: str) -> MemberRow | None:
    """The node's part in the job if token and session are current; its heartbeat is renewed."""
    member = member_of(job, node)
    if job.state not in HOLDING or job.token != token or member is None:
        return None
    return member if renew_session(transaction, node, session) else None


def _expiry(now: datetime, lease_s: float) -> datetime:
    return now + timedelta(seconds=lease_s)


def _order(job: JobRow, member: MemberRow) -> MemberOrder:
    if job.cancelled:
        return CANCELLED
    if has_measured(job, member):
        return MemberOrder(go_on=False, measured=True, reason="another node of the gang knows the program's speed")
    failure = first_failure(job, member)
    if failure is not None:
        return MemberOrder(go_on=False, failure=failure, reason=f"another node of the gang failed ({failure.value})")
    return MemberOrder(go_on=True, endpoint=job.endpoint)


def _grace(session: Session, grace: timedelta) -> bool:
    """Notes that somebody looks now. Prolongs the leases, and says so, where nobody had for longer than `grace`."""
    looked_at = session.scalar(select(CounterRow.value).where(CounterRow.name == SWEPT_AT).with_for_update())
    now = database_now(session)
    now_ms = (now - EPOCH) // timedelta(milliseconds=1)
    since = timedelta(milliseconds=now_ms - looked_at) if looked_at else timedelta(0)  # nothing is known of none
    late = since > grace
    note = upsert(session)(CounterRow).values(name=SWEPT_AT, value=JUST_GRACED if late else now_ms)
    session.execute(note.on_conflict_do_update(index_elements=["name"], set_={"value": note.excluded.value}))
    if late:
        for job in _granted_until(session, now + grace):
            for member in job.members:
                if member.state in BUSY:
                    member.expires_at = max(member.expires_at, now + grace)
    return late


def _granted_until(session: Session, moment: datetime) -> Sequence[JobRow]:
    """The granted jobs with a busy member whose lease runs out by then; locked."""
    by_then = select(MemberRow.job_id).where(MemberRow.state.in_(BUSY), MemberRow.expires_at <= moment).distinct()
    found = session.scalars(by_then.join(JobRow, JobRow.id == MemberRow.job_id).where(of_pool(JobRow.pool))).all()
    return [job for job in lock_jobs(session, found) if job.state == JobState.GRANTED.value]


def _release(session: Session, job: JobRow, warm_nodes: Collection[str]) -> None:
    names = [member.node for member in job.members]
    for row in lock_gang(session, names):
        if row.name in names and row.name not in warm_nodes and row.world_id == job.world_id:
            row.world_id = ""
    session.execute(delete(LeaseRow).where(LeaseRow.job_id == job.id))


def _store(session: Session, job: JobRow, outcome: ProbeOutcome, fingerprint_key: str) -> None:
    """Ends the trial, or stores the probe. A trial that ended without its job (it was given up) stays as it is."""
    spec = job_of(job)
    if spec.trial_id is None:
        add_probe(
            session,
            tuning_id=spec.tuning_id,
            cluster=spec.cluster,
            fingerprint_key=fingerprint_key,
            request=spec.request,
            outcome=outcome,
        )
    elif trial_runs(session, spec.trial_id):
        end_trial(
            session,
            spec.trial_id,
            reading=_step(outcome),
            failure=outcome.failure,
            gpu_s=outcome.gpu_s,
            setup_s=outcome.setup_s,
            fingerprint_key=fingerprint_key,
        )


def _step(outcome: ProbeOutcome) -> StepReading | None:
    return next((reading for reading in outcome.readings if isinstance(reading, StepReading)), None)


def _try_again(session: Session, job: JobRow, tuning: TuningRow | None, outcome: ProbeOutcome, retry: Job) -> None:
    add_job(session, retry)
    if tuning is None:
        return
    now = database_now(session)
    spend(tuning, outcome.gpu_s, now)
    data = retried_data(job_of(job), outcome.failure, retry)
    add_event(session, tuning.id, EventKind.JOB_RETRIED, data, now)
