"""What was measured elsewhere, under its source; summaries of compacted samples; indexes by age."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

KEY = sa.String(length=64)
TEXT = sa.Text()
COUNT = sa.BigInteger()
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FIGURE: sa.Double[float] = sa.Double()
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Creates the tables of imports and of summaries; tunings learn which source they learn from."""
    op.add_column("tunings", sa.Column("history", TEXT, server_default="", nullable=False))
    _batches()
    _runs()
    _readings()
    _sample_summaries()
    _collective_summaries()
    _collective_index()
    op.create_index(op.f("ix_probe_runs_finished_at"), "probe_runs", ["finished_at"], unique=False)
    op.create_index(op.f("ix_tuning_trials_finished_at"), "tuning_trials", ["finished_at"], unique=False)


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _batches() -> None:
    op.create_table(
        "import_batches",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        *_required(TEXT, "source", "file_name"),
        *_required(KEY, "format", "sha256"),
        *_required(COUNT, "size_bytes"),
        *_required(MOMENT, "imported_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_import_batches")),
        sa.UniqueConstraint("sha256", name=op.f("uq_import_batches_sha256")),
    )
    op.create_index(op.f("ix_import_batches_source"), "import_batches", ["source"], unique=False)


def _runs() -> None:
    op.create_table(
        "imported_runs",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        *_required(ROW_ID, "batch_id"),
        *_required(TEXT, "source", "place", "run_group", "model_name", "model_json", "cluster_name", "cluster_json"),
        *_required(TEXT, "workload_json", "plan_key", "plan_json"),
        *_required(KEY, "framework", "model_key", "cluster_key", "workload_key", "recompute", "schedule"),
        *_required(COUNT, "devices", "steps", "tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "zero_stage"),
        *_required(sa.Boolean(), "sequence_parallel"),
        *_optional(FIGURE, "tokens_per_s_per_gpu", "interval_low_tokens_per_s_per_gpu"),
        *_optional(FIGURE, "interval_high_tokens_per_s_per_gpu"),
        *_optional(COUNT, "peak_reserved_bytes", "peak_allocated_bytes", "failure_rank", "failure_stage"),
        *_optional(KEY, "failure_kind"),
        *_optional(TEXT, "failure_message", "failure_log_path", "failure_log_tail"),
        sa.ForeignKeyConstraint(["batch_id"], ["import_batches.id"], name=op.f("fk_imported_runs_batch_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_imported_runs")),
    )
    keys = ["model_key", "cluster_key", "workload_key"]
    for columns in (["source"], ["batch_id"], keys):
        op.create_index(op.f(f"ix_imported_runs_{'_'.join(columns)}"), "imported_runs", columns, unique=False)


def _readings() -> None:
    op.create_table(
        "imported_readings",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        *_required(ROW_ID, "batch_id"),
        *_required(TEXT, "source", "place", "cluster_json"),
        *_required(KEY, "cluster_key", "op"),
        *_required(COUNT, "group_size", "stride", "size_bytes", "iterations"),
        *_required(FIGURE, "time_s", "time_p10_s", "time_p90_s", "algbw_bytes_per_s", "busbw_bytes_per_s"),
        sa.ForeignKeyConstraint(["batch_id"], ["import_batches.id"], name=op.f("fk_imported_readings_batch_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_imported_readings")),
    )
    for columns in (["source", "cluster_key"], ["batch_id"]):
        op.create_index(op.f(f"ix_imported_readings_{'_'.join(columns)}"), "imported_readings", columns, unique=False)


def _sample_summaries() -> None:
    op.create_table(
        "sample_summaries",
        *_required(ROW_ID, "step_measurement_id"),
        *_required(KEY, "series"),
        *_required(COUNT, "count"),
        *_required(FIGURE, "mean", "least", "median", "most", "first", "last"),
        sa.ForeignKeyConstraint(
            ["step_measurement_id"], ["step_measurements.id"], name=op.f("fk_sample_summaries_step_measurement_id")
        ),
        sa.PrimaryKeyConstraint("step_measurement_id", "series", name=op.f("pk_sample_summaries")),
    )


def _collective_summaries() -> None:
    op.create_table(
        "collective_summaries",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        *_required(KEY, "cluster_key", "fingerprint_key", "op"),
        *_required(COUNT, "group_size", "stride", "size_bytes", "count"),
        *_required(FIGURE, "time_s", "time_least_s", "time_most_s"),
        *_required(MOMENT, "first_at", "last_at"),
        sa.ForeignKeyConstraint(
            ["fingerprint_key"], ["fingerprints.key"], name=op.f("fk_collective_summaries_fingerprint_key")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collective_summaries")),
    )
    op.create_index(
        op.f("ix_collective_summaries_cluster_key_fingerprint_key"),
        "collective_summaries",
        ["cluster_key", "fingerprint_key"],
        unique=False,
    )


def _collective_index() -> None:
    """Readings are looked up by cluster and environment, and compacted by all that makes them alike."""
    op.drop_index(op.f("ix_collective_measurements_cluster_key_fingerprint_key"), table_name="collective_measurements")
    op.create_index(
        "ix_collective_measurements_kind",
        "collective_measurements",
        ["cluster_key", "fingerprint_key", "op", "group_size", "stride", "size_bytes"],
        unique=False,
    )
