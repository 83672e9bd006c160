"""Tunings of a fleet over a real store: nodes are scripted, and whatever is done, nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from databases import Databases
from fleet_world import SPACE, World, pool_cluster

from autotune.fleet.service import FleetService
from autotune.settings import FleetTimes
from autotune.specs import (
    Budget,
    JobPurpose,
    JobState,
    NodeState,
    Trial,
    TrialState,
    TuningState,
)
from storage import SqlStore, open_store

BUDGET = Budget(max_trials=4)


@pytest.fixture
def store(databases: Databases, tmp_path: Path) -> Iterator[SqlStore]:
    with open_store(databases.ours("sqlite", tmp_path)) as opened:
        yield opened


@pytest.fixture
def world(store: SqlStore) -> World:
    """A pool of single-device nodes; none has joined."""
    return World(store, pool_cluster(nodes=2, gpus_per_node=1))


def assert_done(world: World, tuning_id: str) -> list[Trial]:
    """The tuning ended well, and everything about it adds up."""
    tuning = world.store.tuning(tuning_id)
    assert tuning.state is TuningState.DONE, tuning.message
    trials = list(world.store.trials(tuning_id))
    jobs = world.store.jobs(tuning_id=tuning_id)
    assert {job.state for job in jobs} == {JobState.ENDED}
    assert all(trial.state is not TrialState.RUNNING for trial in trials)
    measured = [job for job in jobs if job.purpose is JobPurpose.TRIAL and job.failure is None]
    assert Counter(job.trial_id for job in measured) == Counter(t.id for t in trials if t.reading is not None)
    assert all(count == 1 for count in world.runs.values())
    assert tuning.gpu_s_spent == pytest.approx(sum(job.cluster.devices for job in jobs if job.members))
    assert world.store.leased_nodes() == {}
    return trials


def finished(trials: list[Trial]) -> Counter[tuple[str, float]]:
    """What was measured, whatever the numbers of its trials."""
    return Counter((t.plan.key, t.reading.tokens_per_s_per_gpu) for t in trials if t.reading is not None)


def test_a_tuning_runs_from_request_to_answer(world: World) -> None:
    world.join("a", "b")
    tuning_id = world.submit(2, budget=BUDGET)
    world.settle()
    trials = assert_done(world, tuning_id)
    assert len(trials) == BUDGET.max_trials
    best = world.service.best(tuning_id)
    assert best is not None
    assert best.ranked.plan.tp == best.ranked.plan.pp == 1
    jobs = world.store.jobs(tuning_id=tuning_id)
    assert [member.node for member in jobs[0].members] == ["a", "b"]
    assert not jobs[0].warm
    assert all(job.warm for job in jobs[1:])  # the same ranks all along
    assert len({trial.fingerprint_key for trial in trials}) == 1
    assert world.store.fingerprint(trials[0].fingerprint_key).hostname == "box"


def test_what_a_pool_is_known_for_is_not_probed_again(world: World) -> None:
    world.join("a", "b")
    first = world.submit(2, budget=BUDGET)
    world.settle()
    world.join("c", "d")  # other machines of the same kind share the profile
    second = world.submit(2, budget=BUDGET, seed=1)
    world.settle()
    assert_done(world, first)
    assert_done(world, second)
    assert {job.purpose for job in world.store.jobs(tuning_id=second)} == {JobPurpose.TRIAL}


def test_disjoint_gangs_measure_for_one_tuning_at_once(world: World) -> None:
    world.join("a", "b", "c", "d")
    tuning_id = world.submit(2, budget=BUDGET)
    world.settle()
    trials = assert_done(world, tuning_id)
    assert world.most_at_once == 2
    assert len({trial.plan for trial in trials}) >= 2
    assert Counter(trial.plan for trial in trials).most_common(1)[0][1] <= 3


def test_a_tuning_waits_for_nodes_and_says_for_which(world: World) -> None:
    world.join("a")
    world.join("b", slots=0)
    tuning_id = world.submit(2, budget=BUDGET)
    world.settle(sweeps=3)
    tuning = world.store.tuning(tuning_id)
    assert tuning.state is TuningState.PROFILING
    assert tuning.message == (
        "waiting for nodes: pool box has 1 of the 2 nodes that this needs ready; node b came up with 0 of 1 devices"
    )
    events = len(world.service.events(tuning_id))
    world.settle(sweeps=3)
    assert len(world.service.events(tuning_id)) == events  # nothing new is nothing to tell
    world.join("c")
    world.settle()
    assert_done(world, tuning_id)
    assert world.store.tuning(tuning_id).message == ""


def test_a_tuning_keeps_to_the_environment_that_it_began_in(world: World) -> None:
    world.join("a", "b", "c")
    tuning_id = world.submit(2, budget=BUDGET)
    world.deliver(most=12)
    for name in ("a", "b", "c"):  # upgraded in the middle
        world.join(name, torch="2.14.0")
    world.settle(sweeps=3)
    tuning = world.store.tuning(tuning_id)
    assert not tuning.state.ended
    assert "another environment" in tuning.message or "waiting for nodes" in tuning.message
    world.join("d", "e")
    world.settle()
    assert_done(world, tuning_id)


def test_a_sweep_sends_no_more_than_tuners_can_take(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.fleet.sweeping.MAX_ADVANCED", 2)
    monkeypatch.setattr("autotune.fleet.sweeping.ALWAYS_ADVANCED", 1)
    world.join("a", "b")
    asked = [world.submit(2, seed=seed) for seed in range(3)]
    world.service.admit()
    for name in ("a", "b"):
        world.store.set_node_state(name, NodeState.QUARANTINED, "by hand")
    reminded: Counter[str] = Counter()
    for _ in range(3):  # nothing can run: all of them are due every time
        world.mail.waiting.clear()
        world.service.sweep()
        ids = [found[0] for kind, found in world.mail.waiting if kind == "advance"]
        assert len(ids) == 2
        reminded.update(ids)
        for tuning_id in ids:
            world.service.advance(tuning_id)
    assert set(reminded) == set(asked)


def test_sweeps_do_not_double_what_waits_for_tuners(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.fleet.sweeping.MAX_ADVANCED", 6)
    monkeypatch.setattr("autotune.fleet.sweeping.ALWAYS_ADVANCED", 1)
    world.join("a", "b")
    for seed in range(5):
        world.submit(2, seed=seed)
    world.service.admit()
    assert world.mail.backlog() == 5
    for _ in range(3):  # no tuner is there
        world.service.sweep()
    assert world.mail.backlog() == 5 + 3
    world.mail.waiting.clear()  # a flushed broker
    world.service.sweep()
    assert world.mail.backlog() == 5


def test_when_every_message_is_lost_the_sweep_carries_all(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=2, gpus_per_node=1), times=FleetTimes(unsent_after_s=0.0))
    world.join("a", "b")
    lost = Counter[str]()
    swept = False

    def loses(kind: str) -> bool:
        lost[kind] += not swept
        return not swept

    world.mail.loses = loses
    tuning_id = world.submit(2, budget=Budget(max_trials=2))
    for _ in range(300):
        swept = True
        world.service.sweep()
        waiting = list(world.mail.waiting)
        world.mail.waiting.clear()
        swept = False
        for kind, ids in waiting:
            world.act(kind, *ids)
        if world.store.tuning(tuning_id).state.ended:
            break
    assert_done(world, tuning_id)
    assert set(lost) == {"begin", "advance", "run"}


def test_messages_that_come_twice_do_nothing_twice(world: World) -> None:
    world.join("a", "b", "c", "d")
    tuning_id = world.submit(2, budget=BUDGET)
    while world.mail.waiting:
        kind, ids = world.mail.waiting.popleft()
        world.act(kind, *ids)
        world.act(kind, *ids)
    world.settle()
    assert len(assert_done(world, tuning_id)) == BUDGET.max_trials


@dataclass
class MortalStore:
    """A store whose process dies at its n-th call: before it did anything, or after, so that nobody hears of it."""

    store: SqlStore
    dies_at: int
    after: bool
    called: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.called.append(name)
            if len(self.called) < self.dies_at:
                return method(*arguments, **named)
            if len(self.called) == self.dies_at and self.after:
                method(*arguments, **named)
            raise KilledError(name)

        return call


class KilledError(Exception):
    """The process is gone; even what it does on its way out fails."""


@dataclass
class MortalWorld(World):
    """With `mortal`, the first tuner dies at its first call, the next at its second, and so on until one lives."""

    mortal: bool = True
    after: bool = False
    dies_at: int = 1
    deaths: Counter[str] = field(default_factory=Counter)

    def act(self, kind: str, *ids: str | int) -> None:
        if kind != "advance":
            super().act(kind, *ids)
            return
        assert isinstance(self.store, SqlStore)
        store = MortalStore(self.store, self.dies_at if self.mortal else 10**9, self.after)
        self.dies_at += 1
        with suppress(KilledError):
            FleetService(store, self.mail, self.merge, self.times).advance(str(ids[0]))  # type: ignore[arg-type]
        if len(store.called) < store.dies_at:
            self.dies_at = 1
        else:
            self.deaths[store.called[store.dies_at - 1]] += 1


def mortal_world(store: SqlStore, **options: Any) -> tuple[MortalWorld, str]:
    """A world of one gang, with a small tuning that was asked for and brought to its end."""
    times = FleetTimes(claim_s=0.0)  # a dead one's claim would have to run out
    world = MortalWorld(store, pool_cluster(nodes=2, gpus_per_node=1), times=times, **options)
    world.join("a", "b")
    space = SPACE.model_copy(update={"micro_batch": (1,), "pp": (1,)})
    tuning_id = world.submit(2, budget=Budget(max_trials=3), space=space)
    world.settle(sweeps=1000)
    return world, tuning_id


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"])
def test_a_tuner_that_dies_at_any_call_loses_and_doubles_nothing(tmp_path: Path, *, after: bool) -> None:
    with open_store(f"sqlite:///{tmp_path / 'calm.db'}") as store:
        calm, tuning_id = mortal_world(store, mortal=False)
        expected = finished(assert_done(calm, tuning_id))
    with open_store(f"sqlite:///{tmp_path / 'wild.db'}") as store:
        wild, tuning_id = mortal_world(store, after=after)
        assert finished(assert_done(wild, tuning_id)) == expected
    assert set(wild.deaths) >= {"claim_tuning", "put_fingerprint", "trials", "create_job", "save_tuning"}


def test_one_tuner_at_a_time_advances_a_tuning(world: World) -> None:
    world.join("a", "b")
    tuning_id = world.submit(2, budget=BUDGET)
    assert world.store.claim_tuning(tuning_id, "another tuner", lease_s=30.0) is not None
    world.deliver()
    assert world.store.jobs(tuning_id=tuning_id) == []
    assert world.store.tuning(tuning_id).owner == "another tuner"
    world.store.release_tuning(tuning_id, "another tuner")
    world.settle()
    assert_done(world, tuning_id)
