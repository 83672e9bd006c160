"""The tables of what was measured elsewhere: files, runs and collective readings, each row under its source."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from storage.columns import Base, Key, Moment, RowId
from storage.tables import FailureColumns, PlanColumns


class ImportBatchRow(Base):
    """One imported file. The same content is never stored twice, whatever its name."""

    __tablename__ = "import_batches"
    __table_args__ = (UniqueConstraint("sha256"), Index(None, "source"))

    id: Mapped[RowId]
    source: Mapped[str]
    file_name: Mapped[str]
    format: Mapped[Key]
    sha256: Mapped[Key]
    size_bytes: Mapped[int]
    imported_at: Mapped[Moment]


class ImportedRunRow(PlanColumns, FailureColumns, Base):
    """One training run of others. It has either a speed or a failure."""

    __tablename__ = "imported_runs"
    __table_args__ = (
        Index(None, "source"),
        Index(None, "batch_id"),
        Index(None, "model_key", "cluster_key", "workload_key"),
    )

    id: Mapped[RowId]
    batch_id: Mapped[int] = mapped_column(ForeignKey("import_batches.id"))
    source: Mapped[str]
    place: Mapped[str]
    framework: Mapped[Key]
    run_group: Mapped[str]
    model_name: Mapped[str]
    model_key: Mapped[Key]
    model_json: Mapped[str]
    cluster_name: Mapped[str]
    cluster_key: Mapped[Key]
    cluster_json: Mapped[str]
    devices: Mapped[int]
    workload_key: Mapped[Key]
    workload_json: Mapped[str]
    tokens_per_s_per_gpu: Mapped[float | None]
    interval_low_tokens_per_s_per_gpu: Mapped[float | None]
    interval_high_tokens_per_s_per_gpu: Mapped[float | None]
    steps: Mapped[int]
    peak_reserved_bytes: Mapped[int | None]
    peak_allocated_bytes: Mapped[int | None]


class ImportedReadingRow(Base):
    """One size of a collective sweep of others."""

    __tablename__ = "imported_readings"
    __table_args__ = (Index(None, "source", "cluster_key"), Index(None, "batch_id"))

    id: Mapped[RowId]
    batch_id: Mapped[int] = mapped_column(ForeignKey("import_batches.id"))
    source: Mapped[str]
    place: Mapped[str]
    cluster_key: Mapped[Key]
    cluster_json: Mapped[str]
    op: Mapped[Key]
    group_size: Mapped[int]
    stride: Mapped[int]
    size_bytes: Mapped[int]
    iterations: Mapped[int]
    time_s: Mapped[float]
    time_p10_s: Mapped[float]
    time_p90_s: Mapped[float]
    algbw_bytes_per_s: Mapped[float]
    busbw_bytes_per_s: Mapped[float]
