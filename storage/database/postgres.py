"""PostgreSQL through psycopg: how connections are opened, kept and begun. Imported only where it is used."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from typing import Any

from psycopg import Cursor, Error
from sqlalchemy import URL, Connection, Engine, PoolProxiedConnection, create_engine, event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

from storage.database.columns import ALONE, READ


class RowByRow(Cursor[Any]):
    """psycopg's cursor without its pipeline mode: executes a statement for many rows by one round trip each.

    psycopg would send them in a pipeline. To the server, a session in the middle of one is at work: it is not ended for
    being idle in its transaction (storage.database.postgres.OPTIONS). A process that was frozen just then would keep
    its locks, and with them the whole fleet, for as long as it is frozen.
    """

    _changed: int | None = None

    def executemany(self, query: Any, params_seq: Iterable[Any], *, returning: bool = False) -> None:
        """Returned rows are not kept: raises NotImplementedError for `returning`."""
        if returning:
            raise NotImplementedError("executemany with returning")
        changed = 0
        for params in params_seq:
            self.execute(query, params)
            changed += max(super().rowcount, 0)
        self._changed = changed

    def execute(self, *arguments: Any, **named: Any) -> RowByRow:
        """As psycopg's."""
        self._changed = None
        super().execute(*arguments, **named)
        return self

    @property
    def rowcount(self) -> int:
        """Rows that the last execute, or all of the last executemany, changed."""
        return super().rowcount if self._changed is None else self._changed


# Transactions are short. A process that is frozen in the middle of one would keep its locks, and with them the whole
# fleet, for ever: the server ends such a session. A server that is gone without a word is noticed as soon.
OPTIONS = {
    "connect_timeout": 10,  # seconds; the others are milliseconds
    "tcp_user_timeout": 15_000,
    "options": "-c idle_in_transaction_session_timeout=15000",
}

# Kept open once they were needed. By default a sixth one is opened and closed at each use, which costs more than it.
POOL_SIZE = 15
QUIET_S = 5.0
"""A connection that was given back longer ago is asked whether it still lives."""

_USED = "autotune_used_s"


def postgres_engine(url: URL, *, read_only: bool) -> Engine:
    """One engine for one store. Nothing is connected yet."""
    beside = {name: value for name, value in OPTIONS.items() if name not in url.query}  # the URL's own go before ours
    engine = create_engine(
        url,
        isolation_level="AUTOCOMMIT",  # `_begin` begins
        pool_size=POOL_SIZE,
        max_overflow=0,
        connect_args={"cursor_factory": RowByRow} | beside,
    )
    engine.dialect.use_insertmanyvalues_wo_returning = True  # many rows in one statement
    event.listen(engine, "checkout", _look)
    event.listen(engine, "checkin", _note)
    event.listen(engine, "begin", _begin)
    return engine.execution_options(postgresql_readonly=True) if read_only else engine


def _begin(connection: Connection) -> None:
    """Begins a transaction: of READ COMMITTED for writing, with one snapshot for all its statements for reading.

    None for statements that stand alone: each is a transaction by itself, and one around it costs two round trips.
    """
    options = connection.get_execution_options()
    raw = connection.connection.dbapi_connection
    if options.get(ALONE) or raw is None or not raw.autocommit:  # at another level psycopg begins by itself
        return
    if options.get(READ):
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return
    connection.exec_driver_sql("BEGIN READ ONLY" if options.get("postgresql_readonly") else "BEGIN")


def _note(_: object, entry: ConnectionPoolEntry) -> None:
    entry.info[_USED] = time.monotonic()


def _look(connection: Any, entry: ConnectionPoolEntry, _: PoolProxiedConnection) -> None:
    """Replaces the pool's connections if this one is lost.

    A server that ends a session says so, and closes: something lies in the socket. Only after a while is the server
    asked, which costs a round trip, whether it went without a word.
    """
    used_s = entry.info.get(_USED)
    if used_s is None:  # a new one
        return
    try:
        if time.monotonic() - used_s > QUIET_S or _has_news(connection.fileno()):
            connection.execute("SELECT 1")
    except Error as error:
        raise InvalidatePoolError from error


def _has_news(socket: int) -> bool:
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))
