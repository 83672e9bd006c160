"""What many requests of one event loop ask is looked for once, and trusted for a while."""

from __future__ import annotations

import asyncio
import time
from threading import Event

import pytest

from autotune.api.cache import Shared


class Source:
    """Counts how often it was asked; waits, if it is told to, before it answers."""

    def __init__(self) -> None:
        self.asked, self.begun, self.go_on = 0, Event(), Event()
        self.go_on.set()

    def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        self.begun.set()
        assert self.go_on.wait(30)
        return number


def test_all_who_ask_at_once_are_told_by_one() -> None:
    shared, source = Shared(10, 1000.0), Source()

    async def go() -> list[int]:
        return [*await asyncio.gather(*(shared.get("a", source) for _ in range(50))), await shared.get("a", source)]

    assert asyncio.run(go()) == [1] * 51


@pytest.mark.parametrize(
    ("age_s", "told", "at_once"), [(50.0, (1, 1), True), (150.0, (1, 1), True), (250.0, (2, 2), False)]
)
def test_an_old_answer_is_given_while_it_is_asked_again_but_no_very_old_one(
    monkeypatch: pytest.MonkeyPatch, age_s: float, told: tuple[int, int], at_once: bool
) -> None:
    shared, source = Shared(10, 100.0), Source()

    async def go() -> tuple[list[int], bool]:
        await shared.get("a", source)
        moment = time.monotonic() + age_s
        monkeypatch.setattr("autotune.api.cache.time.monotonic", lambda: moment)
        source.go_on.clear()
        both = [asyncio.ensure_future(shared.get("a", source)) for _ in range(2)]
        for _ in range(3):
            await asyncio.sleep(0)
        done_at_once = all(each.done() for each in both)
        source.go_on.set()
        return list(await asyncio.gather(*both)), done_at_once

    found, done_at_once = asyncio.run(go())
    assert (tuple(found), done_at_once) == (told, at_once)


def test_nothing_and_errors_are_not_kept() -> None:
    shared, answers = Shared(10, 1000.0), iter([None, OSError("away"), 3])

    def find() -> int | None:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def go() -> list[object]:
        return [*[(await asyncio.gather(shared.get("a", find), return_exceptions=True))[0] for _ in range(4)]]

    nothing, error, *found = asyncio.run(go())
    assert nothing is None
    assert isinstance(error, OSError)
    assert found == [3, 3]


def test_what_was_being_looked_for_when_something_changed_is_not_kept() -> None:
    shared, source = Shared(10, 1000.0), Source()

    async def go() -> list[int]:
        source.go_on.clear()
        first = asyncio.ensure_future(shared.get("a", source))
        assert await asyncio.to_thread(source.begun.wait, 30)
        shared.forget()
        second = asyncio.ensure_future(shared.get("a", source))
        await asyncio.sleep(0)  # the loop goes round once: it has asked
        source.go_on.set()
        return [*await asyncio.gather(first, second), await shared.get("a", source)]

    assert asyncio.run(go()) == [1, 2, 2]


def test_it_keeps_only_so_many() -> None:
    shared, source = Shared(2, 1000.0), Source()

    async def go() -> list[int]:
        return [await shared.get(key, source) for key in ("a", "b", "b", "c", "a")]

    assert asyncio.run(go()) == [1, 2, 2, 3, 4]
