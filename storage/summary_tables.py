"""What is left of samples once they were compacted. The figures that were made of them stay as they are."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from storage.columns import Base, Key, Moment, RowId


class SampleSummaryRow(Base):
    """A series of a step measurement (storage.tables.SampleRow) in six figures of its own unit."""

    __tablename__ = "sample_summaries"

    step_measurement_id: Mapped[int] = mapped_column(ForeignKey("step_measurements.id"), primary_key=True)
    series: Mapped[Key] = mapped_column(primary_key=True)
    count: Mapped[int]
    mean: Mapped[float]
    least: Mapped[float]
    median: Mapped[float]
    most: Mapped[float]
    first: Mapped[float]
    last: Mapped[float]


class CollectiveSummaryRow(Base):
    """Old readings of one size of a collective in one environment: median time and range, from when to when."""

    __tablename__ = "collective_summaries"
    __table_args__ = (Index(None, "cluster_key", "fingerprint_key"),)

    id: Mapped[RowId]
    cluster_key: Mapped[Key]
    fingerprint_key: Mapped[Key] = mapped_column(ForeignKey("fingerprints.key"))
    op: Mapped[Key]
    group_size: Mapped[int]
    stride: Mapped[int]
    size_bytes: Mapped[int]
    count: Mapped[int]
    time_s: Mapped[float]
    time_least_s: Mapped[float]
    time_most_s: Mapped[float]
    first_at: Mapped[Moment]
    last_at: Mapped[Moment]
