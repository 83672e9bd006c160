"""Combining: what requests ask for at the same time is done in one go, by one thread."""

from __future__ import annotations

from asyncio import Future, Task, create_task, get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

MOST = 64
"""Done in one go at most."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Combiner(Generic[Asked, Answer]):
    """One transaction for many: whoever comes while the last one is under way goes with the next.

    Used within one event loop, where waiting costs no thread. The work is done in one, beside those of the handlers:
    it does not wait for them.

    Args:
        work: answers each of what is asked, in the same order: with an answer, or with an exception for that one alone.
            What it raises is raised to all of them.
    """

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Answer | Exception]]) -> None:
        self._work, self._thread = work, CapacityLimiter(1)
        self._waiting: deque[tuple[Asked, Future[Answer]]] = deque()
        self._task: Task[None] | None = None

    async def ask(self, asked: Asked) -> Answer:
        """The answer, once it is there. Raises what `work` gave or raised."""
        future: Future[Answer] = get_running_loop().create_future()
        self._waiting.append((asked, future))
        if self._task is None:
            self._task = create_task(self._work_off())
        return await future

    async def _work_off(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
                _tell(batch, await self._answers([asked for asked, _ in batch]))
        finally:
            self._task = None

    async def _answers(self, batch: Sequence[Asked]) -> Sequence[Answer | Exception]:
        try:
            return await run_sync(self._work, batch, limiter=self._thread)
        except Exception as error:  # noqa: BLE001 - handed to everybody who waits for it
            return [error] * len(batch)


def _tell(batch: Sequence[tuple[Asked, Future[Answer]]], answers: Sequence[Answer | Exception]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():  # whoever asked is gone
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
