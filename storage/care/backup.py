"""Backup and restore. A backup is one SQLite file with all our tables, whatever the database was.

It also holds a manifest of its tables and rows, so that an incomplete file is recognised.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Row, Table, TextClause, func, inspect, select, text

from autotune.errors import InputError, StoreConflictError, StoreError
from autotune.files import is_part, whole_file
from storage.database.columns import Base
from storage.database.engine import Location, build_engine, clone, locate, translated, writer
from storage.database.schema import HEAD, bring_up_to_date, require_known, stored_revision, upgrade_within
from storage.fleet.leases import TOKEN

KEYS, COUNTERS = Base.metadata.tables["api_keys"], Base.metadata.tables["counters"]
LAST_TOKEN = select(COUNTERS.c.value).where(COUNTERS.c.name == TOKEN)
MANIFEST = "autotune_backup"
ROWS_AT_ONCE = 1000


def known_tables(connection: Connection) -> list[Table]:
    """Our tables that the database has, each after those that it refers to."""
    there = set(inspect(connection).get_table_names())
    return [table for table in Base.metadata.sorted_tables if table.name in there]


def counts(connection: Connection) -> dict[str, int]:
    """The rows of each table."""
    return {
        table.name: connection.scalar(select(func.count()).select_from(table)) or 0
        for table in known_tables(connection)
    }


def empty(connection: Connection) -> None:
    """Deletes all rows."""
    for table in reversed(known_tables(connection)):
        connection.execute(table.delete())


def copy_rows(source: Connection, target: Connection) -> None:
    """Copies all rows of all tables that the source has into the empty tables of the target.

    Columns are those that both know: a source of an older schema is written into one of that schema.
    """
    for table in known_tables(source):
        there = {column["name"] for column in inspect(source).get_columns(table.name)}
        columns = [column for column in table.columns if column.name in there]
        rows = source.execution_options(yield_per=ROWS_AT_ONCE).execute(select(*columns))
        for some in rows.mappings().partitions():
            target.execute(table.insert(), [dict(row) for row in some])
    if target.dialect.name == "postgresql":
        for statement in _counters(target):
            target.execute(statement)


def _counters(connection: Connection) -> Iterator[TextClause]:
    """Statements that let PostgreSQL's sequences go on after the copied ids."""
    for table in known_tables(connection):
        for column in table.primary_key.columns:
            sequence = connection.scalar(
                text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table.name, "column": column.name}
            )
            if sequence is not None:
                most = f'(SELECT max("{column.name}") FROM "{table.name}")'
                yield text(f"SELECT setval('{sequence}', coalesce({most}, 1), {most} IS NOT NULL)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What was backed up or restored: between which database and file, the schema of the copy, its rows by table."""

    database: str
    file: str
    schema: str
    rows: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Copy):
    """Of the API keys that are valid in the backup, those that are not here: each an id and a name.

    `keys_revoked` were revoked since the backup was made. `keys_left_out` may have been: the database knows nothing of
    them.
    """

    keys_revoked: tuple[tuple[str, str], ...]
    keys_left_out: tuple[tuple[str, str], ...]


def backup(url: str, path: Path, *, overwrite: bool = False) -> Copy:
    """Writes a consistent copy of a database to a file, whole or not at all; others may go on writing meanwhile.

    Raises:
        InputError: the file exists and `overwrite` is not given, or it cannot be written.
        StoreError: no such database, or there is nothing of ours in it.
        StoreNewerError: a newer release wrote its schema.
    """
    location, target = locate(url), Path(os.path.realpath(path))
    if target.exists() and (not overwrite or not target.is_file()):
        raise InputError("file", str(path), "the file exists; name another one, or allow overwriting (--overwrite)")
    try:
        with whole_file(target, mode=0o600) as part, translated(location):
            schema, rows = _write(location, part)
    except OSError as error:
        raise InputError("file", str(path), f"a file that can be written ({error.strerror})") from error
    return Copy(database=location.name, file=str(path), schema=schema, rows=rows)


def restore(url: str, path: Path, *, overwrite: bool = False, keys: bool = False) -> Restored:
    """Puts a backup into a database, in one transaction: all of it or nothing.

    What may only go forward does not go back: API keys that the database has stay as they are, what either of the two
    knows to be revoked is revoked, and fencing tokens grow.

    Args:
        url: an empty or new database; with `overwrite` any, whose rows are then replaced.
        path: the backup. One of an older schema is migrated on the way.
        overwrite: allow that the database holds something, or that others are connected to it.
        keys: take over valid keys that the database does not know. It cannot know whether they were revoked since.

    Raises:
        InputError: no such file, no backup, or not a whole one.
        StoreConflictError: the database is not empty or not unused, and `overwrite` is not given.
        StoreNewerError: a newer release wrote the backup or the database.
    """
    location = locate(url)
    with _checked(path) as source, translated(location):
        is_new = location.path is not None and not location.path.exists()
        if not overwrite and not is_new:
            _require_unused(location)
        engine = build_engine(location, read_only=False)
        try:
            rows, revoked, left_out = _fill(engine, location, source, overwrite=overwrite, keys=keys)
        except BaseException as error:
            engine.dispose()
            if is_new and location.path is not None:
                location.path.unlink(missing_ok=True)
            if isinstance(error, ValueError):  # a column holds what its type cannot be
                raise InputError("file", str(path), f"the backup holds what cannot be read ({error})") from error
            raise
        bring_up_to_date(engine, location)  # nothing to migrate: a new SQLite file gets its write-ahead log
        engine.dispose()
    return Restored(
        database=location.name, file=str(path), schema=HEAD, rows=rows, keys_revoked=revoked, keys_left_out=left_out
    )


def _write(location: Location, part: Path) -> tuple[str, dict[str, int]]:
    """Fills the empty file; returns the schema and the rows by table."""
    engine = build_engine(location, read_only=True)
    try:
        with engine.connect() as connection:
            schema = stored_revision(connection)
            require_known(schema, location)
        if schema is None:
            raise StoreError(f"{location.name} holds nothing of autotune yet")
        if location.path is None:
            _dump(engine, part, schema)
        else:
            clone(location.path, part)
    finally:
        engine.dispose()
    return schema, _seal(part)


def _dump(engine: Engine, part: Path, schema: str) -> None:
    """PostgreSQL's rows as of one moment, in a SQLite file of the same schema."""
    copy = locate(f"sqlite:///{part}")
    made = build_engine(copy, read_only=False)
    snapshot = engine.execution_options(isolation_level="REPEATABLE READ")
    try:
        bring_up_to_date(made, copy, target=schema)
        with snapshot.connect() as source, writer(made).begin() as target:
            copy_rows(source, target)
    finally:
        made.dispose()
    with closing(sqlite3.connect(part)) as file:
        file.execute("PRAGMA journal_mode = DELETE")


def _seal(part: Path) -> dict[str, int]:
    """Writes the manifest."""
    file = build_engine(locate(f"sqlite:///{part}"), read_only=False)
    try:
        with writer(file).begin() as connection:
            connection.execute(text(f"DROP TABLE IF EXISTS {MANIFEST}"))
            rows = counts(connection)
            connection.execute(text(f"CREATE TABLE {MANIFEST} (name TEXT PRIMARY KEY, rows INTEGER NOT NULL)"))
            values = [{"name": name, "rows": count} for name, count in rows.items()]
            connection.execute(text(f"INSERT INTO {MANIFEST} (name, rows) VALUES (:name, :rows)"), values)
    finally:
        file.dispose()
    return rows


@contextmanager
def _checked(path: Path) -> Iterator[Connection]:
    """The backup, opened for reading and of our schema: an older one as a migrated copy."""
    if not path.is_file() or is_part(path):
        raise InputError("file", str(path), "a backup made by `autotune db backup` is needed")
    location = locate(f"sqlite:///{path}")
    schema = _require_whole(location)
    if schema == HEAD:
        with _open(location) as connection:
            yield connection
        return
    with tempfile.TemporaryDirectory(prefix="autotune-restore-") as directory:
        newer = locate(f"sqlite:///{Path(directory) / 'backup.db'}")
        assert location.path is not None
        assert newer.path is not None
        clone(location.path, newer.path)
        engine = build_engine(newer, read_only=False)
        try:
            bring_up_to_date(engine, newer)
        finally:
            engine.dispose()
        with _open(newer) as connection:
            yield connection


@contextmanager
def _open(location: Location) -> Iterator[Connection]:
    engine = build_engine(location, read_only=True)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _require_whole(location: Location) -> str:
    """The schema of a backup. Raises InputError for a file that is none, or not a whole one."""
    try:
        with translated(location), _open(location) as connection:
            damage = [line for (line,) in connection.execute(text("PRAGMA integrity_check")) if line != "ok"]
            tables = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars().all()
            if MANIFEST not in tables:
                raise InputError("file", location.name, "no backup: one made by `autotune db backup` is needed")
            schema = stored_revision(connection)
            require_known(schema, location)
            listed = connection.execute(text(f"SELECT name, rows FROM {MANIFEST}"))
            # Backups of older releases list the tables of Optuna's storage, which nothing reads any more.
            stated = {row.name: row.rows for row in listed if row.name in Base.metadata.tables}
            if damage or schema is None or counts(connection) != stated:
                raise InputError("file", location.name, f"the backup is not whole ({[*damage, 'rows are missing'][0]})")
            return schema
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        raise InputError("file", location.name, f"no backup, or not a whole one ({error})") from error


Names = tuple[tuple[str, str], ...]


def _fill(
    engine: Engine, location: Location, source: Connection, *, overwrite: bool, keys: bool
) -> tuple[dict[str, int], Names, Names]:
    """Returns the rows by table, and the keys of `Restored`."""
    with writer(engine).begin() as target:
        upgrade_within(target, location)
        if not overwrite and any(counts(target).values()):
            raise StoreConflictError(f"{location.name} is not empty; --overwrite replaces what it holds")
        known, token = target.execute(select(KEYS)).all(), target.scalar(LAST_TOKEN) or 0
        empty(target)
        rows = counts(source)
        copy_rows(source, target)
        arrived = counts(target)
        if any(arrived[name] != count for name, count in rows.items()):
            raise StoreError(f"{location.name}: not all rows arrived; nothing was changed")
        if token > (target.scalar(LAST_TOKEN) or 0):  # else the clock sees to it (storage.fleet.leases)
            target.execute(COUNTERS.delete().where(COUNTERS.c.name == TOKEN))
            target.execute(COUNTERS.insert().values(name=TOKEN, value=token))
        revoked, left_out = _keep_keys(target, known, keys=keys)
        return counts(target), revoked, left_out


def _keep_keys(target: Connection, known: Sequence[Row[Any]], *, keys: bool) -> tuple[Names, Names]:
    """Puts what was known of the API keys over what the backup says of them; see `Restored` and `restore`."""
    found = {row.id: row for row in target.execute(select(KEYS).order_by(KEYS.c.created_at, KEYS.c.id))}
    valid = [row for row in found.values() if row.revoked_at is None]
    ids = {row.id for row in known}
    revoked_ids = {row.id for row in known if row.revoked_at is not None}
    taken = {row.name for row in known if row.revoked_at is None}
    revoked = [row for row in valid if row.id in revoked_ids]
    left_out = [row for row in valid if row.id not in ids and (not keys or row.name in taken)]
    target.execute(KEYS.delete().where(KEYS.c.id.in_([*ids, *(row.id for row in left_out)])))
    for row in known:
        before = found.get(row.id)
        revoked_at = row.revoked_at or (before.revoked_at if before is not None else None)
        target.execute(KEYS.insert().values({**row._mapping, "revoked_at": revoked_at}))
    return tuple((row.id, row.name) for row in revoked), tuple((row.id, row.name) for row in left_out)


def _require_unused(location: Location) -> None:
    """Raises StoreConflictError if somebody else is connected to the database."""
    if location.path is not None:
        used = not _is_alone(location.path)
    else:
        with _open(location) as connection:
            others = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            used = bool(connection.execute(text(others)).scalar_one())
    if used:
        raise StoreConflictError(f"{location.name} is in use by others; stop them, or allow overwriting (--overwrite)")


def _is_alone(path: Path) -> bool:
    """Whether no other connection has the SQLite file open: each holds a shared lock on it, also while it is idle."""
    with closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if (error.sqlite_errorcode or 0) & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                return False
            raise
        connection.execute("ROLLBACK")
    return True
