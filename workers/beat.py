"""Beat: asks for a sweep every few seconds, and once a night for checks of the best-known plans, for ever.

It keeps nothing: a beat that dies loses nothing, two of them do no harm, and a clock that is set back does not stop it
(Celery's beat compares clock times, and would wait for the old time to come again).
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.queue.sending import CeleryQueue

log = logging.getLogger("autotune.beat")

GRACE = timedelta(minutes=10)


@dataclass(slots=True, kw_only=True)
class Nightly:
    """When checks begin, in UTC, and what they may cost. Begun within `GRACE` of that time, once a day.

    A beat that starts again within it asks twice: checks that are under way are not begun again.
    """

    at: time
    budget_gpu_s: float | None
    begun: date | None = None

    def is_due(self, now: datetime) -> bool:
        """Whether it is time and that night's have not been asked for."""
        night = self.night_of(now)
        return self.begun != night and now - datetime.combine(night, self.at, UTC) < GRACE

    def night_of(self, now: datetime) -> date:
        """The day on which the last night began: a minute after midnight that may be yesterday."""
        return now.date() if now >= datetime.combine(now.date(), self.at, UTC) else now.date() - timedelta(days=1)


def run_beat(queue: CeleryQueue, nightly: Nightly | None = None, *, sweep_every_s: float) -> None:
    """Sends sweeps until SIGTERM or SIGINT. While the broker is away it says so once and goes on."""
    # A handler runs wherever the process just is, also in the middle of waiting: there an Event could not be set, its
    # lock is held. Putting into this queue is always safe.
    told = SimpleQueue[int]()

    def end(number: int, frame: FrameType | None) -> None:
        told.put(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    log.info("a sweep every %g s", sweep_every_s)
    is_over = False
    while not is_over:
        queue.sweep()
        now = datetime.now(UTC)
        if nightly is not None and nightly.is_due(now) and queue.regress(nightly.budget_gpu_s):
            log.info("checks of best-known plans begin")
            nightly.begun = nightly.night_of(now)
        is_over = _is_told(told, within_s=sweep_every_s)
    queue.close()
    log.info("stopped")


def _is_told(told: SimpleQueue[int], *, within_s: float) -> bool:
    try:
        told.get(timeout=within_s)
    except Empty:
        return False
    return True
