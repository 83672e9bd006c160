"""Databases of a known content for tests. What fills one is done once for each kind; the others are copies of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from services import PostgresServer

from storage.care.maintenance import migrate

KINDS = ("sqlite", "postgresql")


class Databases:
    """Makes databases, each of its own.

    Args:
        folder: for SQLite's files.
        postgres: the server, asked for when a database on it is first wanted.
    """

    def __init__(self, folder: Path, postgres: Callable[[], PostgresServer]) -> None:
        self._folder, self._postgres = folder, postgres
        self._originals: dict[tuple[str, Callable[[str], object]], str] = {}

    def empty(self, kind: str, folder: Path | None = None) -> str:
        """The URL of one without anything; SQLite's file, in `folder`, does not exist yet."""
        if kind == "sqlite":
            return f"sqlite:///{(folder or self._folder) / f'{uuid4().hex}.db'}"
        return self._postgres().url(self._postgres().create_database())

    def filled(self, kind: str, folder: Path, fill: Callable[[str], object] = migrate) -> str:
        """The URL of one that `fill` filled, given its URL; by default it has our tables. SQLite's lies in `folder`."""
        if (kind, fill) not in self._originals:
            original = self.empty(kind)
            fill(original)
            self._originals[kind, fill] = original
        original = self._originals[kind, fill]
        if kind == "sqlite":
            copied = self.empty(kind, folder)
            shutil.copy(original.removeprefix("sqlite:///"), copied.removeprefix("sqlite:///"))
            return copied
        return self._postgres().url(self._postgres().create_database(template=original.rpartition("/")[2]))
