"""CeleryQueue: carries ids to workers through Redis; implements autotune.tuning.fleet_ports.Queue."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from workers.app import SWEEP_QUEUE, TUNER_QUEUE, node_queue, pool_queue
from workers.payloads import TaskName

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger("autotune.queue")

# More canaries or sweeps than this do nothing more: who was away must not find thousands of them when it comes back.
_MOST_WAITING = 4


class CeleryQueue:
    """Sends ids; says False, and why in the log, when the broker does not take them. May be used by several threads."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def advance(self, tuning_id: str) -> bool:
        """To any tuner: take the next steps of this tuning."""
        return self._send(TaskName.ADVANCE, (tuning_id,), TUNER_QUEUE)

    def schedule(self, pool: str) -> bool:
        """To any free node of the pool: grant what waits."""
        return self._send(TaskName.SCHEDULE, (pool,), pool_queue(pool))

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

    def check(self, job_id: str) -> bool:
        """To any tuner: take the next step of the check that this job measured for."""
        return self._send(TaskName.CHECK, (job_id,), SWEEP_QUEUE)

    def clear(self, node: str) -> bool:
        """Drops what waits for a node: it was sent to a worker that is gone."""
        try:
            with self._app.connection_or_acquire() as connection:
                connection.default_channel.queue_purge(node_queue(node))
        except (KombuError, RedisError, OSError) as error:
            log.warning("the broker does not answer: %s", error)
            return False
        return True

    def answers(self) -> bool:
        """Whether the broker is there."""
        return self._waiting(TUNER_QUEUE) is not None

    def close(self) -> None:
        """Closes the connections to the broker."""
        self._app.close()

    def _send_unless_many_wait(self, task: TaskName, arguments: tuple[str | int, ...], queue: str) -> bool:
        waiting = self._waiting(queue)
        if waiting is None:
            return False
        return waiting >= _MOST_WAITING or self._send(task, arguments, queue)

    def _send(self, task: TaskName, arguments: tuple[str | float | None, ...], queue: str) -> bool:
        try:
            self._app.send_task(str(task), args=arguments, queue=queue, retry=False)
        except (KombuError, RedisError, OSError) as error:
            log.warning("%s%s was not sent: the broker does not answer (%s)", task, arguments, error)
            return False
        return True

    def _waiting(self, queue: str) -> int | None:
        """The messages that wait in a queue; None if the broker does not answer."""
        try:
            with self._app.connection_or_acquire() as connection:
                return int(connection.default_channel.client.llen(queue))
        except (KombuError, RedisError, OSError) as error:
            log.warning("the broker does not answer: %s", error)
            return None
