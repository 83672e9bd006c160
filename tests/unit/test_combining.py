"""What several threads ask at once is done in one go, each with its own answer."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

import pytest

from autotune.errors import StoreConflictError, StoreError
from autotune.tuning.fleet.combining import Combiner


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


def ask_behind_a_first(work: Work, combiner: Combiner[int, int], numbers: Sequence[int]) -> dict[int, object]:
    """Asks for 1, and for the numbers while that is under way."""
    found: dict[int, object] = {}

    def ask(number: int) -> None:
        try:
            found[number] = combiner.ask(number)
        except Exception as error:  # noqa: BLE001 - it is the answer
            found[number] = error

    first = Thread(target=ask, args=(1,))
    first.start()
    assert work.begun.wait(30)
    others = [Thread(target=ask, args=(number,)) for number in numbers]
    for thread in others:
        thread.start()
    while len(combiner) < len(numbers):  # bounded by the test's own timeout
        pass
    work.go_on.set()
    for thread in [first, *others]:
        thread.join(30)
    return found


def test_all_that_came_meanwhile_is_done_in_one_go() -> None:
    work = Work()
    found = ask_behind_a_first(work, Combiner(work), [2, 3, 4, -5])
    assert work.batches[0] == [1]
    assert sorted(work.batches[1]) == [-5, 2, 3, 4]
    assert len(work.batches) == 2
    assert {number: found[number] for number in (1, 2, 3, 4)} == {1: 1, 2: 4, 3: 9, 4: 16}
    assert isinstance(found[-5], StoreConflictError)


def test_a_failure_of_the_whole_is_told_to_all_of_it_and_to_nobody_else() -> None:
    work = Work()
    combiner = Combiner(work)
    found = ask_behind_a_first(work, combiner, [2, 13])
    assert found[1] == 1
    assert isinstance(found[2], StoreError)
    assert isinstance(found[13], StoreError)
    assert combiner.ask(3) == 9


def test_one_alone_is_done_at_once() -> None:
    work = Work()
    work.go_on.set()
    combiner = Combiner(work)
    assert [combiner.ask(number) for number in (2, 3)] == [4, 9]
    assert work.batches == [[2], [3]]
    with pytest.raises(StoreConflictError, match="-1 again"):
        combiner.ask(-1)
