"""The tables of regression checks: checks with their measurements, incidents with their series, alerts to send."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from storage.database.columns import Base, Free, Key, Moment, RowId, UtcDateTime

RUNNING = text("state = 'running'")
OPEN = text("recovered_at IS NULL")
UNSENT = text("sent_at IS NULL")


class CheckRow(Base):
    """One check. Of one series one runs at a time."""

    __tablename__ = "regression_checks"
    __table_args__ = (
        Index("uq_regression_checks_running", "series", unique=True, sqlite_where=RUNNING, postgresql_where=RUNNING),
        Index(None, "series", "started_at"),
        Index(None, "cluster_key", "started_at"),
        Index(None, "started_at"),
    )

    id: Mapped[Key] = mapped_column(primary_key=True)
    entry_id: Mapped[int] = mapped_column(ForeignKey("best_known.id"))
    series: Mapped[Key]
    cluster_key: Mapped[Key]
    pool: Mapped[str]
    fingerprint_key: Mapped[Key]
    environment_key: Mapped[Key]
    owner: Mapped[str]
    state: Mapped[Key]
    budget_gpu_s: Mapped[float | None]
    gpu_s: Mapped[float]
    started_at: Mapped[Moment]
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    verdict: Mapped[Key | None]
    effect: Mapped[float | None]
    cause: Mapped[Key | None]
    result_json: Mapped[str | None]
    tuning_id: Mapped[Key | None] = mapped_column(ForeignKey("tunings.id"))


class CheckMeasurementRow(Base):
    """One probe of a check."""

    __tablename__ = "regression_measurements"

    check_id: Mapped[Key] = mapped_column(ForeignKey("regression_checks.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    role: Mapped[Key]
    speed: Mapped[float | None]
    at: Mapped[Moment]
    spec_json: Mapped[Free]


class IncidentRow(Base):
    """One incident. Of one key one is open at a time."""

    __tablename__ = "regression_incidents"
    __table_args__ = (
        Index("uq_regression_incidents_open", "key", unique=True, sqlite_where=OPEN, postgresql_where=OPEN),
        Index(None, "opened_at"),
    )

    id: Mapped[RowId]
    key: Mapped[str]
    kind: Mapped[Key]
    subject: Mapped[str]
    message: Mapped[Free]
    check_id: Mapped[Key] = mapped_column(ForeignKey("regression_checks.id"))
    opened_at: Mapped[Moment]
    recovered_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class IncidentSeriesRow(Base):
    """A plan that an incident made slower, until it has recovered. A series is in one incident at a time."""

    __tablename__ = "regression_incident_series"
    __table_args__ = (
        UniqueConstraint("incident_id", "series"),
        Index("uq_regression_incident_series_open", "series", unique=True, sqlite_where=OPEN, postgresql_where=OPEN),
    )

    id: Mapped[RowId]
    incident_id: Mapped[int] = mapped_column(ForeignKey("regression_incidents.id"))
    series: Mapped[Key]
    entry_id: Mapped[int] = mapped_column(ForeignKey("best_known.id"))
    recovered_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class AlertRow(Base):
    """One message to one channel, with how sending it went."""

    __tablename__ = "regression_alerts"
    __table_args__ = (Index("ix_regression_alerts_due", "due_at", sqlite_where=UNSENT, postgresql_where=UNSENT),)

    key: Mapped[Key] = mapped_column(primary_key=True)
    incident_id: Mapped[int] = mapped_column(ForeignKey("regression_incidents.id"))
    event: Mapped[Key]
    channel: Mapped[Key]
    at: Mapped[Moment]
    attempts: Mapped[int]
    due_at: Mapped[Moment]
    sent_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    error: Mapped[Free]
