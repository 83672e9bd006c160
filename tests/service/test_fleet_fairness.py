"""Nobody gets in anybody's way: what one principal asks for holds up nobody else. Nodes are scripted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from databases import Databases
from fleet_world import World, pool_cluster
from sqlalchemy import update

from autotune.errors import InputError
from autotune.fleet.service import MAX_SAME_FAULTS, FleetService
from autotune.settings import MAX_LIVE
from autotune.specs import Budget, Job, JobPurpose, NodeState, TuningState
from storage import SqlStore, open_store
from storage.tunings.tables import FingerprintRow

SMALL = Budget(max_trials=1)


@pytest.fixture
def store(databases: Databases, tmp_path: Path) -> Iterator[SqlStore]:
    with open_store(databases.ours("sqlite", tmp_path)) as opened:
        yield opened


def jobs_until_the_first_trial(world: World, tuning_id: str) -> int:
    """How many jobs got their nodes until a trial of that tuning did; a message is delivered at a time."""

    def granted() -> list[Job]:
        return [job for job in world.store.jobs() if job.granted_at is not None]

    before = len(granted())
    while not any(job.purpose is JobPurpose.TRIAL for job in granted() if job.tuning_id == tuning_id):
        assert world.deliver(most=1), "nothing moves any more"
    return len(granted()) - before


@pytest.mark.parametrize("many", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_first_trial_behind_many_tunings_of_somebody_else_comes_after_twice_the_jobs_at_most(
    databases: Databases, tmp_path: Path, many: int
) -> None:
    found = {}
    for behind in (0, many):
        with open_store(databases.ours("sqlite", tmp_path)) as store:
            world = World(store, pool_cluster(nodes=2, gpus_per_node=1))
            world.join("a", "b")
            for seed in range(behind):
                world.submit(2, budget=SMALL, seed=seed)
            world.deliver(most=20)  # some of them are under way
            found[behind] = jobs_until_the_first_trial(world, world.submit(2, principal="bob", budget=SMALL, seed=-1))
            live = [each for each in store.tunings_page(limit=behind + 1, principal="ann") if not each.state.ended]
            assert sum(each.state is not TuningState.QUEUED for each in live) == min(behind, MAX_LIVE)
    assert found[many] <= 2 * found[0] + 1  # what holds the nodes at that moment


def test_a_shared_tuning_measures_in_the_name_of_whoever_used_least(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=2, gpus_per_node=1))
    world.join("a", "b")
    world.submit(2, budget=SMALL)
    world.deliver(most=12)
    shared = world.submit(2, budget=SMALL, seed=1)
    assert world.submit(2, budget=SMALL, seed=1, principal="bob") == shared
    world.service.admit()
    world.service.advance(shared)
    assert {job.principal for job in store.jobs(tuning_id=shared)} == {"bob"}


def test_a_queued_tuning_says_where_it_stands(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=2, gpus_per_node=1))
    world.join("a", "b")
    for name in ("a", "b"):
        store.set_node_state(name, NodeState.QUARANTINED, "by hand")
    asked = [world.submit(2, budget=SMALL, seed=seed) for seed in range(MAX_LIVE + 2)]
    world.deliver()
    assert world.service.why_waiting(asked[-1]) == "number 2 of what is queued for the same principal in its pool"
    world.service.cancel(asked[0], "ann")
    world.deliver()
    assert world.service.why_waiting(asked[-1]) == "number 1 of what is queued for the same principal in its pool"


def test_all_that_was_asked_for_is_done_in_the_end(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=2, gpus_per_node=1))
    world.join("a", "b")
    world.service = FleetService(store, world.mail, world.merge, world.times, max_live=1)
    asked = [world.submit(2, principal=who, budget=SMALL, seed=seed) for seed, who in enumerate("aabab")]
    world.settle()
    assert {world.store.tuning(each).state for each in asked} == {TuningState.DONE}


def forget_environments(store: SqlStore, text: str) -> None:
    with store.writing() as session:
        session.execute(update(FingerprintRow).values(spec_json=text))


def test_a_step_that_fails_three_times_in_the_same_way_ends_its_tuning_with_the_cause(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=2, gpus_per_node=1))
    world.join("a", "b")
    tuning_id = world.submit(2, budget=SMALL)
    world.service.admit()
    good = store.fingerprint(store.node("a").fingerprint_key).to_json()
    forget_environments(store, "{}")  # a record that nobody can read
    for number in range(2):
        with pytest.raises(InputError, match="hostname"):
            FleetService(store, world.mail, world.merge).advance(tuning_id)  # a tuner each
        assert store.tuning(tuning_id).state is TuningState.PROFILING, number
    forget_environments(store, good)
    world.service.advance(tuning_id)  # that went well, and nothing is counted any more
    other = world.submit(2, budget=SMALL, seed=1)
    world.service.admit()
    forget_environments(store, "{}")
    for _ in range(MAX_SAME_FAULTS):
        with suppress(InputError):
            FleetService(store, world.mail, world.merge).advance(other)
    failed = store.tuning(other)
    assert failed.state is TuningState.FAILED
    assert failed.message.startswith("its next step failed 3 times in the same way (InputError in ")
    assert "hostname" in failed.message
    assert store.events(other)[-1].data["message"] == failed.stop_reason == failed.message
    assert not store.tuning(tuning_id).state.ended
