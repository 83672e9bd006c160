"""From a database URL to one engine (SQLite by file, PostgreSQL through psycopg), and from its errors to ours."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from autotune.errors import InputError, Presence, StoreAwayError, StoreError, StoreReadOnlyError, masked
from storage.database.columns import ALONE, READ, WRITE

log = logging.getLogger("autotune.store")

BUSY_TIMEOUT_S = 30.0
ESCAPES = "@ as %40, / as %2F, ? as %3F and # as %23"
ALLOWED = "give sqlite:///PATH or postgresql://USER@HOST/NAME"


_PRESENCES: dict[str, Presence] = {}
"""Whether this process reaches a server, by URL: the same for all its stores, and what its children begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a database is. `path` is the file of a SQLite database, None for PostgreSQL."""

    url: URL
    path: Path | None
    presence: Presence = field(default_factory=lambda: Presence("the database", log, is_there=None), compare=False)

    @property
    def name(self) -> str:
        """The database as people may see it: without password and options."""
        return masked(str(self.path)) if self.path else self.url.set(query={}).render_as_string(hide_password=True)

    @property
    def secrets(self) -> Sequence[str]:
        """The passwords, so that messages can be cleaned of them."""
        given = (self.url.password, self.url.query.get("password"), self.url.query.get("sslpassword"))
        return [str(each) for each in given if each]


def locate(url: str) -> Location:
    """Parses a database URL. Raises StoreError for one that is not understood; never repeats its password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreError(f"the database URL cannot be read; {ALLOWED}") from None
    if parsed.drivername in {"postgres", "postgresql", "postgresql+psycopg"}:
        if _is_ambiguous(url):  # what follows an @ would be taken for the host, and shown
            raise StoreError(f"the database URL cannot be read: in a name or password write {ESCAPES}; {ALLOWED}")
        presence = _PRESENCES.setdefault(url, Presence("the database", log, is_there=None))
        return Location(url=parsed.set(drivername="postgresql+psycopg"), path=None, presence=presence)
    if parsed.drivername not in {"sqlite", "sqlite+pysqlite"}:
        raise StoreError(f"database driver {parsed.drivername!r} is not supported; {ALLOWED}")
    if not parsed.database or parsed.database == ":memory:" or "\0" in parsed.database or parsed.query:
        raise StoreError(f"a SQLite database must be a plain file; {ALLOWED}")
    path = Path(parsed.database).absolute()
    return Location(url=parsed.set(drivername="sqlite", database=str(path)), path=path)


def _is_ambiguous(url: str) -> bool:
    """Whether an @ is anywhere but once between user and host."""
    rest = url.partition("://")[2]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    return rest.count("@") > min(authority.count("@"), 1)


def build_engine(location: Location, *, read_only: bool) -> Engine:
    """One engine for one store. Nothing is connected yet. Raises StoreError if the driver is not installed."""
    if location.path is not None:
        return _sqlite_engine(location.path, read_only=read_only)
    try:
        from storage.database.postgres import postgres_engine
    except ImportError:
        raise StoreError("PostgreSQL needs the driver psycopg: pip install 'autotune[postgres]'") from None
    return postgres_engine(location.url, read_only=read_only)


def may(access: int, path: Path) -> bool:
    """Whether this process may do that (os.R_OK, os.W_OK) with the path. Its effective user counts."""
    return os.access(path, access, effective_ids=os.access in os.supports_effective_ids)


def writer(engine: Engine) -> Engine:
    """The same engine, for transactions that write: on SQLite they take the write lock when they begin.

    A deferred transaction that turns from reading to writing fails at once when another one wrote meanwhile
    (SQLITE_BUSY_SNAPSHOT); one that begins IMMEDIATE waits for its turn.
    """
    return engine.execution_options(**{WRITE: True})


def reader(engine: Engine) -> Engine:
    """The same engine, for transactions that read: all their statements see the database as one moment left it.

    A SQLite transaction does that by itself; storage.database.postgres begins one of that kind.
    """
    return engine.execution_options(**{READ: True}) if engine.dialect.name == "postgresql" else engine


def alone(engine: Engine) -> Engine:
    """The same engine, for statements that stand alone: on PostgreSQL without a transaction around them."""
    return engine.execution_options(**{ALONE: True}) if engine.dialect.name == "postgresql" else engine


def use_wal(engine: Engine) -> None:
    """Sets a SQLite file to write-ahead logging, once for its life: readers then never block the writer.

    SQLite does not wait for other processes in this one statement, so the wait is here.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    connection = engine.raw_connection()
    try:
        while True:
            try:
                connection.cursor().execute("PRAGMA journal_mode = WAL").close()
                return
            except sqlite3.OperationalError as error:
                busy = (error.sqlite_errorcode or 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    finally:
        connection.close()


def _sqlite_engine(path: Path, *, read_only: bool) -> Engine:
    mode = _read_mode(path) if read_only else "mode=rwc"

    def connect() -> sqlite3.Connection:
        connection = _connect(path, mode)
        _configure(connection, read_only=read_only)
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "begin", _begin)
    return engine


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection to a SQLite file that we only read, whatever we may do with the file."""
    return _connect(path, _read_mode(path))


def clone(database: Path, copy: Path) -> None:
    """SQLite's own online backup (https://sqlite.org/backup.html): one moment of a file that is in use."""
    with closing(connect_to_read(database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path))}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)


def _read_mode(path: Path) -> str:
    """How to open a file that we only read (https://sqlite.org/wal.html#readonly).

    A connection that may write tidies up the log behind itself, one in mode=ro cannot. In a directory that we
    cannot write, a WAL database without a log opens only as immutable, which it is: who writes has a log there.
    """
    if not may(os.W_OK, path.parent):
        return "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    return "mode=rw" if may(os.W_OK, path) else "mode=ro"


def _configure(connection: sqlite3.Connection, *, read_only: bool) -> None:
    """Pragmas of every connection. FULL: a commit survives loss of power too, not only kill -9."""
    connection.isolation_level = None  # sqlite3 must not begin by itself; `_begin` does
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


# https://www.postgresql.org/docs/current/errcodes-appendix.html
READ_ONLY_TRANSACTION = "25006"
_AWAY = ("08", "57P", "53300")  # connection exceptions; shut down, crashed, starting; too many connections
INSUFFICIENT_PRIVILEGE = "42501"
NUL_REFUSED = "cannot contain NUL"  # psycopg: no such text can be in the database, so nothing has that name


@contextmanager
def translated(location: Location) -> Iterator[None]:
    """Turns database errors into StoreError and its kinds, without a password; our own pass unchanged.

    A server that went away, or came back, is told in the log once. A name with a NUL, which PostgreSQL cannot even be
    asked for, is an InputError.
    """
    try:
        yield
    except DBAPIError as error:
        if NUL_REFUSED in str(error.orig):
            raise InputError("name", "...\x00...", "text without NUL characters") from error
        if location.path is None and _is_away(error):
            reason = _clean(error.orig or error, location)
            location.presence.away(reason)
            raise StoreAwayError(f"{location.name}: {reason}") from error
        raise _fault(error.orig or error, location) from error
    except sqlite3.Error as error:
        raise _fault(error, location) from error
    except SQLAlchemyError as error:
        raise StoreError(f"{location.name}: {_clean(error, location)}") from error
    else:
        location.presence.back()


def _is_away(error: DBAPIError) -> bool:
    """Whether the connection was lost or could not be made, rather than a statement refused."""
    state = getattr(error.orig, "sqlstate", None)
    lost = isinstance(error, OperationalError) and (state is None or state.startswith(_AWAY))
    return error.connection_invalidated or lost


def _fault(error: BaseException, location: Location) -> StoreError:
    if isinstance(error, sqlite3.Error):
        return _sqlite_fault(error, location)
    if getattr(error, "sqlstate", None) in {READ_ONLY_TRANSACTION, INSUFFICIENT_PRIVILEGE}:
        return StoreReadOnlyError(f"{location.name} cannot be written: {_clean(error, location)}")
    return StoreError(f"{location.name}: {_clean(error, location)}")


def _sqlite_fault(error: sqlite3.Error, location: Location) -> StoreError:
    """Extended result codes carry the primary one in their low byte (https://sqlite.org/rescode.html)."""
    code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
    if code == sqlite3.SQLITE_READONLY:
        return StoreReadOnlyError(f"{location.name} cannot be written: the file or its directory is read-only")
    if code == sqlite3.SQLITE_CANTOPEN:
        return _cannot_open(location)
    if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        return StoreError(f"{location.name} is not a usable SQLite database: {error}")
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(f"{location.name} is locked by another process that does not end its transaction")
    if code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}:
        return StoreError(f"{location.name}: {error} (is there space left?)")
    return StoreError(f"{location.name}: {error}")


def _cannot_open(location: Location) -> StoreError:
    path = location.path
    if path is None or not os.path.isdir(path.parent):
        return StoreError(f"{location.name} cannot be opened: its directory does not exist")
    if os.path.isdir(path):
        return StoreError(f"{location.name} cannot be opened: it is a directory")
    if not may(os.W_OK, path.parent) and may(os.R_OK, path if os.path.exists(path) else path.parent):
        return StoreReadOnlyError(f"{location.name} cannot be written: its directory is read-only")
    return StoreError(f"{location.name} cannot be opened: " + ("no access" if os.path.exists(path) else "no such file"))


def _clean(error: BaseException, location: Location) -> str:
    """The first line of the message, without the password wherever it may stand."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for secret in location.secrets:
        text = text.replace(secret, "***")
    return masked(text)
