"""Beat: asks for a sweep every few seconds, for ever.

It keeps nothing: a beat that dies loses nothing, two of them do no harm, and a clock that is set back does not stop it
(Celery's beat compares clock times, and would wait for the old time to come again).
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.queue import CeleryQueue

log = logging.getLogger("autotune.beat")

SWEEP_EVERY_S = 5.0


def run_beat(queue: CeleryQueue) -> None:
    """Sends sweeps until SIGTERM or SIGINT. While the broker is away it says so once and goes on."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    log.info("a sweep every %g s", SWEEP_EVERY_S)
    while not stop.is_set():
        queue.sweep()
        stop.wait(SWEEP_EVERY_S)
    queue.close()
    log.info("stopped")
