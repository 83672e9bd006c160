"""Every test that takes `url` or `store` runs over SQLite and over PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from services import PostgresServer, postgres_binaries, postgres_server

from storage import SqlStore, open_store


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed")
    with postgres_server(binaries) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of its own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'autotune.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.create_database())


@pytest.fixture
def other(url: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A second empty database, of the same kind as `url`."""
    if url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'other.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.create_database())


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    with open_store(url) as opened:
        yield opened
