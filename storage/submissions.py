"""Requests to a fleet: shared by equal askers, claimed by one tuner at a time, shown page by page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, or_, select, tuple_

from autotune.errors import StoreConflictError
from autotune.specs import JobState, Tuning, TuningState
from autotune.tuning.fleet_ports import Submission, Submitted
from storage import rows
from storage.clock import database_now
from storage.fleet_tables import InterestRow, JobRow
from storage.intake import take_in
from storage.session import SessionStore, again, locked_tuning, tuning_row
from storage.tables import TuningRow

LIVE_STATES = tuple(state.value for state in TuningState if not state.ended)


class SubmissionStore(SessionStore):
    """Tunings as a fleet sees them."""

    def submit_tuning(
        self,
        tuning: Tuning,
        *,
        sharing_key: str,
        request_digest: str = "",
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Stores a fleet's tuning, or joins its principal to a live one with the same `sharing_key`.

        Returns the tuning and whether it was created now. The same principal and idempotency key give the tuning of
        the first time; raises StoreConflictError if `request_digest` differs from then, or if the id exists.
        """
        one = Submission(
            tuning=tuning, sharing_key=sharing_key, request_digest=request_digest, idempotency_key=idempotency_key
        )
        (answer,) = self.submit_tunings([one])
        if isinstance(answer, StoreConflictError):
            raise answer
        return answer

    def submit_tunings(self, submissions: Sequence[Submission]) -> Sequence[Submitted | StoreConflictError]:
        """Does what `submit_tuning` does for several at once, in one transaction; an answer each, in their order."""

        def submit() -> Sequence[Submitted | StoreConflictError]:
            with self.writing() as session:
                return take_in(session, submissions)

        return again(submit)

    def withdraw(self, tuning_id: str, principal: str) -> bool:
        """Takes back a principal's interest; True if nobody else is interested any more.

        Then nobody can join it any more either, so that it may be cancelled.
        """
        theirs = delete(InterestRow).where(InterestRow.tuning_id == tuning_id, InterestRow.principal == principal)
        with self.writing() as session:
            row = locked_tuning(session, tuning_id, joinable=False)
            session.execute(theirs)
            others = session.scalar(select(func.count()).where(InterestRow.tuning_id == tuning_id))
            if not others:
                row.sharing_key = None
            return not others

    def askers(self, tuning_id: str) -> Sequence[str]:
        """The principals who want a fleet's tuning, by name."""
        theirs = select(InterestRow.principal).where(InterestRow.tuning_id == tuning_id)
        with self.reading() as session:
            return list(session.scalars(theirs.order_by(InterestRow.principal)))

    def claim_tuning(self, tuning_id: str, owner: str, *, lease_s: float) -> Tuning | None:
        """Makes `owner` the one who may advance it, for that long. None if somebody else is, or it has ended.

        Its owner may renew the claim. After its time it still is that owner's until somebody else claims it. None as
        well for a tuning that is not a fleet's.
        """
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            if TuningState(row.state).ended or not row.pool:
                return None
            now = database_now(session)
            held = bool(row.owner) and row.claim_expires_at is not None and row.claim_expires_at > now
            if held and row.owner != owner:
                return None
            if not held:
                row.claimed_at = now
            row.owner, row.claim_expires_at = owner, now + timedelta(seconds=lease_s)
            session.flush()
            return rows.tuning_of(row)

    def release_tuning(self, tuning_id: str, owner: str) -> None:
        """Ends the claim, if it still is that owner's; notes when it was advanced.

        That is the moment at which it was claimed: a job that ended since then may not have been seen.
        """
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            if row.owner == owner:
                row.owner, row.claim_expires_at, row.advanced_at = "", None, row.claimed_at

    def due_tunings(self) -> Sequence[str]:
        """Live fleet tunings that nobody claims and that have no job under way, or one ended since the last advance.

        Those that were advanced longest ago, or never, come first.
        """
        jobs = select(JobRow).where(JobRow.tuning_id == TuningRow.id)
        idle = ~jobs.where(JobRow.ended_at.is_(None)).exists()
        news = jobs.where(or_(TuningRow.advanced_at.is_(None), JobRow.ended_at >= TuningRow.advanced_at)).exists()
        query = select(TuningRow.id).where(TuningRow.state.in_(LIVE_STATES), TuningRow.pool != "", or_(idle, news))
        with self.reading() as session:
            free = _unclaimed(database_now(session))
            oldest = TuningRow.advanced_at.asc().nulls_first(), TuningRow.created_at, TuningRow.id
            return list(session.scalars(query.where(free).order_by(*oldest)))

    def abandoned_tunings(self) -> Sequence[str]:
        """Ended tunings with jobs QUEUED or GRANTED that are not cancelled: who cancelled them died before those."""
        going = JobRow.state.in_((JobState.QUEUED.value, JobState.GRANTED.value)), JobRow.cancelled.is_(False)
        query = select(TuningRow.id).join(JobRow, JobRow.tuning_id == TuningRow.id)
        with self.reading() as session:
            return list(session.scalars(query.where(*going, TuningRow.state.not_in(LIVE_STATES)).distinct()))

    def tunings_page(
        self, *, limit: int, before: str | None = None, state: str | None = None, principal: str | None = None
    ) -> Sequence[Tuning]:
        """Tunings newest first, those older than the tuning `before`. Raises UnknownNameError for that one."""
        query = select(TuningRow)
        if state is not None:
            query = query.where(TuningRow.state == state)
        if principal is not None:
            query = query.where(TuningRow.principal == principal)
        order = TuningRow.created_at.desc(), TuningRow.id.desc()
        with self.reading() as session:
            if before is not None:
                last = tuning_row(session, before)
                place = tuple_(TuningRow.created_at, TuningRow.id)
                query = query.where(place < tuple_(last.created_at, last.id))
            return [rows.tuning_of(row) for row in session.scalars(query.order_by(*order).limit(limit))]


def _unclaimed(now: datetime) -> ColumnElement[bool]:
    return or_(TuningRow.owner == "", TuningRow.claim_expires_at.is_(None), TuningRow.claim_expires_at <= now)
