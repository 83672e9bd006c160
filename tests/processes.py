"""Processes of a test: they begin their work together, or are killed in the middle of it.

A server forks them that has imported everything once: fresh interpreters would take longer than what they do.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Begin = Callable[[], object]
"""Returns when all processes of a test have called it."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "alembic.autogenerate",
        "alembic.command",
        "optuna",
        "pytest",
        "redis",
        "storage.care.backup",
        "storage.database.postgres",
    ]
)
_TIMEOUT_S = 200.0
_barrier: Any = None


def run_together(work: Callable[[str, int, Begin], Answer], url: str, count: int) -> list[Answer]:
    """What each of so many processes returned, which are numbered from 1."""
    barrier = CONTEXT.Barrier(count)
    with ProcessPoolExecutor(count, mp_context=CONTEXT, initializer=_keep, initargs=(barrier,)) as processes:
        # None is free for a second task while the others have not begun.
        found = [processes.submit(_work, work, url, number + 1) for number in range(count)]
        return [each.result(_TIMEOUT_S) for each in found]


def run_apart(work: Callable[..., Answer], *arguments: object) -> Answer:
    """What a process of its own returned."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as process:
        return process.submit(work, *arguments).result(_TIMEOUT_S)


def _keep(barrier: Any) -> None:
    global _barrier  # noqa: PLW0603 -- a barrier reaches a process only when that is made
    _barrier = barrier


def _work(work: Callable[[str, int, Begin], Answer], url: str, number: int) -> Answer:
    return work(url, number, lambda: _barrier.wait(_TIMEOUT_S))
