"""Probe runs with their readings, and the profiles fitted from them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import Label, Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.errors import UnknownNameError
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    EventKind,
    LayerReading,
    LayerRequest,
    ProbeOutcome,
    ProbeRequest,
    Profile,
    StepReading,
)
from storage.database.session import SessionStore, database_now
from storage.fleet.events import add_event, probe_data
from storage.tunings import rows
from storage.tunings.named import fingerprint_row, locked_tuning
from storage.tunings.tables import CollectiveRow, FingerprintRow, LayerRow, ProbeRow, ProfileRow, StepRow, TrialRow
from storage.tunings.tunings import spend

KINDS: dict[str, type[CollectiveRow] | type[LayerRow] | type[StepRow]] = {
    "collective": CollectiveRow,
    "layer": LayerRow,
    "step": StepRow,
}
ENVIRONMENT = ("hostname", "device_name", "device_count", "driver", "runtime", "collective_library", "torch")


class MeasurementStore(SessionStore):
    """Readings outside trials, profiles, and pages of all measurements."""

    def save_probe(
        self,
        *,
        tuning_id: str | None,
        cluster: ClusterSpec,
        fingerprint_key: str,
        request: ProbeRequest,
        outcome: ProbeOutcome,
    ) -> str:
        """Stores a probe run with all its readings; adds its GPU-seconds to the tuning; returns the run's id."""
        with self.writing() as session:
            return add_probe(
                session,
                tuning_id=tuning_id,
                cluster=cluster,
                fingerprint_key=fingerprint_key,
                request=request,
                outcome=outcome,
            )

    def collective_readings(self, cluster_key: str, fingerprint_key: str) -> Sequence[CollectiveReading]:
        """All readings for that cluster and fingerprint, oldest first."""
        query = select(CollectiveRow).where(
            CollectiveRow.cluster_key == cluster_key, CollectiveRow.fingerprint_key == fingerprint_key
        )
        with self.reading() as session:
            return [rows.collective_of(row) for row in session.scalars(query.order_by(CollectiveRow.id))]

    def layer_readings(
        self, cluster_key: str, fingerprint_key: str, model_key: str, workload_key: str
    ) -> Sequence[LayerReading]:
        """All readings for that model, workload, cluster and fingerprint, oldest first."""
        query = select(LayerRow).where(
            LayerRow.cluster_key == cluster_key,
            LayerRow.fingerprint_key == fingerprint_key,
            LayerRow.model_key == model_key,
            LayerRow.workload_key == workload_key,
        )
        with self.reading() as session:
            return [rows.layer_of(row) for row in session.scalars(query.order_by(LayerRow.id))]

    def save_profile(self, profile: Profile) -> None:
        """Stores a new version of the cluster's profile."""
        with self.writing() as session:
            if profile.fingerprint_key:
                fingerprint_row(session, profile.fingerprint_key)
            row = rows.profile_row(profile)
            row.stored_at = datetime.now(UTC)
            session.add(row)

    def profile(self, cluster_key: str, fingerprint_key: str | None = None) -> Profile | None:
        """The newest profile of the cluster (under the fingerprint, if one is given)."""
        query = select(ProfileRow.spec_json).where(ProfileRow.cluster_key == cluster_key)
        if fingerprint_key is not None:
            query = query.where(ProfileRow.fingerprint_key == (fingerprint_key or None))
        with self.asking() as session:
            text = session.scalar(query.order_by(ProfileRow.id.desc()).limit(1))
        return None if text is None else Profile.from_json(text)

    def measurements_page(
        self, kind: str, *, cluster_key: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[dict[str, Any]]:
        """Rows of `collective`, `layer` or `step` measurements with their provenance, by id: those with ids above.

        A row holds the measurement's columns, the environment of its fingerprint, `tuning_id`, `measured_at` and
        `log_path` of its probe or trial, and a trial's `plan_key`. Raises UnknownNameError for another kind.
        """
        if kind not in KINDS:
            raise UnknownNameError("measurement", kind, KINDS)
        row = KINDS[kind]
        query = _query(row).where(row.id > after).order_by(row.id).limit(limit)
        if cluster_key is not None:
            query = query.where(row.cluster_key == cluster_key)
        with self.reading() as session:
            return [dict(found) for found in session.execute(query).mappings()]


def add_probe(
    session: Session,
    *,
    tuning_id: str | None,
    cluster: ClusterSpec,
    fingerprint_key: str,
    request: ProbeRequest,
    outcome: ProbeOutcome,
) -> str:
    """Stores a probe run as `Store.save_probe` says: the one way in which one is stored."""
    if fingerprint_key or outcome.readings:
        fingerprint_row(session, fingerprint_key)
    tuning = locked_tuning(session, tuning_id) if tuning_id is not None else None
    now = database_now(session)
    run = _probe_row(request, outcome, now)
    run.tuning_id, run.cluster_key, run.cluster_json = tuning_id, cluster.key, cluster.to_json()
    run.fingerprint_key = fingerprint_key or None
    session.add(run)
    session.flush()
    keys = {"probe_run_id": run.id, "cluster_key": cluster.key, "fingerprint_key": fingerprint_key}
    session.add_all(_reading_row(reading, request, keys) for reading in outcome.readings)
    if tuning is not None:
        spend(tuning, outcome.gpu_s, now)
        add_event(session, tuning.id, EventKind.PROBE_ENDED, probe_data(run.id, request, outcome), now)
    return run.id


def _probe_row(request: ProbeRequest, outcome: ProbeOutcome, now: datetime) -> ProbeRow:
    return ProbeRow(
        id=uuid4().hex,
        kind=request.kind,
        request_json=request.to_json(),
        wall_s=outcome.wall_s,
        gpu_s=outcome.gpu_s,
        setup_s=outcome.setup_s,
        log_path=outcome.log_path,
        finished_at=now,
        **rows.failure_columns(outcome.failure),
    )


def _reading_row(
    reading: CollectiveReading | LayerReading | StepReading, request: ProbeRequest, keys: dict[str, str]
) -> CollectiveRow | LayerRow | StepRow:
    if isinstance(reading, CollectiveReading):
        return rows.collective_row(reading, **keys)
    if isinstance(reading, StepReading):
        return rows.step_row(reading, **keys)
    if not isinstance(request, LayerRequest):
        raise ValueError(f"a {request.kind} probe cannot have layer readings")
    return rows.layer_row(reading, **keys, model_key=request.model.key, workload_key=request.workload.key)


def _query(row: type[CollectiveRow] | type[LayerRow] | type[StepRow]) -> Select[Any]:
    columns: list[InstrumentedAttribute[Any] | Label[Any]]
    columns = [getattr(row, attribute.key) for attribute in row.__mapper__.column_attrs]
    columns += [getattr(FingerprintRow, name) for name in ENVIRONMENT]
    if row is StepRow:
        return (
            select(
                *columns,
                func.coalesce(TrialRow.tuning_id, ProbeRow.tuning_id).label("tuning_id"),
                func.coalesce(TrialRow.finished_at, ProbeRow.finished_at).label("measured_at"),
                ProbeRow.log_path,
                TrialRow.plan_key,
            )
            .join(FingerprintRow, FingerprintRow.key == StepRow.fingerprint_key)
            .outerjoin(TrialRow, TrialRow.id == StepRow.trial_id)
            .outerjoin(ProbeRow, ProbeRow.id == StepRow.probe_run_id)
        )
    return (
        select(*columns, ProbeRow.tuning_id, ProbeRow.finished_at.label("measured_at"), ProbeRow.log_path)
        .join(FingerprintRow, FingerprintRow.key == row.fingerprint_key)
        .join(ProbeRow, ProbeRow.id == row.probe_run_id)
    )
