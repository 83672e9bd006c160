"""Real servers and real workers for the tests of the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crew import Crew
from services import PostgresServer, RedisServer, redis_server


@pytest.fixture(scope="session")
def broker() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def workplace(
    postgres: PostgresServer, broker: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crew]:
    """A database, a broker, and nobody yet."""
    with Crew(postgres, broker, tmp_path_factory.mktemp("crew")) as found:
        yield found


@pytest.fixture
def crew(workplace: Crew) -> Crew:
    """A fleet of two nodes, a tuner and a beat, which live on from test to test; what a test killed is started."""
    workplace.make_whole()
    return workplace
