"""The machine that a box is made on: its commands, signals, and what it must have."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess


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
