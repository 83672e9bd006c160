"""Leases: all nodes of a gang at once or none, under a token that nothing late can carry."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from autotune.specs import (
    EventKind,
    FailureKind,
    Job,
    JobPurpose,
    JobState,
    MemberOrder,
    MemberReport,
    MemberState,
    NodeState,
    ProbeProgress,
)
from storage.database.session import SessionStore, database_now, locked_tuning
from storage.fleet import rows as fleet_rows
from storage.fleet.events import add_event, granted_data
from storage.fleet.jobs import (
    BUSY,
    HOLDING,
    failure_kind,
    first_failure,
    lock_job,
    lock_jobs,
    lose_members,
    member_of,
    settle,
)
from storage.fleet.nodes import forget_worlds, lock_gang, renew_session
from storage.fleet.tables import CounterRow, JobRow, LeaseRow, MemberRow, NodeRow
from storage.tunings.named import insert

TOKEN = "token"
CANCELLED = MemberOrder(go_on=False, failure=FailureKind.CANCELLED, reason="the job was cancelled")


class LeaseStore(SessionStore):
    """Grants, and the life of a gang's members until each has reported or is lost."""

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
            return fleet_rows.job_of(job)

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
            return fleet_rows.job_of(job)


def _free(session: Session, job: JobRow, gang: Sequence[NodeRow], names: Sequence[str]) -> bool:
    """Whether the job may have these nodes now. They are locked: who is free stays free."""
    if len(gang) != len(names) or job.only_node not in {"", *names}:
        return False
    bound = job.purpose == JobPurpose.HEALTH.value and list(names) == [job.only_node]
    fit = all(row.pool == job.pool and row.session and (bound or row.state == NodeState.READY.value) for row in gang)
    return fit and session.scalar(select(LeaseRow.node).where(LeaseRow.node.in_(names)).limit(1)) is None


def _lease(session: Session, job: JobRow, gang: Sequence[tuple[str, str]], lease_s: float) -> Job:
    """Gives the job a new token and these nodes, each a name and an address."""
    job.state, job.token = JobState.GRANTED.value, _next_token(session)
    job.granted_at = now = database_now(session)
    session.add_all(LeaseRow(node=name, job_id=job.id, token=job.token) for name, _ in gang)
    leased, expires_at = MemberState.LEASED.value, _expiry(now, lease_s)
    job.members = [
        MemberRow(number=number, node=name, address=address, state=leased, expires_at=expires_at)
        for number, (name, address) in enumerate(gang)
    ]
    session.flush()
    granted = fleet_rows.job_of(job)
    if job.tuning_id is not None:
        locked_tuning(session, job.tuning_id)
        add_event(session, job.tuning_id, EventKind.JOB_GRANTED, granted_data(granted), now)
    return granted


def _next_token(session: Session) -> int:
    """The next fencing token. A counter of its own: no deletion of jobs can make a token come again."""
    first = insert(session)(CounterRow).values(name=TOKEN, value=1)
    counting = first.on_conflict_do_update(index_elements=["name"], set_={"value": CounterRow.value + 1})
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
    failure = first_failure(job, member)
    if failure is not None:
        return MemberOrder(go_on=False, failure=failure, reason=f"another node of the gang failed ({failure.value})")
    return MemberOrder(go_on=True, endpoint=job.endpoint)


# ----------------------------------------------------------------------------------------------------
# Leases that ran out: their members are lost, unless for a while nobody could renew, or nobody looked.

SWEPT_AT = "swept_at_ms"
"""The counter that holds when somebody last looked: milliseconds since 1970 of the database's clock."""

JUST_GRACED = 0
"""Its value after a grace. None follows another, or nobody would be missed where every look comes late."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ExpiryStore(SessionStore):
    """Finds the members that are silent."""

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
            return [fleet_rows.job_of(job) for job in jobs if job.state == JobState.REPORTED.value]


def _grace(session: Session, grace: timedelta) -> bool:
    """Notes that somebody looks now. Prolongs the leases, and says so, where nobody had for longer than `grace`."""
    looked_at = session.scalar(select(CounterRow.value).where(CounterRow.name == SWEPT_AT).with_for_update())
    now = database_now(session)
    now_ms = (now - EPOCH) // timedelta(milliseconds=1)
    since = timedelta(milliseconds=now_ms - looked_at) if looked_at else timedelta(0)  # nothing is known of none
    late = since > grace
    note = insert(session)(CounterRow).values(name=SWEPT_AT, value=JUST_GRACED if late else now_ms)
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
    found = session.scalars(by_then).all()
    return [job for job in lock_jobs(session, found) if job.state == JobState.GRANTED.value]
