"""The part of a store that talks to the engine: transactions that read, and transactions that write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, TypeVar

from sqlalchemy import Engine, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.errors import StoreConflictError, StoreReadOnlyError, UnknownNameError
from storage.database.engine import Location, alone, reader, translated, writer
from storage.tunings.tables import FingerprintRow, TuningRow

NAMES_SHOWN = 20
TRIES = 20
Result = TypeVar("Result")


class RacedError(StoreConflictError):
    """Another transaction came in between: the whole of this one is to be tried again."""


def again(work: Callable[[], Result]) -> Result:
    """Does a transaction until nobody comes in between, which is the second time at the latest in all but a storm."""
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

    def study_url(self) -> str:
        """The database URL, password included, for Optuna's storage in the same database."""
        return self._location.url.render_as_string(hide_password=False)


def flush_new(session: Session, conflict: str, error: type[StoreConflictError] = StoreConflictError) -> None:
    """Sends new rows. Raises that error with that message if one of them exists."""
    try:
        session.flush()
    except IntegrityError as cause:
        raise error(conflict) from cause


def fingerprint_row(session: Session, key: str) -> FingerprintRow:
    """The fingerprint of that key. Raises UnknownNameError."""
    row = session.get(FingerprintRow, key)
    if row is None:
        raise UnknownNameError("fingerprint", key, _newest(session, FingerprintRow.key, FingerprintRow.stored_at))
    return row


def tuning_row(session: Session, tuning_id: str) -> TuningRow:
    """The tuning of exactly that id. Raises UnknownNameError that lists the newest ones."""
    row = session.get(TuningRow, tuning_id)
    if row is None:
        raise UnknownNameError("tuning", tuning_id, _newest(session, TuningRow.id, TuningRow.created_at))
    return row


def locked_tuning(session: Session, tuning_id: str, *, joinable: bool = True) -> TuningRow:
    """The tuning, locked until the transaction ends. Raises UnknownNameError.

    Requests can join it meanwhile (storage.fleet.submissions), unless it is not to be `joinable`: they must not wait
    for a tuner.

    Whoever locks several rows does it in this order, so that nobody waits in a circle: jobs by id, nodes by name, the
    counter, the tuning, its trials.
    """
    query = select(TuningRow).where(TuningRow.id == tuning_id).with_for_update(key_share=joinable)
    row = session.scalar(query.execution_options(populate_existing=True))
    return tuning_row(session, tuning_id) if row is None else row


def _newest(session: Session, name: InstrumentedAttribute[str], moment: InstrumentedAttribute[datetime]) -> list[str]:
    return list(session.scalars(select(name).order_by(moment.desc()).limit(NAMES_SHOWN)))


# ----------------------------------------------------------------------------------------------------
# The database's clock, which alone decides about leases, claims and heartbeats.


def database_now(session: Session) -> datetime:
    """The moment at which the database answers, in UTC: not that of the transaction's begin, which may have waited.

    PostgreSQL tells microseconds, SQLite milliseconds.
    """
    if session.get_bind().dialect.name == "postgresql":
        moment: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
        return moment.astimezone(UTC)
    text: str = session.execute(select(func.strftime("%Y-%m-%d %H:%M:%f", "now"))).scalar_one()
    return datetime.fromisoformat(text).replace(tzinfo=UTC)
