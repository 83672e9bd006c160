"""The tables of a fleet: nodes, jobs, leases, the log of events, who asked for what, and API keys."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import InstrumentedAttribute, Mapped, mapped_column, relationship

from autotune.specs.fleet import LOCAL
from storage.database.columns import Base, Free, FreeText, Key, Moment, RowId, UtcDateTime

UNREVOKED = "revoked_at IS NULL"


def of_pool(column: InstrumentedAttribute[str], pool: str | None = None) -> ColumnElement[bool]:
    """Whether a row is of that pool; without one, of any pool of the fleet, which those of single processes are not."""
    return column == pool if pool is not None else ~column.startswith(LOCAL)


class NodeRow(Base):
    """A node, as its newest session registered it. A forgotten one stays only for the rows that name it."""

    __tablename__ = "nodes"
    __table_args__ = (Index(None, "pool"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str]
    address: Mapped[str]
    topology: Mapped[str]
    device_json: Mapped[str]
    slots: Mapped[int]
    nics: Mapped[int]
    cores: Mapped[int]
    memory_bytes: Mapped[int]
    fingerprint_key: Mapped[str]
    environment_key: Mapped[str]
    session: Mapped[str]
    state: Mapped[Key]
    reason: Mapped[Free]
    failures: Mapped[int]
    world_id: Mapped[str]
    lost_after_s: Mapped[float] = mapped_column(server_default="60")
    commands_json: Mapped[Free] = mapped_column(server_default="[]")
    registered_at: Mapped[Moment]
    heartbeat_at: Mapped[Moment]
    forgotten_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class NodeIncidentRow(Base):
    """Something that a node did."""

    __tablename__ = "node_incidents"
    __table_args__ = (Index(None, "node", "id"),)

    id: Mapped[RowId]
    node: Mapped[str] = mapped_column(ForeignKey("nodes.name"))
    at: Mapped[Moment]
    kind: Mapped[str]
    message: Mapped[Free]
    job_id: Mapped[str]


class JobRow(Base):
    """One probe on a gang of nodes. `devices` are those of the gang, for what it used."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "pool", "state", "created_at", "id"),
        Index(None, "state", "created_at", "id"),
        Index(None, "tuning_id", "ended_at"),
        Index(None, "ended_at"),
    )

    id: Mapped[Key] = mapped_column(primary_key=True)
    purpose: Mapped[Key]
    pool: Mapped[str]
    cluster_json: Mapped[str]
    devices: Mapped[int]
    request_json: Mapped[str]
    tuning_id: Mapped[Key | None] = mapped_column(ForeignKey("tunings.id"))
    trial_id: Mapped[Key | None] = mapped_column(ForeignKey("tuning_trials.id"))
    principal: Mapped[str]
    environment_key: Mapped[str]
    only_node: Mapped[str]
    avoid_json: Mapped[str]
    attempt: Mapped[int]
    deadline_s: Mapped[float]
    state: Mapped[Key]
    cancelled: Mapped[bool]
    token: Mapped[int]
    world_id: Mapped[str]
    warm: Mapped[bool]
    endpoint: Mapped[str]
    progress_json: Mapped[str | None] = mapped_column(FreeText)
    failure_kind: Mapped[Key | None]
    message: Mapped[Free]
    created_at: Mapped[Moment]
    granted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    members: Mapped[list[MemberRow]] = relationship(lazy="selectin", order_by="MemberRow.number")


class MemberRow(Base):
    """One node's part in a job; `number` is its place in the gang."""

    __tablename__ = "job_members"
    __table_args__ = (UniqueConstraint("job_id", "node"), Index(None, "state", "expires_at"))

    job_id: Mapped[Key] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(ForeignKey("nodes.name"))
    address: Mapped[str]
    state: Mapped[Key]
    expires_at: Mapped[Moment]
    failure_kind: Mapped[Key | None]
    report_json: Mapped[str | None]


class LeaseRow(Base):
    """Which job holds a node. The node is the primary key: no two jobs can hold one."""

    __tablename__ = "leases"
    __table_args__ = (Index(None, "job_id"),)

    node: Mapped[str] = mapped_column(ForeignKey("nodes.name"), primary_key=True)
    job_id: Mapped[Key] = mapped_column(ForeignKey("jobs.id"))
    token: Mapped[int]


class CounterRow(Base):
    """A number that only grows, whatever else is deleted."""

    __tablename__ = "counters"

    name: Mapped[Key] = mapped_column(primary_key=True)
    value: Mapped[int]


class EventRow(Base):
    """One line of a tuning's log."""

    __tablename__ = "tuning_events"
    __table_args__ = (Index(None, "tuning_id", "id"),)

    id: Mapped[RowId]
    tuning_id: Mapped[Key] = mapped_column(ForeignKey("tunings.id"))
    kind: Mapped[Key]
    at: Mapped[Moment]
    data_json: Mapped[Free]


class InterestRow(Base):
    """A principal who wants a tuning: one that shares it, or the only one."""

    __tablename__ = "tuning_interests"

    tuning_id: Mapped[Key] = mapped_column(ForeignKey("tunings.id"), primary_key=True)
    principal: Mapped[str] = mapped_column(primary_key=True)


class IdempotencyRow(Base):
    """What a principal's idempotency key led to."""

    __tablename__ = "idempotency_keys"

    principal: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    tuning_id: Mapped[Key] = mapped_column(ForeignKey("tunings.id"))
    created_at: Mapped[Moment]


class ApiKeyRow(Base):
    """An API key; of its secret only the hash."""

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("secret_hash"),
        Index(
            "uq_api_keys_name_unrevoked",
            "name",
            unique=True,
            sqlite_where=text(UNREVOKED),
            postgresql_where=text(UNREVOKED),
        ),
    )

    id: Mapped[Key] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[Key]
    secret_hash: Mapped[str]
    created_at: Mapped[Moment]
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
