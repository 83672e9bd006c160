"""Combining: what several threads ask for at the same time is done by one of them, in one go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock
from typing import Generic, TypeVar

MOST = 64
"""Done in one go at most."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Asked, Answer]):
    asked: Asked
    told: Event
    answer: Answer | None = None
    error: Exception | None = None
    done: bool = False


class Combiner(Generic[Asked, Answer]):
    """One transaction for many: whoever comes while the last one is under way goes with the next.

    Args:
        work: answers each of what is asked, in the same order: with an answer, or with an exception for that one alone.
            What it raises is raised to all of them.
    """

    def __init__(self, work: Callable[[Sequence[Asked]], Sequence[Answer | Exception]]) -> None:
        self._work, self._lock, self._busy = work, Lock(), False
        self._queue: deque[_Waiting[Asked, Answer]] = deque()

    def __len__(self) -> int:
        """How many wait for the next go."""
        return len(self._queue)

    def ask(self, asked: Asked) -> Answer:
        """The answer, once it is there. Raises what `work` gave or raised."""
        mine = _Waiting[Asked, Answer](asked, Event())
        with self._lock:
            self._queue.append(mine)
            leads, self._busy = not self._busy, True
        if not leads:
            mine.told.wait()
        if not mine.done:
            self._lead()
        if mine.error is not None:
            raise mine.error
        assert mine.answer is not None
        return mine.answer

    def _lead(self) -> None:
        """Works off what waits, its own among it, and hands the lead to the first of those that came meanwhile."""
        batch = [self._queue.popleft() for _ in range(min(MOST, len(self._queue)))]
        try:
            self._work_off(batch)
        finally:
            with self._lock:
                self._busy = bool(self._queue)
                heir = self._queue[0] if self._queue else None
            if heir is not None:
                heir.told.set()

    def _work_off(self, batch: Sequence[_Waiting[Asked, Answer]]) -> None:
        try:
            answers = self._work([each.asked for each in batch])
        except Exception as error:  # noqa: BLE001 - handed to everybody who waits for it
            answers = [error] * len(batch)
        for each, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                each.error = answer
            else:
                each.answer = answer
            each.done = True
            each.told.set()
