"""Databases as earlier releases left them: each schema's own rows, one file a schema in tests/contract/data."""

from __future__ import annotations

from pathlib import Path

from storage.database.engine import build_engine, locate
from storage.database.schema import bring_up_to_date

DATA = Path(__file__).parent / "contract" / "data"
REVISIONS_WITH_DATA = tuple(sorted(path.stem.removeprefix("schema_") for path in DATA.glob("schema_*.sql")))


def make_database(url: str, revision: str) -> None:
    """Fills an empty database with the tables and rows of a schema."""
    engine = build_engine(locate(url), read_only=False)
    bring_up_to_date(engine, locate(url), target=revision)
    with engine.begin() as connection:
        for statement in (DATA / f"schema_{revision}.sql").read_text().split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    engine.dispose()
