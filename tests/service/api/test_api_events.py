"""A tuning's events as a stream: live, resumed after a break, ended with the tuning."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from api_server import ON_BOTH, TIMEOUT_S, TINY, Api, assert_problem
from fleet_records import live_tuning

from autotune.api import events as stream
from autotune.specs import Plan, Role, TuningEvent, TuningState


@contextmanager
def lines_of(api: Api, path: str, last: int | None = None, role: Role = Role.READ) -> Iterator[Iterator[str]]:
    headers = api.headers(role) | ({} if last is None else {"Last-Event-ID": str(last)})
    with (
        httpx.Client(base_url=api.url, timeout=TIMEOUT_S, verify=False) as client,
        client.stream("GET", path, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.iter_lines()


def events_in(lines: Iterator[str], most: int | None = None) -> list[TuningEvent]:
    """Events from a stream until its end, or so many of them; each carries its id and kind twice."""
    found: list[TuningEvent] = []
    fields: dict[str, str] = {}
    while most is None or len(found) < most:
        line = next(lines, None)
        if line is None:
            break
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            event = TuningEvent.from_data(json.loads(fields["data"]))
            assert (fields["id"], fields["event"]) == (str(event.id), event.kind.value)
            found.append(event)
            fields = {}
    return found


def test_a_stream_tells_what_happens_and_ends_with_the_tuning(api: Api) -> None:
    path = api.request("POST", "/tunings", json=TINY).headers["location"]
    with lines_of(api, f"{path}/events") as lines:
        assert [event.data["state"] for event in events_in(lines, 1)] == ["queued"]
        assert api.request("DELETE", path).json()["state"] == "cancelled"
        rest = events_in(lines)
    assert [event.data["state"] for event in rest] == ["cancelled"]


@ON_BOTH
def test_a_broken_stream_goes_on_where_it_broke(api: Api) -> None:
    first = live_tuning(api.store)
    for number in range(5):
        api.store.start_trial(first.model_copy(update={"id": f"t-{number}", "number": number, "plan": Plan(dp=8)}))
    api.store.save_tuning(api.store.tuning("tuning-1").model_copy(update={"state": TuningState.FAILED}))
    stored = list(api.store.events("tuning-1"))
    with lines_of(api, "/tunings/tuning-1/events") as lines:
        seen = events_in(lines, 3)
    while len(seen) < len(stored):
        with lines_of(api, "/tunings/tuning-1/events", last=seen[-1].id) as lines:
            seen += events_in(lines, 2)
    assert seen == stored
    over = api.request("GET", "/tunings/tuning-1/events", headers={"Last-Event-ID": str(seen[-1].id)})
    assert (over.status_code, over.content) == (204, b"")


def test_many_listeners_hear_the_same(api: Api) -> None:
    path = api.request("POST", "/tunings", json=TINY).headers["location"]
    api.secret(Role.READ)
    heard: list[list[TuningEvent]] = []
    began = threading.Barrier(6)

    def listen() -> None:
        with lines_of(api, f"{path}/events") as lines:
            first = events_in(lines, 1)
            began.wait(TIMEOUT_S)
            heard.append(first + events_in(lines))

    threads = [threading.Thread(target=listen) for _ in range(5)]
    for thread in threads:
        thread.start()
    began.wait(TIMEOUT_S)
    api.request("DELETE", path)
    for thread in threads:
        thread.join()
    tuning = path.rpartition("/")[2]
    assert heard == [list(api.store.events(tuning))] * 5


def test_a_silent_stream_is_kept_alive_by_comments(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 1)
    path = api.request("POST", "/tunings", json=TINY).headers["location"]
    with lines_of(api, f"{path}/events") as lines:
        assert events_in(lines, 1)
        assert next(line for line in lines if line) == ": keep-alive"


def test_too_many_streams_are_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_STREAMS", 1)
    path = api.request("POST", "/tunings", json=TINY).headers["location"]
    with lines_of(api, f"{path}/events") as lines:
        assert events_in(lines, 1)
        refused = api.request("GET", f"{path}/events")
        assert_problem(refused, 503, "unavailable", "streams")
        assert refused.headers["retry-after"]


def test_nobody_takes_the_streams_of_all_others(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_OF_ONE", 1)
    path = api.request("POST", "/tunings", json=TINY).headers["location"]
    with lines_of(api, f"{path}/events") as lines:
        assert events_in(lines, 1)
        refused = api.request("GET", f"{path}/events", Role.READ)
        assert_problem(refused, 429, "too-many-requests", "streams of read")
        assert refused.headers["retry-after"]
        with lines_of(api, f"{path}/events", role=Role.SUBMIT) as others:
            assert events_in(others, 1)


def test_a_stream_ends_after_a_while_and_goes_on_when_asked_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LONGEST_S", 0.0)
    monkeypatch.setattr(stream, "POLL_S", 0.0)
    path = api.request("POST", "/tunings", json=TINY).headers["location"]
    with lines_of(api, f"{path}/events") as lines:
        first = events_in(lines)  # to the end of the stream; the tuning has not ended
    assert [event.data["state"] for event in first] == ["queued"]
    with lines_of(api, f"{path}/events", last=first[-1].id) as lines:
        assert events_in(lines) == []
    api.request("DELETE", path)
    with lines_of(api, f"{path}/events", last=first[-1].id) as lines:
        assert [event.data["state"] for event in events_in(lines)] == ["cancelled"]


def test_a_stream_of_nothing(api: Api) -> None:
    assert_problem(api.request("GET", "/tunings/beef/events"), 404, "not-found", "beef")
    headers = {"Last-Event-ID": "yesterday"}
    assert_problem(
        api.request("GET", "/tunings/beef/events", headers=headers), 422, "input", "last-event-id", "yesterday"
    )
