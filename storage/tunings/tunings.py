"""Tunings and trials: their life from request to result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import (
    ClusterSpec,
    EventKind,
    Failure,
    ModelSpec,
    StepReading,
    Trial,
    TrialState,
    Tuning,
    TuningState,
    Workload,
)
from storage.database.session import NAMES_SHOWN, SessionStore, database_now, flush_new
from storage.fleet.events import add_event, state_data, trial_data
from storage.fleet.tables import EventRow
from storage.tunings import rows
from storage.tunings.named import fingerprint_row, locked_tuning, tuning_row
from storage.tunings.tables import StepRow, TrialRow, TuningRow

SHORTEST_PREFIX = 4


class TuningStore(SessionStore):
    """Tunings and their trials."""

    def create_tuning(self, tuning: Tuning) -> None:
        """Stores a new tuning. Raises StoreConflictError if the id exists."""
        with self.writing() as session:
            row = TuningRow(**rows.tuning_values(tuning))
            session.add(row)
            flush_new(session, f"tuning {tuning.id!r} exists already")
            add_event(session, tuning.id, EventKind.STATE, state_data(row), database_now(session))

    def tuning(self, tuning_id: str) -> Tuning:
        """The tuning of that id (a unique prefix of at least 4 characters will do)."""
        with self.asking() as session:
            if not tuning_id.isprintable():  # no id of ours, and not every driver can send it
                raise UnknownNameError("tuning", tuning_id, ())
            row = session.get(TuningRow, tuning_id)
            if row is None and len(tuning_id) >= SHORTEST_PREFIX:
                start = func.substr(TuningRow.id, 1, len(tuning_id)) == tuning_id
                found = session.scalars(select(TuningRow).where(start).limit(NAMES_SHOWN)).all()
                if len(found) > 1:
                    raise UnknownNameError("tuning (the prefix of several)", tuning_id, [each.id for each in found])
                row = found[0] if found else None
            if row is None:
                row = tuning_row(session, tuning_id)
            return rows.tuning_of(row)

    def tunings(self, limit: int = 50) -> Sequence[Tuning]:
        """The newest tunings, newest first."""
        newest = select(TuningRow).order_by(TuningRow.created_at.desc(), TuningRow.id.desc()).limit(limit)
        with self.reading() as session:
            return [rows.tuning_of(row) for row in session.scalars(newest)]

    def save_tuning(self, tuning: Tuning, *, expected_owner: str | None = None) -> None:
        """Replaces the mutable part (state, message, stop_reason, owner, updated_at).

        GPU-seconds are added by `finish_trial` and `save_probe` alone, so that a stale record cannot take any back.

        With `expected_owner`, raises StoreConflictError unless the stored owner still is that one. It raises as well
        where the state of a fleet's tuning has ended and would change: somebody cancelled it meanwhile.
        """
        with self.writing() as session:
            row = locked_tuning(session, tuning.id)
            if expected_owner is not None and row.owner != expected_owner:
                raise StoreConflictError(f"tuning {tuning.id!r} is owned by {row.owner!r}, not by {expected_owner!r}")
            if row.pool and TuningState(row.state).ended and row.state != tuning.state.value:
                raise StoreConflictError(f"tuning {tuning.id!r} has ended already: it is {row.state}")
            told = (row.state, row.message)
            for name, value in rows.tuning_progress(tuning).items():
                setattr(row, name, value)
            session.flush()
            if told != (row.state, row.message):
                add_event(session, tuning.id, EventKind.STATE, state_data(row), database_now(session))

    def start_trial(self, trial: Trial) -> None:
        """Stores a RUNNING trial before it runs. (tuning_id, number) is unique."""
        with self.writing() as session:
            locked_tuning(session, trial.tuning_id)
            add_trial(session, trial)

    def finish_trial(
        self,
        trial_id: str,
        *,
        reading: StepReading | None,
        failure: Failure | None,
        outcome_gpu_s: float,
        setup_s: float,
        fingerprint_key: str,
    ) -> Trial:
        """Ends a RUNNING trial: complete or pruned with a reading, failed with a failure; adds its GPU-seconds to
        its tuning. Raises StoreConflictError if it has ended already: a result is never overwritten.
        """
        with self.writing() as session:
            return end_trial(
                session,
                trial_id,
                reading=reading,
                failure=failure,
                gpu_s=outcome_gpu_s,
                setup_s=setup_s,
                fingerprint_key=fingerprint_key,
            )

    def trials(self, tuning_id: str) -> Sequence[Trial]:
        """The tuning's trials by number."""
        of_tuning = select(TrialRow).where(TrialRow.tuning_id == tuning_id).order_by(TrialRow.number)
        with self.reading() as session:
            tuning_row(session, tuning_id)
            return [rows.trial_of(row) for row in session.scalars(of_tuning)]

    def best_trials(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        workload: Workload,
        limit: int = 10,
        *,
        before: datetime | None = None,
    ) -> Sequence[Trial]:
        """Complete trials of any tuning for the same model, cluster and workload keys, fastest first.

        With `before` only those that had ended by then.
        """
        query = (
            select(TrialRow)
            .join(TuningRow, TrialRow.tuning_id == TuningRow.id)
            .join(StepRow, StepRow.trial_id == TrialRow.id)
            .where(TuningRow.model_key == model.key)
            .where(TuningRow.cluster_key == cluster.key)
            .where(TuningRow.workload_key == workload.key)
            .where(TrialRow.state == TrialState.COMPLETE.value)
            .order_by(StepRow.tokens_per_s_per_gpu.desc(), TrialRow.started_at)
            .limit(limit)
        )
        if before is not None:
            query = query.where(TrialRow.finished_at <= before)
        with self.reading() as session:
            return [rows.trial_of(row) for row in session.scalars(query)]


def add_trial(session: Session, trial: Trial) -> None:
    """Stores a RUNNING trial of a tuning that the caller has locked. Raises StoreConflictError."""
    if trial.state is not TrialState.RUNNING:
        raise StoreConflictError(f"trial {trial.id!r} starts as {trial.state.value}; it must be running")
    if trial.fingerprint_key:
        fingerprint_row(session, trial.fingerprint_key)
    session.add(rows.trial_row(trial))
    flush_new(session, f"trial {trial.id!r} or number {trial.number} of its tuning exists already")
    add_event(session, trial.tuning_id, EventKind.TRIAL_STARTED, trial_data(trial), database_now(session))


def end_trial(
    session: Session,
    trial_id: str,
    *,
    reading: StepReading | None,
    failure: Failure | None,
    gpu_s: float,
    setup_s: float,
    fingerprint_key: str,
) -> Trial:
    """Ends a trial as `Store.finish_trial` says: the one way in which a trial ends."""
    state = _end_state(reading, failure)
    if fingerprint_key or reading is not None:
        fingerprint_row(session, fingerprint_key)
    tuning = locked_tuning(session, _tuning_of(session, trial_id))
    now = database_now(session)
    ending = update(TrialRow).where(TrialRow.id == trial_id, TrialRow.state == TrialState.RUNNING.value)
    columns = {
        "state": state.value,
        "gpu_s": gpu_s,
        "setup_s": setup_s,
        "fingerprint_key": fingerprint_key or None,
        "finished_at": now,
        **rows.failure_columns(failure),
    }
    if session.scalar(ending.values(columns).returning(TrialRow.id)) is None:
        found = session.scalar(select(TrialRow.state).where(TrialRow.id == trial_id))
        raise StoreConflictError(f"trial {trial_id!r} has ended already: it is {found}")
    spend(tuning, gpu_s, now)
    if reading is not None:
        keys = {"cluster_key": tuning.cluster_key, "fingerprint_key": fingerprint_key}
        session.add(rows.step_row(reading, trial_id=trial_id, **keys))
    session.flush()
    ended = rows.trial_of(session.get_one(TrialRow, trial_id))
    add_event(session, tuning.id, EventKind.TRIAL_ENDED, trial_data(ended), now)
    return ended


def fail_trials(session: Session, ids: Sequence[str], tuning: TuningRow, failure: Failure, now: datetime) -> None:
    """Ends those of a locked tuning's trials that run and never began: they cost nothing."""
    running = TrialRow.id.in_(ids), TrialRow.state == TrialState.RUNNING.value
    columns = {"state": TrialState.FAILED.value, "gpu_s": 0.0, "setup_s": 0.0, "finished_at": now}
    ended = update(TrialRow).where(*running).values(columns | rows.failure_columns(failure)).returning(TrialRow)
    found = sorted(session.scalars(ended).all(), key=lambda row: row.number)
    if found:
        tuning.updated_at = now
        log = {"tuning_id": tuning.id, "kind": EventKind.TRIAL_ENDED.value, "at": now}
        told = [log | {"data_json": json.dumps(trial_data(rows.trial_of(row)))} for row in found]
        session.execute(insert(EventRow), told)


def spend(tuning: TuningRow, gpu_s: float, now: datetime) -> None:
    """Adds GPU-seconds to a locked tuning, within the transaction that stores what they bought."""
    tuning.gpu_s_spent += gpu_s
    tuning.updated_at = now


def _tuning_of(session: Session, trial_id: str) -> str:
    tuning_id = session.scalar(select(TrialRow.tuning_id).where(TrialRow.id == trial_id))
    if tuning_id is None:
        raise UnknownNameError("trial", trial_id, ())
    return tuning_id


def _end_state(reading: StepReading | None, failure: Failure | None) -> TrialState:
    if (reading is None) == (failure is None):
        raise ValueError("a trial ends with a reading or with a failure, and not with both")
    if reading is None:
        return TrialState.FAILED
    return TrialState.PRUNED if reading.pruned else TrialState.COMPLETE
