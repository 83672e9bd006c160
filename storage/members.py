"""Members of jobs: what their states make of the job."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from autotune.errors import UnknownNameError
from autotune.specs import FailureKind, JobState, MemberReport, MemberState
from storage.fleet_tables import JobRow, MemberRow

HOLDING = (JobState.GRANTED.value, JobState.REPORTED.value)
BUSY = (MemberState.LEASED.value, MemberState.RUNNING.value)
# A cancelled rank tells nothing, and one that lost the others is their victim: the cause is reported first.
LEAST = (FailureKind.COMMUNICATION, FailureKind.CANCELLED)


def lock_jobs(session: Session, job_ids: Collection[str]) -> list[JobRow]:
    """The jobs of those ids that there are, by id, locked until the transaction ends, with their members."""
    query = select(JobRow).where(JobRow.id.in_(job_ids)).order_by(JobRow.id)
    locked = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return list(session.scalars(locked))


def lock_job(session: Session, job_id: str) -> JobRow:
    """One job, locked likewise. Raises UnknownNameError."""
    for row in lock_jobs(session, [job_id]):
        return row
    raise UnknownNameError("job", job_id, ())


def member_of(job: JobRow, node: str) -> MemberRow | None:
    """That node's part in the job."""
    return next((member for member in job.members if member.node == node), None)


def lose_members(jobs: Iterable[JobRow], nodes: Collection[str]) -> None:
    """The busy members on those nodes are LOST."""
    for job in jobs:
        for member in job.members:
            if member.node in nodes and member.state in BUSY:
                member.state = MemberState.LOST.value
        settle(job)


def settle(job: JobRow) -> bool:
    """Makes a GRANTED job REPORTED once no member is busy; says whether it did."""
    if job.state != JobState.GRANTED.value or any(member.state in BUSY for member in job.members):
        return False
    job.state = JobState.REPORTED.value
    return True


def failure_kind(report: MemberReport) -> FailureKind | None:
    """The failure of a member's report: its own, or the most telling one of its ranks. None of an obedient stop."""
    if report.ordered:
        return None
    kinds = [kind for kind in (report.failure, *(rank.failure for rank in report.ranks)) if kind is not None]
    return _most_telling(kinds)


def first_failure(job: JobRow, besides: MemberRow) -> FailureKind | None:
    """How the other members failed, if one did."""
    others = [member for member in job.members if member is not besides]
    kinds = [FailureKind(member.failure_kind) for member in others if member.failure_kind]
    kinds += [FailureKind.LOST for member in others if member.state == MemberState.LOST.value]
    return _most_telling(kinds)


def _most_telling(kinds: list[FailureKind]) -> FailureKind | None:
    return min(kinds, key=lambda kind: LEAST.index(kind) + 1 if kind in LEAST else 0, default=None)
