"""The queue over a real Redis: what it sends, what it does not send again, and a broker that is away."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from crew import wait_for
from fleet_records import fleet_tuning
from services import RedisServer, redis_server

from autotune.queue.app import SWEEP_QUEUE, TUNER_QUEUE, create_app, node_queue
from autotune.queue.sending import CeleryQueue
from autotune.settings import read_settings
from autotune.wiring import open_fleet, open_queue, open_regression
from storage import open_store
from workers.handlers import TunerHandlers


@pytest.fixture
def own_broker() -> Iterator[RedisServer]:
    """One that this test may end."""
    with redis_server() as server:
        yield server


@pytest.fixture
def queue(own_broker: RedisServer) -> Iterator[CeleryQueue]:
    opened = open_queue(replace(read_settings({}), broker_url=own_broker.url))
    yield opened
    opened.close()


def waiting(broker: RedisServer, queue: str) -> int:
    with broker.client as client:
        return int(client.llen(queue))  # type: ignore[arg-type]


def test_a_node_that_does_not_consume_is_not_sent_canaries_for_ever(
    own_broker: RedisServer, queue: CeleryQueue
) -> None:
    assert [queue.canary("a", "session") for _ in range(20)] == [True] * 20
    assert 1 <= waiting(own_broker, node_queue("a")) <= 4
    with own_broker.client as client:
        client.delete(node_queue("a"))  # it has come back
    assert queue.canary("a", "session")
    assert waiting(own_broker, node_queue("a")) == 1


def test_a_broker_that_did_not_answer_is_left_alone_for_a_moment(own_broker: RedisServer, queue: CeleryQueue) -> None:
    assert queue.advance("before")
    own_broker.stop()
    assert not queue.advance("lost")
    assert queue.backlog() == 0
    own_broker.start()
    assert [queue.advance("at once"), queue.canary("a", "session"), queue.answers()] == [False] * 3  # nobody was asked
    assert waiting(own_broker, TUNER_QUEUE) == 0
    wait_for("it is tried again", lambda: queue.advance("again"))
    assert waiting(own_broker, TUNER_QUEUE) == 1
    assert queue.answers()


def test_what_was_not_acknowledged_and_cannot_be_read_is_dropped(own_broker: RedisServer) -> None:
    app = create_app(replace(read_settings({}), broker_url=own_broker.url))
    with own_broker.client as client, app.connection() as connection:
        for tag, kept in {"t": "nonsense", "u": '{"a": 1, "b": 2, "c": 3}', "v": "[" * 100_000}.items():
            client.hset("unacked", tag, kept)
            client.zadd("unacked_index", {tag: 0.0})
        connection.default_channel.qos.restore_visible()
        assert (client.hlen("unacked"), client.zcard("unacked_index")) == (0, 0)
    app.close()


def test_word_of_new_requests_is_never_behind_tunings_that_wait_and_never_piles_up(
    own_broker: RedisServer, queue: CeleryQueue
) -> None:
    assert all(queue.advance(name) for name in ("one", "two", "three"))
    assert all(queue.advance() for _ in range(600))
    assert messages(own_broker, TUNER_QUEUE) == [["one"], ["two"], ["three"]]
    assert messages(own_broker, SWEEP_QUEUE) == [[]] * 4
    assert queue.backlog() == 3


def test_a_tuner_that_hears_of_new_requests_begins_those_whose_turn_it_is(
    own_broker: RedisServer, queue: CeleryQueue, tmp_path: Path
) -> None:
    with open_store(f"sqlite:///{tmp_path / 'fleet.db'}") as store:
        for number in range(3):
            store.submit_tuning(fleet_tuning(f"tuning-{number}"), sharing_key=f"{number}")
        fleet = open_fleet(store, queue, max_live=2)
        handlers = TunerHandlers(fleet, open_regression(read_settings({}), store, queue, fleet), sweep_every_s=5.0)
        handlers.advance()
    assert messages(own_broker, TUNER_QUEUE) == [["tuning-0"], ["tuning-1"]]


def messages(broker: RedisServer, queue: str) -> list[list[str]]:
    """The arguments of what waits, oldest first."""
    with broker.client as client:
        raw: list[bytes] = client.lrange(queue, 0, -1)  # type: ignore[assignment]
    return [json.loads(base64.b64decode(json.loads(each)["body"]))[0] for each in reversed(raw)]
