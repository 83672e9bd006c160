"""Rows of all our tables, and of Optuna's, from one database to another of any kind."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy import Connection, Table, func, inspect, select, text

from storage.columns import Base

ROWS_AT_ONCE = 1000


def known_tables(connection: Connection) -> list[Table]:
    """Our tables and Optuna's that the database has, each after those that it refers to."""
    there = set(inspect(connection).get_table_names())
    return [table for table in (*Base.metadata.sorted_tables, *optuna_tables()) if table.name in there]


def optuna_tables() -> list[Table]:
    """The tables of Optuna's storage, which a tuning that goes on needs, parents first."""
    from optuna.storages._rdb.models import BaseModel

    version = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
    return [*BaseModel.metadata.sorted_tables, version]


def make_optuna_tables(connection: Connection, wanted: set[str]) -> None:
    """Creates those of Optuna's tables that are wanted and missing."""
    for table in optuna_tables():
        if table.name in wanted:
            table.create(connection, checkfirst=True)


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


def _counters(connection: Connection) -> Iterator[sa.TextClause]:
    """Statements that let PostgreSQL's sequences go on after the copied ids."""
    for table in known_tables(connection):
        for column in table.primary_key.columns:
            sequence = connection.scalar(
                text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table.name, "column": column.name}
            )
            if sequence is not None:
                most = f'(SELECT max("{column.name}") FROM "{table.name}")'
                yield text(f"SELECT setval('{sequence}', coalesce({most}, 1), {most} IS NOT NULL)")
