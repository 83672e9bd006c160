"""What many ask for at the same time is worked out once, in one go, and kept while it is true."""

from __future__ import annotations

import asyncio
import time
from asyncio import gather
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from threading import Event, Thread
from typing import Any

import pytest
from anyio.to_thread import current_default_thread_limiter, run_sync
from cachetools import LRUCache, TTLCache

from autotune.api.sharing import ENTRY_BYTES, Cache, Combiner, Shared, size_bytes
from autotune.errors import InputError, StoreConflictError, StoreError


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


def lasting(max_bytes: int = 2**20) -> Cache:
    return Cache(LRUCache(max_bytes, size_bytes))


def test_it_is_worked_out_once() -> None:
    cache, source = lasting(), Source()
    assert [cache.get("a", source) for _ in range(3)] == [1, 1, 1]
    assert cache.get("b", source) == 2


def test_nothing_found_is_an_answer_too() -> None:
    cache, calls = lasting(), list[int]()
    for _ in range(2):
        assert cache.get("a", lambda: calls.append(1)) is None
    assert calls == [1]


def test_those_who_come_while_the_first_one_works_it_out_wait_for_its_answer() -> None:
    cache, source, found = lasting(), Source(), list[int]()
    source.go_on.clear()
    threads = [Thread(target=lambda: found.append(cache.get("a", source))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert source.begun.wait(30)
    assert cache.get("b", lambda: "another question does not wait") == "another question does not wait"
    source.go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [1] * 5


def test_what_is_true_for_a_while_is_worked_out_again_after_it() -> None:
    moment = 0.0
    cache, source = Cache(TTLCache(2**20, 10.0, timer=lambda: moment, getsizeof=size_bytes)), Source()
    assert [cache.get("a", source) for _ in range(2)] == [1, 1]
    moment = 9.9
    assert cache.get("a", source) == 1
    moment = 10.1
    assert [cache.get("a", source) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize(("error", "asked"), [(OSError("away"), 2), (InputError("--tp", 3, "2"), 1)])
def test_a_refusal_is_an_answer_and_what_fails_is_asked_again(error: Exception, asked: int) -> None:
    cache, source = lasting(), Source()

    def fail() -> int:
        source()
        raise error

    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            cache.get("a", fail)
        assert str(caught.value) == str(error)
    assert source.asked == asked


def test_it_keeps_only_so_many_bytes_the_least_used_go_first() -> None:
    cache, source = lasting(2 * ENTRY_BYTES + 1000), Source()
    assert [cache.get(key, source) for key in ("a", "b", "a", "c", "a", "b")] == [1, 2, 1, 3, 1, 4]
    assert cache.get("small", lambda: b"x" * 900) == b"x" * 900
    assert cache.get("a", source) == 5  # two entries and 900 bytes: one of them had to go
    assert [len(cache.get("large", lambda: bytes([source()]) * 10**6)) for _ in range(2)] == [10**6] * 2
    assert (source.asked, cache.get("a", source)) == (7, 5)  # what is larger than the whole displaces nothing


def test_all_who_ask_at_once_are_told_by_one() -> None:
    shared, source = Shared(2**20, 1000.0), Source()

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
    shared, source = Shared(2**20, 100.0), Source()

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
    shared, answers = Shared(2**20, 1000.0), iter([None, OSError("away"), 3])

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
    shared, source = Shared(2**20, 1000.0), Source()

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
    shared, source = Shared(2 * ENTRY_BYTES + 100, 1000.0), Source()

    async def go() -> list[int]:
        return [await shared.get(key, in_thread(source)) for key in ("a", "b", "b", "c", "a")]

    assert asyncio.run(go()) == [1, 2, 2, 3, 4]


class Work:
    """Answers with the square; holds its first batch until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go_on = Event(), Event()

    def __call__(self, asked: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(asked))
        self.begun.set()
        assert self.go_on.wait(30)
        if 13 in asked:
            raise StoreError("the database is away")
        return [StoreConflictError(f"{each} again") if each < 0 else each * each for each in asked]


async def behind_a_first(work: Work, ask: Callable[[int], Awaitable[int]], numbers: Sequence[int]) -> dict[int, object]:
    """Asks for 1, and for the numbers while that is under way."""
    first = asyncio.ensure_future(ask(1))
    assert await asyncio.to_thread(work.begun.wait, 30)
    others = [asyncio.ensure_future(ask(number)) for number in numbers]
    await asyncio.sleep(0)  # the loop goes round once: all have asked
    work.go_on.set()
    answers = await gather(first, *others, return_exceptions=True)
    return dict(zip([1, *numbers], answers, strict=True))


def test_all_that_came_meanwhile_is_done_in_one_go() -> None:
    work = Work()

    async def go() -> dict[int, object]:
        return await behind_a_first(work, Combiner(work).ask, [2, 3, 4, -5])

    found = asyncio.run(go())
    assert work.batches == [[1], [2, 3, 4, -5]]
    assert {number: found[number] for number in (1, 2, 3, 4)} == {1: 1, 2: 4, 3: 9, 4: 16}
    assert isinstance(found[-5], StoreConflictError)


def test_a_failure_of_the_whole_is_told_to_all_of_it_and_to_nobody_else() -> None:
    work = Work()

    async def go() -> tuple[dict[int, object], int]:
        combiner = Combiner(work)
        return await behind_a_first(work, combiner.ask, [2, 13]), await combiner.ask(3)

    found, after = asyncio.run(go())
    assert found[1] == 1
    assert isinstance(found[2], StoreError)
    assert isinstance(found[13], StoreError)
    assert after == 9


def test_one_alone_is_done_at_once() -> None:
    work = Work()
    work.go_on.set()

    async def go() -> list[int]:
        combiner = Combiner(work)
        with pytest.raises(StoreConflictError, match="-1 again"):
            await combiner.ask(-1)
        return [await combiner.ask(number) for number in (2, 3)]

    assert asyncio.run(go()) == [4, 9]
    assert work.batches == [[-1], [2], [3]]


def test_who_goes_away_before_the_answer_takes_it_from_nobody() -> None:
    work = Work()

    async def go() -> list[object]:
        combiner = Combiner(work)
        first, second = asyncio.ensure_future(combiner.ask(1)), asyncio.ensure_future(combiner.ask(2))
        assert await asyncio.to_thread(work.begun.wait, 30)
        first.cancel()
        third = asyncio.ensure_future(combiner.ask(3))
        work.go_on.set()
        return list(await gather(first, second, third, return_exceptions=True))

    gone, *others = asyncio.run(go())
    assert isinstance(gone, asyncio.CancelledError)
    assert others == [4, 9]


def test_work_does_not_wait_for_the_threads_of_others() -> None:
    work, held = Work(), Event()
    work.go_on.set()

    async def go() -> int:
        current_default_thread_limiter().total_tokens = 1
        busy = asyncio.ensure_future(run_sync(held.wait, 30))
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(Combiner(work).ask(3), 20)
        finally:
            held.set()
            await busy

    assert asyncio.run(go()) == 9
