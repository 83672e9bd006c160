"""What a worker does with its tasks: the edge between Celery and our code, and a tuner's handlers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, StoreAwayError
from autotune.queue.app import VISIBILITY_TIMEOUT_S, TaskName
from autotune.specs.regression import CHECK_JOB

if TYPE_CHECKING:
    from celery import Celery

    from autotune.fleet.service import FleetService
    from autotune.regression.fleet import FleetRegression

log = logging.getLogger("autotune.tasks")
Action = Callable[..., None]

# Celery kills the process of a task that takes longer: the last resort against one that hangs.
_LIMIT_S = 600.0
_RUN_LIMIT_S = 0.9 * VISIBILITY_TIMEOUT_S


def install_tasks(app: Celery, actions: Mapping[TaskName, Action]) -> None:
    """Makes the application run these tasks alone. Each calls one action, and never raises.

    What comes is exactly what the task takes (autotune.queue.consumer). What an action raises is recorded in the log:
    the database still says what is due, and a sweep sends it again.
    """
    for task, act in actions.items():
        limit_s = _RUN_LIMIT_S if task is TaskName.RUN else _LIMIT_S
        app.task(_guarded(task, act), name=str(task), shared=False, time_limit=limit_s)


def _guarded(task: TaskName, act: Action) -> Callable[..., None]:
    def run(*payload: Any) -> None:
        try:
            act(*payload)
        except StoreAwayError:
            log.debug("%s%s: the database is away", task, payload)
        except AutotuneError as error:
            log.error("%s%s: %s", task, payload, error)
        except Exception:
            log.exception("%s%s failed", task, payload)

    return run


# Of the time between two sweeps. Closer together they do nothing more: many wait when all tuners were away for a while.
_SWEEPS_APART = 0.4


class TunerHandlers:
    """What the tasks of a tuner do. Lives in each child process that runs them.

    Args:
        fleet: the service.
        regression: the checks of best-known plans.
        sweep_every_s: how often sweeps are asked for.
    """

    def __init__(self, fleet: FleetService, regression: FleetRegression, *, sweep_every_s: float) -> None:
        self._fleet, self._regression = fleet, regression
        self._sweep_apart_s = _SWEEPS_APART * sweep_every_s
        self._swept_at_s: float | None = None

    def canary(self, _: str) -> None:
        """Nothing but the heartbeat of having been consumed."""

    def advance(self, *ids: str) -> None:
        """Takes the next steps of a tuning, or of the check that a job measured for; without an id, begins requests."""
        if not ids:
            self._fleet.admit()
        elif ids[0].startswith(CHECK_JOB):
            self._regression.advance(ids[0])
        else:
            self._fleet.advance(ids[0])

    def sweep(self) -> None:
        """Sends again what is due, unless this process did a moment ago; begins what waits in any case."""
        now = time.monotonic()
        if self._swept_at_s is None or now - self._swept_at_s > self._sweep_apart_s:
            self._swept_at_s = now
            self._fleet.sweep()
            self._regression.sweep()
        else:
            self._fleet.admit()

    def regress(self, budget_gpu_s: float | None) -> None:
        """Begins this night's checks; those that are under way are not begun twice."""
        self._regression.begin(budget_gpu_s)

    def close(self) -> None:
        """Nothing is left to end."""
