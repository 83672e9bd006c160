"""Leases that ran out: their members are lost, unless for a while nobody could renew, or nobody looked."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from autotune.specs import Job, JobState
from storage import fleet_rows
from storage.clock import database_now
from storage.fleet_tables import CounterRow, JobRow, MemberRow
from storage.members import BUSY, lock_jobs, lose_members
from storage.named import insert
from storage.session import SessionStore

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
