"""Which process runs a tuning, and whether it still lives."""

from __future__ import annotations

import os
import socket

import psutil


def process_owner() -> str:
    """host:pid:start time of this process: names an owner that can be checked for life."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def owner_lives(owner: str) -> bool:
    """Whether that process is (or may be) alive: one of another host is taken to be."""
    host, pid, started = owner.rsplit(":", 2)
    if host != socket.gethostname():
        return True
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(started)) < 1.0
    except psutil.NoSuchProcess:
        return False
