"""Care of a database: migrate it, check it, count what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, Table, func, inspect, select, text

from storage.database.columns import Base
from storage.database.engine import build_engine, locate, translated
from storage.database.schema import HEAD, bring_up_to_date
from storage.store import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """From which schema version (None: there was none) to which a database was brought."""

    database: str
    found: str | None
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Soundness:
    """What a check found: nothing in `problems` means sound."""

    database: str
    schema: str
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Rows by table, and the size of the whole database (whatever else is in it) in bytes."""

    database: str
    schema: str
    rows: dict[str, int]
    size_bytes: int


def migrate(url: str) -> Migration:
    """Creates or migrates the tables. Raises what open_store raises."""
    location = locate(url)
    with translated(location):
        engine = build_engine(location, read_only=False)
        try:
            found = bring_up_to_date(engine, location)
        finally:
            engine.dispose()
    return Migration(database=location.name, found=found, now=HEAD)


def check(url: str) -> Soundness:
    """Reads the whole database and looks for damage and orphans; writes nothing. Raises what open_store raises."""
    location = locate(url)
    with open_store(url, read_only=True) as store, store.reading() as session:
        problems = tuple(_problems(session.connection()))
    return Soundness(database=location.name, schema=HEAD, problems=problems)


def stats(url: str) -> Stats:
    """Counts the rows of our tables. Raises what open_store raises."""
    location = locate(url)
    with open_store(url, read_only=True) as store, store.reading() as session:
        tables = Base.metadata.sorted_tables
        rows = {table.name: session.scalar(select(func.count()).select_from(table)) or 0 for table in tables}
        size = size_bytes(session.connection())
    return Stats(database=location.name, schema=HEAD, rows=rows, size_bytes=size)


def _problems(connection: Connection) -> Iterator[str]:
    if connection.dialect.name == "sqlite":
        for (line,) in connection.execute(text("PRAGMA integrity_check")):
            if line != "ok":
                yield line
    missing = list(_missing(connection))
    yield from missing
    if missing:
        return  # what is not there cannot be asked
    for table in Base.metadata.sorted_tables:
        yield from _orphans(connection, table)
    yield from _lost_results(connection)
    yield from _stray_leases(connection)


def _missing(connection: Connection) -> Iterator[str]:
    """Tables, columns and indexes that this schema has and the database lacks: somebody altered it by hand."""
    found = inspect(connection)
    there = set(found.get_table_names())
    for table in Base.metadata.sorted_tables:
        if table.name not in there:
            yield f"{table.name}: the table is missing"
            continue
        columns = {column["name"] for column in found.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                yield f"{table.name}: the column {column.name} is missing"
        # By columns: PostgreSQL cuts long names.
        indexed = [tuple(index["column_names"]) for index in found.get_indexes(table.name)]
        for names in (tuple(column.name for column in index.columns) for index in table.indexes):
            if names not in indexed:
                yield f"{table.name}: the index over {', '.join(names)} is missing"


def _orphans(connection: Connection, table: Table) -> Iterator[str]:
    """Rows that refer to nothing: possible where foreign keys were off (another program, damage)."""
    for key in table.foreign_keys:
        parent = key.column.table.alias("parent")
        found = select(parent).where(parent.c[key.column.name] == key.parent).exists()
        count = connection.scalar(select(func.count()).select_from(table).where(key.parent.is_not(None), ~found))
        if count:
            yield f"{table.name}: {count} rows whose {key.parent.name} is not in {key.column.table.name}"


def _lost_results(connection: Connection) -> Iterator[str]:
    """Ended trials without the measurement that they ended with."""
    trials, steps = Base.metadata.tables["tuning_trials"], Base.metadata.tables["step_measurements"]
    measured = select(steps).where(steps.c.trial_id == trials.c.id).exists()
    ended_well = trials.c.state.in_(("complete", "pruned"))
    count = connection.scalar(select(func.count()).select_from(trials).where(ended_well, ~measured))
    if count:
        yield f"tuning_trials: {count} complete or pruned trials without a measurement"


def _stray_leases(connection: Connection) -> Iterator[str]:
    """Nodes held by jobs that hold nothing any more: no job would ever get them again."""
    leases, jobs = Base.metadata.tables["leases"], Base.metadata.tables["jobs"]
    over = leases.join(jobs, leases.c.job_id == jobs.c.id)
    count = connection.scalar(select(func.count()).select_from(over).where(jobs.c.state.in_(("queued", "ended"))))
    if count:
        yield f"leases: {count} nodes held by jobs that do not run"


def size_bytes(connection: Connection) -> int:
    """The size of the whole database."""
    if connection.dialect.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    else:
        query = "SELECT pg_database_size(current_database())"
    return int(connection.execute(text(query)).scalar_one())
