"""A fleet of its own for a benchmark: PostgreSQL, Redis, two nodes of one CPU rank each, a tuner, a beat and an API."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from crew import Crew
from services import postgres_binaries, postgres_server, redis_server
from supervisor import ALL, Supervisor


@contextmanager
def private_fleet(names: Collection[str] = ALL) -> Iterator[tuple[Crew, Supervisor]]:
    """Starts it, with these services, and ends it with all that it made. Exits where PostgreSQL is not installed."""
    binaries = postgres_binaries()
    if binaries is None:
        sys.exit("PostgreSQL's server is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="autotune-fleet-") as folder,
        postgres_server(binaries) as postgres,
        redis_server() as broker,
        Crew(postgres, broker, Path(folder)) as crew,
    ):
        supervisor = Supervisor(crew, names)
        supervisor.start()
        yield crew, supervisor
