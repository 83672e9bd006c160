"""Many clients at once: no submission is lost, equal ones share a tuning. (How fast: benchmarks/fleet_load.py.)"""

from __future__ import annotations

import random

import pytest
from crew import POOL, Crew, wait_for
from load import Asked, ask_all, submission
from supervisor import Supervisor

from autotune.specs import TuningState

CLIENTS, DISTINCT, TIMES = 8, 10, 4


@pytest.mark.slow
def test_submissions_of_many_clients_are_all_stored_and_shared(crew: Crew) -> None:
    supervisor = Supervisor(crew)
    supervisor.start()
    before = {tuning.id for tuning in crew.store.tunings(1000)}
    requests = [submission(9_000_000 + number % DISTINCT) for number in range(DISTINCT * TIMES)]
    random.Random(1).shuffle(requests)
    answers = ask_all(supervisor.url, requests, CLIENTS)
    assert sorted(answer.status for answer in answers) == [200] * DISTINCT * (TIMES - 1) + [201] * DISTINCT
    led_to = {(answer.asked.body or {})["seed"]: answer.data["tuning"] for answer in answers}
    assert all(led_to[(answer.asked.body or {})["seed"]] == answer.data["tuning"] for answer in answers)
    stored = {tuning.id for tuning in crew.store.tunings(1000)} - before
    assert stored == set(led_to.values())
    assert len(stored) == DISTINCT
    taken_back = [Asked(method="DELETE", path=f"/tunings/{each}") for each in sorted(stored)]
    assert {answer.data["state"] for answer in ask_all(supervisor.url, taken_back, CLIENTS)} == {"cancelled"}
    wait_for("the nodes are free", lambda: not crew.store.leased_nodes(POOL))
    assert {crew.store.tuning(each).state for each in stored} == {TuningState.CANCELLED}
    crew.part.pop("api").end()
