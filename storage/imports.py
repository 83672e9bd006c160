"""What was measured elsewhere, kept by source: it comes back only when it is asked for by that name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, ForeignKey, Index, UniqueConstraint, delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import ClusterSpec, CollectiveOp, CollectiveReading, ModelSpec, Plan, Workload
from autotune.specs.imported import ImportBatch, ImportedReading, ImportedRun
from storage.database.columns import Base, Key, Moment, RowId
from storage.database.session import SessionStore
from storage.tunings import rows
from storage.tunings.tables import FailureColumns, PlanColumns


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


ROWS_AT_ONCE = 1000
BATCH_COLUMNS = tuple(ImportBatch.model_fields)
PEAKS = ("steps", "peak_reserved_bytes", "peak_allocated_bytes")


class ImportStore(SessionStore):
    """Imported files, and the runs and readings in them."""

    def save_import(
        self,
        batch: ImportBatch,
        runs: Iterable[ImportedRun],
        readings: Iterable[ImportedReading],
        *,
        replaces: Sequence[str] = (),
    ) -> None:
        """Stores a file with all its rows, whole or not at all, also where going through them raises.

        Args:
            batch: the file.
            runs: in it.
            readings: in it.
            replaces: digests of files of the same source that this one takes the place of.

        Raises:
            StoreConflictError: that content is stored already; nothing changes.
        """
        row = ImportBatchRow(**{name: getattr(batch, name) for name in BATCH_COLUMNS})
        with self.writing() as session:
            outdated = [ImportBatchRow.source == batch.source, ImportBatchRow.sha256.in_(replaces)]
            _forget(session, *outdated)
            session.add(row)
            try:
                session.flush()
            except IntegrityError as error:
                raise StoreConflictError(f"the content of {batch.file_name!r} is imported already") from error
            keys = {"batch_id": row.id, "source": batch.source}
            _add_all(session, (_run_row(run, keys) for run in runs))
            _add_all(session, (_reading_row(reading, keys) for reading in readings))

    def imports(self, source: str | None = None) -> Sequence[ImportBatch]:
        """All imported files (of a source, if one is given), oldest first."""
        query = select(ImportBatchRow).order_by(ImportBatchRow.id)
        if source is not None:
            query = query.where(ImportBatchRow.source == source)
        with self.reading() as session:
            found = session.scalars(query)
            return [ImportBatch(**{name: getattr(row, name) for name in BATCH_COLUMNS}) for row in found]

    def runs_of_import(self, sha256: str) -> Iterator[ImportedRun]:
        """The runs of one imported file, in its order, a few at a time."""
        query = select(ImportedRunRow).join(ImportBatchRow, ImportBatchRow.id == ImportedRunRow.batch_id)
        query, last = query.where(ImportBatchRow.sha256 == sha256).order_by(ImportedRunRow.id), 0
        while True:
            with self.reading() as session:
                found = session.scalars(query.where(ImportedRunRow.id > last).limit(ROWS_AT_ONCE)).all()
                runs = [_run_of(row) for row in found]
                last = max((row.id for row in found), default=last)
            if not runs:
                return
            yield from runs

    def imported_runs(self, source: str) -> Sequence[ImportedRun]:
        """All runs of a source, in the order of their import. Raises UnknownNameError for one that was never used."""
        query = select(ImportedRunRow).where(ImportedRunRow.source == source).order_by(ImportedRunRow.id)
        with self.reading() as session:
            _require_source(session, source)
            return [_run_of(row) for row in session.scalars(query)]

    def imported_readings(self, source: str, cluster_key: str) -> Sequence[CollectiveReading]:
        """A source's collective readings on that cluster, oldest first. Raises UnknownNameError."""
        query = select(ImportedReadingRow).where(
            ImportedReadingRow.source == source, ImportedReadingRow.cluster_key == cluster_key
        )
        with self.reading() as session:
            _require_source(session, source)
            return [_reading_of(row) for row in session.scalars(query.order_by(ImportedReadingRow.id))]

    def forget_import(self, source: str) -> int:
        """Removes everything of a source; returns the number of its files. Raises UnknownNameError."""
        with self.writing() as session:
            _require_source(session, source)
            return _forget(session, ImportBatchRow.source == source)


def _add_all(session: Session, new: Iterator[Base]) -> None:
    """Stores rows some at a time, and holds no more of them."""
    while some := list(islice(new, ROWS_AT_ONCE)):
        session.add_all(some)
        session.flush()
        session.expunge_all()


def _require_source(session: Session, source: str) -> None:
    known = session.scalars(select(ImportBatchRow.source).distinct()).all()
    if source not in known:
        raise UnknownNameError("source", source, known)


def _forget(session: Session, *which: ColumnElement[bool]) -> int:
    batches = session.scalars(select(ImportBatchRow.id).where(*which)).all()
    for table in (ImportedRunRow, ImportedReadingRow):
        session.execute(delete(table).where(table.batch_id.in_(batches)))
    session.execute(delete(ImportBatchRow).where(ImportBatchRow.id.in_(batches)))
    return len(batches)


def _run_row(run: ImportedRun, keys: dict[str, Any]) -> ImportedRunRow:
    low, high = run.interval_tokens_per_s_per_gpu or (None, None)
    return ImportedRunRow(
        **keys,
        **{name: getattr(run, name) for name in ("framework", "tokens_per_s_per_gpu", *PEAKS)},
        **rows.plan_columns(run.plan),
        **rows.failure_columns(run.failure),
        place=run.where,
        run_group=run.group,
        model_name=run.model.name,
        model_key=run.model.key,
        model_json=run.model.to_json(),
        cluster_name=run.cluster.name,
        cluster_key=run.cluster.key,
        cluster_json=run.cluster.to_json(),
        devices=run.cluster.devices,
        workload_key=run.workload.key,
        workload_json=run.workload.to_json(),
        interval_low_tokens_per_s_per_gpu=low,
        interval_high_tokens_per_s_per_gpu=high,
    )


def _run_of(row: ImportedRunRow) -> ImportedRun:
    low, high = row.interval_low_tokens_per_s_per_gpu, row.interval_high_tokens_per_s_per_gpu
    model, cluster, workload = _specs(row.model_json, row.cluster_json, row.workload_json)
    return ImportedRun(
        **{name: getattr(row, name) for name in ("framework", "tokens_per_s_per_gpu", *PEAKS)},
        where=row.place,
        group=row.run_group,
        model=model,
        cluster=cluster,
        workload=workload,
        plan=Plan.from_json(row.plan_json),
        interval_tokens_per_s_per_gpu=None if low is None or high is None else (low, high),
        failure=rows.failure_of(row),
    )


@lru_cache(maxsize=64)
def _specs(model_json: str, cluster_json: str, workload_json: str) -> tuple[ModelSpec, ClusterSpec, Workload]:
    """The rows of a file are mostly of one request: each is parsed once."""
    return ModelSpec.from_json(model_json), ClusterSpec.from_json(cluster_json), Workload.from_json(workload_json)


def _reading_row(item: ImportedReading, keys: dict[str, Any]) -> ImportedReadingRow:
    cluster = {"cluster_key": item.cluster.key, "cluster_json": item.cluster.to_json()}
    return ImportedReadingRow(**keys, **cluster, place=item.where, **item.reading.to_data())


def _reading_of(row: ImportedReadingRow) -> CollectiveReading:
    values: Iterable[tuple[str, Any]] = ((name, getattr(row, name)) for name in CollectiveReading.model_fields)
    return CollectiveReading(**dict(values) | {"op": CollectiveOp(row.op)})
