"""Kills at random moments of tunings, under a supervisor; and what must be true of everything that is stored then."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import psutil
from crew import MAX_TRIALS, POOL, Crew, pool_cluster, wait_for
from supervisor import Supervisor
from truth import assert_grows_only, assert_leases_held, assert_truthful

from autotune.catalog import smallest
from autotune.client import Client
from autotune.errors import ServerError
from autotune.specs import Budget, NodeState, Trial

LIVE_TUNINGS = 2
MAX_TUNINGS = 10_000
END_S = 600.0
LONGEST_PAUSE_S = 5.0
OBSERVE_EVERY_S = 0.3


class Victim(StrEnum):
    """What is killed."""

    RANK = "rank"
    NODE = "node worker"
    NODE_CHILD = "node worker's child"
    TUNER = "tuner"
    TUNER_CHILD = "tuner's child"
    API = "API"
    BEAT = "beat"
    POSTGRES = "PostgreSQL"
    REDIS = "Redis"


@dataclass(slots=True)
class Record:
    """What happened. `states` are those of all tunings in the end, `failures` those of trials."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Victim), 0))
    restarts: int = 0
    wall_s: float = 0.0
    drain_s: float = 0.0
    tunings: list[str] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    jobs: int = 0
    retries: int = 0
    quarantines: int = 0


class Onslaught:
    """Kills processes of a fleet while it tunes, until so many were killed and all that was asked for has ended.

    Nobody helps: nodes that are quarantined come back by their health probes, which are killed like everything else.

    Args:
        crew: with its parts running.
        supervisor: starts again what was killed.
        kills: how many.
        seed: of who is killed and when.
    """

    def __init__(self, crew: Crew, supervisor: Supervisor, *, kills: int, seed: int) -> None:
        self._crew, self._supervisor = crew, supervisor
        self._random = random.Random(seed)
        self._plan = self._victims(kills)
        self._next_kill_at = self._next_look_at = self._last_kill_at = time.monotonic()
        self._known = {tuning.id for tuning in crew.store.tunings(MAX_TUNINGS)}
        self._seed = 1000 * seed
        self._unanswered: tuple[str, int] | None = None
        self._finished: dict[str, Trial] = {}
        self._quarantined: set[tuple[str, str]] = set()
        self.record = Record()

    def run(self) -> Record:
        """Carries it out; asserts what must be true at each moment, and in the end."""
        start_s = time.monotonic()
        while self._plan or self._unanswered or self._live():
            self._supervisor.tend()
            self._observe()
            self._kill_when_due()
            self._keep_asking()
            assert time.monotonic() - self._last_kill_at < END_S, self._story()
            time.sleep(0.05)
        now = time.monotonic()
        self.record.wall_s, self.record.drain_s = now - start_s, now - self._last_kill_at
        self._supervisor.start()
        self._conclude()
        return self.record

    def _victims(self, kills: int) -> list[Victim]:
        """Each kind once, in random order, then again."""
        found: list[Victim] = []
        while len(found) < kills:
            found += self._random.sample(list(Victim), len(Victim))
        return found[:kills]

    def _live(self) -> list[str]:
        return [each for each in self.record.tunings if not self._crew.store.tuning(each).state.ended]

    # -- kills --------------------------------------------------------------------------------------------

    def _kill_when_due(self) -> None:
        if not self._plan or time.monotonic() < self._next_kill_at or not self._live():
            return
        victim = self._plan[0]
        if victim in {Victim.POSTGRES, Victim.REDIS}:
            self._kill_server(victim)
            return
        candidates = sorted(self._candidates(victim), key=lambda process: process.pid)
        if candidates:
            self._random.choice(candidates).kill()
            self._was_killed(victim)

    def _kill_server(self, victim: Victim) -> None:
        """A crash of PostgreSQL, which keeps what was committed, or of Redis, which loses all that it held."""
        if victim is Victim.POSTGRES:
            self._crew.postgres.restart()
        else:
            self._crew.broker.stop()
            self._crew.broker.start()
        self._was_killed(victim)

    def _was_killed(self, victim: Victim) -> None:
        self.record.kills[victim] += 1
        self._plan.pop(0)
        self._last_kill_at = time.monotonic()
        self._next_kill_at = self._last_kill_at + self._random.uniform(0.0, LONGEST_PAUSE_S)

    def _candidates(self, victim: Victim) -> Iterator[psutil.Process]:
        services = self._supervisor.services
        names = {
            Victim.RANK: ("a", "b"), Victim.NODE: ("a", "b"), Victim.NODE_CHILD: ("a", "b"),
            Victim.TUNER: ("tuner", "tuner-2"), Victim.TUNER_CHILD: ("tuner", "tuner-2"), Victim.API: ("api",),
            Victim.BEAT: ("beat",),
        }  # fmt: skip
        for name in names[victim]:
            if name not in services:
                continue
            try:
                if victim is Victim.RANK:
                    yield from services[name].ranks
                elif victim in {Victim.NODE_CHILD, Victim.TUNER_CHILD}:
                    yield from services[name].children
                else:
                    yield psutil.Process(services[name].process.pid)
            except psutil.NoSuchProcess:
                continue

    # -- requests -----------------------------------------------------------------------------------------

    def _keep_asking(self) -> None:
        """Submits through the API so that there is always something to tune; asks again where no answer came."""
        if self._unanswered is None:
            if not self._plan or len(self._live()) >= LIVE_TUNINGS:
                return
            self._unanswered = uuid.uuid4().hex, self._random.choice((1, 2, 2))
            self._seed += 1
        if "api" not in self._supervisor.services:
            return
        key, nodes = self._unanswered
        try:
            with Client(self._supervisor.url) as client:
                answer = client.submit(
                    smallest(), pool_cluster(nodes), workload={"seq_len": 64, "global_batch": 4},
                    budget=Budget(max_trials=MAX_TRIALS), seed=self._seed, idempotency_key=key,
                )  # fmt: skip
        except ServerError:
            return
        assert answer["tuning"] not in self.record.tunings
        self.record.tunings.append(answer["tuning"])
        self._unanswered = None

    # -- what must be true --------------------------------------------------------------------------------

    def _observe(self) -> None:
        if time.monotonic() < self._next_look_at:
            return
        self._next_look_at = time.monotonic() + OBSERVE_EVERY_S
        store = self._crew.store
        assert_grows_only(store, self.record.tunings, self._finished)
        assert_leases_held(self._crew.settings.database_url)
        for node in store.nodes(POOL):
            if node.state is NodeState.QUARANTINED:
                self._quarantined.add((node.name, node.reason))

    def _conclude(self) -> None:
        crew, record = self._crew, self.record
        wait_for("every node is trusted again, and free", self._is_calm, within_s=END_S)
        assert {tuning.id for tuning in crew.store.tunings(MAX_TUNINGS)} - self._known == set(record.tunings)
        for tuning_id in record.tunings:
            tuning = crew.store.tuning(tuning_id)
            trials, jobs = assert_truthful(crew.store, tuning)
            _count(record.states, tuning.state)
            for trial in trials:
                _count(record.trials, trial.state)
                if trial.failure is not None:
                    _count(record.failures, trial.failure.kind)
            record.jobs += len(jobs)
            record.retries += sum(job.attempt > 1 for job in jobs)
        record.restarts, record.quarantines = self._supervisor.restarts, len(self._quarantined)

    def _is_calm(self) -> bool:
        ready = all(node.state is NodeState.READY for node in self._crew.store.nodes(POOL))
        return ready and self._crew.store.leased_nodes(POOL) == {}

    def _story(self) -> str:
        live = [self._crew.store.tuning(each) for each in self._live()]
        return "; ".join(f"{each.id} is {each.state}: {each.message}" for each in live)


def _count(counts: dict[str, int], name: str) -> None:
    counts[str(name)] = counts.get(str(name), 0) + 1
