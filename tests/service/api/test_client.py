"""The typed client and `autotune --server` against the real API."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from api_server import Api
from commands import Command
from fleet_records import fleet_tuning, live_tuning
from store_records import CLUSTER, FINGERPRINT, MODEL, step_reading, trial

from autotune.client import Client
from autotune.client.client import server_sent
from autotune.errors import AccessError, InputError, NothingFitsError, ServerError, StoreConflictError
from autotune.knowledge.recording import remember
from autotune.specs import Budget, EventKind, Plan, Role, Space, TuningEvent, TuningState
from storage import SqlStore

WORKLOAD = {"seq_len": 64, "global_batch": 16}


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with closing(Client(api.url, api.secret(Role.ADMIN))) as opened:
        yield opened


def ended(store: SqlStore, tuning_id: str = "tuning-1") -> None:
    """A live tuning with one complete trial comes to its end."""
    measured(store, tuning_id)
    stored = store.tuning(tuning_id)
    store.save_tuning(stored.model_copy(update={"state": TuningState.DONE, "stop_reason": "enough"}))


def measured(store: SqlStore, tuning_id: str = "tuning-1") -> None:
    """A live tuning with one complete trial."""
    live_tuning(store, tuning_id)
    store.start_trial(trial(1, tuning_id, Plan(tp=2, dp=4)))
    store.finish_trial(
        f"{tuning_id}-1", reading=step_reading(1200.0), failure=None, outcome_gpu_s=8.0, setup_s=1.0,
        fingerprint_key=FINGERPRINT.key,
    )  # fmt: skip


def test_a_tuning_is_submitted_shown_listed_and_cancelled(client: Client) -> None:
    told = client.submit(
        "tiny", "pair", nodes=1, workload=WORKLOAD, space=Space(tp=(1, 2)), budget=Budget(max_trials=3), seed=5
    )
    assert told["created"]
    shown = client.tuning(told["tuning"])
    assert shown["request"]["space"]["tp"] == [1, 2]
    assert shown["request"]["budget"]["max_trials"] == 3
    assert [item["tuning"] for item in client.tunings()] == [told["tuning"]]
    assert list(client.tunings(state=TuningState.DONE)) == []
    assert client.cancel(told["tuning"])["state"] == "cancelled"
    assert client.tuning_ended(told["tuning"])


def test_a_whole_model_and_cluster_may_be_sent(client: Client) -> None:
    told = client.submit(MODEL.model_copy(update={"name": "sent"}), CLUSTER, workload=WORKLOAD)
    assert told["request"]["model"]["name"] == "sent"


def test_an_idempotency_key_makes_one_tuning_and_refuses_another_request(client: Client) -> None:
    first = client.submit("tiny", "pair", workload=WORKLOAD, idempotency_key="once")
    client.cancel(first["tuning"])
    assert client.submit("tiny", "pair", workload=WORKLOAD, idempotency_key="once")["tuning"] == first["tuning"]
    with pytest.raises(StoreConflictError, match="once"):
        client.submit("tiny", "pair", workload=WORKLOAD, seed=1, idempotency_key="once")


def test_lists_are_read_page_by_page(client: Client, store: SqlStore) -> None:
    for number in range(5):
        store.create_tuning(fleet_tuning(f"tuning-{number}"))
    assert len(list(client.tunings(limit=3))) == 3
    assert len(list(client._pages("/tunings", "tunings", {"limit": 2}, None))) == 5


def test_events_come_to_the_end_and_go_on_after_the_last_seen(client: Client, store: SqlStore) -> None:
    ended(store)
    found = list(client.events("tuning-1"))
    assert [event.id for event in found] == sorted({event.id for event in found})
    assert found[-1].kind is EventKind.STATE
    assert found[-1].data["state"] == "done"
    assert EventKind.TRIAL_ENDED in {event.kind for event in found}
    assert list(client.events("tuning-1", after=found[1].id)) == found[2:]


@contextmanager
def breaking_server(events: Sequence[TuningEvent]) -> Iterator[str]:
    """Speaks like the API, but each stream breaks off in the middle of its second event."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            if not self.path.endswith("/events"):
                return self._answer(b'{"state": "done"}', "application/json", 17)
            left = [event for event in events if event.id > int(self.headers["Last-Event-ID"])]
            texts = [f"id: {event.id}\ndata: {event.to_json()}\n\n" for event in left[:2]]
            whole = "".join(texts).encode()
            self._answer(whole if len(texts) < 2 else whole[:-20], "text/event-stream", len(whole))

        def _answer(self, body: bytes, kind: str, promised: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(promised if body else 0))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_lost_connection_loses_and_doubles_no_event(api: Api, store: SqlStore) -> None:
    ended(store)
    with closing(Client(api.url, api.secret(Role.READ))) as direct:
        expected = list(direct.events("tuning-1"))
    with breaking_server(expected) as url, closing(Client(url)) as shaky:
        assert list(shaky.events("tuning-1")) == expected


def test_refusals_are_the_library_s_own_errors(client: Client, api: Api) -> None:
    with pytest.raises(InputError, match="gpt5") as refused:
        client.submit("gpt5", "pair")
    assert refused.value.what == "model"
    with pytest.raises(InputError, match="nope"):
        client.tuning("nope")
    with pytest.raises(NothingFitsError) as tight:
        client.plans(model="gpt3-175b", cluster="a100-40gb-sxm:1x8")
    assert tight.value.misses
    with closing(Client(api.url, "wrong")) as stranger, pytest.raises(ServerError, match="AUTOTUNE_API_KEY"):
        stranger.tuning("tuning-1")
    with closing(Client(api.url, api.secret(Role.READ))) as reader, pytest.raises(ServerError, match="submit"):
        reader.submit("tiny", "pair")


def test_a_server_that_is_not_there_or_no_autotune_server_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with closing(Client(f"http://127.0.0.1:{port}")) as nobody, pytest.raises(ServerError, match="cannot be reached"):
        nobody.health()
    with pytest.raises(InputError, match="http"):
        Client("ftp://somewhere")


def test_comments_and_broken_events_are_dropped() -> None:
    lines = [": keep-alive", "", "id: 1", "data: {", "data: }", "", "data: lost"]
    assert list(server_sent(lines)) == ["{\n}"]


# -- the command line -----------------------------------------------------------------------------------


@pytest.fixture
def there(api: Api, autotune: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command line as a client of the API."""
    monkeypatch.setenv("AUTOTUNE_API_KEY", api.secret(Role.ADMIN))
    return lambda *arguments: autotune("--server", api.url, *arguments)


def test_a_tuning_is_asked_for_and_taken_back_from_the_command_line(there: Command, store: SqlStore) -> None:
    asked = ("tune", "--model", "tiny", "--cluster", "pair", "--seq-len", 64, "--global-batch", 16, "--no-follow")
    told = there(*asked, "--json").data
    assert told["created"]
    assert "you share it" in there(*asked).err
    shown = there("show", told["tuning"], "--json").data
    assert shown["state"] == "queued"
    assert [row["tuning"] for row in there("history", "--json").data["tunings"]] == [told["tuning"]]
    assert "is cancelled" in there("cancel", told["tuning"]).out
    assert store.tuning(told["tuning"]).state is TuningState.CANCELLED


def test_a_tuning_that_ended_is_followed_to_its_result(there: Command, store: SqlStore) -> None:
    ended(store)
    assert "Best plan: " + Plan(tp=2, dp=4).key in there("show", "tuning-1").out


def test_nodes_models_and_clusters_of_the_server(there: Command) -> None:
    assert [row["name"] for row in there("nodes", "list", "--json").data["nodes"]] == ["a", "b"]
    assert "quarantined" in there("nodes", "quarantine", "a", "--reason", "smells").out
    assert "smells" in there("nodes", "show", "a").out
    assert "ready" in there("nodes", "release", "a").out
    assert "pair" in there("cluster", "list").out
    assert "tiny" in there("models", "list").out
    assert there("plan", "--model", "llama3.1-8b", "--cluster", "h100-80gb-sxm:1x8", "--tp", "1,2", "--json").data[
        "plans"
    ]


def test_a_dead_node_is_forgotten_and_a_living_one_is_not(client: Client, there: Command, store: SqlStore) -> None:
    with pytest.raises(StoreConflictError, match="node 'a' lives"):
        client.forget("a")
    refused = there("nodes", "forget", "a")
    assert refused.status == StoreConflictError.exit_code
    assert "lives" in refused.err
    store.retire_node("a", "s1")
    assert there("nodes", "forget", "a", "--json").data == {"node": "a"}
    assert [row["name"] for row in client.nodes()] == ["b"]
    with pytest.raises(InputError, match="nobody"):
        client.forget("nobody")


def test_what_a_request_will_wait_for_or_cost_is_said_at_once(there: Command, store: SqlStore) -> None:
    asked = ("tune", "--model", "tiny", "--cluster", "pair", "--seq-len", 64, "--global-batch", 16, "--no-follow")
    calm = there(*asked).err
    assert "lives" not in calm
    assert "cold" not in calm.lower()
    for name in ("a", "b"):
        store.retire_node(name, "s1")
    told = there(*asked, "--cold").err
    assert "No node of pool pair lives: it waits until one does" in told
    assert told.count("Cold: every trial starts its ranks anew") == 1


def test_a_tuning_without_trials_is_shown_without_a_table(there: Command, store: SqlStore) -> None:
    store.submit_tuning(fleet_tuning(), sharing_key="s")
    shown = there("show", "tuning-1").out
    assert shown.startswith("Tuning tuning-1 of tiny on pair is queued")


def test_the_best_plan_of_a_tuning_that_goes_on_is_called_so(there: Command, store: SqlStore) -> None:
    measured(store)
    assert "Tuning tuning-1 is still under way (profiling): this is its best plan so far" in there("best").out
    store.save_tuning(store.tuning("tuning-1").model_copy(update={"state": TuningState.DONE}))
    assert "under way" not in there("best", "--tuning", "tuning-1").out


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("backtest", "runs.csv"), 2, "this machine only"),
        (("tune", "--model", "tiny"), 2, "--cluster"),
        (("tune", "--cluster", "pair", "--db", "sqlite:///a.db"), 2, "--db"),
        (("tune", "--cluster", "nowhere", "--no-follow"), 2, "nowhere"),
        (("show", "unknown-id"), 2, "unknown-id"),
        (("nodes", "show", "nobody"), 2, "nobody"),
    ],
)
def test_what_cannot_be_asked_of_a_server_is_one_clear_error(
    there: Command, arguments: tuple[object, ...], status: int, word: str
) -> None:
    done = there(*arguments)
    assert done.status == status
    assert word in done.err
    assert "Traceback" not in done.err


def test_without_a_server_its_commands_say_so(autotune: Command) -> None:
    done = autotune("nodes", "list")
    assert done.status == 2
    assert "AUTOTUNE_SERVER" in done.err


def test_a_server_that_is_not_there_is_an_error_of_its_own(autotune: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = autotune("--server", f"http://127.0.0.1:{port}", "show", "tuning-1")
    assert done.status == 7
    assert "cannot be reached" in done.err


def test_what_is_known_is_asked_of_the_server(there: Command, store: SqlStore) -> None:
    ended(store)
    remember(store, store.tuning("tuning-1"))
    stored = store.tuning("tuning-1")
    store.put_model(stored.model.model_copy(update={"name": "mine"}))
    question = ("best", "--model", "mine", "--cluster", "pair", "--dtype", "bf16", "--seq-len", 128, "--global-batch")
    known = there(*question, 16, "--json").data["known"]
    assert known["tuning_id"] == "tuning-1"
    assert Plan.from_data(known["plan"]).key in there(*question, 16).out
    near = there(*question, 32)
    assert "Nothing is known of exactly" in near.out
    assert "16 sequences a step instead of 32" in near.out
    assert there("best", "--tuning", "tuning-1", "--for", "megatron").out.count("--tensor-model-parallel-size") == 1


def test_a_server_and_its_database_say_the_same(there: Command, autotune: Command, store: SqlStore, url: str) -> None:
    ended(store)
    remember(store, store.tuning("tuning-1"))
    stored = store.tuning("tuning-1")
    store.put_model(stored.model.model_copy(update={"name": "mine"}))
    question = ("--model", "mine", "--cluster", "pair", "--dtype", "bf16", "--seq-len", 128, "--global-batch")
    for asked in (
        ("show", "tuning-1"),
        ("history",),
        ("best",),
        ("best", "--tuning", "tuning-1", "--for", "megatron"),
        ("best", *question, 16, "--for", "megatron"),
        ("best", *question, 32),
        ("known", "list", "--model", stored.model.name),
        ("known", "list", "--before", 1),
        ("models", "list"),
        ("cluster", "list"),
    ):
        here, theirs = autotune(*asked, "--db", url), there(*asked)
        assert (here.status, here.out) == (theirs.status, theirs.out)
        assert autotune(*asked, "--db", url, "--json").data == there(*asked, "--json").data
    asked = ("plan", "--model", "llama3.1-8b", "--cluster", "h100-80gb-sxm:1x8", "--tp", "1,2", "--recompute", "full")
    here, theirs = autotune(*asked, "--db", url, "--json").data, there(*asked, "--json").data
    measured = {"seconds": 0.0, "estimates_per_s": 0.0}
    assert here | measured == theirs | measured
    refused = ("plan", "--model", "gpt3-175b", "--cluster", "a100-40gb-sxm:1x8", "--json")
    here, theirs = autotune(*refused, "--db", url), there(*refused)
    assert (here.status, here.data) == (theirs.status, theirs.data)
    assert here.status == 3


def test_a_named_database_is_asked_rather_than_the_settings_server(
    api: Api, autotune: Command, store: SqlStore, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended(store)
    assert autotune("db", "migrate", "--db", f"sqlite:///{tmp_path / 'other.db'}").status == 0
    monkeypatch.setenv("AUTOTUNE_SERVER", api.url)
    monkeypatch.setenv("AUTOTUNE_API_KEY", api.secret(Role.READ))
    assert len(autotune("history", "--json").data["tunings"]) == 1
    assert autotune("history", "--json", "--db", f"sqlite:///{tmp_path / 'other.db'}").data == {"tunings": []}
    refused = autotune("--server", api.url, "history", "--db", url)
    assert refused.status == 2
    assert "--db" in refused.err
    assert autotune("known", "compare", 1, 2).status == 2


def test_a_refused_key_is_not_tried_again(api: Api, store: SqlStore) -> None:
    live_tuning(store)
    with closing(Client(api.url, "wrong")) as stranger, pytest.raises(AccessError):
        next(stranger.events("tuning-1"))
