"""This machine as a fleet of one: what it does with a tuning, what a real fleet sees of it, and what it leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import psutil
import pytest
from fleet_world import MODEL, SPACE, WORKLOAD, World, node_of, pool_cluster
from rich.console import Console
from sqlalchemy import text

from autotune.cli.tune_view import TuneView
from autotune.errors import InputError, ProberError, StoreConflictError
from autotune.fleet.advance import process_owner
from autotune.fleet.local import LocalFleet, cancel_here
from autotune.settings import FleetTimes
from autotune.specs import (
    Budget,
    ClusterSpec,
    CollectiveRequest,
    EventKind,
    FailureKind,
    Fingerprint,
    MemberReport,
    ProbeProgress,
    ProbeRequest,
    StepRequest,
    TrialState,
    Tuning,
    TuningEvent,
    TuningState,
)
from autotune.tuning.request import submit, tuning_of
from storage import SqlStore, open_store

CLUSTER = pool_cluster(nodes=1).model_copy(update={"name": "here", "inter": None})
FINGERPRINT = Fingerprint(hostname="host", device_name="cpu", device_count=2, device_memory_bytes=2**30, torch="2.13.0")
DEAD = process_owner().replace(f":{os.getpid()}:", ":999999999:")
BUDGET = Budget(max_trials=4)


@dataclass
class Ranks:
    """Ranks that answer at once; `meanwhile` sees each request first, and may answer in their place."""

    meanwhile: Callable[[ProbeRequest], MemberReport | None] = lambda request: None
    asked: list[ProbeRequest] = field(default_factory=list)
    shares: list[object] = field(default_factory=list)
    closed: int = 0
    world_id: str = ""

    def fingerprint(self, cluster: ClusterSpec) -> Fingerprint:
        self.world_id = "first"
        return FINGERPRINT

    def run(
        self, share: object, request: ProbeRequest, *, on_progress: Callable[[ProbeProgress], None], **_: object
    ) -> MemberReport:
        self.asked.append(request)
        self.shares.append(share)
        on_progress(ProbeProgress(phase="sweep", done=1, total=2))
        return self.meanwhile(request) or MemberReport(kept_warm=True)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'a.db'}"


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    with open_store(url) as opened:
        yield opened


def fleet_of(
    store: SqlStore,
    ranks: Ranks,
    seen: list[tuple[ProbeRequest, str]] | None = None,
    times: FleetTimes = FleetTimes(),
) -> LocalFleet:
    world = World(store=store, cluster=CLUSTER)
    return LocalFleet(
        store, CLUSTER, lambda: ranks, merge=world.merge, share_of=lambda job, node: (job.world_id, job.warm),
        on_progress=lambda request, progress: seen.append((request, progress.phase)) if seen is not None else None,
        times=times,
    )  # fmt: skip


def asked(store: SqlStore, **changes: object) -> Tuning:
    return submit(store, tuning_of(MODEL, CLUSTER, WORKLOAD, space=SPACE, budget=BUDGET, **changes))  # type: ignore[arg-type]


def run(store: SqlStore, tuning: Tuning, ranks: Ranks, events: list[TuningEvent] | None = None) -> Tuning:
    with closing(fleet_of(store, ranks)) as fleet:
        return fleet.run(tuning.id, (events if events is not None else []).append)


def test_a_tuning_comes_to_its_end_and_leaves_nothing_but_what_was_measured(store: SqlStore) -> None:
    events: list[TuningEvent] = []
    ranks, tuning = Ranks(), asked(store)
    ended = run(store, tuning, ranks, events)
    assert (ended.state, ended.owner, ended.pool) == (TuningState.DONE, "", "")
    assert ended.stop_reason == "4 trials were run, the most allowed"
    trials = store.trials(tuning.id)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * len(trials)
    assert len(trials) == 4
    key = FINGERPRINT.key  # that of the machine itself, not of a pool
    assert {trial.fingerprint_key for trial in trials} == {key}
    assert store.collective_readings(CLUSTER.key, key)
    assert store.newest_fingerprint(CLUSTER.key) == FINGERPRINT
    assert ended.gpu_s_spent == 2.0 * len(ranks.asked)
    states = [event.data["state"] for event in events if event.kind is EventKind.STATE]
    assert states == ["profiling", "searching", "done"]
    assert sum(event.kind is EventKind.TRIAL_ENDED for event in events) == 4
    assert (store.local_pools(), ranks.closed) == ([], 1)
    with store.reading() as session:
        left = [session.connection().exec_driver_sql(f"SELECT count(*) FROM {name}").scalar() for name in
                ("nodes", "jobs", "job_members", "leases")]  # fmt: skip
    assert left == [0, 0, 0, 0]
    again = Ranks()
    assert run(store, tuning, again) == ended  # it is only told once more
    assert again.asked == []


def test_ranks_stay_warm_from_the_fingerprint_on(store: SqlStore) -> None:
    ranks = Ranks()
    run(store, asked(store), ranks)
    assert set(ranks.shares) == {("first", True)}


def test_ranks_that_died_between_two_jobs_are_started_anew(store: SqlStore) -> None:
    ranks = Ranks()

    def die(request: ProbeRequest) -> None:
        if isinstance(request, StepRequest):
            ranks.world_id = ""

    ranks.meanwhile = die
    ended = run(store, asked(store), ranks)
    told = zip(ranks.shares, ranks.asked, strict=True)
    steps = [share for share, request in told if isinstance(request, StepRequest)]
    assert steps == [("first", True), *[("first", False)] * 3]
    assert {trial.state for trial in store.trials(ended.id)} == {TrialState.COMPLETE}


def test_progress_is_told_while_a_probe_runs(store: SqlStore) -> None:
    seen: list[tuple[ProbeRequest, str]] = []
    ranks, tuning = Ranks(), asked(store)
    with closing(fleet_of(store, ranks, seen)) as fleet:
        fleet.run(tuning.id)
    assert [phase for _, phase in seen] == ["start", "sweep"] * len(ranks.asked)
    assert [request for request, _ in seen[::2]] == ranks.asked


def test_each_thing_that_ended_is_a_line(store: SqlStore) -> None:
    kinds = iter([FailureKind.OOM])

    def fail(request: ProbeRequest) -> MemberReport | None:
        kind = next(kinds, None) if isinstance(request, StepRequest) else None
        return MemberReport(failure=kind, message="no memory", wall_s=1.0) if kind else None

    text = StringIO()
    ranks, tuning = Ranks(meanwhile=fail), asked(store)
    with TuneView(Console(file=text), tuning, live=False) as view, closing(fleet_of(store, ranks)) as fleet:
        fleet.run(tuning.id, view.on_event)
    lines = text.getvalue().splitlines()
    trials = store.trials(tuning.id)
    probes = len(ranks.asked) - len(trials)
    assert [line.split(" ")[0] for line in lines] == [
        "profiling", *["probe"] * probes, "searching", *["trial"] * len(trials), "done:",
    ]  # fmt: skip
    assert "probe all_reduce over groups of 2, stride 1: ok (1.0 s)" in lines
    assert "probe layer at tp 1, micro-batch 1: ok (1.0 s)" in lines
    first, second = lines[probes + 2 : probes + 4]
    assert first == f"trial 0 {trials[0].plan.key}: failed, oom: no memory"
    assert second.startswith(f"trial 1 {trials[1].plan.key}: ")
    assert "tokens/s/GPU, step " in second
    assert lines[-1] == "done: 4 trials were run, the most allowed"


def test_a_fleet_in_the_same_store_sees_nothing_of_it(store: SqlStore) -> None:
    """A real fleet sweeps, schedules and lists at each of its probes, with a node and a job of its own."""
    box = World(store=store, cluster=pool_cluster())
    box.join("a")
    before = store.counts()
    looked = 0

    def look(request: ProbeRequest) -> None:
        nonlocal looked
        looked += 1
        store.expire_members()
        box.settle()
        assert [node.name for node in store.nodes()] == ["a"]
        assert [status.node.name for status in box.service.nodes()] == ["a"]
        assert (store.jobs(), store.leased_nodes(), store.due_tunings()) == ([], {}, [])
        assert (store.unsent_members(-1.0), store.gpu_s_by_principal(store.node("a").registered_at)) == ([], {})
        now = store.counts()
        assert (now.jobs, now.nodes, now.leases) == (before.jobs, before.nodes, before.leases)
        assert len(store.local_pools()) == 1
        other = Ranks()
        if looked == 3:  # another process of this machine has its own
            assert run(store, asked(store, seed=1), other).state is TuningState.DONE

    ended = run(store, asked(store), Ranks(meanwhile=look))
    assert ended.state is TuningState.DONE
    assert looked > 5
    box.service.advance(ended.id)
    assert store.tuning(ended.id) == ended


def test_a_lease_that_ran_out_costs_a_local_job_nothing(store: SqlStore) -> None:
    box = World(store=store, cluster=pool_cluster())
    box.join("a")

    def sweep(request: ProbeRequest) -> None:
        box.service.sweep()

    with closing(fleet_of(store, Ranks(meanwhile=sweep), times=FleetTimes(lease_s=-1.0))) as fleet:
        ended = fleet.run(asked(store).id)
    assert ended.state is TuningState.DONE
    assert {trial.state for trial in store.trials(ended.id)} == {TrialState.COMPLETE}


def test_a_process_that_was_stopped_for_a_while_is_not_lost(store: SqlStore) -> None:
    """Ctrl-Z, a laptop's sleep or a long step: whoever asks whether this node lives is the node itself."""

    def outlast(request: ProbeRequest) -> None:
        with store.writing() as session:
            session.execute(text("UPDATE nodes SET lost_after_s = 1e-9"))

    ended = run(store, asked(store), Ranks(meanwhile=outlast))
    assert (ended.state, ended.message) == (TuningState.DONE, "")


def test_failures_are_the_plans_and_none_is_tried_again(store: SqlStore) -> None:
    """With one machine there is nobody else to try it or to blame."""
    kinds = iter([FailureKind.OOM, FailureKind.HANG, FailureKind.CRASH])

    def fail(request: ProbeRequest) -> MemberReport | None:
        kind = next(kinds, None) if isinstance(request, StepRequest) else None
        return MemberReport(failure=kind, message="rank 0 failed", wall_s=1.0) if kind else None

    ended = run(store, asked(store), Ranks(meanwhile=fail))
    trials = store.trials(ended.id)
    assert ended.state is TuningState.DONE
    assert [trial.failure.kind if trial.failure else None for trial in trials][:4] == [
        FailureKind.OOM, FailureKind.HANG, FailureKind.CRASH, None,
    ]  # fmt: skip
    assert len({trial.plan for trial in trials[:4]}) == 4
    assert store.incidents() == []


def die_at_the_first_trial(url: str, tuning_id: str) -> None:
    """What a process does that is killed there: none of our handlers runs."""
    with open_store(url) as store:
        ranks = Ranks(meanwhile=lambda request: os._exit(9) if isinstance(request, StepRequest) else None)
        run(store, store.tuning(tuning_id), ranks)


def interrupted(store: SqlStore, tuning: Tuning, at: type, error: BaseException) -> None:
    """Runs it until the second such request, at which that is raised."""
    seen = 0

    def strike(request: ProbeRequest) -> None:
        nonlocal seen
        seen += isinstance(request, at)
        if seen == 2:
            raise error

    run(store, tuning, Ranks(meanwhile=strike))


def test_an_interrupt_ends_the_trial_and_another_run_goes_on(store: SqlStore) -> None:
    tuning = asked(store)
    with pytest.raises(KeyboardInterrupt):
        interrupted(store, tuning, StepRequest, KeyboardInterrupt())
    left = store.tuning(tuning.id)
    assert (left.state, left.owner) == (TuningState.SEARCHING, "")
    done, cut = store.trials(tuning.id)
    assert (done.state, cut.state) == (TrialState.COMPLETE, TrialState.FAILED)
    assert cut.failure is not None
    assert (cut.failure.kind, cut.failure.message) == (
        FailureKind.CANCELLED, "the tuning was interrupted (KeyboardInterrupt)",
    )  # fmt: skip
    assert cut.gpu_s > 0
    assert store.local_pools() == []
    ended = run(store, tuning, Ranks())
    assert ended.state is TuningState.DONE
    assert store.trials(tuning.id)[0] == done


def test_a_probe_that_was_cut_off_is_measured_after_all(store: SqlStore) -> None:
    tuning = asked(store)
    with pytest.raises(KeyboardInterrupt):
        interrupted(store, tuning, CollectiveRequest, KeyboardInterrupt())
    ranks = Ranks()
    assert run(store, tuning, ranks).state is TuningState.DONE
    requests = [request for request in ranks.asked if isinstance(request, CollectiveRequest)]
    assert requests
    assert len(requests) == len(set(requests))


def test_a_start_that_failed_is_tried_once_more(store: SqlStore) -> None:
    """A rank may be killed while it starts: that is no word about the plan, nor about this machine."""
    failed = MemberReport(failure=FailureKind.CRASH, message="rank 1 was killed", setup_s=2.0, wall_s=2.0)
    starts: list[ProbeRequest] = []

    def fail_the_first(request: ProbeRequest) -> MemberReport | None:
        if isinstance(request, StepRequest):
            starts.append(request)
        return failed if len(starts) == 1 else None

    ended = run(store, asked(store), Ranks(meanwhile=fail_the_first))
    trials = store.trials(ended.id)
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert (len(starts), len(trials)) == (5, 4)


def test_nothing_to_measure_with_ends_the_run_and_not_the_tuning(store: SqlStore) -> None:
    tuning = asked(store)
    none = MemberReport(failure=FailureKind.UNAVAILABLE, message="rank 0 needs cuda device 0, torch sees 0", wall_s=1.0)
    with pytest.raises(ProberError, match="torch sees 0"):
        run(store, tuning, Ranks(meanwhile=lambda request: none))
    dies = MemberReport(failure=FailureKind.CRASH, message="rank 1 exited with status 1", setup_s=1.0, wall_s=1.0)
    with pytest.raises(ProberError, match="rank 1 exited"):  # its ranks never were ready
        run(store, tuning, Ranks(meanwhile=lambda request: dies))
    left = store.tuning(tuning.id)
    assert (left.state, left.owner, left.gpu_s_spent) == (TuningState.PROFILING, "", 0.0)
    assert store.local_pools() == []


def test_what_a_killed_process_left_is_taken_over_at_once_and_tidied_up(store: SqlStore, url: str) -> None:
    tuning = asked(store)

    code = f"import test_fleet_local as here; here.die_at_the_first_trial({url!r}, {tuning.id!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 9
    assert len(store.local_pools()) == 1
    (running,) = store.trials(tuning.id)
    ended = run(store, tuning, Ranks())
    assert ended.state is TuningState.DONE
    lost, *others = store.trials(tuning.id)
    assert lost.id == running.id
    assert lost.failure is not None
    assert lost.failure.kind is FailureKind.LOST
    assert lost.failure.message.endswith("is gone")
    assert store.local_pools() == []
    assert len(others) == 4  # it is tried again, and does not count


def test_what_a_living_process_runs_is_refused(store: SqlStore) -> None:
    tuning = asked(store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        alive = f"{socket.gethostname()}:{process.pid}:{psutil.Process(process.pid).create_time():.2f}"
        store.save_tuning(tuning.model_copy(update={"owner": alive}))
        ranks = Ranks()
        with pytest.raises(StoreConflictError, match=f"is being run by process {alive}"):
            run(store, tuning, ranks)
        with pytest.raises(InputError, match="interrupt the process"):
            cancel_here(store, tuning.id)
        process.kill()
    assert ranks.asked == []
    elsewhere = "another-host:1:0.00"
    store.save_tuning(tuning.model_copy(update={"owner": elsewhere}))
    with pytest.raises(StoreConflictError, match="another-host"):
        run(store, tuning, ranks)
    store.save_tuning(tuning.model_copy(update={"owner": DEAD}))
    assert cancel_here(store, tuning.id).state is TuningState.CANCELLED
    with pytest.raises(InputError, match="ended already"):
        cancel_here(store, tuning.id)


def test_pools_of_other_hosts_and_living_processes_stay(store: SqlStore) -> None:
    names = ["@1@another-host:1:0.00", f"@1@{process_owner()}", f"@1@{DEAD}"]
    for name in names:
        store.register_node(node_of(store, name).model_copy(update={"pool": name}))
    with closing(fleet_of(store, Ranks())) as fleet:
        fleet.join()
        assert set(store.local_pools()) == {*names[:2], fleet.pool}
    assert store.local_pools() == sorted(names[:2])
    with pytest.raises(ValueError, match="fleet's"):
        store.discard_pool("box")


def test_no_job_may_run_longer_than_the_budget_reaches(store: SqlStore) -> None:
    """Each probe and trial costs 2 GPU-seconds. The trial that is cut by the budget is nobody's fault, and the last."""

    def stuck(request: ProbeRequest) -> MemberReport | None:
        hangs = isinstance(request, StepRequest) and len(store.trials(tuning.id)) == 3
        return MemberReport(failure=FailureKind.HANG, message="rank 0 ran at the deadline") if hangs else None

    tuning = submit(store, tuning_of(MODEL, CLUSTER, WORKLOAD, space=SPACE, budget=Budget(gpu_s=120.0), seed=3))
    ended = run(store, tuning, Ranks(meanwhile=stuck))
    jobs, spent = store.jobs(tuning_id=tuning.id), 0.0
    for job in jobs:
        assert job.deadline_s <= (120.0 - spent) / 2 + 1e-9
        spent += 2.0
    assert ended.state is TuningState.DONE
    cut = store.trials(tuning.id)[2]
    assert cut.failure is not None
    assert (cut.failure.kind, cut.failure.message) == (FailureKind.CANCELLED, "the budget of 120 GPU-seconds ended it")


def test_a_budget_that_cannot_do_fails_before_ranks_measure_anything(store: SqlStore) -> None:
    ranks = Ranks()
    ended = run(store, submit(store, tuning_of(MODEL, CLUSTER, WORKLOAD, space=SPACE, budget=Budget(gpu_s=2.0))), ranks)
    assert (ended.state, ranks.asked, ended.gpu_s_spent) == (TuningState.FAILED, [], 0.0)
    assert ended.message.startswith("2 GPU-seconds are too few")
