"""Requests to a fleet: shared by equal askers, shown page by page."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Select, delete, insert, select, text, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError
from autotune.ports.fleet import Submission, Submitted
from autotune.specs import EventKind, Tuning, TuningState
from storage.database.columns import Base
from storage.database.session import RacedError, SessionStore, again, database_now, upsert
from storage.fleet.events import state_data
from storage.fleet.jobs import cancel_rows, lock_live
from storage.fleet.tables import EventRow, IdempotencyRow, InterestRow, JobRow
from storage.fleet.turns import end_row
from storage.tunings import rows
from storage.tunings.named import locked_tuning, tuning_row
from storage.tunings.tables import LIVE, TuningRow


class Intake:
    """Requests that came together, in one transaction: each makes a tuning, joins one, or repeats an earlier request.

    `take` everything in turn, then `store` it once.

    Rows are locked in one order, so that no two transactions wait for each other: the tunings to join by sharing key;
    new ones by it, too, where the unique index lets one of two equal requests wait; keys by principal and key.
    """

    def __init__(self, session: Session, submissions: Sequence[Submission]) -> None:
        self._session = session
        self._known = _known(session, submissions)
        self._live = _joinable(session, {each.sharing_key for each in submissions})
        new = [each.tuning.id for each in submissions if each.sharing_key not in self._live]
        self._taken_ids = _existing(session, new) if new else set()
        self._new: dict[str, Tuning] = {}
        self._interests: set[tuple[str, str]] = set()
        self._keys: list[dict[str, str]] = []

    def take(self, asked: Submission) -> Submitted | StoreConflictError:
        """The tuning that a request leads to, and whether it is a new one."""
        principal, key = asked.tuning.principal, asked.idempotency_key
        known = None if key is None else self._known.get((principal, key))
        if known is not None:
            digest, tuning = known
            if digest != asked.request_digest:
                return StoreConflictError(f"idempotency key {key!r} was used for another request")
            return tuning, False
        found = self._live.get(asked.sharing_key)
        if found is None and asked.tuning.id in self._taken_ids:
            return StoreConflictError(f"tuning {asked.tuning.id!r} exists already")
        tuning = found or self._create(asked)
        self._interests.add((tuning.id, principal))
        if key is not None:
            self._known[principal, key] = (asked.request_digest, tuning)
            names = {"principal": principal, "key": key}
            self._keys.append(names | {"request_digest": asked.request_digest, "tuning_id": tuning.id})
        return tuning, found is None

    def store(self) -> None:
        """Sends it all, each table's rows in one statement: in a busy process round trips cost the most.

        Raises RacedError if another transaction stored an equal request or key meanwhile.
        """
        session, new = self._session, dict(sorted(self._new.items()))
        now = database_now(session) if new or self._keys else None
        if new:
            tunings = [rows.tuning_values(tuning) | {"sharing_key": key} for key, tuning in new.items()]
            self._insert(TuningRow, tunings, "a tuning of that id or sharing key is being stored by somebody else")
            log = {"kind": EventKind.STATE.value, "at": now}
            states = [(tuning.id, json.dumps(state_data(tuning))) for tuning in new.values()]
            session.execute(insert(EventRow), [log | {"tuning_id": each, "data_json": to} for each, to in states])
        if self._keys:
            keys = sorted(self._keys, key=lambda each: (each["principal"], each["key"]))
            values = [{"created_at": now, **each} for each in keys]
            self._insert(IdempotencyRow, values, "an idempotency key is being used by somebody else")
        if self._interests:
            wanted = [{"tuning_id": each, "principal": principal} for each, principal in sorted(self._interests)]
            # SQLAlchemy makes one statement of these only where it returns something.
            new_one = upsert(session)(InterestRow).on_conflict_do_nothing().returning(InterestRow.tuning_id)
            session.execute(new_one, wanted)

    def _create(self, asked: Submission) -> Tuning:
        self._new[asked.sharing_key] = self._live[asked.sharing_key] = asked.tuning
        self._taken_ids.add(asked.tuning.id)
        return asked.tuning

    def _insert(self, table: type[Base], values: Sequence[Mapping[str, object]], conflict: str) -> None:
        try:
            self._session.execute(insert(table), values)
        except IntegrityError as error:
            raise RacedError(conflict) from error


def _known(session: Session, submissions: Sequence[Submission]) -> dict[tuple[str, str], tuple[str, Tuning]]:
    """Of idempotency keys that were used before: the digest of the request, and the tuning."""
    keys = {(each.tuning.principal, each.idempotency_key) for each in submissions if each.idempotency_key is not None}
    if not keys:
        return {}
    query = select(IdempotencyRow, TuningRow).join(TuningRow, TuningRow.id == IdempotencyRow.tuning_id)
    found = session.execute(query.where(tuple_(IdempotencyRow.principal, IdempotencyRow.key).in_(sorted(keys))))
    return {(known.principal, known.key): (known.request_digest, rows.tuning_of(row)) for known, row in found}


def _joinable(session: Session, sharing_keys: set[str]) -> dict[str, Tuning]:
    """The live tunings of those keys, locked, so that nobody cancels one while somebody joins.

    Whoever advances a tuning holds nobody up: one that is just ending may still be joined, and has then ended.
    """
    query = select(TuningRow).where(TuningRow.sharing_key.in_(sorted(sharing_keys)), text(LIVE))
    found = session.scalars(query.order_by(TuningRow.sharing_key).with_for_update(read=True, key_share=True))
    return {row.sharing_key: rows.tuning_of(row) for row in found if row.sharing_key is not None}


def _existing(session: Session, ids: Sequence[str]) -> set[str]:
    return set(session.scalars(select(TuningRow.id).where(TuningRow.id.in_(ids))))


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
                intake = Intake(session, submissions)
                taken = [intake.take(each) for each in submissions]
                intake.store()
                return taken

        return again(submit)

    def cancel_tuning(
        self, tuning_id: str, principals: Collection[str], reason: str, *, force: bool = False
    ) -> tuple[Tuning, bool]:
        """Takes back what these principals want. Where nobody else wants it, or by `force`, the tuning is CANCELLED:
        its queued jobs end now, its granted ones are marked.

        Returns the tuning as it stands then, and whether one of its jobs was queued. One that has ended stays so.

        Raises:
            UnknownNameError: no such tuning.
            StoreConflictError: only others want it; not with `force`.
        """

        def cancel() -> tuple[Tuning, bool]:
            with self.writing() as session:
                jobs = lock_live(session, tuning_id)
                row = locked_tuning(session, tuning_id, joinable=False)
                wanted = set(session.scalars(_askers(tuning_id)).all())
                ended = TuningState(row.state).ended
                if wanted and not (force or ended or wanted & set(principals)):
                    names, who = ", ".join(sorted(wanted)), " or ".join(sorted(principals))
                    raise StoreConflictError(
                        f"tuning {tuning_id} is wanted by {names}, not by {who}: they can take that back, or an admin "
                        "can cancel it by force"
                    )
                theirs = InterestRow.tuning_id == tuning_id, InterestRow.principal.in_(principals)
                session.execute(delete(InterestRow).where(*theirs))
                if wanted - set(principals) and not force:
                    return rows.tuning_of(row), False
                if not ended:
                    end_row(session, row, TuningState.CANCELLED, reason)
                was_queued = cancel_rows(session, jobs, row, row.updated_at)
                later = select(JobRow.id).where(JobRow.tuning_id == tuning_id, JobRow.ended_at.is_(None))
                if session.scalar(later.where(JobRow.id.not_in([job.id for job in jobs])).limit(1)) is not None:
                    raise RacedError("a job began before the tuning was locked")
                return rows.tuning_of(row), was_queued

        return again(cancel)

    def askers(self, tuning_id: str) -> Sequence[str]:
        """The principals who want a fleet's tuning, by name."""
        with self.reading() as session:
            return list(session.scalars(_askers(tuning_id)))

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


def _askers(tuning_id: str) -> Select[str]:
    return select(InterestRow.principal).where(InterestRow.tuning_id == tuning_id).order_by(InterestRow.principal)
