"""Kills at random moments of tunings: ranks, workers, tuner, API and beat of a fleet on this machine. Prints JSON.

Two nodes of one CPU rank each, a tuner, a beat and the API, over a PostgreSQL and a Redis of their own, started again
by a supervisor when they end. Ends with an AssertionError if anything that is stored is not true, is lost or doubled,
or if a process is left.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]

from crew import Crew, assert_gone  # noqa: E402
from kills import Onslaught  # noqa: E402
from services import postgres_binaries, postgres_server, redis_server  # noqa: E402
from supervisor import Supervisor  # noqa: E402


def main() -> None:
    """Kills, and tells what came of it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    binaries = postgres_binaries()
    if binaries is None:
        sys.exit("PostgreSQL's server is not installed")
    with tempfile.TemporaryDirectory() as folder, postgres_server(binaries) as postgres, redis_server() as broker:
        with Crew(postgres, broker, Path(folder)) as crew:
            supervisor = Supervisor(crew)
            supervisor.start()
            record = Onslaught(crew, supervisor, kills=asked.kills, seed=asked.seed).run()
        assert_gone(list(supervisor.seen))
        assert supervisor.strays() == []
    print(json.dumps(asdict(record), indent=2))


if __name__ == "__main__":
    main()
