"""Compaction: raw samples of a stated age become summaries, and what storage.care.retention names is deleted.

Summaries take the place of the single steps behind a step measurement, and of readings of a collective beyond the
newest of each kind. Figures and verdicts that were made of them never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import fmean, median
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Engine,
    Row,
    Select,
    delete,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.orm import Session

from autotune.errors import InputError
from storage.care.maintenance import size_bytes
from storage.care.retention import (
    AT_ONCE,
    drop_events,
    drop_incidents,
    drop_keys,
    drop_logs,
    drop_ranks,
    drop_reports,
    pieces,
)
from storage.database.columns import Base
from storage.database.engine import alone, build_engine, locate, translated
from storage.store import SqlStore, open_store
from storage.tunings.tables import (
    CollectiveRow,
    CollectiveSummaryRow,
    ProbeRow,
    SampleRow,
    SampleSummaryRow,
    StepRow,
    TrialRow,
)

DEFAULT_AGE = timedelta(days=90)
DEFAULT_KEPT = 20
SETTLED_AGE = timedelta(days=1)
"""Reports and keys stay for at least this long, whatever age is asked for: checks under way read the reports of their
jobs again, and a client that lost an answer sends its idempotency key again."""

KINDS_AT_ONCE = 50
KEY = (
    CollectiveRow.cluster_key, CollectiveRow.fingerprint_key, CollectiveRow.op, CollectiveRow.group_size,
    CollectiveRow.stride, CollectiveRow.size_bytes,
)  # fmt: skip
"""What makes readings of a collective alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What was compacted: raw rows that are summaries now, logs and events that are gone, and the size.

    Args:
        database: its name.
        before: what ended before this moment was old enough.
        samples: rows of single steps.
        readings: rows of collective readings.
        logs: failed probes whose log was dropped; what failed and why is kept.
        events: lines of ended tunings' logs.
        reports: members of ended jobs whose ranks' reports were dropped.
        ranks: what single ranks saw in a step.
        incidents: of nodes.
        keys: idempotency keys of ended tunings.
        size_before_bytes: of the whole database.
        size_after_bytes: the same after the vacuum.
    """

    database: str
    before: datetime
    samples: int
    readings: int
    logs: int
    events: int
    reports: int
    ranks: int
    incidents: int
    keys: int
    size_before_bytes: int
    size_after_bytes: int


def compact(
    url: str, *, age: timedelta = DEFAULT_AGE, kept: int = DEFAULT_KEPT, now: datetime | None = None
) -> Compaction:
    """Compacts what is older than `age`, and gives the space back.

    Args:
        url: the database.
        age: of what is compacted, since it ended.
        kept: newest readings of each collective (cluster, environment, operation, layout, size) that stay raw.
        now: the present moment, for tests.

    Raises:
        InputError: an age or number below zero.
        StoreError: the database cannot be used or written.
    """
    if age < timedelta(0) or kept < 1:
        raise InputError("compaction", f"{age}, {kept}", "an age of at least 0 days, and at least 1 reading to keep")
    now = now or datetime.now(UTC)
    before = now - age
    settled = min(before, now - SETTLED_AGE)
    location = locate(url)
    with open_store(url) as store:
        size_before = _size(store)
        found = {
            "samples": sum(_samples(store, before)),
            "readings": sum(_readings(store, before, kept)),
            "logs": drop_logs(store, before),
            "events": drop_events(store, before),
            "reports": sum(drop_reports(store, settled)),
            "ranks": sum(drop_ranks(store, before)),
            "incidents": drop_incidents(store, before),
            "keys": drop_keys(store, settled),
        }
    engine = build_engine(location, read_only=False)
    try:
        with translated(location):
            vacuum(engine)
    finally:
        engine.dispose()
    with open_store(url, read_only=True) as store:
        return Compaction(
            database=location.name, before=before, size_before_bytes=size_before, size_after_bytes=_size(store), **found
        )


def vacuum(engine: Engine) -> None:
    """Gives free space back and renews the planner's statistics, table by table on PostgreSQL."""
    with alone(engine).connect() as connection:
        if connection.dialect.name == "sqlite":
            connection.commit()  # VACUUM must stand outside the transaction that SQLAlchemy has begun
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.execute("VACUUM")
            raw.execute("ANALYZE")
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return
        for table in Base.metadata.sorted_tables:
            connection.execute(text(f'VACUUM (ANALYZE) "{table.name}"'))


def _size(store: SqlStore) -> int:
    with store.reading() as session:
        return size_bytes(session.connection())


def _samples(store: SqlStore, before: datetime) -> Iterator[int]:
    """Series of step measurements to their summaries; gives the rows of each transaction."""
    for session, ids in pieces(store, _old_steps(before), StepRow.id, 0):
        query = select(SampleRow).where(SampleRow.step_measurement_id.in_(ids))
        series: dict[tuple[int, str], list[float]] = {}
        for row in session.scalars(query.order_by(SampleRow.number)):
            series.setdefault((row.step_measurement_id, row.series), []).append(row.value)
        session.execute(insert(SampleSummaryRow), [_summary(*key, values) for key, values in series.items()])
        session.execute(delete(SampleRow).where(SampleRow.step_measurement_id.in_(ids)))
        yield sum(len(values) for values in series.values())


def _old_steps(before: datetime) -> Select[int]:
    """Step measurements with samples whose trial or probe ended before that moment."""
    ended = or_(TrialRow.finished_at < before, ProbeRow.finished_at < before)
    raw = select(SampleRow).where(SampleRow.step_measurement_id == StepRow.id).exists()
    query = select(StepRow.id).outerjoin(TrialRow, TrialRow.id == StepRow.trial_id)
    return query.outerjoin(ProbeRow, ProbeRow.id == StepRow.probe_run_id).where(ended, raw)


def _summary(step_measurement_id: int, series: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        "step_measurement_id": step_measurement_id,
        "series": series,
        "count": len(values),
        "mean": fmean(values),
        "least": min(values),
        "median": median(values),
        "most": max(values),
        "first": values[0],
        "last": values[-1],
    }


def _readings(store: SqlStore, before: datetime, kept: int) -> Iterator[int]:
    """Old readings of each collective beyond the newest `kept` to one summary; gives the rows of each transaction."""
    with store.reading() as session:
        keys = session.execute(select(*KEY).group_by(*KEY).having(func.count() > kept)).all()
    for start in range(0, len(keys), KINDS_AT_ONCE):
        with store.writing() as session:
            gone = [_compact_kind(session, key, before, kept) for key in keys[start : start + KINDS_AT_ONCE]]
        yield sum(gone)


def _compact_kind(session: Session, key: Sequence[Any], before: datetime, kept: int) -> int:
    rows = _outdated(session, [column == value for column, value in zip(KEY, key, strict=True)], before, kept)
    if rows:
        session.add(_collective_summary(key, rows))
    for start in range(0, len(rows), AT_ONCE):
        ids = [row.id for row in rows[start : start + AT_ONCE]]
        session.execute(delete(CollectiveRow).where(CollectiveRow.id.in_(ids)))
    return len(rows)


def _outdated(
    session: Session, alike: Sequence[ColumnElement[bool]], before: datetime, kept: int
) -> Sequence[Row[int, float, datetime]]:
    oldest_kept = (
        select(CollectiveRow.id).where(*alike).order_by(CollectiveRow.id.desc()).offset(kept - 1).limit(1)
    ).scalar_subquery()
    query = select(CollectiveRow.id, CollectiveRow.time_s, ProbeRow.finished_at).join(
        ProbeRow, ProbeRow.id == CollectiveRow.probe_run_id
    )
    return session.execute(query.where(*alike, CollectiveRow.id < oldest_kept, ProbeRow.finished_at < before)).all()


def _collective_summary(key: Sequence[Any], rows: Sequence[Row[int, float, datetime]]) -> CollectiveSummaryRow:
    times, moments = [row.time_s for row in rows], [row.finished_at for row in rows]
    return CollectiveSummaryRow(
        **dict(zip((column.key for column in KEY), key, strict=True)),
        count=len(rows),
        time_s=median(times),
        time_least_s=min(times),
        time_most_s=max(times),
        first_at=min(moments),
        last_at=max(moments),
    )
