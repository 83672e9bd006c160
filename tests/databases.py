"""Databases of a known content for tests. What fills one is done once for each kind, and what is done is used again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psycopg
from services import PostgresServer

from storage.care.maintenance import migrate
from storage.database.schema import VERSION_TABLE

KINDS = ("sqlite", "postgresql")

# Equal for databases whose tables have the same columns, at the same revision.
SHAPE = f"""
SELECT md5(string_agg(format('%s %s %s', attrelid::regclass, attname, atttypid), ',' ORDER BY attrelid, attnum)),
    (SELECT version_num FROM {VERSION_TABLE})
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""

# Sessions of killed processes may still be at work.
END_OTHERS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

# In this role nobody asks in which order rows refer to each other.
CLEAR = f"""
DO $$
DECLARE found record;
BEGIN
    SET LOCAL session_replication_role = replica;
    FOR found IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> '{VERSION_TABLE}' LOOP
        EXECUTE format('DELETE FROM %I', found.tablename);
    END LOOP;
    PERFORM setval(format('%I', sequencename)::regclass, start_value, false) FROM pg_sequences;
END $$
"""


class Databases:
    """Makes databases.

    Args:
        folder: for SQLite's files.
        postgres: the server, asked for when a database on it is first wanted.
    """

    def __init__(self, folder: Path, postgres: Callable[[], PostgresServer]) -> None:
        self._folder, self._postgres = folder, postgres
        self._originals: dict[tuple[str, Callable[[str], object]], str] = {}
        self._shared = ""

    def empty(self, kind: str, folder: Path) -> str:
        """The URL of a new one without anything; SQLite's file, in `folder`, does not exist yet."""
        if kind == "sqlite":
            return f"sqlite:///{folder / f'{uuid4().hex}.db'}"
        return self._postgres().url(self._postgres().create_database())

    def ours(self, kind: str, folder: Path) -> str:
        """The URL of one with our tables and no rows.

        PostgreSQL has one for all tests, emptied for each; a new one when a test has changed its tables.
        """
        if kind == "sqlite":
            return self.filled(kind, folder, migrate)
        if not self._shared or not self._cleared(self._shared):
            self._shared = self.filled(kind, folder, migrate)
        return self._shared

    def _cleared(self, url: str) -> bool:
        with psycopg.connect(self._original("postgresql", migrate)) as original:
            expected = original.execute(SHAPE).fetchone()
        with psycopg.connect(url, autocommit=True) as shared:
            shared.execute(END_OTHERS)
            try:
                if shared.execute(SHAPE).fetchone() != expected:
                    return False
            except psycopg.errors.UndefinedTable:
                return False
            shared.execute(CLEAR)
        return True

    def filled(self, kind: str, folder: Path, fill: Callable[[str], object]) -> str:
        """The URL of a new one that `fill` filled, given its URL, or of a copy; SQLite's file is in `folder`."""
        original = self._original(kind, fill)
        if kind == "sqlite":
            copied = self.empty(kind, folder)
            shutil.copy(original.removeprefix("sqlite:///"), copied.removeprefix("sqlite:///"))
            return copied
        return self._postgres().url(self._postgres().create_database(template=original.rpartition("/")[2]))

    def _original(self, kind: str, fill: Callable[[str], object]) -> str:
        if (kind, fill) not in self._originals:
            original = self.empty(kind, self._folder)
            fill(original)
            self._originals[kind, fill] = original
        return self._originals[kind, fill]
