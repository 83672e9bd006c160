"""`autotune serve` and `autotune keys` as a user runs them, and what an operator looks at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

import anyio
import httpx
import pytest
from api_server import ON_BOTH, TIMEOUT_S, TINY, Api, StartApi, assert_problem, serving
from commands import Command
from crew import autotune as command_line
from crew import wait_for
from fleet_records import fleet_tuning, granted, job, live_tuning
from prometheus_client.parser import text_string_to_metric_families
from services import RedisServer, redis_server
from store_records import (
    CLUSTER,
    COLLECTIVE_OUTCOME,
    COLLECTIVE_REQUEST,
    FINGERPRINT,
    LAYER_OUTCOME,
    LAYER_REQUEST,
    step_reading,
    trial,
)

from autotune.api.access import is_loopback
from autotune.api.application import create_app
from autotune.api.known_answers import (
    CollectiveMeasurement,
    LayerMeasurement,
    MeasurementPage,
    StepMeasurement,
)
from autotune.api.metrics import Liveness
from autotune.errors import StoreError
from autotune.queue.app import SWEEP_QUEUE
from autotune.settings import Settings
from autotune.specs import NodeState, Role
from autotune.wiring import open_fleet, open_queue
from storage import SqlStore

OPEN = "--open-to-this-machine"


@contextmanager
def served(
    url: str, broker: RedisServer, *arguments: str, said: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on a free port, and its address, once it says that it listens; `said` gets the lines before that."""
    command = command_line("serve", "--port", "0", "--db", url, "--broker", broker.url)
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if said is not None:
                said.append(line)
            found = re.search(r"running on (http://\S+)", line)
            if found:
                yield process, found[1]
                break
        else:
            pytest.fail("it ended without listening")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]


@ON_BOTH
def test_a_server_is_used_with_a_key_of_the_command_line(
    store: SqlStore, url: str, broker: RedisServer, autotune: Command
) -> None:
    made = autotune("keys", "create", "ci", "--role", "submit", "--expires-days", "7", "--db", url, "--json").data
    shown = {"Authorization": f"Bearer {made['secret']}"}
    with (
        served(url, broker) as (process, address),
        httpx.Client(base_url=address, headers=shown, verify=False) as client,
    ):
        assert client.get("/healthz").json() == {"status": "ok", "database": "ok", "broker": "ok"}
        path = client.post("/tunings", json=TINY).headers["location"]
        with client.stream("GET", f"{path}/events", timeout=TIMEOUT_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("id: ")
            assert client.delete(path).json()["state"] == "cancelled"
            assert '"state":"cancelled"' in "".join(lines)
        assert store.tuning(path.rpartition("/")[2]).principal == "ci"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) in {0, -signal.SIGTERM}


@ON_BOTH
def test_a_killed_server_loses_nothing_that_it_answered(store: SqlStore, url: str, broker: RedisServer) -> None:
    with served(url, broker, OPEN) as (process, address), httpx.Client(base_url=address, verify=False) as client:
        made = [client.post("/tunings", json=TINY | {"seed": seed}).json()["tuning"] for seed in range(3)]
        process.kill()
        process.wait()
    assert {tuning.id for tuning in store.tunings()} == set(made)


def test_nobody_waits_for_a_broker_that_is_silent(
    store: SqlStore, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server() as broker:
        settings = Settings(database_url=url, log_dir=tmp_path, broker_url=broker.url)
        with closing(open_fleet(store, open_queue(settings))) as fleet:
            app = create_app(store, fleet, broker_answers=bool)
            with serving(app, store) as api:
                with broker.frozen():
                    assert api.request("POST", "/tunings", json=TINY).status_code == 201
                    assert "was not sent" not in caplog.text  # nobody has given up on the broker yet
                wait_for("the message", lambda: broker.client.llen(SWEEP_QUEUE) == 1)


def test_nobody_is_served_before_there_is_a_key_but_this_machine_by_name(url: str, autotune: Command) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        done = autotune("serve", "--host", host, "--db", url)
        assert done.status == 2
        for word in ("API key", "autotune keys create NAME --role admin", OPEN):
            assert word in done.err
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        done = autotune("serve", "--host", host, "--db", url, OPEN)
        assert done.status == 2
        for word in ("--host", host, "127.0.0.1", OPEN):
            assert word in done.err


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host: str, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours


@ON_BOTH
def test_keys_are_made_listed_and_revoked(url: str, autotune: Command) -> None:
    autotune("db", "migrate", "--db", url)
    made = autotune("keys", "create", "ann", "--db", url, "--json").data
    assert made["key"]["role"] == "submit"
    printed = autotune("keys", "create", "bob", "--role", "admin", "--expires-days", "1", "--db", url).out
    assert re.search(r"^autotune_\S{43}$", printed, re.MULTILINE)
    listed = autotune("keys", "list", "--db", url).out
    assert "ann" in listed
    assert made["secret"] not in listed
    assert autotune("keys", "revoke", made["key"]["id"], "--db", url, "--json").data["revoked_at"]
    keys = autotune("keys", "list", "--db", url, "--json").data["keys"]
    assert [(key["name"], key["revoked_at"] is None) for key in keys] == [("ann", False), ("bob", True)]


def test_a_key_makes_no_database(autotune: Command, tmp_path: Path) -> None:
    for arguments in (("create", "ann"), ("revoke", "nobody")):
        done = autotune("keys", *arguments, "--db", f"sqlite:///{tmp_path / 'none.db'}")
        assert done.status == 5
        assert "autotune db migrate" in done.err
    assert not (tmp_path / "none.db").exists()


def test_keys_that_cannot_be_made(url: str, autotune: Command) -> None:
    autotune("db", "migrate", "--db", url)
    autotune("keys", "create", "ann", "--db", url)
    for arguments, status, words in (
        (("create", "bob", "--role", "owner"), 2, ("role", "owner", "read, submit, admin")),
        (("create", "bob", "--expires-days", "0"), 2, ("expires_days", "0")),
        (("create", "b\nob"), 2, ("name",)),
        (("create", "  "), 2, ("name", "can be seen")),
        (("create", "ann"), 5, ("ann",)),
        (("revoke", "nobody"), 2, ("nobody",)),
    ):
        done = autotune("keys", *arguments, "--db", url)
        assert done.status == status
        for word in words:
            assert word in done.err


def test_a_broker_that_is_away_is_said_once_and_requests_are_served(url: str) -> None:
    said: list[str] = []
    with redis_server() as broker:
        broker.stop()
        with (
            served(url, broker, OPEN, said=said) as (_, address),
            httpx.Client(base_url=address, verify=False) as client,
        ):
            told = client.get("/healthz").json()
    assert [line for line in said if "broker" in line] == [
        f"Warning: the broker redis://***@127.0.0.1:{broker.port}/0 does not answer. "
        "Requests are stored; workers get them once it is back.\n"
    ]
    assert (told["status"], told["broker"], told["database"]) == ("degraded", "unreachable", "ok")


def test_health_tells_the_truth(start_api: StartApi, store: SqlStore) -> None:
    ill = start_api(broker_answers=lambda: False)
    answer = ill.request("GET", "/healthz", None)
    assert (answer.status_code, answer.json()["broker"], answer.json()["status"]) == (200, "unreachable", "degraded")


def test_health_is_asked_once_a_second_by_however_many(start_api: StartApi) -> None:
    asked = []

    def answers() -> bool:
        asked.append(time.monotonic())
        return True

    api = start_api(broker_answers=answers)
    with ThreadPoolExecutor(8) as clients:
        found = [clients.submit(api.request, "GET", "/healthz", None) for _ in range(200)]
    assert {each.result().status_code for each in found} == {200}
    assert len(asked) <= 1 + asked[-1] - asked[0]


def test_a_database_that_does_not_answer_is_not_asked_more_often() -> None:
    asked = []

    class Gone:
        def now(self) -> datetime:
            asked.append(time.monotonic())
            raise StoreError("nobody is there")

    async def ask() -> None:
        liveness = Liveness(Gone(), bool)  # type: ignore[arg-type]
        for _ in range(20):
            with pytest.raises(StoreError):
                await liveness.broker_is_there()

    anyio.run(ask)
    assert len(asked) <= 1 + asked[-1] - asked[0]


@ON_BOTH
def test_metrics_count_what_there_is(api: Api, store: SqlStore) -> None:
    store.submit_tuning(fleet_tuning(), sharing_key="x")
    granted(store, job("job-1"))
    store.create_job(job("job-2"))
    store.set_node_state("a", NodeState.QUARANTINED, "test")
    api.request("GET", "/tunings")
    api.request("GET", "/nothing/of/ours", None)
    text = api.request("GET", "/metrics", Role.READ).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(name: str, **labels: str) -> float:
        (found,) = [each.value for each in samples if each.name == name and each.labels == labels]
        return float(found)

    assert value("autotune_tunings", state="queued") == 1
    assert value("autotune_tunings", state="done") == 0
    assert (value("autotune_jobs", state="granted"), value("autotune_jobs", state="queued")) == (1, 1)
    assert (value("autotune_nodes", state="quarantined"), value("autotune_nodes", state="ready")) == (1, 1)
    assert value("autotune_leases") == 2
    assert value("autotune_gpu_seconds_total") == 0
    assert value("autotune_requests_total", method="GET", route="/tunings", status="200") == 1
    assert value("autotune_requests_total", method="any", route="none", status="404") == 1
    assert value("autotune_request_seconds_count", method="GET", route="/tunings") == 1


def test_an_admin_takes_a_node_out_and_lets_it_in(api: Api) -> None:
    wrong = api.request("POST", "/nodes/a/quarantine", json={"reason": ""})
    assert_problem(wrong, 422, "input", "reason")
    out = api.request("POST", "/nodes/a/quarantine", json={"reason": "its fan is broken"}).json()
    assert out == {"node": "a", "state": "quarantined", "reason": "its fan is broken (by admin)"}
    rows = {row["name"]: row for row in api.request("GET", "/nodes?pool=pair", Role.READ).json()["nodes"]}
    assert "its fan is broken" in rows["a"]["obstacle"]
    assert (rows["b"]["obstacle"], rows["b"]["job"]) == ("", None)
    assert api.request("POST", "/nodes/a/release").json()["state"] == "ready"
    assert api.request("GET", "/nodes/a").json()["node"]["obstacle"] == ""
    assert_problem(api.request("POST", "/nodes/zz/release"), 404, "not-found", "zz")


@ON_BOTH
def test_jobs_are_an_admins(api: Api, store: SqlStore) -> None:
    granted(store, job("job-1"))
    store.create_job(job("job-2"))
    found = api.request("GET", "/jobs?state=granted").json()["jobs"]
    assert [(each["id"], [member["node"] for member in each["members"]]) for each in found] == [("job-1", ["a", "b"])]
    assert len(api.request("GET", "/jobs").json()["jobs"]) == 2
    first = api.request("GET", "/jobs?limit=1&pool=pair").json()
    assert (len(first["jobs"]), first["next"]) == (1, f"/jobs?limit=1&pool=pair&after={first['jobs'][0]['id']}")
    rest = api.request("GET", first["next"]).json()
    assert [each["id"] for each in (*first["jobs"], *rest["jobs"])] == ["job-1", "job-2"]
    assert rest["next"] is None
    assert_problem(api.request("GET", "/jobs?after=nowhere"), 422, "input", "job", "nowhere")
    rows = {row["name"]: row for row in api.request("GET", "/nodes").json()["nodes"]}
    assert rows["a"]["job"] == "job-1"


@ON_BOTH
def test_measurements_come_with_where_they_are_from(api: Api, store: SqlStore) -> None:
    live_tuning(store)
    origin = {"tuning_id": "tuning-1", "cluster": CLUSTER, "fingerprint_key": FINGERPRINT.key}
    store.save_probe(**origin, request=COLLECTIVE_REQUEST, outcome=COLLECTIVE_OUTCOME)
    store.save_probe(**origin, request=LAYER_REQUEST, outcome=LAYER_OUTCOME)
    store.start_trial(trial(0))
    store.finish_trial(
        "tuning-1-0", reading=step_reading(), failure=None, outcome_gpu_s=4.0, setup_s=1.0,
        fingerprint_key=FINGERPRINT.key,
    )  # fmt: skip
    for kind, shape, rows in (
        ("collective", CollectiveMeasurement, 2), ("layer", LayerMeasurement, 1), ("step", StepMeasurement, 1),
    ):  # fmt: skip
        found = MeasurementPage.from_data(api.request("GET", f"/measurements?kind={kind}", Role.READ).json())
        assert [type(row) for row in found.measurements] == [shape] * rows
        assert {(row.tuning_id, row.hostname) for row in found.measurements} == {("tuning-1", "node-1")}
    first = api.request("GET", f"/measurements?kind=collective&limit=1&cluster={CLUSTER.key}").json()
    assert first["next"] == f"/measurements?kind=collective&limit=1&cluster={CLUSTER.key}&after=1"
    assert_problem(api.request("GET", "/measurements?kind=weather"), 422, "input", "kind", "weather")
