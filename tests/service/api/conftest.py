"""The real API on a real socket, over an empty database: PostgreSQL, and for some tests SQLite as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from api_server import Api, StartApi, serving
from databases import Databases
from fleet_records import CLUSTER, pair
from services import RedisServer

from autotune.api.application import create_app
from autotune.settings import Settings
from autotune.wiring import open_fleet, open_queue, open_store
from storage import SqlStore


@pytest.fixture
def url(request: pytest.FixtureRequest, databases: Databases, tmp_path: Path) -> str:
    """A database without rows. `api_server.ON_BOTH` makes it one of each kind."""
    return databases.ours(getattr(request, "param", "postgresql"), tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    """A store with the pool `pair` of two nodes."""
    with open_store(url) as opened:
        opened.put_cluster(CLUSTER)
        pair(opened)
        yield opened


@pytest.fixture
def start_api(store: SqlStore, url: str, broker: RedisServer, tmp_path: Path) -> Iterator[StartApi]:
    """Starts the API with options of create_app; ended after the test."""
    settings = Settings(database_url=url, log_dir=tmp_path, broker_url=broker.url)
    with closing(open_queue(settings)) as queue, closing(open_fleet(store, open_queue(settings))) as fleet:
        running = []

        def start(**options: object) -> Api:
            app = create_app(store, fleet, **({"broker_answers": queue.answers} | options))  # type: ignore[arg-type]
            running.append(serving(app, store))
            return running[-1].__enter__()

        yield start
        for server in running:
            server.__exit__(None, None, None)


@pytest.fixture
def api(start_api: StartApi) -> Api:
    """The API, with keys."""
    return start_api()
