"""FleetService: what the API, the workers and the beat ask of a fleet."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from autotune.errors import InputError, StoreConflictError, StoreError
from autotune.fleet.advance import Campaign, process_owner
from autotune.fleet.eligibility import obstacle, why_waiting
from autotune.fleet.finishing import Merge, finish
from autotune.fleet.scheduling import schedule
from autotune.fleet.sweeping import sweep
from autotune.ports.fleet import FleetStore, Queue, Submission
from autotune.search.ranking import Best, best_of
from autotune.settings import MAX_LIVE, FleetTimes
from autotune.specs import (
    Budget,
    ClusterSpec,
    Job,
    JobState,
    ModelSpec,
    Node,
    NodeState,
    SamplerName,
    Space,
    Trial,
    Tuning,
    TuningEvent,
    TuningState,
    Workload,
)
from autotune.tuning.report import queue_text
from autotune.tuning.request import check_request, tuning_of

log = logging.getLogger("autotune.fleet")
MAX_CHECKED, MAX_POOLS = 10_000, 256
POOL_TRUST_S = 5.0
MAX_SAME_FAULTS = 3
"""A tuning whose next step fails so often in a row, each time in the same way, would fail so for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node, why it may not get jobs (empty: it may), and the job that holds it (empty: none)."""

    node: Node
    obstacle: str
    job_id: str


class FleetService:
    """Requests to a fleet, and what moves them on.

    Args:
        store: keeps everything.
        queue: carries ids to workers.
        merge: what the reports of a job's members amount to.
        times: how soon it notices that something is gone.
        max_live: how many tunings of one principal and one pool are under way at most; the others stay queued.
    """

    def __init__(
        self,
        store: FleetStore,
        queue: Queue,
        merge: Merge,
        times: FleetTimes = FleetTimes(),
        max_live: int = MAX_LIVE,
    ) -> None:
        self._store, self._queue, self._merge, self._times, self._max_live = store, queue, merge, times, max_live
        self._checked: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._pools: dict[str, tuple[float, ClusterSpec, int]] = {}

    def close(self) -> None:
        """Lets go of the broker; the store is whoever's opened it."""
        self._queue.close()

    # -- requests -----------------------------------------------------------------------------------------

    def check(self, model: ModelSpec, cluster: ClusterSpec, workload: Workload, space: Space) -> None:
        """Refuses a request that cannot lead to a plan. What was found good is not judged again; its pool is.

        `cluster` is a pool, by its name, with as many nodes as the training would use.

        Raises:
            UnknownNameError: no such pool.
            InputError: other hardware than the pool's, more nodes than have registered in it, or no plan is legal.
            NothingFitsError: no legal plan is estimated to fit.
        """
        self._require_pool(cluster)
        asked = (model.key, cluster.key, workload.key, space.digest())
        if asked in self._checked:
            return
        check_request(model, cluster, workload, space)
        self._checked[asked] = None
        if len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)

    def submit(self, submission: Submission) -> tuple[Tuning, bool]:
        """Stores a request, QUEUED, or joins a live one that asks for the same; begins a new one.

        Returns the tuning and whether it was created now.

        Raises:
            UnknownNameError, InputError, NothingFitsError: see `check`.
            StoreConflictError: the idempotency key was used for another request.
        """
        tuning = submission.tuning
        self.check(tuning.model, tuning.cluster, tuning.workload, tuning.space)
        (answer,) = self._store.submit_tunings([submission])
        if isinstance(answer, StoreConflictError):
            raise answer
        if answer[1]:
            self.begin()
        return answer

    def begin(self) -> bool:
        """Tells the tuners that requests wait. If the broker does not take that (False), a sweep will find them."""
        return self._queue.advance()

    def cancel(self, tuning_id: str, principal: str, *, also: str | None = None, force: bool = False) -> Tuning:
        """Takes back a principal's request. When nobody asks for it any more (or by `force`) it is cancelled: its
        queued jobs end now, running ones are told to stop within a second or so.

        Args:
            tuning_id: which.
            principal: who takes back what he asked for.
            also: somebody who cannot do it any more, whose request is taken back as well.
            force: cancels it, whoever asks for it.

        Raises:
            UnknownNameError: no such tuning.
            InputError: it has ended already, or runs on one machine, where nobody here may reach.
            StoreConflictError: only others ask for it.
        """
        tuning = self._store.tuning(tuning_id)
        if not tuning.pool:
            raise InputError(
                "tuning", tuning.id, "a fleet's tuning: this one runs on one machine, and is cancelled there"
            )
        if tuning.state.ended and tuning.state is not TuningState.CANCELLED:
            raise InputError("tuning", tuning.id, f"it has ended already ({tuning.state})")
        principals = {principal} if also is None else {principal, also}
        tuning, was_queued = self._store.cancel_tuning(tuning.id, principals, f"cancelled by {principal}", force=force)
        if was_queued:  # free nodes may have been kept for that
            self.schedule(tuning.pool)
        if tuning.state is TuningState.CANCELLED:
            self.begin()
        return tuning

    def _end(self, tuning_id: str, state: TuningState, reason: str) -> None:
        pool = self._store.end_tuning(tuning_id, state, reason)
        self._store.cancel_jobs(tuning_id)  # again too, if who ended it first died before this line
        self.schedule(pool)

    def _require_pool(self, cluster: ClusterSpec) -> None:
        pool, nodes = self._pool(cluster.name)
        if cluster.key != pool.model_copy(update={"nodes": cluster.nodes}).key:
            same = pool.model_copy(update={"nodes": cluster.nodes, "inter": cluster.inter or pool.inter})
            asked = cluster.model_copy(update={"inter": cluster.inter or pool.inter})
            if same.key != asked.key:
                ours, theirs = same.to_data(), asked.to_data()
                differ = ", ".join(name for name in ours if ours[name] != theirs[name])
                raise InputError("cluster", cluster.name, f"the pool of that name has other hardware ({differ} differ)")
        if cluster.nodes > nodes:
            self._pools.pop(cluster.name, None)  # one may have registered since
            nodes = self._pool(cluster.name)[1]
        if cluster.nodes > nodes:
            raise InputError("nodes", cluster.nodes, f"{nodes} at most: so many have registered in pool {cluster.name}")

    def _pool(self, name: str) -> tuple[ClusterSpec, int]:
        """A pool and how many nodes it has, as they were a few seconds ago at most."""
        known = self._pools.get(name)
        if known is None or time.monotonic() > known[0]:
            pool, nodes = self._store.cluster(name), len(self._store.nodes(name))
            if len(self._pools) >= MAX_POOLS:
                self._pools.clear()
            known = self._pools[name] = (time.monotonic() + POOL_TRUST_S, pool, nodes)
        return known[1], known[2]

    # -- what moves them on -------------------------------------------------------------------------------

    def admit(self) -> None:
        """Begins requests whose turn it is: of each principal and pool the oldest, up to `max_live` at a time."""
        for tuning_id in self._store.admit_tunings(self._max_live):
            self._queue.advance(tuning_id)

    def advance(self, tuning_id: str) -> None:
        """Takes the next steps of a tuning, unless somebody else is at it or there is nothing to be done.

        Where it is another principal's turn, that one's tuning is advanced, and this one is sent again.
        """
        turn = self._store.next_turn(tuning_id)
        if turn is None:
            return
        try:
            self._advance(turn)
        finally:
            if turn != tuning_id:
                self._queue.advance(tuning_id)

    def _advance(self, tuning_id: str) -> None:
        seen = self._live_jobs(tuning_id)
        owner = f"{uuid.uuid4().hex[:8]}@{process_owner()}"
        campaign = Campaign(self._store, tuning_id, owner, claim_s=self._times.claim_s)
        dispatched, fault = False, ""
        try:
            dispatched = campaign.advance()
        except StoreConflictError as error:
            log.info("tuning %s: %s", tuning_id, error)
        except (StoreError, OSError):  # it is not the tuning's: what is away now comes back
            raise
        except Exception as error:
            fault = _fault_of(error)
            self._note(tuning_id, fault, error)
            raise
        finally:
            campaign.close(failed=bool(fault))
        tuning = self._store.tuning(tuning_id)
        if dispatched:
            self.schedule(tuning.pool)
        if tuning.state.ended:
            self.admit()
        elif seen - self._live_jobs(tuning_id):
            self._queue.advance(tuning_id)  # a job ended meanwhile, and whoever was told found the tuning claimed

    def _note(self, tuning_id: str, fault: str, error: Exception) -> None:
        """Counts a failed step; ends a tuning of which it would be the same each time."""
        if self._store.note_fault(tuning_id, fault) < MAX_SAME_FAULTS:
            return
        reason = f"its next step failed {MAX_SAME_FAULTS} times in the same way ({fault}): {error}"
        log.error("tuning %s fails: %s", tuning_id, reason)
        self._end(tuning_id, TuningState.FAILED, reason)
        self.admit()

    def schedule(self, pool: str) -> Sequence[Job]:
        """Grants what can run in a pool now."""
        return schedule(self._store, self._queue, pool)

    def finish(self, job: Job) -> Job | None:
        """Ends a job that all its members have reported or been lost from; None if somebody has."""
        return finish(self._store, self._queue, job, self._merge)

    def sweep(self) -> None:
        """Sends again what is due, ends what was left, and begins what waits."""
        sweep(self._store, self._queue, self._merge, self._times)
        self.admit()

    # -- answers ------------------------------------------------------------------------------------------

    def tuning(self, tuning_id: str) -> Tuning:
        """The tuning as it stands."""
        return self._store.tuning(tuning_id)

    def why_waiting(self, tuning_id: str) -> str:
        """What a tuning waits for just now, in words: nodes for its oldest queued job; empty if it does not wait."""
        tuning = self._store.tuning(tuning_id)
        place = self._store.queue_places([tuning.id]).get(tuning.id)
        if place is not None:
            return queue_text(place)
        queued = self._store.jobs(tuning_id=tuning.id, states={JobState.QUEUED}, limit=1)
        if not queued:
            return tuning.message
        nodes, leased = self._store.nodes(tuning.pool), self._store.leased_nodes(tuning.pool)
        return why_waiting(queued[0], nodes, leased, self._store.now())

    def trials(self, tuning_id: str) -> Sequence[Trial]:
        """The trials of a tuning by number."""
        return self._store.trials(self._store.tuning(tuning_id).id)

    def best(self, tuning_id: str) -> Best | None:
        """The winner of a tuning so far; None when nothing was measured."""
        tuning = self._store.tuning(tuning_id)
        return best_of(self._store.trials(tuning.id), tuning.cluster)

    def events(self, tuning_id: str, *, after: int = 0, limit: int = 500) -> Sequence[TuningEvent]:
        """The tuning's log, oldest first."""
        return self._store.events(self._store.tuning(tuning_id).id, after=after, limit=limit)

    def nodes(self, pool: str | None = None) -> Sequence[NodeStatus]:
        """The nodes by name, each with why it may not get jobs, and what holds it."""
        leased, now = self._store.leased_nodes(pool), self._store.now()
        needed = {cluster.name: cluster.gpus_per_node for cluster in self._store.clusters()}
        return [
            NodeStatus(
                node=node, obstacle=obstacle(node, now, needed.get(node.pool, 1)), job_id=leased.get(node.name, "")
            )
            for node in self._store.nodes(pool)
        ]

    def quarantine(self, name: str, reason: str) -> Node:
        """Gives a node no more jobs until it is released; what runs on it goes on. Raises UnknownNameError."""
        self._store.set_node_state(name, NodeState.QUARANTINED, reason)
        self._store.clear_blame([name])  # a node that has failures is checked, and comes back by itself
        return self._store.node(name)

    def release(self, name: str) -> Node:
        """Lets a node have jobs again, and forgets its failures. Raises UnknownNameError."""
        self._store.set_node_state(name, NodeState.READY, "")
        self.schedule(self._store.node(name).pool)
        return self._store.node(name)

    def forget(self, name: str) -> None:
        """Takes a dead node out of the list; what it measured stays. A worker that registers brings it back.

        Raises UnknownNameError, and StoreConflictError while it lives or a job holds it.
        """
        self._store.forget_node(name, silent_s=self._store.node(name).lost_after_s)

    def _live_jobs(self, tuning_id: str) -> set[str]:
        live = {JobState.QUEUED, JobState.GRANTED, JobState.REPORTED}
        return {job.id for job in self._store.jobs(tuning_id=tuning_id, states=live)}


def _fault_of(error: Exception) -> str:
    """The kind of an error and the line that raised it: the same again is the same fault, whatever its words."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {PurePath(last.filename).name}:{last.lineno}"


def require_no_pool(store: FleetStore, cluster: ClusterSpec) -> None:
    """A pool's cluster is what its nodes registered for: other hardware by that name would leave them without jobs.

    Raises:
        StoreConflictError: a pool of other hardware has the cluster's name.
    """
    if not store.nodes(cluster.name):
        return
    pool = store.cluster(cluster.name)
    grows = frozenset({"nodes"} if pool.inter else {"nodes", "inter"})
    if pool.digest(without=grows) != cluster.digest(without=grows):
        raise StoreConflictError(f"cluster {cluster.name!r} is a pool with nodes of other hardware: give another name")


def submission_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    space: Space = Space(),
    budget: Budget = Budget(),
    seed: int = 0,
    cold: bool = False,
    sampler: SamplerName = SamplerName.PLAN,
    principal: str,
    idempotency_key: str | None = None,
) -> Submission:
    """A request by `principal` for a tuning in the pool of the cluster's name. Nothing is checked, nothing stored."""
    tuning = tuning_of(
        model,
        cluster,
        workload,
        space=space,
        budget=budget,
        seed=seed,
        cold=cold,
        sampler=sampler,
        pool=cluster.name,
        principal=principal,
    )
    asked = request_key(tuning)
    return Submission(tuning=tuning, sharing_key=asked, request_digest=asked, idempotency_key=idempotency_key)


def request_key(tuning: Tuning) -> str:
    """Equal for requests that ask for the same thing, whoever asks and when."""
    parts = {name: getattr(tuning, name).to_data() for name in ("model", "cluster", "workload", "space", "budget")} | {
        "seed": tuning.seed,
        "cold": tuning.cold,
        "sampler": tuning.sampler.value,
    }
    if tuning.history:
        parts["history"] = tuning.history
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
