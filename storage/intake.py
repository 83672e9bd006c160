"""The intake: requests that came together, stored in one transaction; each makes a tuning, joins one or is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select, text, tuple_
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError
from autotune.specs import EventKind, Tuning
from autotune.tuning.fleet_ports import Submission, Submitted
from storage import rows
from storage.clock import database_now
from storage.events import state_data
from storage.fleet_tables import EventRow, IdempotencyRow, InterestRow
from storage.named import insert, put_models
from storage.session import RacedError, flush_new
from storage.tables import LIVE, TuningRow


class Intake:
    """One transaction's work. `take` everything in turn, then `store` it once.

    Rows are locked in one order, so that no two transactions wait for each other: the tunings to join by sharing key;
    new ones by it, too, where the unique index lets one of two equal requests wait; keys by principal and key; models
    by name.
    """

    def __init__(self, session: Session, submissions: Sequence[Submission]) -> None:
        self._session = session
        self._known = _known(session, submissions)
        self._live = _joinable(session, {each.sharing_key for each in submissions})
        new = [each.tuning.id for each in submissions if each.sharing_key not in self._live]
        self._taken_ids = _existing(session, new) if new else set()
        self._new: dict[str, tuple[TuningRow, Tuning]] = {}
        self._interests: set[tuple[str, str]] = set()
        self._keys: list[IdempotencyRow] = []

    def take(self, asked: Submission) -> tuple[TuningRow, bool] | StoreConflictError:
        """The row that a request leads to, and whether it is a new one."""
        principal, key = asked.tuning.principal, asked.idempotency_key
        known = None if key is None else self._known.get((principal, key))
        if known is not None:
            digest, row = known
            if digest != asked.request_digest:
                return StoreConflictError(f"idempotency key {key!r} was used for another request")
            return row, False
        found = self._live.get(asked.sharing_key)
        if found is None and asked.tuning.id in self._taken_ids:
            return StoreConflictError(f"tuning {asked.tuning.id!r} exists already")
        row = found or self._create(asked)
        self._interests.add((row.id, principal))
        if key is not None:
            self._known[principal, key] = (asked.request_digest, row)
            self._keys.append(
                IdempotencyRow(principal=principal, key=key, request_digest=asked.request_digest, tuning_id=row.id)
            )
        return row, found is None

    def store(self) -> None:
        """Sends it all. Raises RacedError if another transaction stored an equal request or key meanwhile."""
        session, new = self._session, [self._new[key] for key in sorted(self._new)]
        session.add_all([row for row, _ in new])
        flush_new(session, "a tuning of that id or sharing key is being stored by somebody else", RacedError)
        if new or self._keys:
            self._add_log(new, database_now(session))
        put_models(session, [tuning.model for _, tuning in new])
        if self._interests:
            wanted = [{"tuning_id": each, "principal": principal} for each, principal in sorted(self._interests)]
            # SQLAlchemy sends many rows in one statement only where it returns something. A round trip each would be
            # dear in a busy process: after each of them the thread waits for the others.
            new_one = insert(session)(InterestRow).on_conflict_do_nothing().returning(InterestRow.tuning_id)
            session.execute(new_one, wanted)

    def _create(self, asked: Submission) -> TuningRow:
        row = rows.tuning_row(asked.tuning)
        row.sharing_key = asked.sharing_key
        self._new[asked.sharing_key] = (row, asked.tuning)
        self._live[asked.sharing_key] = row
        self._taken_ids.add(row.id)
        return row

    def _add_log(self, new: Sequence[tuple[TuningRow, Tuning]], now: datetime) -> None:
        for row, _ in new:
            data = json.dumps(state_data(row))
            self._session.add(EventRow(tuning_id=row.id, kind=EventKind.STATE.value, at=now, data_json=data))
        for key in self._keys:
            key.created_at = now
        self._keys.sort(key=lambda row: (row.principal, row.key))
        self._session.add_all(self._keys)
        flush_new(self._session, "an idempotency key is being used by somebody else", RacedError)


def take_in(session: Session, submissions: Sequence[Submission]) -> Sequence[Submitted | StoreConflictError]:
    """Stores requests; what each of them led to, in their order. Raises RacedError."""
    intake = Intake(session, submissions)
    taken = [intake.take(each) for each in submissions]
    intake.store()
    tunings: dict[str, Tuning] = {}
    found: list[Submitted | StoreConflictError] = []
    for answer in taken:
        if isinstance(answer, StoreConflictError):
            found.append(answer)
            continue
        row, created = answer
        if row.id not in tunings:
            tunings[row.id] = rows.tuning_of(row)
        found.append((tunings[row.id], created))
    return found


def _known(session: Session, submissions: Sequence[Submission]) -> dict[tuple[str, str], tuple[str, TuningRow]]:
    """Of idempotency keys that were used before: the digest of the request, and the tuning."""
    keys = {(each.tuning.principal, each.idempotency_key) for each in submissions if each.idempotency_key is not None}
    if not keys:
        return {}
    query = select(IdempotencyRow, TuningRow).join(TuningRow, TuningRow.id == IdempotencyRow.tuning_id)
    found = session.execute(query.where(tuple_(IdempotencyRow.principal, IdempotencyRow.key).in_(sorted(keys))))
    return {(known.principal, known.key): (known.request_digest, row) for known, row in found}


def _joinable(session: Session, sharing_keys: set[str]) -> dict[str, TuningRow]:
    """The live tunings of those keys, locked, so that nobody cancels one while somebody joins."""
    query = select(TuningRow).where(TuningRow.sharing_key.in_(sorted(sharing_keys)), text(LIVE))
    found = session.scalars(query.order_by(TuningRow.sharing_key).with_for_update(key_share=True))
    return {row.sharing_key: row for row in found if row.sharing_key is not None}


def _existing(session: Session, ids: Sequence[str]) -> set[str]:
    return set(session.scalars(select(TuningRow.id).where(TuningRow.id.in_(ids))))
