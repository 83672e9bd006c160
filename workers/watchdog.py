"""Watchdog: a worker that is up but does not consume is worth nothing, so its main process starts it again.

What it is judged by, its processes share in memory across a fork."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawValue
from typing import NoReturn

import psutil
from celery.platforms import close_open_fds

from autotune.errors import InputError


class Heartbeat:
    """What the processes of one worker know of each other, in memory that they share across a fork: make it before.

    The child, which runs the tasks, beats; the main process watches and asks the child to stop. Only a task that was
    consumed, or a probe that is under way, beats: neither a process that is merely up nor a database that is away can
    be mistaken for a consumer. The clock is the machine's monotonic one, which all its processes share.
    """

    def __init__(self) -> None:
        self._beat_at_s = RawValue("d", time.monotonic())
        self._stopping = RawValue("b", 0)
        self._evicted = RawValue("b", 0)

    def renew(self) -> None:
        """A task was consumed, or a probe goes on."""
        self._beat_at_s.value = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last renewal."""
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


log = logging.getLogger("autotune.watchdog")
_LOOK_EVERY_S = 2.0
_DEATH_S = 10.0

# The watchdog may wait some seconds for a broker or a database that is away. So many looks without a step of it are not
# that; they are counted, rather than the time, because a whole worker may be frozen for a while and go on.
_STUCK_LOOKS, _STUCK_LOOK_S = 12, 5.0


class Watchdog:
    """Judges this worker from a thread of its main process.

    A consumer can stop in silence after Redis dropped its connection (autotune.queue.consumer knows one way), and a
    child can hang. Neither shows from outside the queue, so the worker sends canaries to its own queue and waits for
    their heartbeat. Where the broker took a canary and none came back for long, the main process kills its children
    (the kernel then kills their ranks) and executes itself again: the same process id, so that whatever supervises it,
    or nothing at all, sees no change; a new session, so that what the old one held is given to others. Where another
    worker has meanwhile taken its name, which gets its canaries too, it ends instead: two workers must not evict each
    other for ever.

    Sending takes locks of the broker's client, which the main thread uses too. A second thread, which takes none, looks
    whether the first one still does.

    Args:
        heartbeat: beaten by the tasks.
        send_canary: to the worker's own queue; False if the broker did not take it.
        keeps_name: whether no other worker has registered under this one's name; asked before it starts itself again.
        patience_s: how long canaries that the broker took may be on their way.
        quiet_after_s: without a renewal for so long one is sent; it also keeps the node's heartbeat young.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        send_canary: Callable[[], bool],
        keeps_name: Callable[[], bool],
        *,
        patience_s: float,
        quiet_after_s: float,
    ) -> None:
        self._heartbeat, self._send_canary, self._keeps_name = heartbeat, send_canary, keeps_name
        self._patience_s, self._quiet_after_s = patience_s, quiet_after_s
        self._waiting_since: float | None = None
        self._steps = 0

    def start(self) -> None:
        """Watches until the worker shuts down."""
        for act in (self._watch, self._watch_the_watch):
            threading.Thread(target=act, name=act.__name__, daemon=True).start()

    def _watch(self) -> None:
        while not self._heartbeat.stopping:
            if self.waited_s() > self._patience_s:
                self._begin_anew()
            if self._heartbeat.evicted:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._steps += 1
            time.sleep(min(_LOOK_EVERY_S, max(self._quiet_after_s, 0.1)))

    def _begin_anew(self) -> NoReturn:
        waited = f"no canary came back for {self._patience_s:.0f} s"
        if self._keeps_name():
            log.error("%s: this worker starts itself again", waited)
            execute_again()
        log.error("%s, and another worker has registered as this node: this one ends", waited)
        end_children()
        os._exit(InputError.exit_code)

    def _watch_the_watch(self) -> None:
        steps, looks = -1, 0
        while not (self._heartbeat.stopping or self._heartbeat.evicted):
            steps, looks = self._steps, looks + 1 if steps == self._steps else 0
            if looks > _STUCK_LOOKS:
                faulthandler.dump_traceback(sys.stderr)
                log.error("the watchdog is stuck, all threads are above: this worker starts itself again")
                execute_again()
            time.sleep(_STUCK_LOOK_S)

    def waited_s(self) -> float:
        """Sends a canary where the heartbeat is old; returns how long the broker has had some and none came back."""
        if self._heartbeat.age_s < self._quiet_after_s or not self._send_canary():
            self._waiting_since = None  # it lives, or the broker is away and nothing can come back
            return 0.0
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        return now - self._waiting_since


def execute_again() -> NoReturn:
    """Kills this process's children and replaces it with a new run of the same command, which does `end_children`."""
    end_children()
    close_open_fds([sys.stdin, sys.stdout, sys.stderr])
    os.execv(sys.executable, sys.orig_argv)


def end_children() -> None:
    """Kills the children of this process. To be called at its start, too: before it executed itself again its pool may
    have made new ones in the place of those that were killed.
    """
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=_DEATH_S)
