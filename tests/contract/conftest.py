"""Every test that takes `url`, `empty_url` or `store` runs over SQLite and over PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import KINDS, Databases

from storage import SqlStore, open_store


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of the test's database."""
    return str(request.param)


@pytest.fixture
def url(kind: str, databases: Databases, tmp_path: Path) -> str:
    """A database with our tables and no row in them."""
    return databases.ours(kind, tmp_path)


@pytest.fixture
def empty_url(kind: str, databases: Databases, tmp_path: Path) -> str:
    """A new database without tables. On SQLite there is no file yet."""
    return databases.empty(kind, tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    with open_store(url) as opened:
        yield opened
