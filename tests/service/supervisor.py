"""A supervisor for tests: keeps the services of a crew running, as systemd would, and knows every process there was."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection

import psutil
from crew import Crew, Worker, autotune, wait_for

ALL = ("a", "b", "tuner", "beat", "api")
WITH_TWO_TUNERS = (*ALL, "tuner-2")
RESTART_S = 1.0
"""How long a service that ended stays down."""


class Supervisor:
    """Two nodes, one or two tuners, a beat and an API, each started again when it ends.

    Args:
        crew: they are its parts.
        names: those that are wanted.
    """

    def __init__(self, crew: Crew, names: Collection[str] = ALL) -> None:
        self._crew, self._port = crew, _free_port()
        starts: dict[str, Callable[[], Worker]] = {
            "a": lambda: crew.start_node("a"),
            "b": lambda: crew.start_node("b", "127.0.0.2"),
            "tuner": crew.start_tuner,
            "tuner-2": crew.start_tuner,
            "beat": crew.start_beat,
            "api": lambda: crew.start("api", *autotune("serve", "--port", str(self._port), "--open-to-this-machine")),
        }
        self._starts = {name: starts[name] for name in names}
        self._down_since: dict[str, float] = {}
        self.seen: set[psutil.Process] = set()
        self.restarts = 0

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def services(self) -> dict[str, Worker]:
        """Those that run, by name."""
        parts = {name: self._crew.part.get(name) for name in self._starts}
        return {name: worker for name, worker in parts.items() if worker is not None and worker.process.poll() is None}

    def start(self) -> None:
        """Starts what does not run, and waits until all of it is of use."""
        running = self.services
        for name in self._starts.keys() - running.keys():
            self._crew.part[name] = self._starts[name]()
        for name in self._starts.keys() & {"a", "b", "tuner", "tuner-2"}:
            self._crew.wait_ready(self._crew.part[name])
        if "api" in self._starts:
            wait_for("an API that listens", self._listens)

    def _listens(self) -> bool:
        api = self._crew.part["api"]
        assert api.process.poll() is None, api.log
        return api.says("running on http://")

    def tend(self) -> None:
        """Starts again what has been down for long enough, and takes note of every process that there is."""
        running, now = self.services, time.monotonic()
        for name in self._starts.keys() - running.keys():
            if now - self._down_since.setdefault(name, now) >= RESTART_S:
                self._crew.part[name] = self._starts[name]()
                del self._down_since[name]
                self.restarts += 1
        self.seen.update(self.living())

    def living(self) -> set[psutil.Process]:
        """The services, their children and ranks, as they are now."""
        return {process for worker in self.services.values() for process in _family(worker)}

    def strays(self) -> list[psutil.Process]:
        """Processes of the crew, found by its folder of logs, that belong to no service that runs."""
        ours = [process for process in psutil.process_iter() if _has(process, str(self._crew.settings.log_dir))]
        return [process for process in ours if process not in self.living()]


def _family(worker: Worker) -> list[psutil.Process]:
    try:
        return worker.family
    except psutil.NoSuchProcess:
        return []


def _has(process: psutil.Process, log_dir: str) -> bool:
    """Whether a process was given that folder: in its environment, or, as ranks are, by its arguments."""
    try:
        return process.environ().get("AUTOTUNE_LOG_DIR") == log_dir or log_dir in " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
