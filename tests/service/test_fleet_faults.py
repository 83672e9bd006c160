"""What a fleet does when nodes fail, are slow, or go; and who may ask it for what. Nodes are scripted."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from databases import Databases
from fleet_world import MODEL, SPACE, WORKLOAD, World, pool_cluster
from sqlalchemy import select

from autotune.errors import InputError, StoreConflictError, UnknownNameError
from autotune.fleet.health import health_requests
from autotune.fleet.local import LocalFleet, cancel_here
from autotune.fleet.service import submission_of
from autotune.settings import FleetTimes
from autotune.specs import (
    Budget,
    ClusterSpec,
    CollectiveOp,
    CollectiveRequest,
    EventKind,
    FailureKind,
    Job,
    JobPurpose,
    JobState,
    LayerRequest,
    MemberState,
    NodeIncident,
    NodeState,
    Space,
    StepRequest,
    TrialState,
    Tuning,
    TuningState,
)
from storage import SqlStore, open_store
from storage.fleet.tables import NodeIncidentRow

TWO = Budget(max_trials=2)
REQUEST = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(4096,))


@pytest.fixture
def store(databases: Databases, tmp_path: Path) -> Iterator[SqlStore]:
    with open_store(databases.ours("sqlite", tmp_path)) as opened:
        yield opened


@pytest.fixture
def world(store: SqlStore) -> World:
    return World(store, pool_cluster(nodes=2, gpus_per_node=2))


def probe(world: World, *avoid: str) -> None:
    """A probe that belongs to no tuning, on any node but those; and all that follows."""
    job = Job(
        id=uuid.uuid4().hex,
        purpose=JobPurpose.PROFILE,
        pool="box",
        cluster=world.cluster.model_copy(update={"nodes": 1}),
        request=REQUEST,
        avoid=avoid,
        deadline_s=60.0,
        created_at=world.store.now(),
    )
    world.store.create_job(job)
    world.service.schedule("box")
    world.settle()


def attempts(world: World) -> list[tuple[int, list[str], FailureKind | None]]:
    jobs = [job for job in world.store.jobs() if job.purpose is not JobPurpose.HEALTH]
    return [(job.attempt, [member.node for member in job.members], job.failure) for job in jobs]


def failing(*names: str, kind: FailureKind = FailureKind.HANG, health: bool = False) -> object:
    """Nodes that fail at everything, or at everything but health probes."""

    def fault(job: Job, node: str) -> FailureKind | None:
        spared = job.purpose is JobPurpose.HEALTH and not health
        return kind if node in names and not spared else None

    return fault


def test_what_a_node_fails_at_is_done_elsewhere(world: World) -> None:
    world.join("a", "b", "c")
    world.fault = failing("a")
    probe(world)
    assert attempts(world) == [(1, ["a"], FailureKind.HANG), (2, ["b"], None)]
    assert [(i.node, i.kind) for i in world.store.incidents()] == [("a", "hang")]
    assert world.store.node("a").failures == 1
    world.fault = lambda job, node: None
    probe(world, "b", "c")
    assert world.store.node("a").failures == 0  # it did well since


@pytest.mark.parametrize("kind", [FailureKind.OOM, FailureKind.ILLEGAL])
def test_what_is_the_plans_own_is_not_tried_again(world: World, kind: FailureKind) -> None:
    world.join("a", "b")
    world.fault = failing("a", "b", kind=kind)
    probe(world)
    assert attempts(world) == [(1, ["a"], kind)]
    assert world.store.incidents() == []


def test_three_attempts_are_the_most(world: World) -> None:
    world.join("a", "b", "c", "d")
    world.fault = failing("a", "b", "c", "d", kind=FailureKind.UNAVAILABLE)
    probe(world)
    assert [nodes for _, nodes, _ in attempts(world)] == [["a"], ["b"], ["c"]]


def test_a_node_that_fails_twice_in_a_row_is_out_until_its_health_probes_pass(world: World) -> None:
    world.join("a", "b", "c")
    world.fault = failing("a")
    probe(world)
    states = []
    blame = world.store.blame_node

    def watched(*arguments: object, **named: object) -> object:
        node = blame(*arguments, **named)  # type: ignore[arg-type]
        states.append((node.name, node.state, node.reason))
        return node

    world.store.blame_node = watched  # type: ignore[method-assign,assignment]
    probe(world, "b", "c")
    assert states == [("a", NodeState.QUARANTINED, "node a: rank 0 failed")]
    assert world.store.node("a").state is NodeState.READY  # by now
    assert world.store.node("a").failures == 0
    health = [job for job in world.store.jobs() if job.purpose is JobPurpose.HEALTH]
    checked = Counter(job.only_node for job in health if job.failure is None)
    assert checked == dict.fromkeys("abc", len(health_requests(world.cluster)))  # a's peers were measured to compare


def test_a_node_that_fails_its_health_probe_stays_out_and_is_asked_less_and_less(world: World) -> None:
    world.join("a", "b")
    world.fault = failing("a", health=True)
    probe(world)
    probe(world, "b")
    node = world.store.node("a")
    assert (node.state, node.failures) == (NodeState.QUARANTINED, 3)
    assert node.reason == "its health probe failed: node a: rank 0 failed"
    world.fault = lambda job, node: None
    world.settle(sweeps=3)
    assert world.store.node("a").state is NodeState.QUARANTINED  # its next probe is half a minute away
    probe(world)
    assert attempts(world)[-1] == (1, ["b"], None)


def pass_time(store: SqlStore, seconds: float) -> None:
    """Makes all incidents so much older."""
    with store.writing() as session:
        for row in session.scalars(select(NodeIncidentRow)):
            row.at -= timedelta(seconds=seconds)


def health_probes(world: World, node: str) -> int:
    return sum(job.only_node == node for job in world.store.jobs() if job.purpose is JobPurpose.HEALTH)


def test_a_health_probe_that_was_cut_off_counts_only_until_the_next(world: World, store: SqlStore) -> None:
    world.join("a", "b")
    ends = {JobPurpose.HEALTH: FailureKind.LOST}
    world.fault = lambda job, node: ends.get(job.purpose, FailureKind.HANG) if node == "a" else None
    probe(world)
    probe(world, "b")
    for probes in range(1, 7):  # each is killed
        node = world.store.node("a")
        assert (node.state, node.failures, node.reason) == (NodeState.QUARANTINED, 2, "node a: rank 0 failed")
        assert world.store.incidents("a")[0].kind == "health_undecided"
        assert health_probes(world, "a") == probes
        pass_time(store, 31.0)
        world.settle()
    ends[JobPurpose.HEALTH] = FailureKind.UNAVAILABLE
    pass_time(store, 31.0)
    world.settle()
    assert world.store.node("a").failures == 3  # one that failed counts
    pass_time(store, 31.0)
    world.fault = lambda job, node: None
    world.settle()
    assert world.store.node("a").state is NodeState.READY


def test_a_peer_whose_health_probe_was_cut_off_is_not_quarantined_for_it(world: World) -> None:
    world.join("a", "b")
    cut_off: list[str] = []

    def fault(job: Job, node: str) -> FailureKind | None:
        if job.purpose is not JobPurpose.HEALTH:
            return FailureKind.HANG if node == "a" else None
        if node == "b" and not cut_off:
            cut_off.append(job.id)
            return FailureKind.LOST
        return None

    world.fault = fault
    probe(world)
    probe(world, "b")
    assert cut_off
    assert [incident.kind for incident in world.store.incidents("b")] == ["health_undecided"]
    assert world.nodes_ready() == {"a", "b"}


def test_a_slow_node_stays_out(world: World) -> None:
    world.join("a", "b", "c")
    world.fault = failing("a")
    world.speed["a"] = 0.6
    probe(world)
    probe(world, "b", "c")
    node = world.store.node("a")
    assert node.state is NodeState.QUARANTINED
    assert "slow in its health probe: all_reduce of 65536 bytes at 0.60 of the pool's median" in node.reason
    assert world.nodes_ready() == {"b", "c"}


def test_a_quarantined_node_is_never_free_while_a_hand_takes_it_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join("a", "b")
    incident = NodeIncident(node="a", at=world.store.now(), kind="crash", message="broken")
    world.store.blame_node(incident, quarantine_at=1)
    seen = []

    def watched(*change: Any) -> None:
        set_node_state(*change)
        seen.append(world.store.node("a").state)

    set_node_state = world.store.set_node_state
    monkeypatch.setattr(world.store, "set_node_state", watched)
    node = world.service.quarantine("a", "its fan is broken")
    assert set(seen) == {NodeState.QUARANTINED}
    assert (node.reason, node.failures) == ("its fan is broken", 0)


def test_a_node_at_a_tenth_of_the_speed_is_measured_told_and_left_out(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=3, gpus_per_node=2))
    world.join("a", "b", "c")
    world.speed["b"] = 0.1
    tuning_id = world.submit(2, budget=TWO)
    world.settle()
    assert store.tuning(tuning_id).state is TuningState.DONE
    assert world.nodes_ready() == {"a", "c"}
    figures = "rank 2 computed 0.2 s for what took the other nodes 0.02 s, 10.0 x as long"
    first = store.incidents("b")[-1]
    assert (first.kind, first.message) == ("slow", figures)
    assert store.node("b").reason.startswith("slow in its health probe: all_reduce of 65536 bytes at 0.10 of the pool")
    (retried,) = [event.data for event in store.events(tuning_id) if event.kind is EventKind.JOB_RETRIED]
    assert retried["failure"]["message"] == f"node b: {figures}"
    with_b = [job for job in store.jobs(tuning_id=tuning_id) if "b" in {member.node for member in job.members}]
    assert {job.failure for job in with_b if isinstance(job.request, LayerRequest | StepRequest)} == {FailureKind.SLOW}


def test_a_slow_node_of_gangs_of_one_is_found_by_what_the_others_compute(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=3, gpus_per_node=2))
    world.join("a", "b", "c")
    world.speed["b"] = 0.1
    asked = [world.submit(1, budget=Budget(max_trials=6), seed=seed) for seed in range(2)]
    world.settle()
    assert {store.tuning(each).state for each in asked} == {TuningState.DONE}
    assert world.nodes_ready() == {"a", "c"}
    first = next(each for each in reversed(store.incidents("b")) if each.kind == "slow")
    told = r"computed 0\.2 s for what takes [12] other nodes? of the pool 0\.02 s, 10\.0 x as long"
    assert re.fullmatch(told, first.message)
    (retried,) = [job for job in store.jobs() if job.attempt == 2]
    assert [member.node for member in retried.members] != ["b"]
    assert retried.failure is None
    assert {each.node for name in "ac" for each in store.incidents(name)} == set()


def test_a_plan_that_computes_longer_on_every_node_is_measured_once_more_and_nobody_is_left_out(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(store, pool_cluster(nodes=3, gpus_per_node=2))
    world.join("a", "b", "c")
    calc_s, heavy = World._calc_s, []

    def of_plan(self: World, job: Job) -> dict[int, float]:
        is_fourth = isinstance(job.request, StepRequest) and store.trials(job.tuning_id)[-1].number >= 3
        heavy.extend([job.request.plan] if is_fourth and not heavy else [])
        longer = isinstance(job.request, StepRequest) and job.request.plan in heavy
        return {rank: (10 if longer else 1) * time_s for rank, time_s in calc_s(self, job).items()}

    monkeypatch.setattr(World, "_calc_s", of_plan)
    tuning_id = world.submit(1, budget=Budget(max_trials=6))
    world.settle()
    assert store.tuning(tuning_id).state is TuningState.DONE
    assert world.nodes_ready() == {"a", "b", "c"}
    slow = [job for job in store.jobs(tuning_id=tuning_id) if job.failure is FailureKind.SLOW]
    assert [job.attempt for job in slow] == [1]
    assert all(trial.failure is None for trial in store.trials(tuning_id))


def test_a_pool_that_is_left_too_small_by_a_slow_node_says_why_it_waits(store: SqlStore) -> None:
    world = World(store, pool_cluster(nodes=2, gpus_per_node=2))
    world.join("a", "b")
    world.speed["b"] = 0.1
    tuning_id = world.submit(2)
    world.settle()
    assert not store.tuning(tuning_id).state.ended
    assert "node b quarantined: slow in its health probe" in world.service.why_waiting(tuning_id)


def test_a_node_that_is_taken_out_by_hand_waits_for_a_hand(world: World) -> None:
    world.join("a", "b")
    world.service.quarantine("a", "its fan is broken")
    world.settle()
    assert world.service.nodes()[0].obstacle == "quarantined: its fan is broken"
    world.service.release("a")
    assert world.nodes_ready() == {"a", "b"}


def test_a_node_that_does_not_answer_is_lost_and_its_job_done_elsewhere(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.fleet.scheduling.START_LEASES", 0.0)
    world = World(store, pool_cluster(nodes=2, gpus_per_node=2), times=FleetTimes(unsent_after_s=3600.0))
    world.join("a", "b")
    act = world.act
    world.act = lambda kind, *ids: None if ids[0] == "a" else act(kind, *ids)  # type: ignore[method-assign]
    probe(world)
    assert attempts(world) == [(1, ["a"], FailureKind.LOST), (2, ["b"], None)]
    (lost,) = [member for job in world.store.jobs() for member in job.members if member.node == "a"]
    assert lost.state is MemberState.LOST
    assert world.store.leased_nodes() == {}


def test_a_trial_is_retried_within_its_tuning(world: World) -> None:
    world.cluster = pool_cluster(nodes=2, gpus_per_node=1)
    world.join("a", "b", "c")
    failed: list[str] = []

    def fault(job: Job, node: str) -> FailureKind | None:
        if job.purpose is JobPurpose.TRIAL and len(failed) < 2 and node != "c":
            failed.append(node)
            return FailureKind.COMMUNICATION
        return None

    world.fault = fault
    tuning_id = world.submit(2, budget=TWO)
    world.settle()
    assert world.store.tuning(tuning_id).state is TuningState.DONE
    trials = world.store.trials(tuning_id)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
    jobs = [job for job in world.store.jobs(tuning_id=tuning_id) if job.purpose is JobPurpose.TRIAL]
    assert max(job.attempt for job in jobs) == 2
    assert {event.kind.value for event in world.service.events(tuning_id)} >= {"job_retried", "trial_ended"}


def test_when_every_trial_takes_its_nodes_along_the_tuning_fails_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.fleet.finishing.QUARANTINE_AT", 1000)
    world.cluster = pool_cluster(nodes=2, gpus_per_node=1)
    world.join("a", "b")
    world.fault = lambda job, node: FailureKind.LOST if job.purpose is JobPurpose.TRIAL else None
    tuning_id = world.submit(2)
    world.settle()
    tuning = world.store.tuning(tuning_id)
    assert tuning.state is TuningState.FAILED
    assert tuning.message == "the last 5 trials were lost with their nodes, on every node that they ran on"
    assert len({trial.plan for trial in world.store.trials(tuning_id)}) == 5  # none is asked twice


def test_cancelling_ends_what_waits_and_stops_what_runs(world: World) -> None:
    world.cluster = pool_cluster(nodes=1, gpus_per_node=2)
    world.join("a", "b")
    tuning_id = world.submit(1, budget=TWO)
    world.deliver(most=2)  # begun, advanced, and granted on both nodes
    assert {job.state for job in world.store.jobs(tuning_id=tuning_id)} == {JobState.GRANTED}
    assert world.service.cancel(tuning_id, "ann").state is TuningState.CANCELLED
    assert all(job.cancelled for job in world.store.jobs(tuning_id=tuning_id))
    world.fault = lambda job, node: FailureKind.CANCELLED if job.cancelled else None
    world.settle()
    jobs = world.store.jobs(tuning_id=tuning_id)
    assert {job.state for job in jobs} == {JobState.ENDED}
    assert world.store.leased_nodes() == {}
    assert world.store.tuning(tuning_id).state is TuningState.CANCELLED
    assert world.store.incidents() == []
    assert world.service.cancel(tuning_id, "ann").state is TuningState.CANCELLED  # again changes nothing


def queued(world: World) -> str:
    """A tuning whose job waits for two nodes, which somebody else's tuning has."""
    world.join("a", "b")
    world.submit(2, principal="bob", budget=TWO)
    world.deliver(most=2)
    tuning_id = world.submit(2, budget=TWO, seed=1)
    world.service.admit()
    world.service.advance(tuning_id)
    assert {job.state for job in world.store.jobs(tuning_id=tuning_id)} == {JobState.QUEUED}
    return tuning_id


def test_jobs_that_a_dying_canceller_left_are_ended_by_the_sweep(world: World) -> None:
    tuning_id = queued(world)
    tuning = world.store.tuning(tuning_id)
    world.store.save_tuning(tuning.model_copy(update={"state": TuningState.CANCELLED}))
    world.mail.waiting.clear()
    world.service.sweep()
    assert {(job.state, job.failure) for job in world.store.jobs(tuning_id=tuning_id)} == {
        (JobState.ENDED, FailureKind.CANCELLED)
    }


def test_a_shared_tuning_goes_on_until_nobody_wants_it(world: World) -> None:
    world.join("a", "b")
    first = world.submit(2, budget=TWO)
    assert world.submit(2, budget=TWO, principal="bob") == first
    assert world.submit(2, budget=TWO, seed=1) != first
    assert not world.service.cancel(first, "ann").state.ended
    assert world.service.cancel(first, "bob").state is TuningState.CANCELLED
    assert world.submit(2, budget=TWO) != first
    other = world.submit(2, budget=TWO, principal="eve")
    assert world.service.cancel(other, "root", force=True).state is TuningState.CANCELLED


def test_a_request_is_checked_before_it_is_stored(world: World) -> None:
    world.join("a", "b")

    def submit(cluster: ClusterSpec, **options: Any) -> tuple[Tuning, bool]:
        return world.service.submit(submission_of(MODEL, cluster, WORKLOAD, principal="ann", **options))

    with pytest.raises(UnknownNameError, match="box"):
        submit(world.cluster.model_copy(update={"name": "attic"}))
    with pytest.raises(InputError, match=r"other hardware \(gpus_per_node differ\)"):
        submit(world.cluster.model_copy(update={"gpus_per_node": 8}))
    with pytest.raises(InputError, match="2 at most: so many have registered in pool box"):
        world.submit(3)
    with pytest.raises(InputError, match="no plan is legal"):
        world.submit(2, space=Space(tp=(3,)))
    assert world.store.tunings() == []
    alone = world.cluster.model_copy(update={"nodes": 1, "inter": None})
    tuning, created = submit(alone, idempotency_key="k", space=SPACE)
    assert (created, tuning.pool) == (True, "box")
    again = submit(alone, idempotency_key="k", space=SPACE)
    assert again == (tuning, False)
    with pytest.raises(StoreConflictError, match="another request"):
        submit(alone, idempotency_key="k", space=SPACE, seed=1)


def test_a_fleets_tuning_is_not_for_one_process(world: World) -> None:
    world.join("a", "b")
    tuning_id = world.submit(2)

    def no_ranks() -> NoReturn:
        raise AssertionError("nothing may be measured here")

    local = LocalFleet(world.store, world.cluster, no_ranks, merge=world.merge, share_of=lambda job, node: None)
    for refused in (lambda: local.run(tuning_id), lambda: cancel_here(world.store, tuning_id)):
        with pytest.raises(InputError, match="pool box measures for it"):
            refused()


def test_why_a_tuning_waits_is_told_as_it_is_now(world: World) -> None:
    tuning_id = queued(world)
    assert world.service.why_waiting(tuning_id) == "needs 2 nodes of pool box: 0 free; 2 busy (a, b)"
    world.service.quarantine("b", "dust")
    text = "needs 2 nodes of pool box: 0 free; 1 busy (a); node b quarantined: dust"
    assert world.service.why_waiting(tuning_id) == text
