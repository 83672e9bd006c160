"""An answer of a moment ago: asked for once, however many want it at the same time."""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest

from autotune.api.cache import Recent


class Source:
    """Counts how often it is asked; the next answer waits until it is let go."""

    def __init__(self) -> None:
        self.asked, self.begun, self.go_on = 0, Event(), Event()
        self.go_on.set()

    def __call__(self) -> int:
        self.asked += 1
        self.begun.set()
        assert self.go_on.wait(30)
        return self.asked


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
    monkeypatch.setattr("autotune.api.cache.time.monotonic", lambda: moment)
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
