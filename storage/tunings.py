"""Tunings and trials: their life from request to result."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import ClusterSpec, Failure, ModelSpec, StepReading, Trial, TrialState, Tuning, Workload
from storage import rows
from storage.session import NAMES_SHOWN, SessionStore, fingerprint_row, flush_new, tuning_row
from storage.tables import StepRow, TrialRow, TuningRow

SHORTEST_PREFIX = 4


class TuningStore(SessionStore):
    """Tunings and their trials."""

    def create_tuning(self, tuning: Tuning) -> None:
        """Stores a new tuning. Raises StoreConflictError if the id exists."""
        with self.writing() as session:
            session.add(rows.tuning_row(tuning))
            flush_new(session, f"tuning {tuning.id!r} exists already")

    def tuning(self, tuning_id: str) -> Tuning:
        """The tuning of that id (a unique prefix of at least 4 characters will do)."""
        with self.reading() as session:
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

        With `expected_owner`, raises StoreConflictError unless the stored owner still is that one.
        """
        change = update(TuningRow).where(TuningRow.id == tuning.id)
        if expected_owner is not None:
            change = change.where(TuningRow.owner == expected_owner)
        with self.writing() as session:
            if session.execute(change.values(rows.tuning_progress(tuning)).returning(TuningRow.id)).first():
                return
            owner = tuning_row(session, tuning.id).owner
            raise StoreConflictError(f"tuning {tuning.id!r} is owned by {owner!r}, not by {expected_owner!r}")

    def start_trial(self, trial: Trial) -> None:
        """Stores a RUNNING trial before it runs. (tuning_id, number) is unique."""
        if trial.state is not TrialState.RUNNING:
            raise StoreConflictError(f"trial {trial.id!r} starts as {trial.state.value}; it must be running")
        with self.writing() as session:
            tuning_row(session, trial.tuning_id)
            if trial.fingerprint_key:
                fingerprint_row(session, trial.fingerprint_key)
            session.add(rows.trial_row(trial))
            flush_new(session, f"trial {trial.id!r} or number {trial.number} of its tuning exists already")

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
        now = datetime.now(UTC)
        values = {
            "state": _end_state(reading, failure).value,
            "gpu_s": outcome_gpu_s,
            "setup_s": setup_s,
            "fingerprint_key": fingerprint_key or None,
            "finished_at": now,
            **rows.failure_columns(failure),
        }
        ending = update(TrialRow).where(TrialRow.id == trial_id, TrialRow.state == TrialState.RUNNING.value)
        with self.writing() as session:
            if fingerprint_key or reading is not None:
                fingerprint_row(session, fingerprint_key)
            tuning_id = session.scalar(ending.values(values).returning(TrialRow.tuning_id))
            if tuning_id is None:
                raise _cannot_end(session, trial_id)
            spend(session, tuning_id, outcome_gpu_s, now)
            if reading is not None:
                cluster_key = tuning_row(session, tuning_id).cluster_key
                keys = {"cluster_key": cluster_key, "fingerprint_key": fingerprint_key}
                session.add(rows.step_row(reading, trial_id=trial_id, **keys))
                session.flush()
            return rows.trial_of(session.get_one(TrialRow, trial_id))

    def trials(self, tuning_id: str) -> Sequence[Trial]:
        """The tuning's trials by number."""
        of_tuning = select(TrialRow).where(TrialRow.tuning_id == tuning_id).order_by(TrialRow.number)
        with self.reading() as session:
            tuning_row(session, tuning_id)
            return [rows.trial_of(row) for row in session.scalars(of_tuning)]

    def best_trials(
        self, model: ModelSpec, cluster: ClusterSpec, workload: Workload, limit: int = 10
    ) -> Sequence[Trial]:
        """Complete trials of any tuning for the same model, cluster and workload keys, fastest first."""
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
        with self.reading() as session:
            return [rows.trial_of(row) for row in session.scalars(query)]


def spend(session: Session, tuning_id: str, gpu_s: float, now: datetime) -> None:
    """Adds GPU-seconds to a tuning, within the transaction that stores what they bought."""
    change = update(TuningRow).where(TuningRow.id == tuning_id)
    session.execute(change.values(gpu_s_spent=TuningRow.gpu_s_spent + gpu_s, updated_at=now))


def _end_state(reading: StepReading | None, failure: Failure | None) -> TrialState:
    if (reading is None) == (failure is None):
        raise ValueError("a trial ends with a reading or with a failure, and not with both")
    if reading is None:
        return TrialState.FAILED
    return TrialState.PRUNED if reading.pruned else TrialState.COMPLETE


def _cannot_end(session: Session, trial_id: str) -> StoreConflictError | UnknownNameError:
    row = session.get(TrialRow, trial_id)
    if row is None:
        return UnknownNameError("trial", trial_id, ())
    return StoreConflictError(f"trial {trial_id!r} has ended already: it is {row.state}")
