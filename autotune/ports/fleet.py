"""What the service needs from a fleet: a FleetStore and a Queue. storage and workers implement them.

All times that decide (leases, claims, heartbeats) are the database's clock: a node whose clock is wrong harms nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from autotune.errors import StoreConflictError
from autotune.ports.store import KnowledgeStore
from autotune.specs import (
    ApiKey,
    Failure,
    Job,
    JobState,
    MemberOrder,
    MemberReport,
    Node,
    NodeIncident,
    NodeState,
    ProbeOutcome,
    ProbeProgress,
    Role,
    Trial,
    Tuning,
    TuningEvent,
    TuningState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCounts:
    """How much there is of what, at one moment: by state, the nodes that jobs hold, GPU-seconds of all tunings."""

    tunings: dict[str, int]
    jobs: dict[str, int]
    nodes: dict[str, int]
    leases: int
    gpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request for a tuning: `sharing_key` is equal for requests that may share one (see FleetStore.submit_tuning)."""

    tuning: Tuning
    sharing_key: str
    request_digest: str = ""
    idempotency_key: str | None = None


Submitted = tuple[Tuning, bool]
"""What a submission led to, and whether it was created now."""


class Queue(Protocol):
    """Carries ids to workers. The database is the truth: a message may be lost, late or doubled.

    No method raises when the broker is down: it logs, returns False, and a sweep sends again what is due.
    """

    def advance(self, *ids: str) -> bool:
        """To any tuner: take the next steps of this tuning; without an id, begin what waits to begin.

        The id of a check's job (specs.regression.CHECK_JOB) stands for the check that it measured for. Without an id
        it is not sent where such a message waits already.
        """

    def backlog(self) -> int:
        """How many messages wait for tuners. 0 if the broker does not say."""

    def run(self, node: str, job_id: str, token: int) -> bool:
        """To one node: run your share of this job under this grant."""

    def canary(self, node: str, session: str) -> bool:
        """To one node: prove that you consume, by renewing your heartbeat."""

    def close(self) -> None:
        """Lets go of the broker."""


class FleetStore(KnowledgeStore, Protocol):
    """A Store that knows nodes, jobs and leases. Each method is one transaction."""

    def now(self) -> datetime:
        """The database's clock, UTC."""

    # -- nodes --------------------------------------------------------------------------------------------

    def register_node(self, node: Node) -> Node:
        """Stores a node and evicts an older session of its name: its leases are lost and its warm world forgotten.

        State, reason and failures of a known node stay. `registered_at` and `heartbeat_at` are the database's now.
        """

    def retire_node(self, name: str, session: str) -> None:
        """The worker of that session ends: its leases are lost, and the node gets none until one registers again.

        Its session is empty then. Nothing happens if the session is not the node's any more.
        """

    def forget_node(self, name: str, *, silent_s: float) -> None:
        """Takes a dead node out of the list until a worker registers it again. What it did and measured stays.

        Raises UnknownNameError, and StoreConflictError where a job holds it or its worker was heard of in the last
        `silent_s` seconds.
        """

    def nodes(self, pool: str | None = None) -> Sequence[Node]:
        """Nodes by name, without those that were forgotten."""

    def node(self, name: str) -> Node:
        """The node of that name. Raises UnknownNameError."""

    def local_pools(self) -> Sequence[str]:
        """The pools of single processes (specs.fleet.LOCAL), also of those that died before they could discard theirs.

        What is asked of all pools is asked of the fleet's, which these are not.
        """

    def discard_pool(self, pool: str) -> None:
        """Deletes a single process's pool: its node and its jobs, not what they measured. Its trials stay as they are.

        Raises ValueError for a fleet's pool.
        """

    def renew_node(self, name: str, session: str) -> bool:
        """Renews the heartbeat; False if the session is not the node's any more."""

    def set_node_state(self, name: str, state: NodeState, reason: str) -> None:
        """Quarantines or releases a node; a release sets its failures to zero."""

    def blame_node(self, incident: NodeIncident, *, quarantine_at: int) -> Node:
        """Records an incident, adds one to the failures, and quarantines at that many. Returns the node."""

    def record_incident(self, incident: NodeIncident) -> None:
        """Records what happened to a node, and blames it for nothing."""

    def clear_blame(self, names: Collection[str]) -> None:
        """Sets the failures of nodes to zero: a job on them went well."""

    def incidents(self, node: str | None = None, limit: int = 50) -> Sequence[NodeIncident]:
        """The newest incidents, newest first."""

    # -- jobs and leases ------------------------------------------------------------------------------------

    def create_job(self, job: Job, *, trial: Trial | None = None, expected_owner: str | None = None) -> None:
        """Stores a QUEUED job, together with its new RUNNING trial if one is given.

        With `expected_owner`, raises StoreConflictError unless the tuning is claimed by that owner, and its state has
        not ended: a tuner that was taken for dead cannot start anything.
        """

    def job(self, job_id: str) -> Job:
        """The job of that id. Raises UnknownNameError."""

    def jobs(
        self,
        *,
        pool: str | None = None,
        tuning_id: str | None = None,
        states: Collection[JobState] | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> Sequence[Job]:
        """Jobs, oldest first, those that come after the job `after`. Raises UnknownNameError for that one."""

    def queued_jobs(self, pool: str, *, most_each: int) -> Sequence[Job]:
        """QUEUED jobs of a pool, oldest first: of each purpose of each principal the oldest `most_each`."""

    def leased_nodes(self, pool: str | None = None) -> dict[str, str]:
        """Node name -> id of the job that holds it. A node is held by one job at most."""

    def gpu_s_by_principal(self, since: datetime) -> dict[str, float]:
        """GPU-seconds that each principal's jobs used since then, running ones included (for fairness)."""

    def grant(self, job_id: str, nodes: Sequence[str], *, lease_s: float, world_id: str, warm: bool) -> Job | None:
        """Leases all `nodes` to a QUEUED job or none: GRANTED under a new token, members in that order.

        None if the job is not queued any more, or a node is leased, gone, not ready (unless the job is a health
        probe bound to it) or of another session meanwhile.
        """

    def start_member(self, job_id: str, token: int, node: str, session: str, *, lease_s: float) -> Job | None:
        """A member begins: LEASED -> RUNNING. None for a late, doubled or evicted delivery."""

    def renew_member(
        self,
        job_id: str,
        token: int,
        node: str,
        session: str,
        *,
        lease_s: float,
        progress: ProbeProgress | None = None,
        endpoint: str | None = None,
    ) -> MemberOrder:
        """Renews the member's lease and the node's heartbeat; stores progress and, from the first node, the endpoint.

        The order says to stop when the token or session is not current (CANCELLED), the job is cancelled
        (CANCELLED), or another member reported a failure or was lost (with that failure's kind).
        """

    def report_member(self, job_id: str, token: int, node: str, session: str, report: MemberReport) -> Job | None:
        """Stores a member's report. Its node stays leased until the job ends. The job is REPORTED after the last one.

        Returns the job as it stands; None when the token or session is not current (nothing is written).
        """

    def expire_members(self, *, grace_s: float | None = None) -> Sequence[Job]:
        """Marks members whose lease ran out as LOST, in jobs not ended. Returns the jobs that became REPORTED so.

        With `grace_s`, the length of a lease: where no such call came for longer than that, nobody is lost, and each
        has that much time from now, because leases may not have been renewable. Not twice in a row.
        """

    def unsent_members(self, older_than_s: float) -> Sequence[Job]:
        """GRANTED jobs with a member still LEASED that long after the grant: their message may be lost."""

    def end_job(
        self,
        job_id: str,
        token: int,
        outcome: ProbeOutcome,
        *,
        failure: Failure | None,
        retry: Job | None = None,
        fingerprint_key: str = "",
        warm_nodes: Collection[str] = (),
    ) -> Job | None:
        """Ends a REPORTED job: releases its leases, stores what it measured, adds its GPU-seconds to the tuning.

        With `retry` that job is stored QUEUED instead of ending the trial. Without, a trial ends as
        `Store.finish_trial` says, and a probe is stored as `Store.save_probe` says (readings or failure; health probes
        too). `warm_nodes` keep their world, other members forget theirs. None (and nothing written) if the token is not
        current or the job has ended: a result is stored once.
        """

    def alike_jobs(self, job: Job, *, limit: int) -> Sequence[Job]:
        """Jobs that went well within the last hour, newest first: of the same purpose, pool, cluster and environment,
        for the same model and workload; probes of a layer of the same layer alone.
        """

    def cancel_job(self, job_id: str) -> bool:
        """Ends a job of no tuning that is still QUEUED; False if it is not. Raises UnknownNameError."""

    def cancel_jobs(self, tuning_id: str) -> Sequence[Job]:
        """Ends the tuning's QUEUED jobs (their trials fail as CANCELLED) and marks its granted ones cancelled.

        Returns the jobs still granted.
        """

    # -- tunings ----------------------------------------------------------------------------------------------

    def submit_tuning(
        self,
        tuning: Tuning,
        *,
        sharing_key: str,
        request_digest: str = "",
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Stores a fleet's tuning, or joins its principal to a live one with the same `sharing_key`.

        Returns the tuning and whether it was created now. The same principal and idempotency key give the tuning of
        the first time; raises StoreConflictError if `request_digest` differs from then. The model of a new tuning is
        stored by its name as well.
        """

    def submit_tunings(self, submissions: Sequence[Submission]) -> Sequence[Submitted | StoreConflictError]:
        """Does what `submit_tuning` does for several at once, in one transaction; an answer each, in their order."""

    def cancel_tuning(
        self, tuning_id: str, principals: Collection[str], reason: str, *, force: bool = False
    ) -> tuple[Tuning, bool]:
        """Takes back what these principals want. Where nobody else wants it, or by `force`, the tuning is CANCELLED:
        its queued jobs end now, its granted ones are marked.

        Returns the tuning as it stands then, and whether one of its jobs was queued. One that has ended stays so.

        Raises:
            UnknownNameError: no such tuning.
            StoreConflictError: only others want it; not with `force`.
        """

    def askers(self, tuning_id: str) -> Sequence[str]:
        """The principals who want a fleet's tuning, by name."""

    def claim_tuning(self, tuning_id: str, owner: str, *, lease_s: float | None) -> Tuning | None:
        """Makes `owner` the one who may advance it, for that long. None if somebody else is, or it has ended.

        A fleet's tuning is claimed for a time; one without a pool without (None), until it is released.
        """

    def release_tuning(self, tuning_id: str, owner: str, *, failed: bool = False) -> None:
        """Ends the claim, if it still is that owner's; notes when it was advanced. Unless it `failed` that went well.

        What went well sets the count of `note_fault` to zero.
        """

    def note_fault(self, tuning_id: str, fault: str) -> int:
        """Counts that an advance failed; how often in a row it failed like this, whoever tried."""

    def end_tuning(self, tuning_id: str, state: TuningState, reason: str) -> str:
        """Ends a tuning, also while somebody advances it, whose claim is then gone; nothing happens if it has ended.

        Returns its pool.
        """

    def admit_tunings(self, most_each: int) -> Sequence[str]:
        """Begins what is queued, oldest first, while a principal who wants it has fewer than `most_each` in its pool.

        It is PROFILING then. Returns the ids in the order of turns: whoever has the fewest goes first.
        """

    def queue_places(self, tuning_ids: Sequence[str]) -> dict[str, int]:
        """Which places those of these tunings that are QUEUED have, from 1: among what a principal wants in a pool.

        Of several principals the best place counts.
        """

    def next_turn(self, tuning_id: str) -> str | None:
        """The tuning to advance now that somebody is told of `tuning_id`; None where that has nothing to be done.

        It may be another one, of which there is news as well: principals take turns, the one whose tunings were not
        claimed for the longest time is next; and so do the tunings of one principal.
        """

    def due_tunings(self) -> Sequence[str]:
        """Begun fleet tunings that nobody claims and that have no job under way, or one ended since the last advance.

        Those that were advanced longest ago, or never, come first.
        """

    def abandoned_tunings(self) -> Sequence[str]:
        """Ended tunings with jobs QUEUED or GRANTED that are not cancelled: whoever ended them died then."""

    def tunings_page(
        self, *, limit: int, before: str | None = None, state: str | None = None, principal: str | None = None
    ) -> Sequence[Tuning]:
        """Tunings newest first, those older than the tuning `before`."""

    def events(self, tuning_id: str, *, after: int = 0, limit: int = 500) -> Sequence[TuningEvent]:
        """The tuning's log, oldest first.

        The store writes it in the same transaction as what it tells: STATE in create, submit and
        save_tuning when state or message changed, TRIAL_* in start_trial, create_job and finish_trial, end_job,
        PROBE_ENDED, JOB_GRANTED and JOB_RETRIED likewise. `data` is what a client shows without asking again.
        """

    def measurements_page(
        self, kind: str, *, cluster_key: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[dict[str, Any]]:
        """Rows of `collective`, `layer` or `step` measurements with their provenance, by id."""

    def counts(self) -> FleetCounts:
        """What a monitor watches. Counted by the database: nothing is read row by row."""

    # -- keys ---------------------------------------------------------------------------------------------------

    def create_key(self, key: ApiKey, secret_hash: str) -> None:
        """Stores a key. Raises StoreConflictError if an unrevoked one of that name exists."""

    def keys_of(self, secret_hashes: Collection[str]) -> Mapping[str, ApiKey]:
        """The keys with those hashes, by their hash, expired and revoked ones included."""

    def keys(self) -> Sequence[ApiKey]:
        """All keys, oldest first."""

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revokes a key for good. Raises UnknownNameError."""

    def has_role(self, role: Role) -> bool:
        """Whether an unrevoked key with that role exists."""
