"""Best-known plans get a table of their own. Until now they were looked for among all trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds best_known and spec_documents, and the indexes by which the newest environment of a cluster is found."""
    key, number = sa.String(length=64), sa.BigInteger()
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "spec_documents",
        sa.Column("digest", key, nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_spec_documents"),
    )
    digests = [
        sa.ForeignKeyConstraint([f"{name}_digest"], ["spec_documents.digest"], name=f"fk_best_known_{name}_digest")
        for name in ("model", "cluster", "workload")
    ]
    op.create_table(
        "best_known",
        sa.Column("id", number.with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("model_key", key, nullable=False),
        sa.Column("model_digest", key, nullable=False),
        sa.Column("parameters", sa.Double(), nullable=False),
        sa.Column("cluster_name", sa.Text(), nullable=False),
        sa.Column("cluster_key", key, nullable=False),
        sa.Column("cluster_digest", key, nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("gpus_per_node", number, nullable=False),
        sa.Column("devices", number, nullable=False),
        sa.Column("workload_key", key, nullable=False),
        sa.Column("workload_digest", key, nullable=False),
        sa.Column("seq_len", number, nullable=False),
        sa.Column("global_batch", number, nullable=False),
        sa.Column("dtype", key, nullable=False),
        sa.Column("plan_key", sa.Text(), nullable=False),
        sa.Column("plan_json", sa.Text(), nullable=False),
        sa.Column("tokens_per_s_per_gpu", sa.Double(), nullable=False),
        sa.Column("interval_low_tokens_per_s_per_gpu", sa.Double(), nullable=False),
        sa.Column("interval_high_tokens_per_s_per_gpu", sa.Double(), nullable=False),
        sa.Column("repeats", number, nullable=False),
        sa.Column("peak_bytes", number, nullable=True),
        sa.Column("memory_source", sa.Text(), nullable=False),
        sa.Column("runner_up_json", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("tuning_id", key, nullable=True),
        sa.Column("fingerprint_key", key, nullable=False),
        sa.Column("environment_key", key, nullable=False),
        sa.Column("measured_at", moment, nullable=False),
        sa.Column("superseded_at", moment, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_best_known"),
        *digests,
    )
    _current("uq_best_known_current", ["model_key", "cluster_key", "workload_key", "environment_key", "source"], True)
    _current("ix_best_known_same_model", ["model_key", "device_name", "dtype", "devices", "seq_len"])
    _current("ix_best_known_siblings", ["device_name", "dtype", "parameters"])
    op.create_index("ix_best_known_question", "best_known", ["model_key", "cluster_key", "workload_key"])
    op.create_index("ix_best_known_model_name", "best_known", ["model_name", "id"])
    op.create_index("ix_best_known_cluster_name", "best_known", ["cluster_name", "id"])
    op.create_index("ix_probe_runs_cluster_key_finished_at", "probe_runs", ["cluster_key", "finished_at"])
    op.create_index("ix_step_measurements_cluster_key_id", "step_measurements", ["cluster_key", "id"])


def _current(name: str, columns: list[str], unique: bool = False) -> None:
    """An index over current entries only."""
    where = sa.text("superseded_at IS NULL")
    op.create_index(name, "best_known", columns, unique=unique, sqlite_where=where, postgresql_where=where)
