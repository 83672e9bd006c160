"""Every error is a problem document, and tells nothing that is not the client's."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from urllib.parse import quote, urlsplit

import httpx
import pytest
from api_server import ON_BOTH, TIMEOUT_S, TINY, Api, StartApi, assert_problem
from sqlalchemy import create_engine, text

from autotune.api import application
from autotune.api.server import MAX_BODY_BYTES
from autotune.api.sharing import MAX_OF_ONE, MAX_WAITING, one_at_a_time
from autotune.fleet.keys import create_key
from autotune.specs import Role
from storage import SqlStore

JSON = {"content-type": "application/json"}


def test_nothing_is_at_other_paths(api: Api) -> None:
    for path in ("/", "/docs", "/redoc", "/tunings/", "/tunings/beef/", "/../etc/passwd", "/openapi.yaml"):
        assert_problem(api.request("GET", path), 404, "not-found")


def test_a_method_that_is_not_understood_says_which_are(api: Api) -> None:
    refused = api.request("PATCH", "/tunings")
    assert_problem(refused, 405, "method-not-allowed", "PATCH")
    assert refused.headers["allow"] == "GET, POST"
    assert api.request("POST", "/tunings/beef").headers["allow"] == "DELETE, GET"
    assert api.request("DELETE", "/models/a/b").headers["allow"] == "GET"


def test_head_is_get_without_the_body(api: Api) -> None:
    for path, status in (("/models", 200), ("/openapi.json", 200), ("/tunings/beef", 404)):
        asked, told = api.request("GET", path), api.request("HEAD", path)
        assert (told.status_code, told.content, asked.status_code) == (status, b"", status)
        assert told.headers["content-length"] == asked.headers["content-length"] == str(len(asked.content))
    assert_problem(api.request("PATCH", "/nodes"), 405, "method-not-allowed")


def test_a_body_that_is_no_json(api: Api) -> None:
    for content in (b"{", b"\xff", b'{"model":NaN}x', b"[" * 15_000):
        assert_problem(api.request("POST", "/tunings", content=content, headers=JSON), 400, "malformed")


def test_a_body_that_is_no_request(api: Api) -> None:
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    lone = b'{"model": "\\ud800", "cluster": "pair"}'
    for content in (b"[]", b"null", b'"x"', b"7", b"{}", b'{"seed": NaN}', lone, json.dumps({"space": deep}).encode()):
        answer = api.request("POST", "/tunings", content=content, headers=JSON)
        assert_problem(answer, 422, "input", "body")
    plain = api.request("POST", "/tunings", content=json.dumps(TINY), headers={"content-type": "text/plain"})
    assert_problem(plain, 415, "unsupported-media-type", "Content-Type")
    assert plain.headers["accept"] == "application/json"


def test_what_a_terminal_obeys_is_in_no_name(api: Api, store: SqlStore) -> None:
    model, cluster = (api.request("GET", path).json() for path in ("/models/tiny", "/clusters/pair"))
    for hidden in ("a\x9b2Jb", "a\nb", "a\x85b", "a\u202eb", "a\u2028b"):
        for path, body in (
            ("/models", model | {"name": hidden}),
            ("/clusters", cluster | {"name": hidden}),
            ("/clusters", cluster | {"name": "mine", "inter": cluster["inter"] | {"name": hidden}}),
            ("/keys", {"name": hidden, "role": "read"}),
            ("/nodes/a/quarantine", {"reason": hidden}),
            ("/tunings", TINY | {"model": model | {"name": hidden}}),
            ("/tunings", TINY | {"cluster": hidden}),
        ):
            assert_problem(api.request("POST", path, json=body), 422, "input")
        for path in (f"/models/{quote(hidden)}", f"/nodes?pool={quote(hidden)}", f"/tunings?principal={quote(hidden)}"):
            assert api.request("GET", path).status_code == (404 if "/models/a%0Ab" in path else 422)
    assert (store.models(), [each.name for each in store.clusters()]) == ([], ["pair"])
    assert store.node("a").reason == ""


def test_a_large_body_is_refused_however_it_comes(api: Api) -> None:
    large = b" " * (MAX_BODY_BYTES + 1)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 65536):
            yield large[start : start + 65536]

    assert_problem(api.request("POST", "/tunings", content=large, headers=JSON), 413, "content-too-large", "1048576")
    assert_problem(api.request("POST", "/tunings", content=pieces(), headers=JSON), 413, "content-too-large")
    fits = api.request("POST", "/tunings", content=json.dumps(TINY).ljust(MAX_BODY_BYTES), headers=JSON)
    assert fits.status_code == 201


def test_what_nobody_foresaw_is_logged_and_not_told(start_api: StartApi, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bool:
        raise RuntimeError("SELECT secret FROM vault")

    answer = start_api(broker_answers=broken).request("GET", "/healthz", None)
    assert_problem(answer, 500, "internal")
    assert "vault" not in answer.text
    assert "Traceback" not in answer.text
    assert "SELECT secret FROM vault" in caplog.text


@ON_BOTH
def test_a_broken_database_is_told_without_its_place(start_api: StartApi, url: str) -> None:
    api = start_api()
    headers = api.headers(Role.READ)
    database = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with database.begin() as connection:
        connection.execute(text("ALTER TABLE tunings RENAME TO gone"))
    database.dispose()
    answer = api.request("GET", "/tunings", None, headers=headers)
    assert_problem(answer, 503, "database")
    assert answer.headers["retry-after"]
    for word in ("SELECT", "tunings", "gone", "sqlite", "postgres", "127.0.0.1", "Traceback"):
        assert word not in answer.text


def ranked(api: Api, secret: str, seq_len: int) -> httpx.Response:
    question = {"model": "gpt2", "cluster": "a100-80gb-sxm:2x8", "seq_len": seq_len}
    return api.request("GET", "/plans", None, params=question, headers={"Authorization": f"Bearer {secret}"})


def test_many_rankings_leave_room_for_quick_requests(api: Api) -> None:
    names = range(MAX_WAITING // MAX_OF_ONE)
    secrets = [create_key(api.store, f"user-{name}", "read").secret for name in names]
    with ThreadPoolExecutor(MAX_WAITING) as clients:
        with one_at_a_time("somebody"):  # one place is taken, so one of these is too many
            asked = [
                clients.submit(ranked, api, secrets[number // MAX_OF_ONE], 1024 - number)
                for number in range(MAX_WAITING)
            ]
            (refused,) = wait(asked, return_when=FIRST_COMPLETED).done
            assert_problem(refused.result(), 503, "unavailable", "wait already")
            assert int(refused.result().headers["retry-after"]) > 0
            assert api.request("GET", "/tunings").status_code == 200
        assert sorted(each.result().status_code for each in asked) == [200] * (MAX_WAITING - 1) + [503]


def test_one_principal_leaves_the_others_their_places_for_rankings(api: Api) -> None:
    greedy, modest = (create_key(api.store, name, "read").secret for name in ("greedy", "modest"))
    with ThreadPoolExecutor(MAX_WAITING + 1) as clients:
        with one_at_a_time("somebody"):
            asked = [clients.submit(ranked, api, greedy, 1024 - number) for number in range(MAX_WAITING)]
            refused, waiting = set[Future[httpx.Response]](), set(asked)
            while len(waiting) > MAX_OF_ONE:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                refused |= done
            for each in refused:
                assert_problem(each.result(), 429, "too-many-requests", "greedy")
            other = clients.submit(ranked, api, modest, 512)
        assert [each.result().status_code for each in (*waiting, other)] == [200] * (MAX_OF_ONE + 1)


def test_whoever_waits_for_the_same_ranking_waits_in_no_thread(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "THREADS", 2)
    api = start_api()
    assert api.request("GET", "/tunings").status_code == 200
    key = f"Authorization: Bearer {api.secret(Role.ADMIN)}"
    asked = f"GET /plans?model=gpt2&cluster=a100-80gb-sxm:2x8 HTTP/1.0\r\n{key}\r\n\r\n".encode()
    where = urlsplit(api.url)
    with ExitStack() as stack:
        address = (where.hostname or "", where.port or 0)
        clients = [stack.enter_context(socket.create_connection(address, TIMEOUT_S)) for _ in range(4)]
        with one_at_a_time("somebody"):
            for client in clients:
                client.sendall(asked)
            assert api.request("GET", "/tunings").status_code == 200
        assert [client.recv(12)[-3:] for client in clients] == [b"200"] * 4


def test_a_cluster_that_a_path_cannot_mean_is_not_found(api: Api) -> None:
    for name, word in (("nowhere", "pair"), ("a100-80gb-sxm:8", "GPU:NODESxGPUS_PER_NODE"), ("gpu9:1x8", "gpu9")):
        assert_problem(api.request("GET", f"/clusters/{name}"), 404, "not-found", word)
    assert api.request("GET", "/clusters/a100-80gb-sxm:1x8").json()["gpus_per_node"] == 8
