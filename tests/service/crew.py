"""A fleet for tests: workers as real processes over a real Redis and PostgreSQL, and what a test does to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil
import psycopg
from services import PostgresServer, RedisServer

from autotune.catalog import smallest
from autotune.fleet.scheduling import schedule
from autotune.fleet.service import submission_of
from autotune.settings import read_settings
from autotune.specs import (
    Budget,
    ClusterSpec,
    CollectiveOp,
    CollectiveRequest,
    Job,
    JobPurpose,
    JobState,
    NodeState,
    ProbeRequest,
    TrialState,
    Tuning,
    TuningState,
    Workload,
)
from autotune.wiring import open_fleet, open_queue, open_store

Answer = TypeVar("Answer")

AMPLE_S = 120.0  # what a busy machine may need; never waited for where all is well
PATIENCE = ("--patience", "30")
RANK_MEMORY_BYTES = 512 << 20
POOL = "box"
MAX_TRIALS = 3
QUICK = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1 << 16,))
# A node that died is noticed after that, and a message that was lost sent again after a third of it.
LEASE_S = 8.0
# Takes some seconds, so that something can happen meanwhile.
LONG = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1 << 16,), iterations=2_000)


def pool_cluster(nodes: int = 2, name: str = POOL) -> ClusterSpec:
    """Nodes of one CPU rank each, which are all this machine."""
    return ClusterSpec.from_data(
        {
            "name": name,
            "nodes": nodes,
            "gpus_per_node": 1,
            "device": {"name": "cpu-rank", "kind": "cpu", "memory_bytes": RANK_MEMORY_BYTES},
            "intra": {"name": "loopback"},
            "inter": {"name": "loopback"},
        }
    )


def wait_for(what: str, look: Callable[[], Answer], within_s: float = AMPLE_S) -> Answer:
    """Looks until there is a true answer, and returns it."""
    deadline = time.monotonic() + within_s
    while not (answer := look()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.05)
    return answer


class Worker:
    """One of our commands as a process, with its output in a file."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as out:
            # A session each, as any init system gives its services: Linux shares the processor out among sessions.
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def children(self) -> list[psutil.Process]:
        """The processes that run its tasks."""
        return psutil.Process(self.process.pid).children()

    @property
    def ranks(self) -> list[psutil.Process]:
        """The ranks that it keeps."""
        return [rank for child in self.children for rank in child.children()]

    @property
    def family(self) -> list[psutil.Process]:
        """Itself, its children and their ranks."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def says(self, text: str) -> bool:
        """Whether it has written that."""
        return text in self.log

    def kill(self) -> list[psutil.Process]:
        """SIGKILLs its main process; returns all that must be gone now."""
        family = self.family
        self.process.kill()
        self.process.wait()
        return family

    def end(self) -> int:
        """SIGTERMs it and waits; SIGKILLs it if that takes too long, which is returned as -9."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(AMPLE_S / 2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


class Crew:
    """The workers of one fleet, ended with it."""

    def __init__(self, postgres: PostgresServer, broker: RedisServer, folder: Path) -> None:
        self.postgres, self.broker, self.folder = postgres, broker, folder
        self.database = postgres.create_database()
        self.environment = os.environ | {
            "AUTOTUNE_DB": postgres.url(self.database),
            "AUTOTUNE_BROKER": broker.url,
            "AUTOTUNE_LOG_DIR": str(folder / "ranks"),
            "AUTOTUNE_LEASE_S": f"{LEASE_S:g}",
            "OMP_NUM_THREADS": "1",
        }
        self.settings = read_settings(self.environment)
        self.store = open_store(self.settings.database_url)
        self.node_database_url = postgres.node_url(self.database)
        self.queue = open_queue(self.settings)
        self.workers: list[Worker] = []
        self.part: dict[str, Worker] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGCONT)
                worker.process.terminate()
        for worker in self.workers:
            worker.end()
        self.store.close()
        self.queue.close()

    def start(self, name: str, *command: str, **environment: str) -> Worker:
        """Starts a process of this fleet."""
        log = self.folder / f"{name}-{len(self.workers)}.log"
        worker = Worker(command, self.environment | environment, log)
        self.workers.append(worker)
        return worker

    def start_node(
        self, name: str, address: str = "127.0.0.1", patience: Sequence[str] = PATIENCE, **environment: str
    ) -> Worker:
        """Starts a node of the pool, which has the rights of a node in database and broker."""
        cluster = self.folder / "pool.yaml"
        cluster.write_text(pool_cluster().to_yaml())
        place = ["--cluster", str(cluster), "--address", address]
        environment = {"AUTOTUNE_DB": self.node_database_url, "AUTOTUNE_BROKER": self.broker.node_url} | environment
        return self.start(name, *autotune("worker", "--name", name, *place, *patience), **environment)

    def start_tuner(self, *more: str) -> Worker:
        """Starts a tuner."""
        return self.start("tuner", *autotune("worker", "--role", "tuner", *(more or PATIENCE)))

    def start_beat(self) -> Worker:
        """Starts the beat."""
        return self.start("beat", *autotune("beat"))

    def make_whole(self) -> None:
        """Two trusted nodes, a tuner and a beat, all alive and free."""
        starts = {
            "a": lambda: self.start_node("a"),
            "b": lambda: self.start_node("b", "127.0.0.2"),
            "tuner": self.start_tuner,
            "beat": self.start_beat,
        }
        for name, start in starts.items():
            if name not in self.part or self.part[name].process.poll() is not None:
                self.part[name] = start()
        for name in ("a", "b", "tuner"):
            self.wait_ready(self.part[name])
        for name in ("a", "b"):
            self.store.set_node_state(name, NodeState.READY, "")

    def wait_ready(self, worker: Worker) -> None:
        """Waits until it consumes."""

        def is_ready() -> bool:
            assert worker.process.poll() is None, "it has ended"
            return worker.says(" ready.")

        try:
            wait_for("a worker that is ready", is_ready)
        except AssertionError as error:
            raise AssertionError(f"{error}: {worker.log}") from error

    def submit(self, nodes: int) -> Tuning:
        """A request to tune the smallest model on that many nodes."""
        fleet = open_fleet(self.store, open_queue(self.settings))
        submission = submission_of(
            smallest(),
            pool_cluster(nodes),
            Workload(seq_len=64, global_batch=4),
            budget=Budget(max_trials=MAX_TRIALS),
            seed=len(self.store.tunings_page(limit=100)),  # or it would be shared with an earlier one
            principal="ada",
        )
        submitted, created = fleet.submit(submission)
        fleet.close()
        assert created
        return submitted

    def wait_done(self, tuning: Tuning) -> Tuning:
        """The tuning once it has ended: done with measured trials, each stored once, and nothing held any more."""
        ended = wait_for("the tuning ends", lambda: self._tuning_ended(tuning.id), within_s=2 * AMPLE_S)
        assert ended.state is TuningState.DONE, ended.message
        trials = self.store.trials(ended.id)
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert all(trial.state is not TrialState.RUNNING for trial in trials)
        assert sum(trial.state is TrialState.COMPLETE for trial in trials) >= 1
        jobs = self.store.jobs(tuning_id=ended.id)
        assert all(job.state is JobState.ENDED for job in jobs)
        measured = [job.trial_id for job in jobs if job.trial_id is not None and job.failure is None]
        assert len(measured) == len(set(measured))
        assert self.store.leased_nodes(POOL) == {}
        return ended

    def create_job(self, nodes: int, request: ProbeRequest = QUICK, *, deadline_s: float = 60.0) -> Job:
        """Stores a job of no tuning, which gets its nodes if they are free."""
        job = Job(
            id=uuid.uuid4().hex[:12],
            purpose=JobPurpose.PROFILE,
            pool=POOL,
            cluster=pool_cluster(nodes),
            request=request,
            deadline_s=deadline_s,
            created_at=datetime.now(UTC),
        )
        self.store.create_job(job)
        schedule(self.store, self.queue, POOL)
        return job

    def wait_ended(self, job: Job) -> Job:
        """The job once it has ended."""
        return wait_for(f"job {job.id} ends", lambda: self._ended(job.id))

    def retry_of(self, job: Job) -> Job:
        """The next attempt at a job that has ended."""
        jobs = [each for each in self.store.jobs(pool=POOL) if each.created_at >= job.created_at]
        found = next((each for each in jobs if each.attempt == job.attempt + 1), None)
        assert found is not None, [(each.attempt, each.failure, each.message) for each in jobs]
        return found

    def wait_measuring(self, job: Job) -> Job:
        """The job once its ranks measure."""
        return wait_for(f"job {job.id} measures", lambda: self._measuring(job.id))

    def rows(self, *tables: str) -> dict[str, list[str]]:
        """All that is stored in some tables."""
        with psycopg.connect(self.settings.database_url) as connection:
            return {
                table: sorted(str(row) for row in connection.execute(f"SELECT * FROM {table}"))  # type: ignore[call-overload]
                for table in tables
            }

    def _tuning_ended(self, tuning_id: str) -> Tuning | None:
        tuning = self.store.tuning(tuning_id)
        return tuning if tuning.state.ended else None

    def _ended(self, job_id: str) -> Job | None:
        job = self.store.job(job_id)
        return job if job.state is JobState.ENDED else None

    def _measuring(self, job_id: str) -> Job | None:
        job = self.store.job(job_id)
        assert job.state is not JobState.ENDED, job.message
        return job if job.progress is not None else None


def autotune(*arguments: str) -> list[str]:
    """A command of ours, of this environment."""
    return [str(Path(sys.executable).with_name("autotune")), *arguments]


def assert_gone(processes: Sequence[psutil.Process], within_s: float = 20.0) -> None:
    """None of the processes is alive after at most `within_s`."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
