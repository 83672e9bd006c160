"""The end of a job: its nodes are free, and what it measured is stored, once and in one transaction."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete
from sqlalchemy.orm import Session

from autotune.specs import EventKind, Failure, FailureKind, Job, JobState, ProbeOutcome, StepReading, TuningState
from storage.database.session import SessionStore, database_now, locked_tuning
from storage.fleet import rows as fleet_rows
from storage.fleet.events import add_event, retried_data
from storage.fleet.jobs import add_job, lock_job, trial_runs
from storage.fleet.nodes import lock_gang
from storage.fleet.tables import JobRow, LeaseRow
from storage.tunings.measurements import add_probe
from storage.tunings.tables import TuningRow
from storage.tunings.tunings import end_trial, spend

WITHDRAWN = Failure(kind=FailureKind.CANCELLED, message="the tuning was cancelled before another attempt")


class EndingStore(SessionStore):
    """Ends jobs."""

    def end_job(
        self,
        job_id: str,
        token: int,
        outcome: ProbeOutcome,
        *,
        failure: Failure | None,
        retry: Job | None = None,
        fingerprint_key: str = "",
        warm_nodes: Collection[str] = (),
    ) -> Job | None:
        """Ends a REPORTED job: releases its leases, stores what it measured, adds its GPU-seconds to the tuning.

        With `retry` that job is stored QUEUED instead of ending the trial; but not if the job or the tuning was
        cancelled meanwhile: then the trial ends as CANCELLED. Without, a trial ends as `Store.finish_trial` says, and a
        probe is stored as `Store.save_probe` says (readings or failure; health probes too). `failure`, where given,
        is what is stored instead of the outcome's. `warm_nodes` keep their world, other members forget theirs. None
        (and nothing written) if the token is not current or the job has ended: a result is stored once.
        """
        ended = outcome if failure is None else outcome.model_copy(update={"readings": (), "failure": failure})
        with self.writing() as session:
            job = lock_job(session, job_id)
            if job.state != JobState.REPORTED.value or job.token != token:
                return None
            _free(session, job, warm_nodes)
            tuning = locked_tuning(session, job.tuning_id) if job.tuning_id is not None else None
            job.state, job.ended_at = JobState.ENDED.value, database_now(session)
            if ended.failure is not None:
                job.failure_kind, job.message = ended.failure.kind.value, ended.failure.message
            session.flush()
            if retry is None:
                _store(session, job, ended, fingerprint_key)
            elif job.cancelled or (tuning is not None and TuningState(tuning.state).ended):
                withdrawn = ended.model_copy(update={"readings": (), "failure": WITHDRAWN})
                _store(session, job, withdrawn, fingerprint_key)
            else:
                _try_again(session, job, tuning, ended, retry)
            return fleet_rows.job_of(job)


def _free(session: Session, job: JobRow, warm_nodes: Collection[str]) -> None:
    names = [member.node for member in job.members]
    for row in lock_gang(session, names):
        if row.name in names and row.name not in warm_nodes and row.world_id == job.world_id:
            row.world_id = ""
    session.execute(delete(LeaseRow).where(LeaseRow.job_id == job.id))


def _store(session: Session, job: JobRow, outcome: ProbeOutcome, fingerprint_key: str) -> None:
    """Ends the trial, or stores the probe. A trial that ended without its job (it was given up) stays as it is."""
    spec = fleet_rows.job_of(job)
    if spec.trial_id is None:
        add_probe(
            session,
            tuning_id=spec.tuning_id,
            cluster=spec.cluster,
            fingerprint_key=fingerprint_key,
            request=spec.request,
            outcome=outcome,
        )
    elif trial_runs(session, spec.trial_id):
        end_trial(
            session,
            spec.trial_id,
            reading=_step(outcome),
            failure=outcome.failure,
            gpu_s=outcome.gpu_s,
            setup_s=outcome.setup_s,
            fingerprint_key=fingerprint_key,
        )


def _step(outcome: ProbeOutcome) -> StepReading | None:
    return next((reading for reading in outcome.readings if isinstance(reading, StepReading)), None)


def _try_again(session: Session, job: JobRow, tuning: TuningRow | None, outcome: ProbeOutcome, retry: Job) -> None:
    add_job(session, retry)
    if tuning is None:
        return
    now = database_now(session)
    spend(tuning, outcome.gpu_s, now)
    data = retried_data(fleet_rows.job_of(job), outcome.failure, retry)
    add_event(session, tuning.id, EventKind.JOB_RETRIED, data, now)
