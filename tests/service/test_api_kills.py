"""An API that is killed with -9 while clients hear from it and ask of it: what it answered is stored, once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from crew import AMPLE_S, POOL, Crew, pool_cluster, wait_for
from fleet_records import node
from services import PostgresServer, redis_server
from supervisor import Supervisor

from autotune.catalog import smallest
from autotune.client import Client
from autotune.errors import ServerError
from autotune.specs import TuningEvent, TuningState

EVENTS, KILL_AFTER = 9, (2, 5, 6)
CLIENTS, REQUESTS, KILLS = 4, 6, 4


class KilledApi:
    """An API without workers, which is started again at the same address."""

    def __init__(self, crew: Crew) -> None:
        self._crew, self._supervisor = crew, Supervisor(crew, ["api"])
        self.store, self.url = crew.store, self._supervisor.url
        self._supervisor.start()

    def kill(self) -> None:
        """Kills it and starts another."""
        self._crew.part["api"].kill()
        self._supervisor.start()


@pytest.fixture
def api(postgres: PostgresServer, tmp_path: Path) -> Iterator[KilledApi]:
    with redis_server() as broker, Crew(postgres, broker, tmp_path) as crew:
        crew.store.put_cluster(pool_cluster())
        for name in ("a", "b"):
            crew.store.register_node(node(name).model_copy(update={"pool": POOL}))
        yield KilledApi(crew)


def asked(client: Client, seed: int, key: str) -> str:
    """The id of the tuning that a request leads to."""
    workload = {"seq_len": 64, "global_batch": 4}
    return str(client.submit(smallest(), pool_cluster(), workload=workload, seed=seed, idempotency_key=key)["tuning"])


@pytest.mark.slow
def test_a_stream_goes_on_over_killed_servers(api: KilledApi) -> None:
    heard: list[TuningEvent] = []
    with Client(api.url) as client:
        tuning_id = asked(client, 1, "stream")
        for event in client.events(tuning_id):
            heard.append(event)
            if len(heard) in KILL_AFTER:
                api.kill()
            tuning = api.store.tuning(tuning_id)
            if len(heard) == EVENTS:
                client.cancel(tuning_id)
            elif not tuning.state.ended:
                api.store.save_tuning(tuning.model_copy(update={"message": f"event {len(heard)}"}))
    assert heard == list(api.store.events(tuning_id))
    assert len(heard) == EVENTS + 1
    assert heard[-1].data["state"] == TuningState.CANCELLED


@pytest.mark.slow
def test_submissions_to_killed_servers_are_stored_once(api: KilledApi) -> None:
    answers: dict[str, str] = {}

    def submit(number: int) -> None:
        for request in range(REQUESTS):
            key = f"{number}-{request}"
            while key not in answers:
                with suppress(ServerError), Client(api.url) as client:
                    answers[key] = asked(client, 100 * number + request, key)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    moments = sorted(random.Random(1).sample(range(CLIENTS * REQUESTS - CLIENTS), KILLS))
    for moment in moments:
        wait_for("so many answers", lambda count=moment: len(answers) >= count)
        api.kill()  # while the other clients wait for theirs
    for thread in threads:
        thread.join(AMPLE_S)
    assert len(answers) == CLIENTS * REQUESTS
    assert sorted(answers.values()) == sorted(tuning.id for tuning in api.store.tunings(1000))
    with Client(api.url) as client:
        assert all(asked(client, 100 * int(key[0]) + int(key[2]), key) == found for key, found in answers.items())
