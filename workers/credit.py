"""Credit: a consumer that waits for a message that was lost gets its connection anew.

With a prefetch of 1 a consumer asks for the next message when the last one is acknowledged. Where Redis goes away in
just that moment, kombu logs "Couldn't ack" and keeps the message counted for ever (kombu.message.ack_log_error): the
consumer asks for nothing any more, and so does not even see that its connection is gone. workers.watch would find that
by its canaries; this finds it sooner, and without ending what runs.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.state import reserved_requests

_EVERY_S = 2.0


class CreditCheck(bootsteps.StartStopStep):  # type: ignore[misc]
    """A step of Celery's consumer: looks now and then, on its event loop."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None
        self._was_stuck = False

    def start(self, consumer: Any) -> None:
        """Begins with each connection."""
        self._was_stuck = False
        self._timer = consumer.timer.call_repeatedly(_EVERY_S, self._look, (consumer,))

    def stop(self, consumer: Any) -> None:
        """Ends with it."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, consumer: Any) -> None:
        """Raises ConnectionError, which makes the consumer connect again, at the second look that finds it stuck."""
        is_stuck = not reserved_requests and not consumer.task_consumer.channel.qos.can_consume()
        if is_stuck and self._was_stuck:
            raise ConnectionError("a message that could not be acknowledged is in the way")
        self._was_stuck = is_stuck
