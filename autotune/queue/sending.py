"""CeleryQueue: carries ids to workers through Redis; implements autotune.ports.fleet.Queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from autotune.queue.app import BROKER, SWEEP_QUEUE, TUNER_QUEUE, TaskName, node_queue

if TYPE_CHECKING:
    from celery import Celery

Answer = TypeVar("Answer")

# More messages of one kind than this have no use: a worker that was away must not find thousands of them.
_MAX_WAITING = 4
# Shorter than a beat's pause (workers.beat), so that each sweep is really tried.
_AWAY_S = 3.0


class CeleryQueue:
    """Sends ids; says False when the broker does not take them. May be used by several threads.

    A broker that does not answer costs seconds. After that it is taken to be away for a moment, and sending gives False
    at once: a sweep sends again what is due.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._away_until_s = 0.0

    def advance(self, *ids: str) -> bool:
        """Asks any tuner to take the next steps of this tuning; without an id, to begin what waits.

        That is never behind tunings that wait to be advanced, and not sent where enough messages of its kind wait: a
        sweep begins what waits, too.
        """
        if ids:
            return self._send(TaskName.ADVANCE, ids, TUNER_QUEUE)
        return self._send_unless_many_wait(TaskName.ADVANCE, (), SWEEP_QUEUE)

    def backlog(self) -> int:
        """How many messages wait for tuners; 0 if the broker does not answer."""
        return self._ask(self._counted(TUNER_QUEUE)) or 0

    def run(self, node: str, job_id: str, token: int) -> bool:
        """To one node: run your share of this job under this grant."""
        return self._send(TaskName.RUN, (job_id, token), node_queue(node))

    def canary(self, node: str, session: str) -> bool:
        """To one node: prove that you consume. True without sending where enough messages wait there already."""
        return self._send_unless_many_wait(TaskName.CANARY, (session,), node_queue(node))

    def sweep(self) -> bool:
        """To any tuner: send again what is due. True without sending where sweeps wait already."""
        return self._send_unless_many_wait(TaskName.SWEEP, (), SWEEP_QUEUE)

    def regress(self, budget_gpu_s: float | None) -> bool:
        """To any tuner: begin this night's checks of best-known plans."""
        return self._send(TaskName.REGRESS, (budget_gpu_s,), SWEEP_QUEUE)

    def clear(self, node: str) -> bool:
        """Drops what waits for a node: it was sent to a worker that is gone."""

        def purge() -> bool:
            with self._app.connection_or_acquire() as connection:
                connection.default_channel.queue_purge(node_queue(node))
            return True

        return self._ask(purge) is not None

    def answers(self) -> bool:
        """Whether the broker is there. Whoever asks says so: its absence is not logged."""
        return self._ask(self._counted(TUNER_QUEUE), quietly=True) is not None

    def close(self) -> None:
        """Closes the connections to the broker."""
        self._app.close()

    def _send_unless_many_wait(self, task: TaskName, arguments: tuple[str | int, ...], queue: str) -> bool:
        waiting = self._ask(self._counted(queue))
        if waiting is None:
            return False
        return waiting >= _MAX_WAITING or self._send(task, arguments, queue)

    def _send(self, task: TaskName, arguments: Sequence[str | float | None], queue: str) -> bool:
        def send() -> bool:
            self._app.send_task(str(task), args=arguments, queue=queue, retry=False)
            return True

        return self._ask(send) is not None

    def _counted(self, queue: str) -> Callable[[], int]:
        """What asks how many messages wait in a queue."""

        def count() -> int:
            with self._app.connection_or_acquire() as connection:
                return int(connection.default_channel.client.llen(queue))

        return count

    def _ask(self, ask: Callable[[], Answer], *, quietly: bool = False) -> Answer | None:
        """What the broker answers; None if it does not, or did not a moment ago."""
        if time.monotonic() < self._away_until_s:
            return None
        if self._away_until_s:
            self._away_until_s = math.inf  # one thread tries, and the others need not wait with it
        answer = None
        try:
            answer = ask()
            BROKER.back()
        except (KombuError, RedisError, OSError) as error:
            if not quietly:
                BROKER.away(error)
        finally:
            self._away_until_s = 0.0 if answer is not None else time.monotonic() + _AWAY_S
        return answer
