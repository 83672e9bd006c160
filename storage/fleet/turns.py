"""Turns: which request begins next, which tuning is advanced next, and by whom.

Messages come in the order in which they were sent; who sends many would go first. So that nobody gets in anybody's way,
turns are decided here, from what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import Session

from autotune.specs import EventKind, JobState, Tuning, TuningState
from storage.database.session import RacedError, SessionStore, again, database_now
from storage.fleet.events import add_event, state_data
from storage.fleet.tables import InterestRow, JobRow
from storage.tunings import rows
from storage.tunings.named import locked_tuning
from storage.tunings.tables import TuningRow

LIVE_STATES = tuple(state.value for state in TuningState if not state.ended)
BEGUN_STATES = tuple(state for state in LIVE_STATES if state != TuningState.QUEUED.value)
QUEUED = TuningRow.state == TuningState.QUEUED.value, TuningRow.pool != ""
BEGUN = TuningRow.state.in_(BEGUN_STATES), TuningRow.pool != ""
EVER = datetime.min.replace(tzinfo=UTC)

# A tuning counts for each of those who want it: whoever joins the last one of a long queue need not wait for the rest.
ASKER = func.coalesce(InterestRow.principal, TuningRow.principal)
LINE = TuningRow.pool, ASKER


class TurnStore(SessionStore):
    """Whose turn it is."""

    def admit_tunings(self, most_each: int) -> Sequence[str]:
        """Begins what is queued, oldest first, while a principal who wants it has fewer than `most_each` in its pool.

        It is PROFILING then. Returns the ids in the order of turns: whoever has the fewest goes first.
        """
        admitted = []
        while (tuning_id := again(lambda: self._admit(most_each))) is not None:
            admitted.append(tuning_id)
        return admitted

    def _admit(self, most_each: int) -> str | None:
        """Begins one. Raises RacedError if somebody else began that one, or one of the same principal, meanwhile."""
        with self.writing() as session:
            oldest = func.min(TuningRow.created_at)
            waiting = session.execute(_asked(*LINE, oldest).where(*QUEUED).group_by(*LINE))
            lines = {(pool, who): since for pool, who, since in waiting}
            begun = _begun(session) if lines else {}
            free = [line for line in lines if begun.get(line, 0) < most_each]
            if not free:
                return None
            pool, who = min(free, key=lambda line: (begun.get(line, 0), lines[line], line))
            first = _asked(TuningRow).where(*QUEUED, TuningRow.pool == pool, who == ASKER)
            first = first.order_by(TuningRow.created_at, TuningRow.id).limit(1)
            row: TuningRow | None = session.scalar(first.with_for_update(of=TuningRow, key_share=True))
            # Whoever begins another one of the same line waited for this lock, or we for his: what is true now?
            if row is None or _begun(session).get((pool, who), 0) >= most_each:
                raise RacedError("somebody else begins these tunings")
            row.state, row.updated_at = TuningState.PROFILING.value, database_now(session)
            session.flush()
            add_event(session, row.id, EventKind.STATE, state_data(row), row.updated_at)
            return row.id

    def queue_places(self, tuning_ids: Sequence[str]) -> dict[str, int]:
        """Which places those of these tunings that are QUEUED have, from 1: among what a principal wants in a pool.

        Of several principals the best place counts.
        """
        place = func.row_number().over(partition_by=LINE, order_by=(TuningRow.created_at, TuningRow.id))
        places = _asked(TuningRow.id, place.label("place")).where(*QUEUED).subquery("places")
        best = select(places.c.id, func.min(places.c.place)).where(places.c.id.in_(tuning_ids)).group_by(places.c.id)
        with self.reading() as session:
            return dict(session.execute(best).all())

    def next_turn(self, tuning_id: str) -> str | None:
        """The tuning to advance now that somebody is told of `tuning_id`; None where that has nothing to be done.

        It may be another one, of which there is news as well: principals take turns, the one whose tunings were not
        claimed for the longest time is next; and so do the tunings of one principal.
        """
        columns = TuningRow.id, ASKER.label("asker"), TuningRow.advanced_at, TuningRow.created_at
        told = (TuningRow.id == tuning_id) & _idle()
        with self.asking() as session:
            due = _asked(*columns).where(*BEGUN, or_(told, _fresh()), _unclaimed(database_now(session)))
            found = session.execute(due).all()
            if not found:
                return None
            last: dict[str, datetime | None] = {}
            if len(found) > 1:
                claimed = _asked(ASKER, func.max(TuningRow.claimed_at)).where(*BEGUN).group_by(ASKER)
                last = dict(session.execute(claimed).all())
        first = min(
            found, key=lambda row: (last.get(row.asker) or EVER, row.advanced_at or EVER, row.created_at, row.id)
        )
        return str(first.id)

    def due_tunings(self) -> Sequence[str]:
        """Begun fleet tunings that nobody claims and that have no job under way, or one ended since the last advance.

        Those that were advanced longest ago, or never, come first.
        """
        query = select(TuningRow.id).where(*BEGUN, or_(_idle(), _fresh()))
        with self.reading() as session:
            free = _unclaimed(database_now(session))
            oldest = TuningRow.advanced_at.asc().nulls_first(), TuningRow.created_at, TuningRow.id
            return list(session.scalars(query.where(free).order_by(*oldest)))

    def claim_tuning(self, tuning_id: str, owner: str, *, lease_s: float | None) -> Tuning | None:
        """Makes `owner` the one who may advance it, for that long. None if somebody else is, or it has ended.

        Its owner may renew the claim. After its time it still is that owner's until somebody else claims it. A fleet's
        tuning is claimed for a time; one without a pool without (None), until it is released: None for any other.
        """
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            if TuningState(row.state).ended or bool(row.pool) != (lease_s is not None):
                return None
            now = database_now(session)
            expires_at = now if lease_s is None else now + timedelta(seconds=lease_s)
            lasts = lease_s is None or (row.claim_expires_at is not None and row.claim_expires_at > now)
            held = bool(row.owner) and lasts
            if held and row.owner != owner:
                return None
            if not held:
                row.claimed_at = now
            row.owner, row.claim_expires_at = owner, expires_at
            session.flush()
            return rows.tuning_of(row)

    def release_tuning(self, tuning_id: str, owner: str, *, failed: bool = False) -> None:
        """Ends the claim, if it still is that owner's; notes when it was advanced. Unless it `failed` that went well.

        That is the moment at which it was claimed: a job that ended since then may not have been seen.
        """
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            if row.owner == owner:
                row.owner, row.claim_expires_at, row.advanced_at = "", None, row.claimed_at
                if not failed:
                    row.fault, row.faults = "", 0

    def note_fault(self, tuning_id: str, fault: str) -> int:
        """Counts that an advance failed; how often in a row it failed like this, whoever tried."""
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            row.fault, row.faults = fault, row.faults + 1 if row.fault == fault else 1
            return row.faults

    def end_tuning(self, tuning_id: str, state: TuningState, reason: str) -> str:
        """Ends a tuning, also while somebody advances it, whose claim is then gone; nothing happens if it has ended.

        Returns its pool.
        """
        with self.writing() as session:
            row = locked_tuning(session, tuning_id)
            if not TuningState(row.state).ended:
                end_row(session, row, state, reason)
            return row.pool

    def abandoned_tunings(self) -> Sequence[str]:
        """Ended tunings with jobs QUEUED or GRANTED that are not cancelled: whoever ended them died then."""
        going = JobRow.state.in_((JobState.QUEUED.value, JobState.GRANTED.value)), JobRow.cancelled.is_(False)
        query = select(TuningRow.id).join(JobRow, JobRow.tuning_id == TuningRow.id)
        with self.reading() as session:
            ended = TuningRow.pool != "", TuningRow.state.not_in(LIVE_STATES)
            return list(session.scalars(query.where(*going, *ended).distinct()))


def end_row(session: Session, row: TuningRow, state: TuningState, reason: str) -> None:
    """Ends a locked tuning that has not ended, whoever claims it, and tells it in its log; nobody can join it."""
    row.updated_at = database_now(session)
    row.state, row.owner, row.stop_reason, row.sharing_key = state.value, "", reason, None
    row.message = reason if state is TuningState.FAILED else ""
    add_event(session, row.id, EventKind.STATE, state_data(row), row.updated_at)


def _asked(*columns: Any) -> Select[Any]:
    """Tunings, each as often as there are principals who want it."""
    return select(*columns).outerjoin(InterestRow, InterestRow.tuning_id == TuningRow.id)


def _begun(session: Session) -> dict[tuple[str, str], int]:
    """How many tunings that have begun there are of a pool and a principal."""
    counted = _asked(*LINE, func.count()).where(*BEGUN).group_by(*LINE)
    return {(pool, who): count for pool, who, count in session.execute(counted)}


def _idle() -> ColumnElement[bool]:
    return ~select(JobRow).where(JobRow.tuning_id == TuningRow.id, JobRow.ended_at.is_(None)).exists()


def _fresh() -> ColumnElement[bool]:
    """It was never advanced, or a job of it has ended since it was."""
    ended = select(JobRow).where(JobRow.tuning_id == TuningRow.id, JobRow.ended_at >= TuningRow.advanced_at)
    return or_(TuningRow.advanced_at.is_(None), ended.exists())


def _unclaimed(now: datetime) -> ColumnElement[bool]:
    return or_(TuningRow.owner == "", TuningRow.claim_expires_at.is_(None), TuningRow.claim_expires_at <= now)
