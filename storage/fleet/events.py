"""A tuning's log of events: each line is written in the transaction that does what it tells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from autotune.specs import EventKind, Failure, Job, ProbeOutcome, ProbeRequest, Trial, Tuning, TuningEvent
from storage.database.session import SessionStore
from storage.fleet.tables import EventRow
from storage.tunings.named import tuning_row
from storage.tunings.rows import values
from storage.tunings.tables import TuningRow

ESTIMATE = ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_bytes", "fits")
READING = (
    "tokens_per_s_per_gpu", "interval_tokens_per_s_per_gpu", "step_time_s", "t_calc_s", "t_comm_s", "t_comm_exposed_s",
    "steady", "pruned", "mfu", "mu",
    "peak_allocated_bytes", "peak_reserved_bytes", "memory_source",
)  # fmt: skip


class EventStore(SessionStore):
    """Reads the log; whoever changes something writes it."""

    def events(self, tuning_id: str, *, after: int = 0, limit: int = 500) -> Sequence[TuningEvent]:
        """The tuning's log, oldest first: at most `limit` events with ids above `after`.

        The ids of one tuning become visible in ascending order, so that nobody who asks on from the last one that he
        saw misses any.
        """
        query = select(EventRow).where(EventRow.tuning_id == tuning_id, EventRow.id > after)
        with self.reading() as session:
            tuning_row(session, tuning_id)
            return [_event_of(row) for row in session.scalars(query.order_by(EventRow.id).limit(limit))]


def add_event(session: Session, tuning_id: str, kind: EventKind, data: dict[str, Any], at: datetime) -> None:
    """Adds a line to the log. The caller has locked the tuning (`locked_tuning`): that keeps ids in order."""
    session.add(EventRow(tuning_id=tuning_id, kind=kind.value, at=at, data_json=json.dumps(data)))
    session.flush()


def state_data(row: TuningRow | Tuning) -> dict[str, Any]:
    """What a STATE event tells."""
    return values(row, ("state", "message", "stop_reason", "gpu_s_spent"))


def trial_data(trial: Trial) -> dict[str, Any]:
    """What a TRIAL_STARTED or TRIAL_ENDED event tells."""
    data: dict[str, Any] = {
        "trial_id": trial.id,
        "number": trial.number,
        "plan": trial.plan.to_data(),
        "plan_key": trial.plan.key,
        "state": trial.state.value,
    }
    if trial.estimate is not None:
        data["estimate"] = values(trial.estimate, ESTIMATE)
    if trial.finished_at is not None:
        data |= {"gpu_s": trial.gpu_s, "setup_s": trial.setup_s, "failure": failure_data(trial.failure)}
    if trial.reading is not None:
        data["reading"] = values(trial.reading, READING)
    return data


def probe_data(run_id: str, request: ProbeRequest, outcome: ProbeOutcome) -> dict[str, Any]:
    """What a PROBE_ENDED event tells; the request without its model and workload, which are the tuning's."""
    asked = request.to_data()
    return {
        "probe_id": run_id,
        "request": {name: value for name, value in asked.items() if name not in {"model", "workload"}},
        "readings": len(outcome.readings),
        "failure": failure_data(outcome.failure),
        "wall_s": outcome.wall_s,
        "gpu_s": outcome.gpu_s,
    }


def granted_data(job: Job) -> dict[str, Any]:
    """What a JOB_GRANTED event tells."""
    return _job_data(job) | {"nodes": [member.node for member in job.members], "warm": job.warm}


def retried_data(job: Job, failure: Failure | None, retry: Job) -> dict[str, Any]:
    """What a JOB_RETRIED event tells: of the job that failed, and of the one that takes its place."""
    return _job_data(job) | {
        "nodes": [member.node for member in job.members],
        "failure": failure_data(failure),
        "retry_job_id": retry.id,
        "avoid": list(retry.avoid),
    }


def failure_data(failure: Failure | None) -> dict[str, Any] | None:
    """A failure without its log, which may be long."""
    if failure is None:
        return None
    return {name: value for name, value in failure.to_data().items() if name != "log_tail"}


def _job_data(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "purpose": job.purpose.value,
        "probe": job.request.kind,
        "trial_id": job.trial_id,
        "attempt": job.attempt,
    }


def _event_of(row: EventRow) -> TuningEvent:
    return TuningEvent(
        id=row.id, tuning_id=row.tuning_id, kind=EventKind(row.kind), at=row.at, data=json.loads(row.data_json)
    )
