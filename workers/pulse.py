"""Pulse: what the processes of one worker know of each other, in memory that they share across a fork.

The child, which runs the tasks, beats; the main process watches (workers.watch) and asks the child to stop. Only a
task that was consumed, or a probe that is under way, beats: neither a process that is merely up nor a database that
is away can be mistaken for a consumer.
"""

from __future__ import annotations

import time
from multiprocessing.sharedctypes import RawValue


class Pulse:
    """Make it before the fork. The clock is the machine's monotonic one, which all its processes share."""

    def __init__(self) -> None:
        self._beat_at_s = RawValue("d", time.monotonic())
        self._stopping = RawValue("b", 0)
        self._evicted = RawValue("b", 0)

    def beat(self) -> None:
        """A task was consumed, or a probe goes on."""
        self._beat_at_s.value = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - float(self._beat_at_s.value)

    def stop(self) -> None:
        """The worker shuts down: what it runs is given up."""
        self._stopping.value = 1

    @property
    def stopping(self) -> bool:
        """Whether the worker shuts down."""
        return bool(self._stopping.value)

    def evict(self) -> None:
        """Another worker has taken this one's name."""
        self._evicted.value = 1

    @property
    def evicted(self) -> bool:
        """Whether another worker has taken this one's name."""
        return bool(self._evicted.value)
