"""Regression checks with their measurements, the incidents that follow from them, and alerts to send."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

KEY = sa.String(length=64)
TEXT = sa.Text()
COUNT = sa.BigInteger()
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FIGURE: sa.Double[float] = sa.Double()
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Creates the tables."""
    _checks()
    _measurements()
    _incidents()
    _series()
    _alerts()


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _partial(name: str, table: str, columns: list[str], condition: str, *, unique: bool) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, unique=unique, sqlite_where=where, postgresql_where=where)


def _checks() -> None:
    table = "regression_checks"
    op.create_table(
        table,
        *_required(KEY, "id"),
        *_required(ROW_ID, "entry_id"),
        *_required(KEY, "series", "cluster_key"),
        *_required(TEXT, "pool"),
        *_required(KEY, "fingerprint_key", "environment_key"),
        *_required(TEXT, "owner"),
        *_required(KEY, "state"),
        *_optional(FIGURE, "budget_gpu_s"),
        *_required(FIGURE, "gpu_s"),
        *_required(MOMENT, "started_at"),
        *_optional(MOMENT, "ended_at"),
        *_optional(KEY, "verdict"),
        *_optional(FIGURE, "effect"),
        *_optional(KEY, "cause"),
        *_optional(TEXT, "result_json"),
        *_optional(KEY, "tuning_id"),
        sa.PrimaryKeyConstraint("id", name="pk_regression_checks"),
        sa.ForeignKeyConstraint(["entry_id"], ["best_known.id"], name="fk_regression_checks_entry_id"),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name="fk_regression_checks_tuning_id"),
    )
    _partial("uq_regression_checks_running", table, ["series"], "state = 'running'", unique=True)
    op.create_index("ix_regression_checks_series_started_at", table, ["series", "started_at"])
    op.create_index("ix_regression_checks_cluster_key_started_at", table, ["cluster_key", "started_at"])
    op.create_index("ix_regression_checks_started_at", table, ["started_at"])


def _measurements() -> None:
    op.create_table(
        "regression_measurements",
        *_required(KEY, "check_id"),
        *_required(COUNT, "number"),
        *_required(KEY, "role"),
        *_optional(FIGURE, "speed"),
        *_required(MOMENT, "at"),
        *_required(TEXT, "spec_json"),
        sa.PrimaryKeyConstraint("check_id", "number", name="pk_regression_measurements"),
        sa.ForeignKeyConstraint(["check_id"], ["regression_checks.id"], name="fk_regression_measurements_check_id"),
    )


def _incidents() -> None:
    table = "regression_incidents"
    op.create_table(
        table,
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        *_required(TEXT, "key"),
        *_required(KEY, "kind"),
        *_required(TEXT, "subject", "message"),
        *_required(KEY, "check_id"),
        *_required(MOMENT, "opened_at"),
        *_optional(MOMENT, "recovered_at"),
        sa.PrimaryKeyConstraint("id", name="pk_regression_incidents"),
        sa.ForeignKeyConstraint(["check_id"], ["regression_checks.id"], name="fk_regression_incidents_check_id"),
    )
    _partial("uq_regression_incidents_open", table, ["key"], "recovered_at IS NULL", unique=True)
    op.create_index("ix_regression_incidents_opened_at", table, ["opened_at"])


def _series() -> None:
    table = "regression_incident_series"
    op.create_table(
        table,
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        *_required(ROW_ID, "incident_id"),
        *_required(KEY, "series"),
        *_required(ROW_ID, "entry_id"),
        *_optional(MOMENT, "recovered_at"),
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(["incident_id"], ["regression_incidents.id"], name=f"fk_{table}_incident_id"),
        sa.ForeignKeyConstraint(["entry_id"], ["best_known.id"], name=f"fk_{table}_entry_id"),
        sa.UniqueConstraint("incident_id", "series", name=f"uq_{table}_incident_id_series"),
    )
    _partial(f"uq_{table}_open", table, ["series"], "recovered_at IS NULL", unique=True)


def _alerts() -> None:
    table = "regression_alerts"
    op.create_table(
        table,
        *_required(KEY, "key"),
        *_required(ROW_ID, "incident_id"),
        *_required(KEY, "event", "channel"),
        *_required(MOMENT, "at"),
        *_required(COUNT, "attempts"),
        *_required(MOMENT, "due_at"),
        *_optional(MOMENT, "sent_at"),
        *_required(TEXT, "error"),
        sa.PrimaryKeyConstraint("key", name="pk_regression_alerts"),
        sa.ForeignKeyConstraint(["incident_id"], ["regression_incidents.id"], name="fk_regression_alerts_incident_id"),
    )
    _partial("ix_regression_alerts_due", table, ["due_at"], "sent_at IS NULL", unique=False)
