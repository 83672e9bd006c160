"""Campaign: one tuner's hold on one tuning. It dispatches jobs and never waits for one.

Everything is durable at each line: after a crash, whoever advances the tuning next rebuilds all from the store.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from autotune.errors import InputError, MissingMeasurementError, NothingFitsError
from autotune.fleet.eligibility import common_environment, gang_fingerprint, lacks_command, obstacle, too_few
from autotune.fleet.finishing import MAX_JOBS
from autotune.fleet.scheduling import FAIRNESS_WINDOW
from autotune.fleet.spending import limit_s
from autotune.ports.fleet import FleetStore
from autotune.specs import (
    Job,
    JobPurpose,
    JobState,
    Node,
    Plan,
    ProbeRequest,
    Trial,
    TrialState,
    Tuning,
    TuningState,
)
from autotune.tuning.lifecycle import Facts, NextStep, StepKind, next_step
from autotune.tuning.planner import PROBE_DEADLINE_S, Planner, step_request, trial_deadline_s

OTHER_ENVIRONMENT = "has another environment than the one that this tuning began in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The nodes of a tuning's pool as one tuner saw them.

    Args:
        nodes: all of the pool.
        environment_key: of the gangs that measure for the tuning; empty while no node is ready.
        obstacles: why each node may not measure for it, empty where it may.
        slots: gangs that can measure at once.
    """

    nodes: Sequence[Node]
    environment_key: str
    obstacles: dict[str, str]
    slots: int


class Campaign:
    """Advances one tuning of the fleet. Close it after use.

    Args:
        store: where everything is kept.
        tuning_id: which.
        owner: who claims it; different each time, so that nobody is taken for somebody who was here before.
        claim_s: how long it may be silent within one step before another tuner takes the tuning over; None: for ever.
        pool: of this process alone, for a tuning that it runs on its own machine; else the tuning's.
    """

    def __init__(self, store: FleetStore, tuning_id: str, owner: str, *, claim_s: float | None, pool: str = "") -> None:
        self._store, self._tuning_id, self._owner, self._own_pool = store, tuning_id, owner, pool
        self._claim_s = claim_s
        self._planner: Planner | None = None

    def close(self, *, failed: bool = False) -> None:
        """Lets go of the tuning; says whether its last step failed."""
        self._store.release_tuning(self._tuning_id, self._owner, failed=failed)

    def advance(self) -> bool:
        """Takes steps until there is nothing to do but wait; says whether jobs were dispatched.

        Raises:
            StoreConflictError: the tuning was cancelled or taken over meanwhile; nothing was started after that.
        """
        dispatched = False
        while (tuning := self._claim()) is not None:
            step = self._next(tuning)
            if step.kind in {StepKind.WAIT, StepKind.NOTHING}:
                break
            dispatched |= step.kind in {StepKind.PROBE, StepKind.TRIAL, StepKind.CONFIRM}
        return dispatched

    def _claim(self) -> Tuning | None:
        return self._store.claim_tuning(self._tuning_id, self._owner, lease_s=self._claim_s)

    def _next(self, tuning: Tuning) -> NextStep:
        """Takes one step and returns it."""
        if tuning.state is TuningState.QUEUED:
            self._save(tuning, state=TuningState.PROFILING)
            return NextStep(kind=StepKind.START)
        # Of a search only the first job matters: the store knows its trials.
        limit = MAX_JOBS if tuning.state is TuningState.PROFILING else 1
        jobs = self._store.jobs(tuning_id=tuning.id, pool=self._own_pool or None, limit=limit)
        pool = self._pool(tuning, jobs)
        if not pool.slots and tuning.message == _waits_for(tuning, pool):  # and nothing is in flight
            return NextStep(kind=StepKind.WAIT)
        planner = self._planner_of(tuning, pool)
        if planner is None:
            return self._wait_for_nodes(tuning, pool)
        try:
            step = next_step(self._facts(planner, tuning, jobs, pool))
        except (InputError, MissingMeasurementError, NothingFitsError) as error:  # they would come again each time
            step = NextStep(kind=StepKind.FAIL, reason=str(error))
        if step.kind in {StepKind.PROBE, StepKind.TRIAL, StepKind.CONFIRM}:
            if not pool.slots:
                return self._wait_for_nodes(tuning, pool)
            if limit_s(self._store, tuning) is None:
                return NextStep(kind=StepKind.WAIT)
            if tuning.message:
                self._save(tuning, message="")
        self._take(step, tuning, pool, planner)
        return step

    def _facts(self, planner: Planner, tuning: Tuning, jobs: Sequence[Job], pool: Pool) -> Facts:
        probes = [job for job in jobs if job.purpose is JobPurpose.PROFILE]
        # Whatever has ended was tried as often as it is ever tried: another attempt is under way where one is due.
        attempted: list[ProbeRequest] = [job.request for job in probes]
        in_flight = sum(job.state is not JobState.ENDED for job in probes)
        return planner.facts(
            tuning,
            attempted=attempted,
            probes_gpu_s=[
                tuning.cluster.devices * (job.ended_at - job.granted_at).total_seconds()
                for job in probes
                if job.granted_at is not None and job.ended_at is not None
            ],
            in_flight=in_flight,
            slots=max(pool.slots, 1),
        )

    def _take(self, step: NextStep, tuning: Tuning, pool: Pool, planner: Planner) -> None:
        match step.kind:
            case StepKind.PROBE:
                assert step.probe is not None
                self._dispatch(self._job(tuning, pool, JobPurpose.PROFILE, step.probe, PROBE_DEADLINE_S))
            case StepKind.CALIBRATE:
                planner.calibrate()
                self._save(tuning, state=TuningState.SEARCHING)
            case StepKind.TRIAL | StepKind.CONFIRM:
                self._trial(step.plan, tuning, pool, planner)
            case StepKind.FINISH:
                planner.remember()
                self._save(tuning, state=TuningState.DONE, message="", stop_reason=step.reason)
            case StepKind.FAIL:
                self._save(tuning, state=TuningState.FAILED, message=step.reason, stop_reason=step.reason)
            case _:
                pass

    def _trial(self, confirm: Plan | None, tuning: Tuning, pool: Pool, planner: Planner) -> None:
        asked = planner.ask(confirm)
        estimate = planner.estimate_of(asked.plan)
        request = step_request(tuning, asked, planner.best if confirm is None else None)
        job = self._job(tuning, pool, JobPurpose.TRIAL, request, trial_deadline_s(tuning, estimate))
        trial = Trial(
            id=uuid.uuid4().hex,
            tuning_id=tuning.id,
            number=asked.number,
            plan=asked.plan,
            state=TrialState.RUNNING,
            estimate=estimate,
            fingerprint_key=planner.fingerprint_key,
            owner=self._owner,
            started_at=job.created_at,
        )
        self._dispatch(job.model_copy(update={"trial_id": trial.id}), trial)

    def _job(self, tuning: Tuning, pool: Pool, purpose: JobPurpose, request: ProbeRequest, deadline_s: float) -> Job:
        return Job(
            id=uuid.uuid4().hex,
            purpose=purpose,
            pool=self._own_pool or tuning.pool,
            cluster=tuning.cluster,
            request=request,
            tuning_id=tuning.id,
            principal=self._whose(tuning),
            environment_key=pool.environment_key,
            deadline_s=min(deadline_s, limit_s(self._store, tuning) or deadline_s),
            created_at=self._store.now(),
        )

    def _whose(self, tuning: Tuning) -> str:
        """Whose turn at the nodes a job takes: of those who want the tuning, the one who used least of late."""
        askers = self._store.askers(tuning.id)
        if len(askers) < 2:
            return next(iter(askers), tuning.principal)
        used = self._store.gpu_s_by_principal(self._store.now() - FAIRNESS_WINDOW)
        return min(askers, key=lambda who: (used.get(who, 0.0), who))

    def _dispatch(self, job: Job, trial: Trial | None = None) -> None:
        self._store.create_job(job, trial=trial, expected_owner=self._owner)

    # -- nodes --------------------------------------------------------------------------------------------

    def _pool(self, tuning: Tuning, jobs: Sequence[Job]) -> Pool:
        """The pool now. A tuning keeps to the environment that it began in: figures of two are not compared."""
        nodes, now = self._store.nodes(self._own_pool or tuning.pool), self._store.now()
        obstacles = {node.name: obstacle(node, now, tuning.cluster.gpus_per_node) for node in nodes}
        for node in nodes:
            obstacles[node.name] = obstacles[node.name] or lacks_command(node, tuning.workload.command)
        environment = next((job.environment_key for job in jobs), "")
        environment = environment or common_environment([node for node in nodes if not obstacles[node.name]])
        for node in nodes:
            if environment and not obstacles[node.name] and node.environment_key != environment:
                obstacles[node.name] = OTHER_ENVIRONMENT
        ready = sum(not text for text in obstacles.values())
        return Pool(nodes=nodes, environment_key=environment, obstacles=obstacles, slots=ready // tuning.cluster.nodes)

    def _planner_of(self, tuning: Tuning, pool: Pool) -> Planner | None:
        """What is decided by; None while no node has the environment, so that nothing can be known or measured."""
        if self._planner is None:
            name = self._own_pool or tuning.pool
            key = gang_fingerprint(self._store, name, pool.environment_key) if pool.environment_key else None
            if key is not None:
                self._planner = Planner(self._store, tuning, key, retried=not self._own_pool)
        return self._planner

    def _wait_for_nodes(self, tuning: Tuning, pool: Pool) -> NextStep:
        message = _waits_for(tuning, pool)
        if message != tuning.message:
            self._save(tuning, message=message)
        return NextStep(kind=StepKind.WAIT)

    def _save(self, tuning: Tuning, **changes: object) -> None:
        changed = tuning.model_copy(update={**changes, "owner": self._owner, "updated_at": self._store.now()})
        self._store.save_tuning(changed, expected_owner=self._owner)


def _waits_for(tuning: Tuning, pool: Pool) -> str:
    return too_few(tuning.pool, tuning.cluster.nodes, pool.nodes, pool.obstacles)


def process_owner() -> str:
    """host:pid:start time of this process: names an owner that can be checked for life."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def owner_lives(owner: str) -> bool:
    """Whether that process is (or may be) alive: one of another host is taken to be."""
    host, pid, started = owner.rsplit(":", 2)
    if host != socket.gethostname():
        return True
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(started)) < 1.0
    except psutil.NoSuchProcess:
        return False
