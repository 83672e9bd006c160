"""Kills at random moments of tunings: ranks, workers, tuners, API, beat and servers of a fleet here. Prints JSON.

Two nodes of one CPU rank each, two tuners, a beat and the API, started again by a supervisor when they end, over a
PostgreSQL and a Redis of their own. Ends with an AssertionError if anything that is stored is not true, is lost or
doubled, or if a process is left.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]

from crew import assert_gone  # noqa: E402
from kills import Onslaught  # noqa: E402
from private_fleet import private_fleet  # noqa: E402
from supervisor import WITH_TWO_TUNERS  # noqa: E402


def main() -> None:
    """Kills, and tells what came of it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with private_fleet(WITH_TWO_TUNERS) as (crew, supervisor):
        record = Onslaught(crew, supervisor, kills=asked.kills, seed=asked.seed).run()
    assert_gone(list(supervisor.seen))
    assert supervisor.strays() == []
    print(json.dumps(asdict(record), indent=2))


if __name__ == "__main__":
    main()
