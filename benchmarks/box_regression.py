"""Nights of a fleet in a cluster in a box, with real trouble: what is found, and what is blamed?

Run as root: .venv/bin/python -m benchmarks.box_regression [--json] [--quiet-nights N] [unchanged link neighbour code]

Two nodes of one CPU rank each, a core a node, with PostgreSQL, Redis, API, tuner, beat and workers. For each trouble in
a box of its own: a tuning through the API finds what is best known, `autotune regress start` begins the first check and
N quiet nights (1), then the trouble comes, a night checks again, the trouble goes, and a last night checks once more.

unchanged: nothing comes. link: the links of both nodes at half their rate. neighbour: a busy process on the core of
node1's rank. code: the step takes 10 % longer, by a sitecustomize on the path of workers that are started again for it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from autotune.fleet.eligibility import obstacle
from autotune.specs.regression import Check, CheckState
from benchmarks.regression_real import SLOWER_STEP
from deploy.box import Box
from storage import SqlStore, open_store

Answer = TypeVar("Answer")

AUTOTUNE = str(Path(sys.executable).with_name("autotune"))
AMPLE_S = 600.0
"""What a busy machine may need for a night; never waited for where all is well."""

BEFORE_OTHERS = -15

MODEL = "tiny"
SPACE = {
    "tp": [1], "pp": [1], "micro_batch": [4], "zero_stage": [0], "recompute": ["none"], "sequence_parallel": [False],
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """A night's check, and what the machine was like."""

    label: str
    check: Check
    load: float

    def data(self) -> dict[str, Any]:
        """For --json."""
        found = self.check.result and self.check.result.to_data()
        return {"night": self.label, "state": self.check.state.value, "load": self.load, "result": found}


class Nights:
    """The nights of a box's fleet, one after the other. Close it before the box."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.store: SqlStore = open_store(box.database_url)

    def begin(self) -> None:
        """Begins a night's checks, as cron would."""
        where = {"AUTOTUNE_DB": self.box.database_url, "AUTOTUNE_BROKER": self.box.broker_url, "AUTOTUNE_SERVER": ""}
        subprocess.run([AUTOTUNE, "regress", "start"], env=os.environ | where, check=True, stdout=subprocess.DEVNULL)

    def night(self) -> Check:
        """One night of a fleet that knows one plan: its check, when it has ended."""
        wait_for("nodes that are ready", self.are_ready)
        before = {check.id for check in self.store.checks()}
        self.begin()
        return wait_for("the end of the check", lambda: self._ended(before))

    def stop_tuning(self, check: Check) -> None:
        """Takes back the tuning that follows from a check: nights are what is looked at here."""
        if check.result is None or not check.result.retune_reason:
            return
        tuning = wait_for("the tuning that follows", lambda: self.store.check(check.id).tuning_id)
        self.box.ask(f"/tunings/{tuning}?force=true", method="DELETE")
        wait_for("nodes that are free", lambda: not self.store.leased_nodes())

    def are_ready(self) -> bool:
        """Whether every node may get jobs."""
        nodes, now = self.store.nodes(), self.store.now()
        return len(nodes) == len(self.box.nodes) and not any(obstacle(node, now, node.slots) for node in nodes)

    def close(self) -> None:
        """Lets go of the database."""
        self.store.close()

    def _ended(self, before: set[str]) -> Check | None:
        return next((each for each in self.store.checks() if _is_new(each, before)), None)


def _is_new(check: Check, before: set[str]) -> bool:
    return check.id not in before and check.state is not CheckState.RUNNING


def wait_for(what: str, look: Callable[[], Answer], within_s: float = AMPLE_S) -> Answer:
    """Looks until there is a true answer, and returns it. Raises TimeoutError."""
    ends = time.monotonic() + within_s
    while not (answer := look()):
        if time.monotonic() > ends:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(0.1)
    return answer


@contextmanager
def nothing(nights: Nights) -> Iterator[None]:
    """No trouble."""
    yield


@contextmanager
def halved_link(nights: Nights) -> Iterator[None]:
    """Both nodes' links at half their rate."""
    rate_mbit = TROUBLES["link"].rate_mbit
    for node in nights.box.nodes:
        nights.box.set_rate(node, rate_mbit / 2)
    yield
    for node in nights.box.nodes:
        nights.box.set_rate(node, rate_mbit)


@contextmanager
def busy_neighbour(nights: Nights) -> Iterator[None]:
    """A process that wants the core of node1 as much as the rank there does."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, {core_of(nights.box, "node1")})
        os.setpriority(os.PRIO_PROCESS, process.pid, BEFORE_OTHERS)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def slower_code(nights: Nights) -> Iterator[None]:
    """Workers whose ranks have another step: 10 % longer."""
    own = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SLOWER_STEP)
        _start_again(nights, os.pathsep.join(filter(None, [folder, own])))
        yield
        _start_again(nights, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What comes, the speed of the links, tokens of a sequence (few for a step that is little but its link), and the
    nodes that the plan takes.
    """

    come: Callable[[Nights], AbstractContextManager[None]]
    rate_mbit: float = 2000.0
    seq_len: int = 128
    nodes: int = 2


TROUBLES = {
    "unchanged": Trouble(come=nothing),
    "link": Trouble(come=halved_link, rate_mbit=200.0, seq_len=64),
    "neighbour": Trouble(come=busy_neighbour),
    # On one node of two: two busy cores of a small machine slow each other down by more than the code does.
    "code": Trouble(come=slower_code, nodes=1),
}


def run(name: str, quiet_nights: int) -> list[Night]:
    """The nights of one trouble, in a box of their own."""
    trouble, found = TROUBLES[name], list[Night]()

    def night(label: str) -> None:
        check = nights.night()
        nights.stop_tuning(check)
        found.append(Night(label=f"{name}: {label}", check=check, load=os.getloadavg()[0]))
        print(line(found[-1]), file=sys.stderr, flush=True)

    with Box(nodes=2, ranks=1, rate_mbit=trouble.rate_mbit) as box:
        nights = Nights(box)
        try:
            settle(box)
            _tune(box, trouble)
            night("first")
            for _ in range(quiet_nights):
                night("as it was")
            with trouble.come(nights):
                night("trouble")
            night("as it was")
        finally:
            nights.close()
    return found


def line(night: Night) -> str:
    """A night as a line of the table."""
    result = night.check.result
    if result is None:
        return f"{night.label:22} {night.check.state.value}"
    low, high = result.interval
    change = f"{result.effect:+.1%} ({low:+.1%} to {high:+.1%})" if result.baseline_windows else ""
    cause = "" if result.cause is None else f"{result.cause.kind.value}: {result.cause.subject or result.cause.text}"
    figures = f"{len(result.windows):7} {night.load:5.1f}"
    return f"{night.label:22} {result.verdict.value:12} {change:29} {figures}  {cause}"


def main() -> None:
    """Reads the command line, runs and prints."""
    parser = argparse.ArgumentParser(description="Nights of a fleet in a cluster in a box, with real trouble.")
    parser.add_argument("trouble", nargs="*", metavar="TROUBLE", help=f"of {', '.join(TROUBLES)}; all if none is named")
    parser.add_argument("--quiet-nights", type=int, default=1, metavar="N", help="nights before the trouble comes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    unknown = [name for name in options.trouble if name not in TROUBLES]
    if unknown:
        parser.error(f"no such trouble: {', '.join(unknown)}")
    found = [night for name in options.trouble or TROUBLES for night in run(name, options.quiet_nights)]
    if options.json:
        print(json.dumps([night.data() for night in found], indent=2))
        return
    print(f"{'night':22} {'verdict':12} {'throughput':29} windows  load  cause")
    for night in found:
        print(line(night))


def _tune(box: Box, trouble: Trouble) -> None:
    """A short tuning through the API, whose winner is what is checked."""
    request = {
        "model": MODEL, "cluster": "box", "nodes": trouble.nodes, "space": SPACE, "budget": {"max_trials": 1},
        "workload": {"seq_len": trouble.seq_len, "global_batch": 8},
    }  # fmt: skip
    tuning = box.ask("/tunings", request)["tuning"]
    wait_for("the end of the tuning", lambda: box.ask(f"/tunings/{tuning}")["state"] == "done")
    wait_for("nodes that are free", lambda: all(node["job"] is None for node in box.ask("/nodes")["nodes"]))


def core_of(box: Box, node: str) -> int:
    """The core of a node."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[box.nodes.index(node) % len(cores)]


def settle(box: Box) -> None:
    """Gives each node's worker, and the ranks that it will start, one core and precedence over all else there.

    The servers of the box, and whatever else this machine does, are on the same few cores, where a cluster's are not.
    """
    for node in box.nodes:
        worker = psutil.Process(box.pids[node])
        for process in (worker, *worker.children(recursive=True)):
            for thread in process.threads():  # each has its own of both
                os.sched_setaffinity(thread.id, {core_of(box, node)})
                os.setpriority(os.PRIO_PROCESS, thread.id, BEFORE_OTHERS)


def _start_again(nights: Nights, path: str) -> None:
    """Ends the nodes' workers in order and starts them with another path for Python."""
    for node in nights.box.nodes:
        nights.box.kill(node, signal.SIGTERM)
        nights.box.start(node, {"PYTHONPATH": path})
    wait_for("nodes that are back", nights.are_ready)
    settle(nights.box)


if __name__ == "__main__":
    main()
