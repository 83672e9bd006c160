"""The database's clock, which alone decides about leases, claims and heartbeats."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session


def database_now(session: Session) -> datetime:
    """The moment at which the database answers, in UTC: not that of the transaction's begin, which may have waited.

    PostgreSQL tells microseconds, SQLite milliseconds.
    """
    if session.get_bind().dialect.name == "postgresql":
        moment: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
        return moment.astimezone(UTC)
    text: str = session.execute(select(func.strftime("%Y-%m-%d %H:%M:%f", "now"))).scalar_one()
    return datetime.fromisoformat(text).replace(tzinfo=UTC)
