"""Watch: a worker that is up but does not consume is worth nothing, so its main process judges it and starts it anew.

A consumer can stop in silence after Redis dropped its connection (workers.credit knows one way), and a child can hang.
Neither shows from outside the queue, so the worker sends canaries to its own queue and waits for their pulse. Where the
broker took a canary and none came back for long, the main process kills its children (the kernel then kills their
ranks) and executes itself again: the same process id, so that whatever supervises it, or nothing at all, sees no
change; a new session, so that what the old one held is given to others.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import psutil
from celery.platforms import close_open_fds

from workers.pulse import Pulse

log = logging.getLogger("autotune.watch")

_QUIET_S = 5.0  # without a beat for this long, a canary is sent; it also keeps the node's heartbeat young
_LOOK_EVERY_S = 2.0
_DEATH_S = 10.0


class Watch:
    """Judges this worker from a thread of its main process.

    Args:
        pulse: beaten by the tasks.
        send_canary: to the worker's own queue; False if the broker did not take it.
        patience_s: how long canaries that the broker took may be on their way.
    """

    def __init__(self, pulse: Pulse, send_canary: Callable[[], bool], *, patience_s: float) -> None:
        self._pulse, self._send_canary, self._patience_s = pulse, send_canary, patience_s
        self._waiting_since: float | None = None

    def start(self) -> None:
        """Watches until the worker shuts down."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._pulse.stopping:
            if self._pulse.evicted:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self.waited_s() > self._patience_s:
                log.error("no canary came back for %.0f s: this worker starts itself again", self._patience_s)
                execute_again()
            time.sleep(_LOOK_EVERY_S)

    def waited_s(self) -> float:
        """Sends a canary where the pulse is old; returns how long the broker has had some and none came back."""
        if self._pulse.age_s < _QUIET_S or not self._send_canary():
            self._waiting_since = None  # it lives, or the broker is away and nothing can come back
            return 0.0
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        return now - self._waiting_since


def execute_again() -> NoReturn:
    """Kills this process's children and replaces it with a new run of the same command."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=_DEATH_S)
    close_open_fds([sys.stdin, sys.stdout, sys.stderr])
    os.execv(sys.executable, sys.orig_argv)
