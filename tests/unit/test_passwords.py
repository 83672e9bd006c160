"""A password in a URL is never shown, however the URL is mistyped and wherever it is told of."""

from __future__ import annotations

import logging

import pytest
from commands import Command
from sqlalchemy.exc import ArgumentError

from autotune.errors import InputError, StoreError, masked
from autotune.queue.app import create_app
from autotune.settings import read_settings
from autotune.shown import LogFormatter
from storage.database.engine import locate, translated
from workers.process import LOG_FORMAT

WORD = "hun@ter2"
DATABASES = [
    "postgresql://me:{}@127.0.0.1:1/n",
    "postgresql://127.0.0.1:1/n?password={}",
    "postgresql://me@127.0.0.1:1/n?password={}",
    "postgresql:///me:{}@127.0.0.1/n",
    "postgresql://me:p/{}@127.0.0.1/n",
    "postgresql://me:p?{}@127.0.0.1/n",
    "postgresql://me:p#{}@127.0.0.1/n",
    "postgresql://me:{}@127.0.0.1:port/n",
    "postgresql://me:{}@[::1/n",
    "postgresql:/me:{}@h/n",
    "postgresql:me:{}@h/n",
    "postgres//me:{}@h/n",
    "mysql://me:{}@h/n",
    "me:{}@h/n",
    "sqlite://me:{}@h/n",
    "sqlite:///me:{}@h/n",
    "sqlite:///me:{}@h/n?x=1",
    "sqlite:///:memory:?password={}",
]
BROKERS = [
    "redis:/:{}@h:1/0",
    "redis//:{}@h:1",
    "redis::{}@h",
    ":{}@h",
    "amqp://me:{}@h",
    "redis://:{}@h:port/0",
    "redis://:{}@h:1/zero",
    "redis://[:{}@h",
    "redis://:p/{}@h:1/0",
    "redis://:p#{}@h:1/0",
    "redis://:p?{}@h:1/0",
]


def shows_part_of_it(text: str) -> bool:
    return any(part in text for part in ("hun", "ter2"))


@pytest.mark.parametrize("command", [["history"], ["db", "check"]])
@pytest.mark.parametrize("form", DATABASES)
def test_the_database_s(autotune: Command, monkeypatch: pytest.MonkeyPatch, form: str, command: list[str]) -> None:
    url = form.format(WORD)
    monkeypatch.setenv("AUTOTUNE_DB", url)
    for done in (autotune(*command), autotune(*command, "--db", url, "--json"), autotune(*command, url)):
        assert done.status != 0
        assert not shows_part_of_it(done.out + done.err)
        assert "Traceback" not in done.err


@pytest.mark.parametrize("form", BROKERS)
def test_the_broker_s(autotune: Command, form: str) -> None:
    for done in (autotune("beat", "--broker", form.format(WORD)), autotune("beat", form.format(WORD))):
        assert done.status == InputError.exit_code
        assert not shows_part_of_it(done.err)
        assert "Traceback" not in done.err


def test_help_shows_none(autotune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", f"postgresql://me:{WORD}@h/n")
    monkeypatch.setenv("AUTOTUNE_BROKER", f"redis://:{WORD}@h")
    assert not shows_part_of_it(autotune("worker", "--help").out)


def test_a_password_that_is_written_as_it_should_be_works() -> None:
    location = locate("postgresql://me:hun%40ter2@host/n")
    assert (location.url.password, location.url.host) == (WORD, "host")
    app = create_app(read_settings({"AUTOTUNE_BROKER": "redis://:hun%40ter2@host:1/3"}))
    with app.connection() as connection:
        assert (connection.password, connection.hostname, connection.virtual_host) == (WORD, "host", "3")


def test_what_a_driver_says_is_cleaned() -> None:
    location = locate("postgresql://h/n?password=hunter2")
    with pytest.raises(StoreError) as error, translated(location):
        raise ArgumentError("no such thing: hunter2 of postgresql://me:hunter2@h/n")
    assert not shows_part_of_it(str(error.value))


def test_a_log_shows_none_in_tracebacks_neither() -> None:
    try:
        raise OSError(f"redis://:{WORD}@h:1/0 does not answer")
    except OSError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", None, (type(error), error, error.__traceback__))
    written = LogFormatter(LOG_FORMAT).format(record)
    assert "redis://***@h:1/0 does not answer" in written
    assert not shows_part_of_it(written)


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////home/me@corp/a.db is locked",
        "postgresql+psycopg://me:***@h:1/n: connection refused",
        "--alert-email: 'a@b.org' cannot be used",
        "http://host:8765/path",
    ],
)
def test_what_holds_no_password_is_left_as_it_is(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("part", ["a", ":", ":a", "a:/", "@", "://", "a@:/"])
def test_a_million_characters_are_looked_through_once(part: str) -> None:
    text = part * (1_000_000 // len(part))  # a search that begins anew at each character takes hours
    assert masked(f"{text} redis://:{WORD}@h").endswith(" redis://***@h")
