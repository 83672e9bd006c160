"""Column types and the declarative base: what SQLite and PostgreSQL must agree on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from sqlalchemy import BigInteger, DateTime, Double, Integer, MetaData, String, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, mapped_column
from sqlalchemy.types import TypeDecorator

# Execution options of the engines that write, that read, and whose statements stand alone.
WRITE, READ, ALONE = "autotune_write", "autotune_read", "autotune_alone"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment. Stored as UTC, comes back with tzinfo UTC; SQLite has no time zones, so they are restored here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuses a naive datetime, which names no certain moment."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; give an aware datetime")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Gives the moment in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FreeText(TypeDecorator[str]):
    """Text from outside (a rank's log). PostgreSQL cannot hold NUL, so it becomes U+FFFD in every database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replaces NUL characters."""
        return None if value is None else value.replace("\x00", "\ufffd")


RowId = Annotated[
    int, mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
]
Key = Annotated[str, mapped_column(String(64))]
Moment = Annotated[datetime, mapped_column(UtcDateTime)]
Free = Annotated[str, mapped_column(FreeText)]


class Base(DeclarativeBase):
    """Base of all tables. Constraint names are fixed, so that later migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {float: Double, int: BigInteger, str: Text}
