"""The processes of a box: each in a namespace, with a log of its own, started and ended by name; and what the machine
that a box is made on must have.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class BoxError(Exception):
    """A box that cannot be made or used: says what failed, and what is needed."""


def program(name: str) -> str | None:
    """The path of a program, also of those that are on root's PATH only. None if there is none."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def require_root() -> None:
    """Raises BoxError where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise BoxError("network namespaces need root: run it with sudo")
    missing = [name for name in ("ip", "tc") if program(name) is None]
    if missing:
        raise BoxError(f"{' and '.join(missing)} not found; they are in the package iproute2")


def command(name: str, *arguments: str) -> str:
    """Runs a command and returns what it prints. Raises BoxError with what it complains about."""
    words = [program(name) or name, *arguments]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        complaint = done.stderr.strip() or f"exit status {done.returncode}"
        raise BoxError(f"{' '.join([name, *arguments])}: {complaint}")
    return done.stdout


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


_TAIL_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to start: `namespace` is where, `user` who (None: who started the box)."""

    namespace: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None

    def full(self) -> list[str]:
        """The whole command line. `ip netns exec` and `setpriv` become the command: its process id is theirs."""
        change = (
            [] if self.user is None else ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--init-groups"]
        )
        return [program("ip") or "ip", "netns", "exec", self.namespace, *change, *self.words]


class Processes:
    """Named processes with logs in one folder. Not safe for threads."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._commands: dict[str, Command] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Command | None = None) -> int:
        """Starts a process, the one that had that name before if `command` is None. Returns its process id."""
        if command is not None:
            self._commands[name] = command
        if self.is_running(name):
            raise BoxError(f"{name} runs already (process {self._running[name].pid})")
        what = self._commands[name]
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                what.full(),
                env={**os.environ, **what.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal is for who started the box; it then ends these in its own order.
                start_new_session=True,
            )
        return self._running[name].pid

    def command(self, name: str) -> Command:
        """How a process was started the last time."""
        return self._commands[name]

    @property
    def pids(self) -> dict[str, int]:
        """Name to process id of those that run."""
        return {name: process.pid for name, process in self._running.items() if process.poll() is None}

    def is_running(self, name: str) -> bool:
        """Whether it was started and has not ended."""
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to one process (not to its children)."""
        self._running[name].send_signal(number)

    def stop(self, name: str, *, number: signal.Signals = signal.SIGTERM, within_s: float = 30.0) -> int:
        """Ends a process by a signal and returns its exit status. Raises BoxError if it does not end."""
        process = self._running[name]
        process.send_signal(number)
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise BoxError(f"{name} did not end within {within_s:g} s of {number.name}\n{self.tail(name)}") from None

    def wait_until(self, name: str, ready: Callable[[], bool], *, within_s: float) -> None:
        """Waits until a process is ready. Raises BoxError with the tail of its log if it ends, or time runs out."""
        ends = time.monotonic() + within_s
        while not ready():
            status = self._running[name].poll()
            if status is not None:
                raise BoxError(f"{name} ended with status {status} while it started\n{self.tail(name)}")
            if time.monotonic() > ends:
                raise BoxError(f"{name} was not ready within {within_s:g} s\n{self.tail(name)}")
            time.sleep(0.05)

    def reap(self) -> None:
        """Waits for those that were ended by somebody else."""
        for process in self._running.values():
            process.wait()

    def log(self, name: str) -> Path:
        """The file of what a process prints."""
        return self.log_dir / f"{name}.log"

    def tail(self, name: str) -> str:
        """The last lines of it."""
        lines = self.log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  {name}: {line}" for line in lines)


def run_once(command: Command) -> str:
    """Runs a command to its end and returns what it prints. Raises BoxError with its complaint."""
    done = subprocess.run(
        command.full(),
        env={**os.environ, **command.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise BoxError(f"{_words(command.words)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _words(words: Sequence[str]) -> str:
    return " ".join([Path(words[0]).name, *words[1:]])
