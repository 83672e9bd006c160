"""The table of best-known plans, and the documents that its rows share."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from storage.columns import Base, Free, Key, Moment, RowId, UtcDateTime

CURRENT = text("superseded_at IS NULL")


class DocumentRow(Base):
    """The canonical JSON of a model, cluster or workload, once for all rows that name its key."""

    __tablename__ = "spec_documents"

    digest: Mapped[Key] = mapped_column(primary_key=True)
    spec_json: Mapped[str]


class BestRow(Base):
    """One entry. Of one model, cluster, workload, environment and source one is current."""

    __tablename__ = "best_known"
    __table_args__ = (
        Index(
            "uq_best_known_current",
            "model_key", "cluster_key", "workload_key", "environment_key", "source",
            unique=True, sqlite_where=CURRENT, postgresql_where=CURRENT,
        ),
        Index(
            "ix_best_known_same_model",
            "model_key", "device_name", "dtype", "devices", "seq_len",
            sqlite_where=CURRENT, postgresql_where=CURRENT,
        ),
        Index(
            "ix_best_known_siblings",
            "device_name", "dtype", "parameters",
            sqlite_where=CURRENT, postgresql_where=CURRENT,
        ),
        Index("ix_best_known_question", "model_key", "cluster_key", "workload_key"),
        Index("ix_best_known_model_name", "model_name", "id"),
        Index("ix_best_known_cluster_name", "cluster_name", "id"),
    )  # fmt: skip

    id: Mapped[RowId]
    model_name: Mapped[str]
    model_key: Mapped[Key]
    model_digest: Mapped[Key] = mapped_column(ForeignKey("spec_documents.digest"))
    parameters: Mapped[float]
    cluster_name: Mapped[str]
    cluster_key: Mapped[Key]
    cluster_digest: Mapped[Key] = mapped_column(ForeignKey("spec_documents.digest"))
    device_name: Mapped[str]
    gpus_per_node: Mapped[int]
    devices: Mapped[int]
    workload_key: Mapped[Key]
    workload_digest: Mapped[Key] = mapped_column(ForeignKey("spec_documents.digest"))
    seq_len: Mapped[int]
    global_batch: Mapped[int]
    dtype: Mapped[Key]
    plan_key: Mapped[str]
    plan_json: Mapped[str]
    tokens_per_s_per_gpu: Mapped[float]
    interval_low_tokens_per_s_per_gpu: Mapped[float]
    interval_high_tokens_per_s_per_gpu: Mapped[float]
    repeats: Mapped[int]
    peak_bytes: Mapped[int | None]
    memory_source: Mapped[str]
    runner_up_json: Mapped[str | None]
    reason: Mapped[Free]
    source: Mapped[str]
    tuning_id: Mapped[Key | None]
    fingerprint_key: Mapped[Key]
    environment_key: Mapped[Key]
    measured_at: Mapped[Moment]
    superseded_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
