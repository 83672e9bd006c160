"""Requests to a fleet: shared by equal askers, claimed by one tuner at a time, shown page by page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, or_, select, text, tuple_
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError
from autotune.specs import EventKind, JobState, Tuning, TuningState
from storage import rows
from storage.clock import database_now
from storage.events import add_event, state_data
from storage.fleet_tables import IdempotencyRow, InterestRow, JobRow
from storage.named import insert
from storage.session import RacedError, SessionStore, again, flush_new, locked_tuning, tuning_row
from storage.tables import LIVE, TuningRow

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
    ) -> tuple[Tuning, bool]:
        """Stores a fleet's tuning, or joins its principal to a live one with the same `sharing_key`.

        Returns the tuning and whether it was created now. The same principal and idempotency key give the tuning of
        the first time; raises StoreConflictError if `request_digest` differs from then, or if the id exists.
        """

        def submit() -> tuple[Tuning, bool]:
            with self.writing() as session:
                if idempotency_key is not None:
                    known = _known(session, tuning.principal, idempotency_key, request_digest)
                    if known is not None:
                        return rows.tuning_of(known), False
                row = _joinable(session, sharing_key)
                created = row is None
                if row is None:
                    row = _create(session, tuning, sharing_key)
                _interest(session, row.id, tuning.principal)
                if idempotency_key is not None:
                    _remember(session, tuning.principal, idempotency_key, request_digest, row.id)
                return rows.tuning_of(row), created

        return again(submit)

    def withdraw(self, tuning_id: str, principal: str) -> bool:
        """Takes back a principal's interest; True if nobody else is interested any more.

        Then nobody can join it any more either, so that it may be cancelled.
        """
        theirs = delete(InterestRow).where(InterestRow.tuning_id == tuning_id, InterestRow.principal == principal)
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            session.execute(theirs)
            others = session.scalar(select(func.count()).where(InterestRow.tuning_id == tuning_id))
            if not others:
                row.sharing_key = None
            return not others

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


def _known(session: Session, principal: str, key: str, digest: str) -> TuningRow | None:
    known = session.get(IdempotencyRow, (principal, key))
    if known is None:
        return None
    if known.request_digest != digest:
        raise StoreConflictError(f"idempotency key {key!r} was used for another request")
    return tuning_row(session, known.tuning_id)


def _joinable(session: Session, sharing_key: str) -> TuningRow | None:
    """The live tuning of that key, locked, so that nobody cancels it while somebody joins."""
    query = select(TuningRow).where(TuningRow.sharing_key == sharing_key, text(LIVE))
    return session.scalar(query.with_for_update(key_share=True))


def _create(session: Session, tuning: Tuning, sharing_key: str) -> TuningRow:
    row = rows.tuning_row(tuning)
    row.sharing_key = sharing_key
    if session.get(TuningRow, tuning.id) is not None:
        raise StoreConflictError(f"tuning {tuning.id!r} exists already")
    session.add(row)
    flush_new(session, f"tuning {tuning.id!r} or its sharing key is being stored by somebody else", RacedError)
    add_event(session, row.id, EventKind.STATE, state_data(row), database_now(session))
    return row


def _interest(session: Session, tuning_id: str, principal: str) -> None:
    session.execute(
        insert(session)(InterestRow).values(tuning_id=tuning_id, principal=principal).on_conflict_do_nothing()
    )


def _remember(session: Session, principal: str, key: str, digest: str, tuning_id: str) -> None:
    now = database_now(session)
    session.add(
        IdempotencyRow(principal=principal, key=key, request_digest=digest, tuning_id=tuning_id, created_at=now)
    )
    flush_new(session, f"idempotency key {key!r} is being used by somebody else", RacedError)


def _unclaimed(now: datetime) -> ColumnElement[bool]:
    return or_(TuningRow.owner == "", TuningRow.claim_expires_at.is_(None), TuningRow.claim_expires_at <= now)
