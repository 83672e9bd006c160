"""The part of a store that talks to the engine: transactions that read, and transactions that write.

The database's clock alone decides about leases, claims and heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, TypeVar

from sqlalchemy import Engine, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError, StoreReadOnlyError
from storage.database.engine import Location, alone, reader, translated, writer

NAMES_SHOWN = 20
TRIES = 20
Result = TypeVar("Result")


class RacedError(StoreConflictError):
    """Another transaction came in between: the whole of this one is to be tried again."""


def again(work: Callable[[], Result]) -> Result:
    """Repeats a transaction until nobody comes in between: once, unless very many write at the same time."""
    for _ in range(TRIES - 1):
        try:
            return work()
        except RacedError:
            continue
    return work()


class SessionStore:
    """One database through one engine, shared by threads. Close it, or use it as a context manager."""

    def __init__(self, engine: Engine, location: Location, *, read_only: bool) -> None:
        self._engine, self._location = engine, location
        self._alone, self._reader, self._writer = alone(engine), reader(engine), writer(engine)
        self._read_only = read_only

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections. May be called twice."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session to read with, for the queries of this package: they see the database as one moment left it."""
        with translated(self._location), Session(self._reader) as session:
            yield session

    @contextmanager
    def asking(self) -> Iterator[Session]:
        """A session for one question, or for several of which each may see a later moment than the one before."""
        with translated(self._location), Session(self._alone) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that commits at its end, or nothing of it if an error passes.

        Raises:
            StoreReadOnlyError: the store was opened for reading only.
        """
        if self._read_only:
            raise StoreReadOnlyError(f"{self._location.name} was opened for reading only")
        with translated(self._location), Session(self._writer) as session, session.begin():
            yield session


def flush_new(session: Session, conflict: str, error: type[StoreConflictError] = StoreConflictError) -> None:
    """Sends new rows. Raises that error with that message if one of them exists."""
    try:
        session.flush()
    except IntegrityError as cause:
        raise error(conflict) from cause


def upsert(session: Session) -> Callable[..., postgresql.Insert | sqlite.Insert]:
    """INSERT with ON CONFLICT, which both databases write alike but SQLAlchemy keeps by dialect."""
    return postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert


def database_now(session: Session) -> datetime:
    """The moment at which the database answers, in UTC: not that of the transaction's begin, which may have waited.

    PostgreSQL tells microseconds, SQLite milliseconds.
    """
    if session.get_bind().dialect.name == "postgresql":
        moment: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
        return moment.astimezone(UTC)
    text: str = session.execute(select(func.strftime("%Y-%m-%d %H:%M:%f", "now"))).scalar_one()
    return datetime.fromisoformat(text).replace(tzinfo=UTC)
