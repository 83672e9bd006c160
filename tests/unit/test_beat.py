"""When a night's checks are due, and what beat refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, time, timedelta
from pathlib import Path

import pytest
from commands import Command

from autotune.queue.app import TaskName, read_payload
from workers.beat import Nightly

NIGHT = datetime(2026, 5, 4, 2, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("after", "due"),
    [(timedelta(minutes=-1), False), (timedelta(0), True), (timedelta(minutes=9), True), (timedelta(hours=1), False)],
)
def test_checks_are_due_within_some_minutes_of_their_time(after: timedelta, due: bool) -> None:
    assert Nightly(at=time(2, 30), budget_gpu_s=None).is_due(NIGHT + after) is due


def test_they_are_due_once_a_day() -> None:
    nightly = Nightly(at=time(2, 30), budget_gpu_s=None, begun=NIGHT.date())
    assert not nightly.is_due(NIGHT)
    assert nightly.is_due(NIGHT + timedelta(days=1))


def test_a_night_that_begins_before_midnight_is_begun_after_it() -> None:
    nightly = Nightly(at=time(23, 58), budget_gpu_s=None)
    after = datetime(2026, 5, 5, 0, 3, tzinfo=UTC)
    assert nightly.is_due(after)
    nightly.begun = nightly.night_of(after)
    assert not nightly.is_due(after)
    assert nightly.is_due(datetime(2026, 5, 5, 23, 58, tzinfo=UTC))


def test_a_budget_travels_as_it_is() -> None:
    assert read_payload(TaskName.REGRESS, (60.0,), {}) == (60.0,)
    assert read_payload(TaskName.REGRESS, (None,), {}) == (None,)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--nightly", "25:00"), "--nightly"),
        (("--nightly", "soon"), "HH:MM"),
        (("--nightly-gpu-s", "60"), "--nightly-gpu-s"),
        (("--nightly", "02:30", "--nightly-gpu-s", "-1"), "--nightly-gpu-s"),
    ],
)
def test_a_night_that_cannot_be_is_refused(autotune: Command, arguments: tuple[str, ...], word: str) -> None:
    done = autotune("beat", *arguments)
    assert done.status == 2
    assert word in done.err


def test_a_signal_ends_it_wherever_it_is(tmp_path: Path) -> None:
    nowhere = ("--db", f"sqlite:///{tmp_path / 'autotune.db'}", "--broker", "redis://127.0.0.1:1/0")
    with subprocess.Popen(
        [Path(sys.executable).with_name("autotune"), "beat", *nowhere], stderr=subprocess.PIPE, text=True
    ) as beat:
        assert beat.stderr is not None
        try:
            while "a sweep every" not in (line := beat.stderr.readline()):
                assert line, "it ended"
            for _ in range(20_000):  # without a pause: they meet it everywhere
                os.kill(beat.pid, signal.SIGTERM)
            # The last ones may come when Python has let go of its handlers.
            assert beat.wait(timeout=30) in {0, -signal.SIGTERM}
        finally:
            beat.kill()
