"""Does the memory of a fleet stay flat? `python benchmarks/fleet_memory.py --minutes 60`.

A fleet of two nodes of one CPU rank each, a tuner, a beat and an API is kept at steady work: two tunings are always
under way, a new one is asked for as soon as one ends, and clients ask what a page or a script would, again and again.
Every few seconds the resident memory of each service is read: of all its processes together, a node's ranks apart.

Prints JSON: for each service the start and the end (medians of the first and the last tenth after the warm-up, MiB),
and the slope, by least squares over all samples after the warm-up, in MiB an hour. Ends with an AssertionError where a
service ended, or a tuning failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "service")]

from crew import POOL, Crew, Worker  # noqa: E402
from load import Asked, ask_all, submission  # noqa: E402
from private_fleet import private_fleet  # noqa: E402

from autotune.fleet.keys import create_key  # noqa: E402
from autotune.specs import TuningState  # noqa: E402

LIVE, PAUSE_S, MIB = 2, 0.5, 2**20
QUESTIONS = (
    f"/best?model=tiny&cluster={POOL}&nodes=2&seq_len=64&global_batch=4&dtype=bf16",
    "/tunings?limit=50", "/nodes", "/measurements?kind=step&limit=50", "/known", "/healthz",
)  # fmt: skip


class Steady:
    """Steady work for a fleet."""

    def __init__(self, crew: Crew, url: str) -> None:
        self._crew, self._url = crew, url
        self._secret = create_key(crew.store, "steady", "admin").secret
        self._seeds = itertools.count(1)
        self.asked, self.ended = 0, 0
        self._live: set[str] = set()

    def go_on(self) -> None:
        """Replaces the tunings that have ended, and asks each question once."""
        for tuning_id in sorted(self._live):
            tuning = self._crew.store.tuning(tuning_id)
            assert tuning.state is not TuningState.FAILED, tuning.message
            if tuning.state.ended:
                self._live.discard(tuning_id)
                self.ended += 1
        missing = [submission(next(self._seeds)) for _ in range(LIVE - len(self._live))]
        questions = [Asked(method="GET", path=path) for path in QUESTIONS]
        answers = ask_all(self._url, [*missing, *questions], 4, [self._secret])
        self.asked += len(answers)
        for answer in answers:
            assert answer.status < 400, (answer.asked.path, answer.status, answer.data)
            if answer.asked.method == "POST":
                self._live.add(str(answer.data["tuning"]))


def resident_bytes(services: dict[str, Worker]) -> dict[str, int]:
    """The resident memory of each service by name, and of a node's ranks as `NAME ranks`."""
    found = {}
    for name, worker in services.items():
        ranks = set(worker.ranks) if name in {"a", "b"} else set()
        found[name] = _sum(process for process in worker.family if process not in ranks)
        if ranks:
            found[f"{name} ranks"] = _sum(ranks)
    return found


def _sum(processes: Iterator[psutil.Process] | set[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a rank may end at any moment
            total += process.memory_info().rss
    return total


def summary(samples: list[tuple[float, int]]) -> dict[str, float]:
    """Start, end and slope of samples of seconds and bytes."""
    times, sizes = [at for at, _ in samples], [size / MIB for _, size in samples]
    tenth = max(1, len(samples) // 10)
    slope = statistics.linear_regression(times, sizes).slope * 3600 if len(set(times)) > 1 else 0.0
    return {
        "start_mib": round(statistics.median(sizes[:tenth]), 1),
        "end_mib": round(statistics.median(sizes[-tenth:]), 1),
        "slope_mib_per_hour": round(slope, 2),
        "samples": len(samples),
    }


def main() -> None:
    """Runs the fleet, and prints what its memory did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of work, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=5.0, help="minutes of work that are not counted")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    options = parser.parse_args()
    samples: dict[str, list[tuple[float, int]]] = {}
    with private_fleet() as (crew, supervisor):
        steady = Steady(crew, supervisor.url)
        begin_s = time.monotonic() + 60 * options.warm_up
        next_s, end_s = begin_s, begin_s + 60 * options.minutes
        expected = set(supervisor.services)
        while (now_s := time.monotonic()) < end_s:
            steady.go_on()
            assert set(supervisor.services) == expected, f"{expected - set(supervisor.services)} ended"
            if now_s >= next_s:
                for name, size in resident_bytes(supervisor.services).items():
                    samples.setdefault(name, []).append((now_s - begin_s, size))
                next_s += options.every
            time.sleep(PAUSE_S)
    told = {name: summary(found) for name, found in sorted(samples.items())}
    print(json.dumps({"minutes": options.minutes, "tunings": steady.ended, "requests": steady.asked, "rss": told}))


if __name__ == "__main__":
    main()
