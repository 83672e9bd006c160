"""What several requests ask at once is done in one go, each with its own answer."""

from __future__ import annotations

import asyncio
from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from threading import Event

import pytest
from anyio.to_thread import current_default_thread_limiter, run_sync

from autotune.api.sharing import Combiner
from autotune.errors import StoreConflictError, StoreError


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
