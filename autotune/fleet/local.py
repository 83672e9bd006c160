"""LocalFleet: this machine as a fleet of one, for as long as this process needs it, over the same store as any fleet.

It measures in a pool of its own, which no fleet sees, and which is discarded at the end; that of a process that was
killed is discarded by the next one. A tuning belongs to the process that runs it, and not for a time: whoever finds it
owned looks whether that process lives.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from autotune.errors import InputError, ProberError, StoreConflictError
from autotune.fleet.advance import Campaign, owner_lives, process_owner
from autotune.fleet.finishing import Merge
from autotune.fleet.node import NodeHandlers
from autotune.fleet.scheduling import schedule
from autotune.fleet.service import FleetService
from autotune.ports.fleet import FleetStore
from autotune.settings import FleetTimes
from autotune.specs import (
    ClusterSpec,
    Failure,
    FailureKind,
    Fingerprint,
    Job,
    MemberOrder,
    MemberReport,
    Node,
    ProbeProgress,
    ProbeRequest,
    TrialState,
    Tuning,
    TuningEvent,
    TuningState,
)
from autotune.specs.fleet import LOCAL
from autotune.tuning.planner import DEADLINE_LEAST_S

OnEvent = Callable[[TuningEvent], None]
OnProgress = Callable[[ProbeRequest, ProbeProgress], None]


class OwnRanks(Protocol):
    """The ranks of this machine; probes.launch.NodeRanks are."""

    @property
    def world_id(self) -> str:
        """The world that they are warm for; empty without any."""

    def fingerprint(self, cluster: ClusterSpec) -> Fingerprint:
        """The environment of the first one, as a world of their own. Raises ProberError if they cannot be started."""

    def run(
        self,
        share: Any,
        request: ProbeRequest,
        *,
        deadline_s: float,
        publish: Callable[[str], object],
        order: Callable[..., MemberOrder],
        on_progress: Callable[[ProbeProgress], None],
    ) -> MemberReport:
        """Runs a job."""

    def close(self) -> None:
        """Ends them."""


class LocalQueue:
    """A fleet's queue in this process: a job to run (its id and token), or None for the next step of what goes on."""

    def __init__(self) -> None:
        self.due: deque[tuple[str, int] | None] = deque()

    def advance(self, *ids: str) -> bool:
        """The next step is due."""
        self.due.append(None)
        return True

    def run(self, node: str, job_id: str, token: int) -> bool:
        """A job is to be run."""
        self.due.append((job_id, token))
        return True

    def backlog(self) -> int:
        """Nobody else waits."""
        return 0

    def canary(self, node: str, session: str) -> bool:
        """This process knows that it lives."""
        return True

    def close(self) -> None:
        """Nothing is kept open."""


class LocalFleet:
    """One machine, which registers itself as a node when there is something to measure. Close it.

    Args:
        store: keeps everything.
        cluster: this machine.
        open_ranks: opens its ranks, of which none is started yet.
        merge: what the reports of a job's members amount to.
        share_of: the part of a job's world that a node contributes, as its ranks take it.
        on_progress: told what is measured, and how far it is.
        times: of leases, which nobody looks at here.
    """

    def __init__(
        self,
        store: FleetStore,
        cluster: ClusterSpec,
        open_ranks: Callable[[], OwnRanks],
        *,
        merge: Merge,
        share_of: Callable[[Job, str], Any],
        on_progress: OnProgress = lambda request, progress: None,
        times: FleetTimes = FleetTimes(),
    ) -> None:
        self._owner, self._times = process_owner(), times
        self.pool = f"{LOCAL}{uuid.uuid4().hex[:8]}@{self._owner}"
        self.queue = LocalQueue()
        self._store, self._cluster, self.merge = store, cluster, merge
        self._open_ranks, self._share_of, self._on_progress = open_ranks, share_of, on_progress
        self._ranks: OwnRanks | None = None
        self._node: Node | None = None

    def join(self) -> Node:
        """This machine as the only node of its pool; its ranks are started to read their environment.

        Raises:
            InputError: the cluster is not this machine.
            ProberError: there is nothing to measure with.
        """
        if self._node is None:
            discard_dead_pools(self._store)
            self._ranks = self._ranks or self._open_ranks()
            fingerprint, now = self._ranks.fingerprint(self._cluster), self._store.now()
            node = Node(
                name=self.pool,
                pool=self.pool,
                address="127.0.0.1",
                device=self._cluster.device,
                slots=self._cluster.gpus_per_node,
                fingerprint_key=self._store.put_fingerprint(fingerprint),
                environment_key=fingerprint.environment_key,
                session=self.pool,
                world_id=self._ranks.world_id,
                registered_at=now,
                heartbeat_at=now,
            )
            self._node = self._store.register_node(node)
        return self._node

    def close(self) -> None:
        """Ends the ranks and leaves nothing behind but what was measured."""
        if self._ranks is not None:
            self._ranks.close()
        if self._node is not None:
            self._node = None
            self._store.discard_pool(self.pool)

    def run(self, tuning_id: str, on_event: OnEvent = lambda event: None) -> Tuning:
        """Advances a tuning to its end; may be interrupted and called again, also after a kill -9.

        Raises:
            UnknownNameError: no such tuning.
            InputError: a fleet measures for it.
            StoreConflictError: another living process runs it.
            ProberError: there is nothing to measure with.
        """
        tuning = self._store.tuning(tuning_id)
        if tuning.state.ended:
            return tuning
        _require_own(tuning)
        self._take_over(tuning)
        campaign = Campaign(self._store, tuning.id, self._owner, claim_s=None, pool=self.pool)
        log = _Log(self._store, tuning.id, on_event)
        try:
            message = f"the process that ran this trial ({tuning.owner or 'unknown'}) is gone"
            self._end_trials(tuning, FailureKind.LOST, message)
            log.skip()
            self.until(
                lambda: self._store.tuning(tuning.id).state.ended, lambda: self._advance(campaign), after=log.tell
            )
        except BaseException as error:
            self._end_trials(tuning, FailureKind.CANCELLED, f"the tuning was interrupted ({type(error).__name__})")
            raise
        finally:
            campaign.close()
        return self._store.tuning(tuning.id)

    def until(
        self, is_over: Callable[[], bool], act: Callable[[], object], *, after: Callable[[], object] = lambda: None
    ) -> None:
        """Calls `act`, and again whenever a job that it created has been run, until it is over.

        Args:
            is_over: whether there is nothing more to do.
            act: takes the next step: creates jobs in this pool, and grants them.
            after: called after each step and each job.

        Raises:
            ProberError: there is nothing to measure with, or nothing is measured any more.
        """
        handlers = self._handlers()
        self.queue.due.clear()
        self.queue.due.append(None)
        while not is_over():
            if not self.queue.due:
                raise ProberError("nothing is measured any more, and it is not over")
            job = self.queue.due.popleft()
            if job is not None:
                handlers.run(*job)
            else:
                act()
            after()

    def _handlers(self) -> NodeHandlers:
        node = self.join()
        assert self._ranks is not None
        return NodeHandlers(
            name=node.name,
            session=node.session,
            store=self._store,
            fleet=FleetService(self._store, self.queue, self.merge),
            ranks=_Told(self._ranks, self._on_progress),
            share_of=self._share,
            heartbeat=_Alive(),
            times=self._times,
        )

    def _share(self, job: Job, node: str) -> Any:
        """The whole world. Ranks that died since their last job are started anew: no other node waits for them."""
        assert self._ranks is not None
        lives = self._ranks.world_id == job.world_id
        return self._share_of(job if lives else job.model_copy(update={"warm": False}), node)

    def _advance(self, campaign: Campaign) -> None:
        if campaign.advance():
            schedule(self._store, self.queue, self.pool)

    def _take_over(self, tuning: Tuning) -> None:
        if tuning.owner and tuning.owner != self._owner:
            if owner_lives(tuning.owner):
                raise StoreConflictError(f"tuning {tuning.id} is being run by process {tuning.owner}")
            self._store.release_tuning(tuning.id, tuning.owner)
        if self._store.claim_tuning(tuning.id, self._owner, lease_s=None) is None:
            raise StoreConflictError(f"tuning {tuning.id} has just been taken by another process")

    def _end_trials(self, tuning: Tuning, kind: FailureKind, message: str) -> None:
        """Ends the trials that are running and will not end otherwise; of an interrupt it is known what they cost."""
        now = self._store.now()
        for trial in self._store.trials(tuning.id):
            if trial.state is TrialState.RUNNING:
                held_s = (now - trial.started_at).total_seconds() if kind is FailureKind.CANCELLED else 0.0
                self._store.finish_trial(
                    trial.id,
                    reading=None,
                    failure=Failure(kind=kind, message=message),
                    outcome_gpu_s=held_s * tuning.cluster.devices,
                    setup_s=0.0,
                    fingerprint_key=trial.fingerprint_key,
                )


def cancel_here(store: FleetStore, tuning_id: str) -> Tuning:
    """Ends a tuning that nobody runs. Raises InputError if it has ended, is a fleet's, or a living process runs it."""
    tuning = store.tuning(tuning_id)
    if tuning.state.ended:
        raise InputError("tuning", tuning.id, f"it has ended already ({tuning.state})")
    _require_own(tuning)
    if tuning.owner and owner_lives(tuning.owner):
        raise InputError("tuning", tuning.id, f"interrupt the process that runs it ({tuning.owner})")
    changes = {"state": TuningState.CANCELLED, "owner": "", "updated_at": store.now()}
    store.save_tuning(tuning.model_copy(update=changes), expected_owner=tuning.owner)
    return store.tuning(tuning.id)


def discard_dead_pools(store: FleetStore) -> None:
    """Takes away what processes of this machine left that were killed."""
    for pool in store.local_pools():
        if not owner_lives(pool.rpartition("@")[2]):
            store.discard_pool(pool)


def _require_own(tuning: Tuning) -> None:
    if tuning.pool:
        raise InputError("tuning", tuning.id, f"the fleet's pool {tuning.pool} measures for it: ask its server")


class _Log:
    """Tells what a tuning's log has got since the last time."""

    def __init__(self, store: FleetStore, tuning_id: str, on_event: OnEvent) -> None:
        self._store, self._tuning_id, self._on_event = store, tuning_id, on_event
        self._last = 0

    def skip(self) -> None:
        """What is there is not told."""
        while events := self._store.events(self._tuning_id, after=self._last):
            self._last = events[-1].id

    def tell(self) -> None:
        while events := self._store.events(self._tuning_id, after=self._last):
            for event in events:
                self._last = event.id
                self._on_event(event)


class _Told:
    """Ranks that tell their progress; without any that can be started there is nothing to measure with."""

    def __init__(self, ranks: OwnRanks, on_progress: OnProgress) -> None:
        self._ranks, self._on_progress = ranks, on_progress

    def run(self, share: Any, request: ProbeRequest, **how: Any) -> MemberReport:
        self._on_progress(request, ProbeProgress(phase="start"))
        report, lost_s = self._run(share, request, how), 0.0
        if report.failure is FailureKind.HANG and how["deadline_s"] < DEADLINE_LEAST_S:
            return report  # the budget did not reach for it
        if _never_ready(report) and report.failure is not FailureKind.UNAVAILABLE:
            lost_s = report.wall_s  # a rank may be killed while it starts: that says nothing yet
            report = self._run(share, request, how)
        if _never_ready(report):
            raise ProberError(report.message)
        return report.model_copy(update={"wall_s": report.wall_s + lost_s, "setup_s": report.setup_s + lost_s})

    def _run(self, share: Any, request: ProbeRequest, how: dict[str, Any]) -> MemberReport:
        return self._ranks.run(share, request, on_progress=lambda progress: self._on_progress(request, progress), **how)

    def close(self) -> None:
        self._ranks.close()


def _never_ready(report: MemberReport) -> bool:
    failed = report.failure is not None and report.setup_s >= report.wall_s
    return failed or report.failure is FailureKind.UNAVAILABLE


class _Alive:
    """The heartbeat of a node that is this very process."""

    stopping = False

    def renew(self) -> None:
        """Whoever would listen is here."""

    def evict(self) -> None:
        """Nobody else can have this name."""
