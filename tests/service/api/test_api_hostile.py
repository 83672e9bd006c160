"""Clients that mean harm: what they send has bounds in bytes, number and time, and others are served meanwhile."""

from __future__ import annotations

import itertools
import json
import re
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from api_server import TIMEOUT_S, TINY, Api, StartApi, assert_problem
from crew import wait_for
from databases import Databases
from fleet_records import live_tuning
from prometheus_client.parser import text_string_to_metric_families
from services import RedisServer
from test_api_serve import OPEN, served

from autotune.api import access, connections, server
from autotune.api import events as stream
from autotune.api.connections import MAX_HEAD_BYTES, MAX_SENT_BYTES, origin_of
from autotune.api.examples import CLUSTERS, KEYS, MODELS, QUARANTINES, TUNING_REQUESTS
from autotune.specs import EventKind, Role
from storage import SqlStore
from storage.fleet.tables import EventRow

GET = b"GET /livez HTTP/1.1\r\nHost: us\r\n"
POST = b"POST /tunings HTTP/1.1\r\nHost: us\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MUCH = 16 * 2**20
KERNEL_BYTES = 6 * 2**20
"""What the kernels of both ends may hold of what was sent, beside what the server took."""

ENDLESS = {
    "headers": (GET, b"".join(b"x-%d: y\r\n" % number for number in range(4096))),
    "header": (GET + b"x: ", b"y" * 65536),
    "name": (GET, b"y" * 65536),
    "path": (b"GET /", b"y" * 65536),
    "body": (CHUNKED, b"10000\r\n" + b"y" * 65536 + b"\r\n"),
    "chunk extension": (CHUNKED + b"1;", b"y" * 65536),
    "tiny chunks": (CHUNKED, b"1\r\ny\r\n" * 10_000),
    "trailers": (CHUNKED + b"0\r\n", b"".join(b"x-%d: y\r\n" % number for number in range(4096))),
    "trailer": (CHUNKED + b"0\r\nx: ", b"y" * 65536),
    "requests": (b"", (GET + b"\r\n") * 2000),
    "empty lines": (b"", b"\r\n" * 32768),
}


@pytest.fixture
def url(databases: Databases, tmp_path: Path) -> str:
    """SQLite: none of this asks much of a database."""
    return databases.ours("sqlite", tmp_path)


@contextmanager
def opened(url: str, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has sent so much."""
    where = urlsplit(url)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 80), TIMEOUT_S) as connection:
        connection.sendall(sent)
        yield connection


def heard(connection: socket.socket) -> bytes:
    """All that still comes, until the other end closes."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionError:
        pass
    return found


def taken(url: str, first: bytes, piece: bytes) -> int:
    """Bytes that a server takes of an endless request, up to MUCH."""
    with opened(url, first) as connection:
        sent = 0
        try:
            while sent < MUCH:
                connection.sendall(piece)
                sent += len(piece)
        except ConnectionError:
            pass
        return sent


def closed_for(api: Api) -> dict[str, float]:
    """How many connections the API has closed, by reason."""
    return {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(api.request("GET", "/metrics").text)
        for sample in family.samples
        if sample.name == "autotune_connections_closed_total"
    }


def test_no_endless_request_is_taken_or_costs_memory(url: str, broker: RedisServer) -> None:
    with served(url, broker, OPEN) as (process, address), httpx.Client(base_url=address, verify=False) as client:
        assert client.get("/livez").status_code == 200
        server = psutil.Process(process.pid)
        before = server.memory_info().rss
        with ThreadPoolExecutor(2 * len(ENDLESS)) as clients:
            sent = [clients.submit(taken, address, *request) for request in ENDLESS.values() for _ in range(2)]
        assert max(each.result() for each in sent) < KERNEL_BYTES
        assert client.get("/livez").json() == {"status": "ok"}
        assert server.memory_info().rss - before < 48 * 2**20


@pytest.mark.parametrize(
    ("name", "status"), [("headers", 431), ("header", 431), ("name", 431), ("path", 431), ("empty lines", 431)]
)
def test_large_headers_are_refused_with_a_reason(api: Api, name: str, status: int) -> None:
    first, piece = ENDLESS[name]
    with opened(api.url, (first + piece)[: MAX_HEAD_BYTES + 32 * 1024]) as connection:
        head, _, body = heard(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head.lower()
    assert json.loads(body)["type"] == "urn:autotune:problem:headers-too-large"
    assert closed_for(api) == {"large_head": 1}


def test_what_fits_is_taken(api: Api) -> None:
    headers = {f"x-{number}": "y" * 500 for number in range(50)}
    assert api.request("GET", "/tunings", headers=headers).status_code == 200
    with opened(api.url, (GET + b"\r\n") * 10 + GET + b"Connection: close\r\n\r\n") as connection:
        assert heard(connection).count(b"HTTP/1.1 200 ") == 11
    assert closed_for(api) == {}


def test_a_body_that_nobody_waits_for_has_an_end(api: Api) -> None:
    head = POST + b"Content-Length: 100000000\r\n\r\n"  # without a key: answered 401 before it has come
    with opened(api.url, head) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    sent = taken(api.url, CHUNKED, b"10000\r\n" + b"y" * 65536 + b"\r\n")
    assert sent <= MAX_SENT_BYTES + KERNEL_BYTES
    assert closed_for(api) == {"large_body": 1}


def test_a_request_for_another_protocol_is_answered_and_the_last_one(api: Api) -> None:
    asked = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with opened(api.url, asked + GET + b"\r\n") as connection:
        assert heard(connection).count(b"HTTP/1.1 200 ") == 1


def test_what_is_no_http_is_told_so(api: Api) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"):
        with opened(api.url, sent) as connection:
            assert heard(connection).startswith(b"HTTP/1.1 400 ")
    assert closed_for(api) == {"malformed": 3}


@pytest.mark.parametrize(
    ("sent", "drop", "reason"),
    [
        (b"", b"", "slow_head"),
        (GET, b"x: y\r\n", "slow_head"),
        (GET + b"\r\n", b"\r\n", "slow_head"),
        (POST + b"Content-Length: 100\r\n\r\n{", b" ", "slow_body"),
        (CHUNKED, b"1;y=z\r\n \r\n", "slow_body"),
    ],
)
def test_a_request_that_drips_is_closed(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: bytes, drop: bytes, reason: str
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "BODY_S", 0.3)

    def is_closed() -> bool:
        for each in dripping:
            try:
                each.sendall(drop)
            except ConnectionError:
                dripping.remove(each)
        return not dripping

    with ExitStack() as stack:
        dripping = [stack.enter_context(opened(api.url, sent)) for _ in range(3)]
        if drop:
            wait_for("the end of the connections", is_closed)
        else:
            assert [heard(each)[:13] for each in dripping] == [b"HTTP/1.1 408 "] * 3
    assert closed_for(api) == {reason: 3}
    assert len([line for line in caplog.messages if "connections closed" in line]) == 1


def test_half_requests_keep_nobody_out(url: str, broker: RedisServer) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        server = served(url, broker, OPEN)
        process, address = server.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with closing(stack := ExitStack()):
        stack.push(server)
        with ExitStack() as crowd:
            for number in range(1100):
                sent = (GET, b"", POST + b"Content-Length: 9\r\n\r\n")[number % 3]
                crowd.enter_context(opened(address, sent))
            statuses = [httpx.get(f"{address}/healthz", verify=False, timeout=5).status_code for _ in range(10)]
            assert statuses == [200] * 10
            assert len(psutil.Process(process.pid).net_connections()) < 700
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard


def test_a_full_house_makes_room_by_who_waits_longest(start_api: StartApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_OF_ONE", 4)
    api = start_api()
    api.secret(Role.ADMIN)
    with ExitStack() as stack:
        half = [stack.enter_context(opened(api.url, GET)) for _ in range(3)]
        first = stack.enter_context(opened(api.url, GET))
        first.sendall(b"\r\n")
        assert first.recv(100).startswith(b"HTTP/1.1 200 ")  # it asked after the others
        assert api.request("GET", "/livez", None).status_code == 200
        assert heard(half[0]) == b""
        first.sendall(GET + b"\r\n")
        assert first.recv(100)
        assert closed_for(api) == {"crowded": 1}


def test_where_everybody_is_being_answered_no_more_are_taken(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_OF_ONE", 2)
    api = start_api()
    live_tuning(api.store)
    with streaming(api), streaming(api), opened(api.url, GET + b"\r\n") as connection:
        assert heard(connection).startswith(b"HTTP/1.1 503 ")


@contextmanager
def streaming(api: Api, after: bytes = b"", *, reads: int = 10) -> Iterator[socket.socket]:
    """A stream of the events of tuning-1 that was begun, of which so many bytes are read, with little room."""
    key = api.secret(Role.READ).encode()
    asked = b"GET /tunings/tuning-1/events HTTP/1.1\r\nHost: us\r\nAuthorization: Bearer " + key + b"\r\n\r\n"
    where = urlsplit(api.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(TIMEOUT_S)
        connection.connect((where.hostname, where.port))
        connection.sendall(asked + after)
        assert connection.recv(reads)
        yield connection


def say_much(store: SqlStore) -> None:
    """More events of tuning-1 than all buffers hold."""
    live_tuning(store)
    at = store.now()
    with store.writing() as session:
        session.add_all(
            EventRow(tuning_id="tuning-1", kind=EventKind.STATE.value, at=at, data_json=json.dumps({"x": "y" * 50_000}))
            for _ in range(150)
        )


def test_a_stream_that_nobody_reads_is_closed(
    api: Api, store: SqlStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    monkeypatch.setattr(stream, "MAX_OF_ONE", 1)
    say_much(store)
    with streaming(api):
        wait_for("the end of the stream", lambda: closed_for(api) == {"unread": 1})
        with streaming(api):  # its place is free
            pass
    assert "Traceback" not in caplog.text
    assert "Exception in ASGI" not in caplog.text


def test_an_answer_that_nobody_reads_is_closed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: us\r\n\r\n" * 16
    where = urlsplit(api.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((where.hostname, where.port))
        connection.sendall(asked)
        wait_for("the end of the connection", lambda: closed_for(api) == {"unread": 1})


def test_a_stream_ends_with_its_connection_whatever_was_asked_after_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_OF_ONE", 1)
    live_tuning(api.store)
    with streaming(api, after=GET + b"\r\n"):
        refused = api.request("GET", "/tunings/tuning-1/events", Role.READ)
        assert_problem(refused, 429, "too-many-requests", "streams of read")

    def is_free() -> bool:
        with httpx.stream("GET", f"{api.url}/tunings/tuning-1/events", headers=api.headers(Role.READ)) as answer:
            return answer.status_code == 200

    wait_for("a place for a stream", is_free)


def test_an_address_is_a_network_where_one_client_has_many() -> None:
    assert origin_of("192.0.2.7") == "192.0.2.7"
    assert origin_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert origin_of("2001:db8:1:2:3::4") == origin_of("2001:db8:1:2:ffff::1") != origin_of("2001:db8:1:3::1")


BODIES = {
    "/tunings": next(iter(TUNING_REQUESTS.values()))["value"],
    "/models": next(iter(MODELS.values()))["value"],
    "/clusters": next(iter(CLUSTERS.values()))["value"],
    "/keys": next(iter(KEYS.values()))["value"],
    "/nodes/a/quarantine": next(iter(QUARANTINES.values()))["value"],
}
WRONG = (
    "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "NaN", "Infinity", "-Infinity", "1e400", "[" * 900 + "]" * 900,
    '{"a":' * 900 + "1" + "}" * 900, '"\\ud800"', '"\\udc00x"', '"\\u0000"', '{"a":1,"a":1}',
)  # fmt: skip
LARGE = (
    "[" * 90_000, "[" + ",".join(["[]"] * 300_000) + "]", '"' + "x" * 1_000_000 + '"',
    "{" + ",".join(f'"k{number}":{number}' for number in range(15_000)) + "}",
)  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_no_value_in_a_body_is_an_error_of_ours(api: Api, path: str) -> None:
    body = BODIES[path]
    bodies = [json.dumps(body | {name: "@"}) for name in [*body, "more"]]
    contents = [each.replace('"@"', value) for each in bodies for value in WRONG]
    contents += [each.replace('"@"', value) for each in ('"@"', bodies[-1]) for value in LARGE]
    for content in (*contents, *WRONG):
        answer = api.request("POST", path, content=content.encode(), headers={"content-type": "application/json"})
        assert answer.status_code in {400, 413, 422}, (content[:200], answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


def test_no_number_in_a_query_is_an_error_of_ours(api: Api) -> None:
    asked = {"model": "gpt2", "cluster": "pair"}
    numbers = {
        "/plans": ("nodes", "seq_len", "global_batch", "tp", "zero_stage", "top"), "/best": ("nodes", "seq_len"),
        "/tunings": ("limit",), "/known": ("limit", "after"), "/measurements": ("limit", "after"), "/jobs": ("limit",),
    }  # fmt: skip
    for path, names in numbers.items():
        for name, value in itertools.product(
            names, ("1" + "0" * 400, "9" * 5000, "1e400", "NaN", "Infinity", "\ud800")
        ):
            answer = api.request("GET", path, params=asked | {name: value.encode("utf-8", "surrogatepass")})
            assert answer.status_code == 422, (path, name, value[:20], answer.text)


def test_a_key_that_comes_twice_means_nothing(api: Api) -> None:
    content = json.dumps(TINY)[:-1] + ', "seed": 1, "seed": 2}'
    refused = api.request("POST", "/tunings", content=content, headers={"content-type": "application/json"})
    assert_problem(refused, 400, "malformed", "seed", "twice")


def test_a_refusal_takes_no_longer_than_the_body_is_long(api: Api) -> None:
    """Each is refused after one look at it; one that compares all with all holds everybody up for minutes or hours."""
    headers = {"content-type": "application/json"}
    named = api.request("POST", "/tunings", content=json.dumps(TINY | {"model": "a:" * 500_000}), headers=headers)
    assert_problem(named, 422, "input", "model")
    names = [*range(18_000), 17_999]
    many = "{" + ",".join(f'"{"x" * 40}{name:05}":1' for name in names) + "}"
    assert_problem(api.request("POST", "/tunings", content=many, headers=headers), 400, "malformed", "twice")


def test_no_header_is_an_error_of_ours(start_api: StartApi) -> None:
    api = start_api(open_locally=True)
    for name, value in (
        ("Host", b"["), ("Host", b"[::1"), ("Host", b"a:b:c"), ("Host", b"\xff"), ("Authorization", b"Bearer \xff"),
        ("Authorization", b"Bearer " + b"x" * 20_000), ("Content-Type", b"application/json; charset=\xff"),
        ("Last-Event-ID", b"9" * 5000), ("Idempotency-Key", b"\x80"),
    ):  # fmt: skip
        for method, path in (("GET", "/tunings"), ("POST", "/tunings"), ("GET", "/models?limit=1"), ("GET", "/no")):
            asked = b"%s %s HTTP/1.1\r\n" % (method.encode(), path.encode())
            host = b"" if name == "Host" else b"Host: 127.0.0.1\r\n"
            rest = b"%s: %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % (name.encode(), value)
            with opened(api.url, asked + host + rest) as connection:
                answer = heard(connection)
            assert re.match(rb"HTTP/1\.1 [24]", answer), (name, value[:20], method, path, answer[:300])


def test_what_no_route_takes_has_a_rate_by_address_and_rests(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = start_api(rate="3/hour")
    missed = [api.request(*asked, None).status_code for asked in (("GET", "/a"), ("PATCH", "/tunings"), ("PUT", "/b"))]
    assert missed == [404, 405, 404]
    for asked in (("GET", "/c"), ("TRACE", "/healthz")):
        refused = api.request(*asked, None)
        assert_problem(refused, 429, "too-many-requests", "3 per 1 hour")
        assert int(refused.headers["retry-after"]) > 0
    assert api.request("GET", "/tunings", Role.READ).status_code == 200
    monkeypatch.setattr(connections, "REST_S", 3600.0)
    monkeypatch.setattr(connections, "IDLE_S", 0.5)
    refused_one = b"GET /c HTTP/1.1\r\nHost: us\r\n\r\n"
    with opened(api.url, refused_one) as connection:
        assert connection.recv(13) == b"HTTP/1.1 429 "
        connection.sendall(GET + b"\r\n")
        assert b"HTTP/1.1" not in heard(connection)  # the second request is not read
    with opened(api.url, refused_one + GET + b"\r\n") as connection:
        assert heard(connection).count(b"HTTP/1.1") == 1
    assert closed_for(api) == {"idle": 1, "pipelined": 1}


def test_a_minutes_strays_are_not_taken_at_once(start_api: StartApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "STRANGERS", 2)
    api = start_api(rate="500/minute")
    for path, headers in (("/no", {}), ("/tunings", {"Authorization": "Bearer x"})):
        asked = partial(api.request, "GET", path, None, headers=headers)
        refused = wait_for("a refusal", lambda asked=asked: found if (found := asked()).status_code == 429 else None)
        assert_problem(refused, 429, "too-many-requests", "2 per 1 second")
    assert api.request("GET", "/tunings").status_code == 200


def test_nobody_makes_series_of_metrics(api: Api) -> None:
    def series() -> set[tuple[str, ...]]:
        families = text_string_to_metric_families(api.request("GET", "/metrics").text)
        return {(sample.name, *sorted(sample.labels.values())) for each in families for sample in each.samples}

    api.request("GET", "/nothing", None)
    api.request("PATCH", "/tunings", None)
    series()
    before = series()
    for number in range(5):
        api.request("GET", f"/nothing/{number}", None)
    for method in ("PUT", "PROPFIND", "TRACE", "M-SEARCH"):
        api.request(method, "/tunings", None)
        api.request(method, "/elsewhere", None)
    assert series() == before


def test_bodies_that_are_being_sent_have_a_bound_in_all(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODIES_BYTES", 100_000)
    head = POST + b"Authorization: Bearer " + api.secret(Role.SUBMIT).encode() + b"\r\n"
    half = head + b"Content-Length: 100000\r\n\r\n" + b" " * 80_000
    padded = json.dumps(TINY).ljust(50_000)

    def submit() -> httpx.Response:
        return api.request("POST", "/tunings", content=padded, headers={"content-type": "application/json"})

    with opened(api.url, half):
        refused = wait_for("a refusal", lambda: found if (found := submit()).status_code == 503 else None)
        assert_problem(refused, 503, "unavailable", "is being sent")
        assert refused.headers["retry-after"]
    wait_for("room", lambda: submit().status_code == 200)


def test_it_is_alive_whatever_its_database_is(start_api: StartApi, url: str) -> None:
    api = start_api(rate="1/hour")
    Path(url.removeprefix("sqlite:///")).unlink()
    assert [api.request("GET", "/livez", None).status_code for _ in range(5)] == [200] * 5
