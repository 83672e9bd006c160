"""A fleet's nights: checks whose measurements are jobs, through crashes, lost messages and doubled ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from fleet_world import MODEL, WORKLOAD, World, node_of, pool_cluster

from autotune.errors import UnknownNameError
from autotune.regression.fleet import PRINCIPAL, advance_after, advance_check, advance_regression, start_regression
from autotune.regression.protocol import order_of
from autotune.regression.selection import on_turn
from autotune.settings import FleetTimes
from autotune.specs import (
    BestEntry,
    CollectiveOp,
    CollectiveRequest,
    FailureKind,
    Job,
    JobPurpose,
    JobState,
    NodeState,
    Plan,
)
from autotune.specs.regression import CHECK_JOB, AlertChannel, CauseKind, Check, CheckState, VerdictKind
from benchmarks.regression_machine import Machine, Noises
from storage import SqlStore, open_store

CLUSTER = pool_cluster()
WINDOWS = 1
CALM = Noises(within=0.004, between=0.002, visits=0.001)


@dataclass
class NightWorld(World):
    """Nodes whose regression jobs measure a machine made of formulas; a job measures the same however often asked."""

    machine: Machine = field(default_factory=lambda: Machine(cluster=CLUSTER, noises=CALM))
    answers: dict[str, tuple[object, ...]] = field(default_factory=dict)
    hears: bool = False
    """Whether a tuner takes the next step when a job has ended, as it is told to; else sweeps alone do."""

    def _readings(self, job: Job, speed: float) -> tuple[object, ...]:
        if job.purpose is not JobPurpose.REGRESSION:
            return super()._readings(job, speed)
        if job.id not in self.answers:
            self.answers[job.id] = self.machine.answer(job.request).readings
        return self.answers[job.id]

    def advance_by(self, each: str) -> None:
        if each.startswith(CHECK_JOB) and self.hears:
            assert isinstance(self.store, SqlStore)
            advance_after(self.store, self.mail, self.merge, each)
        else:
            super().advance_by(each)

    def start(self, budget_gpu_s: float | None = None) -> list[int]:
        assert isinstance(self.store, SqlStore)
        found = start_regression(self.store, budget_gpu_s=budget_gpu_s)
        return [item.candidate.entry_id for item in found.chosen]

    def advance(self, *, retune: bool = False) -> list[Check]:
        assert isinstance(self.store, SqlStore)
        service = self.service if retune else None
        return list(
            advance_regression(self.store, self.mail, self.merge, service=service, channels=(AlertChannel.WEBHOOK,))
        )

    def night(self, *, retune: bool = False, budget_gpu_s: float | None = None, **trouble: object) -> Check:
        """One check from its start to its end."""
        self.machine.visit(**trouble)
        self.start(budget_gpu_s)
        for _ in range(500):
            ended = self.advance(retune=retune)
            if ended:
                return ended[0]
            self.settle()
        raise AssertionError("the check does not end")

    def checked_jobs(self, check: Check) -> list[Job]:
        return [job for job in self.store.jobs() if job.id.startswith(f"check-{check.id}-")]


@pytest.fixture
def times() -> FleetTimes:
    return FleetTimes()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: FleetTimes) -> Iterator[NightWorld]:
    """A pool of three nodes, and what was once found to be best on two of them. Short first checks: all is formulas."""
    monkeypatch.setattr("autotune.regression.conclusion.BASELINE_WINDOWS", WINDOWS)
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        found = NightWorld(store=store, cluster=CLUSTER, times=times)
        found.join("a", "b", "c")
        store.put_best(entry(store))
        yield found


def entry(store: SqlStore, global_batch: int = 8) -> BestEntry:
    node = store.node("a")
    workload = WORKLOAD.model_copy(update={"global_batch": global_batch})
    return BestEntry(
        model=MODEL, parameters=1e6, cluster=CLUSTER, workload=workload, plan=Plan(tp=2, dp=2),
        tokens_per_s_per_gpu=700.0, interval=(690.0, 710.0), repeats=3, peak_bytes=None,
        fingerprint_key=node.fingerprint_key, environment_key=node.environment_key,
        measured_at=datetime(2026, 5, 4, tzinfo=UTC),
    )  # fmt: skip


def keep_busy(world: NightWorld, *names: str) -> Job:
    """Somebody else's job on those nodes."""
    node = world.store.node(names[0])
    job = Job(
        id="somebody-else's", purpose=JobPurpose.PROFILE, pool=node.pool,
        cluster=CLUSTER.model_copy(update={"nodes": len(names)}), environment_key=node.environment_key,
        request=CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024,)), deadline_s=60.0,
        created_at=world.store.now(),
    )  # fmt: skip
    world.store.create_job(job)
    granted = world.store.grant(job.id, names, lease_s=60.0, world_id=job.id, warm=False)
    assert granted is not None
    return granted


def check_jobs(world: NightWorld) -> list[Job]:
    return [job for job in world.store.jobs() if job.purpose is JobPurpose.REGRESSION]


def verdict(check: Check) -> VerdictKind:
    assert check.result is not None
    return check.result.verdict


def cause(check: Check) -> CauseKind:
    assert check.result is not None
    assert check.result.cause is not None, check.result
    return check.result.cause.kind


def test_a_night_of_a_fleet(world: NightWorld) -> None:
    first = world.night()
    assert verdict(first) is VerdictKind.BASELINE
    jobs = world.checked_jobs(first)
    (known,) = world.store.best_page()  # type: ignore[attr-defined]
    assert len(jobs) == WINDOWS * len(order_of(known))
    assert {(job.purpose, job.principal, job.state) for job in jobs} == {
        (JobPurpose.REGRESSION, PRINCIPAL, JobState.ENDED)
    }
    assert len({tuple(member.node for member in job.members) for job in jobs}) == 1  # the same nodes all along
    second = world.night()
    assert verdict(second) is VerdictKind.UNCHANGED
    assert {member.node for member in world.checked_jobs(second)[0].members} == {
        member.node for member in jobs[0].members
    }
    assert second.gpu_s == 4.0 * len(world.checked_jobs(second))


def test_a_slow_link_is_named_and_a_challenger_tuned_for_once(world: NightWorld) -> None:
    world.night()
    check = world.night(across=2.0, retune=True, budget_gpu_s=10_000.0)
    assert cause(check) is CauseKind.LINK_ACROSS
    (tuning,) = world.store.tunings()
    world.advance(retune=True)
    assert [each.id for each in world.store.tunings()] == [tuning.id]
    assert tuning.principal == PRINCIPAL
    assert tuning.budget.gpu_s is not None
    assert tuning.budget.gpu_s < 10_000.0
    assert world.store.check(check.id).tuning_id == tuning.id  # type: ignore[attr-defined]


def test_a_slow_rank_is_named_with_its_node(world: NightWorld) -> None:
    world.night()
    check = world.night(ranks={3: 1.5})
    assert cause(check) is CauseKind.RANK
    assert check.result is not None
    assert check.result.cause is not None
    assert check.result.cause.subject == "rank 3 on node b"


def test_one_measurement_is_in_flight_and_a_second_start_begins_nothing(world: NightWorld) -> None:
    assert len(world.start()) == 1
    assert len(world.start()) == 1  # chosen, and found to be under way
    assert len(world.store.checks(state=CheckState.RUNNING)) == 1  # type: ignore[attr-defined]
    for _ in range(3):
        world.advance()
    live = [job for job in world.store.jobs() if job.state is not JobState.ENDED]
    assert len(live) == 1
    world.settle()
    for _ in range(3):  # whoever comes later finds the next one begun
        world.advance()
    assert len(world.store.jobs()) == 2


def test_a_check_goes_to_its_end_without_a_sweep_and_the_next_one_begins(world: NightWorld) -> None:
    world.hears = True
    world.machine.visit()
    world.store.put_best(entry(world.store, global_batch=16))  # type: ignore[arg-type]
    assert len(world.start()) == 2
    world.advance()
    world.deliver()
    assert len(world.store.checks(state=CheckState.DONE)) == 2  # type: ignore[attr-defined]
    with pytest.raises(UnknownNameError):
        world.act("advance", "check-of-nobody-1")


def test_a_check_measures_alone_on_its_nodes(world: NightWorld) -> None:
    """Of three nodes two checks of two nodes cannot be had at once: one takes all its windows, then the other does."""
    world.hears = True
    world.machine.visit()
    world.store.put_best(entry(world.store, global_batch=16))  # type: ignore[arg-type]
    world.start()
    world.advance()
    world.deliver()
    checks = [job.id.rpartition("-")[0] for job in world.store.jobs()]
    assert len(set(checks)) == 2
    assert sum(one != other for one, other in pairwise(checks)) == 1


def test_checks_that_have_room_measure_side_by_side(world: NightWorld) -> None:
    world.join("d")
    world.store.put_best(entry(world.store, global_batch=16))  # type: ignore[arg-type]
    world.start()
    world.advance()
    assert len(world.store.jobs(states={JobState.GRANTED})) == 2


def test_a_check_of_an_environment_that_is_gone_ends_and_the_next_night_is_of_the_new_one(world: NightWorld) -> None:
    other = keep_busy(world, "b", "c")
    world.start()
    world.advance()  # its first job waits
    for name in ("a", "b"):
        assert world.advance() == []  # two of three nodes can still run it
        world.store.register_node(node_of(world.store, name, torch="2.14.0", session="s2"))
    (ended,) = world.advance()
    assert ended.state is CheckState.ABANDONED
    assert [(job.state, job.failure) for job in check_jobs(world)] == [(JobState.ENDED, FailureKind.CANCELLED)]
    world.play("c", other.id, other.token)
    assert verdict(world.night()) is VerdictKind.BASELINE  # of the new environment, on the nodes that have it


def test_a_check_whose_nodes_stay_away_ends_though_it_is_not_its_turn(
    world: NightWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.machine.visit()
    world.start()
    world.advance()
    world.settle()
    keep_busy(world, "a", "b")
    world.advance()  # its second job waits
    for name in ("a", "b"):
        world.store.set_node_state(name, NodeState.QUARANTINED, "away")
    assert world.advance() == []
    monkeypatch.setattr("autotune.regression.protocol.MAX_PAUSE", timedelta(seconds=-1))
    (ended,) = world.advance()
    assert ended.state is CheckState.ABANDONED
    assert [job.failure for job in check_jobs(world)] == [None, FailureKind.CANCELLED]


def test_what_was_measured_after_too_long_a_pause_is_not_a_part_of_the_check(
    world: NightWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.machine.visit()
    world.start()
    world.advance()
    world.settle()
    world.advance()
    world.settle()  # granted long after the first one had ended
    monkeypatch.setattr("autotune.regression.protocol.MAX_PAUSE", timedelta(seconds=-1))
    (ended,) = world.advance()
    assert ended.state is CheckState.ABANDONED
    assert [item.number for item in world.store.measurements(ended.id)] == [0]  # type: ignore[attr-defined]


def test_a_sweep_that_comes_late_leaves_a_check_alone_that_another_one_ended(world: NightWorld) -> None:
    assert isinstance(world.store, SqlStore)
    world.machine.visit()
    world.start()
    world.advance()
    world.settle()
    (seen,) = world.store.checks(state=CheckState.RUNNING)
    world.store.abandon_check(seen.id)
    assert advance_check(world.store, world.mail, world.merge, seen) is None
    assert world.store.measurements(seen.id) == []


def test_only_nodes_of_its_environment_make_it_a_checks_turn() -> None:
    def check(name: str, environment: str) -> Check:
        return Check.model_construct(
            id=name, pool="box", environment_key=environment, gpu_s=0.0, started_at=datetime(2026, 5, 4, tzinfo=UTC)
        )

    pair, other, anywhere = check("1-pair", "old"), check("2-one", "old"), check("3-one", "")
    nodes = {"1-pair": 2, "2-one": 1, "3-one": 1}
    running = [anywhere, other, pair]
    assert on_turn(running, lambda each: nodes[each.id], {("box", "old"): 1, ("box", "new"): 1, ("box", ""): 2}) == [
        other,
        anywhere,
    ]
    assert on_turn(running, lambda each: nodes[each.id], {("box", "old"): 2, ("box", ""): 2}) == [pair, anywhere]
    assert on_turn(running, lambda each: nodes[each.id], {}) == []


@pytest.mark.parametrize("times", [FleetTimes(unsent_after_s=-1.0)])
def test_what_is_not_sent_is_found_by_the_sweep(world: NightWorld) -> None:
    turns = cycle([True, False])
    world.mail.loses = lambda kind: kind == "run" and next(turns)
    assert verdict(world.night()) is VerdictKind.BASELINE


def test_a_crash_between_two_lines_loses_and_doubles_nothing(
    world: NightWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = world.store
    assert isinstance(store, SqlStore)
    crashes = iter(range(10**6))

    def fails_sometimes(name: str) -> None:
        real = getattr(store, name)

        def call(*arguments: object, **named: object) -> object:
            number = next(crashes)
            if number % 5 == 1:
                raise RuntimeError(f"died before {name}")
            result = real(*arguments, **named)
            if number % 5 == 3:
                raise RuntimeError(f"died after {name}")
            return result

        monkeypatch.setattr(store, name, call)

    for name in ("create_job", "add_measurement", "end_check", "put_best"):
        fails_sometimes(name)
    world.machine.visit()
    world.start()
    for _ in range(500):
        world.advance()
        world.settle()
        if not store.checks(state=CheckState.RUNNING):
            break
    (check,) = store.checks(state=CheckState.DONE)
    assert [item.number for item in store.measurements(check.id)] == list(range(len(world.checked_jobs(check))))
    assert check.gpu_s == 4.0 * len(world.checked_jobs(check))


def test_a_measurement_that_fails_is_taken_again_by_the_check_alone(world: NightWorld) -> None:
    world.night()
    failed: list[str] = []

    def fault(job: Job, node: str) -> FailureKind | None:
        if job.purpose is JobPurpose.REGRESSION and not failed:
            failed.append(job.id)
            return FailureKind.HANG
        return None

    world.fault = fault
    check = world.night()
    assert verdict(check) is VerdictKind.UNCHANGED
    jobs = world.checked_jobs(check)
    assert sum(job.failure is FailureKind.HANG for job in jobs) == 1
    assert {job.attempt for job in jobs} == {1}
    assert len(world.store.jobs()) == len(jobs) + len(world.checked_jobs(world.store.checks(limit=5)[-1]))  # type: ignore[attr-defined]


def test_an_upgraded_pool_is_compared_with_what_it_was(world: NightWorld) -> None:
    world.night()
    for name in ("a", "b", "c"):
        world.store.register_node(node_of(world.store, name, torch="2.14.0", session="s2"))
    check = world.night(plan=1.2)
    assert cause(check) is CauseKind.SOFTWARE
    assert check.result is not None
    assert check.result.cause is not None
    assert check.result.cause.changed == ("torch: 2.13.0 then, 2.14.0 now",)


def test_a_pool_without_nodes_that_are_ready_is_left_alone(world: NightWorld) -> None:
    for name in ("a", "b", "c"):
        world.store.set_node_state(name, NodeState.QUARANTINED, "by hand")
    assert world.start() == []
