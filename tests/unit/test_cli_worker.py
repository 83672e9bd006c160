"""`autotune worker`: what cannot be used is one clear error, before anything is started."""

from __future__ import annotations

import os

import pytest
from commands import Command

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--cluster", "no-such-pool"], 2, "no-such-pool"),
        (["--name", "two words"], 2, "letters, digits"),
        (["--interface", "eth-none"], 2, "this machine has"),
        (["--address", "192.0.2.77"], 2, "this machine has"),
        (["--role", "dreamer"], 2, "dreamer"),
        (["--role", "tuner", "--db", NOWHERE], 5, "127.0.0.1"),
        (["--db", NOWHERE], 5, "127.0.0.1"),
    ],
)
def test_what_cannot_be_used(autotune: Command, arguments: list[str], status: int, told: str) -> None:
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    done = autotune("worker", *arguments)
    assert done.status == status
    assert told in done.err
    assert "Traceback" not in done.err
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice  # nothing was started, so nothing of this process is changed


@pytest.mark.parametrize("command", [["worker", "--role", "tuner"], ["beat"]])
def test_a_broker_that_is_not_redis(autotune: Command, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("AUTOTUNE_BROKER", "amqp://me:secret@host")
    done = autotune(*command)
    assert done.status == 2
    assert "redis://" in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize("command", [["worker", "--role", "tuner"], ["beat"], ["serve"]])
def test_the_broker_and_the_database_are_told_alike(autotune: Command, command: list[str]) -> None:
    done = autotune(*command, "--db", "sqlite:///here.db", "--broker", "amqp://me:secret@elsewhere")
    assert done.status == 2
    assert "elsewhere" in done.err
    assert "secret" not in done.err
