"""An answer of a moment ago: asked for once, however many want it at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from threading import Event, Thread
from typing import Any

import pytest

from autotune.api.sharing import Recent, Shared


class Source:
    """Counts how often it is asked; the next answer waits until it is let go."""

    def __init__(self) -> None:
        self.asked, self.begun, self.go_on = 0, Event(), Event()
        self.go_on.set()

    def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        self.begun.set()
        assert self.go_on.wait(30)
        return number


def in_thread(find: Callable[[], Any]) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Asks it without holding the event loop up."""
    return lambda: asyncio.to_thread(find)


def test_it_is_asked_once_while_it_is_trusted() -> None:
    recent, source = Recent(10, 1000.0), Source()
    assert [recent.get("a", source) for _ in range(3)] == [1, 1, 1]
    assert recent.get("b", source) == 2


def test_nothing_found_is_an_answer_too() -> None:
    recent, calls = Recent(10, 1000.0), list[int]()
    for _ in range(2):
        assert recent.get("a", lambda: calls.append(1)) is None
    assert calls == [1]


def test_those_who_come_while_the_first_one_asks_wait_for_its_answer() -> None:
    recent, source, found = Recent(10, 1000.0), Source(), list[int]()
    source.go_on.clear()
    threads = [Thread(target=lambda: found.append(recent.get("a", source))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert source.begun.wait(30)
    source.go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [1] * 5


@pytest.mark.parametrize(("age_s", "told"), [(150.0, [1, 2]), (250.0, [2, 2])])
def test_an_old_answer_is_given_while_somebody_asks_again_but_no_very_old_one(
    monkeypatch: pytest.MonkeyPatch, age_s: float, told: list[int]
) -> None:
    recent, source, found = Recent(10, 100.0), Source(), list[int]()
    assert recent.get("a", source) == 1
    moment = time.monotonic() + age_s
    monkeypatch.setattr("autotune.api.sharing.time.monotonic", lambda: moment)
    source.go_on.clear()
    source.begun.clear()
    first = Thread(target=lambda: found.append(recent.get("a", source)))
    first.start()
    assert source.begun.wait(30)
    second = Thread(target=lambda: found.append(recent.get("a", source)))
    second.start()
    if told[0] == 1:  # it does not wait for the first
        second.join(30)
    source.go_on.set()
    for thread in (first, second):
        thread.join(30)
    assert found == told


def test_what_fails_is_asked_again() -> None:
    recent, source = Recent(10, 1000.0), Source()

    def fail() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        recent.get("a", fail)
    assert recent.get("a", source) == 1


def test_it_keeps_only_so_many() -> None:
    recent, source = Recent(2, 1000.0), Source()
    assert [recent.get(key, source) for key in ("a", "b", "c", "a")] == [1, 2, 3, 4]


def test_all_who_ask_at_once_are_told_by_one() -> None:
    shared, source = Shared(10, 1000.0), Source()

    async def go() -> list[int]:
        return [
            *await asyncio.gather(*(shared.get("a", in_thread(source)) for _ in range(50))),
            await shared.get("a", in_thread(source)),
        ]

    assert asyncio.run(go()) == [1] * 51


@pytest.mark.parametrize(
    ("age_s", "told", "at_once"), [(50.0, (1, 1), True), (150.0, (1, 1), True), (250.0, (2, 2), False)]
)
def test_in_an_event_loop_an_old_answer_is_given_while_it_is_asked_again_but_no_very_old_one(
    monkeypatch: pytest.MonkeyPatch, age_s: float, told: tuple[int, int], at_once: bool
) -> None:
    shared, source = Shared(10, 100.0), Source()

    async def go() -> tuple[list[int], bool]:
        await shared.get("a", in_thread(source))
        moment = time.monotonic() + age_s
        monkeypatch.setattr("autotune.api.sharing.time.monotonic", lambda: moment)
        source.go_on.clear()
        both = [asyncio.ensure_future(shared.get("a", in_thread(source))) for _ in range(2)]
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
        return [
            *[(await asyncio.gather(shared.get("a", in_thread(find)), return_exceptions=True))[0] for _ in range(4)]
        ]

    nothing, error, *found = asyncio.run(go())
    assert nothing is None
    assert isinstance(error, OSError)
    assert found == [3, 3]


def test_what_was_being_looked_for_when_something_changed_is_not_kept() -> None:
    shared, source = Shared(10, 1000.0), Source()

    async def go() -> list[int]:
        source.go_on.clear()
        first = asyncio.ensure_future(shared.get("a", in_thread(source)))
        assert await asyncio.to_thread(source.begun.wait, 30)
        shared.forget()
        second = asyncio.ensure_future(shared.get("a", in_thread(source)))
        await asyncio.sleep(0)  # the loop goes round once: it has asked
        source.go_on.set()
        return [*await asyncio.gather(first, second), await shared.get("a", in_thread(source))]

    assert asyncio.run(go()) == [1, 2, 2]


def test_in_an_event_loop_it_keeps_only_so_many() -> None:
    shared, source = Shared(2, 1000.0), Source()

    async def go() -> list[int]:
        return [await shared.get(key, in_thread(source)) for key in ("a", "b", "b", "c", "a")]

    assert asyncio.run(go()) == [1, 2, 2, 3, 4]
