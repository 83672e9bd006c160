"""What a fleet is made of: nodes, jobs with their members, and what a node reports of its share of a job."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from autotune.specs.base import LONGEST_S, Name, Spec
from autotune.specs.cluster import ClusterSpec, Device
from autotune.specs.command import CommandOffer
from autotune.specs.measurement import FailureKind, ProbeProgress, ProbeRequest, Seconds
from autotune.specs.model import Count

LOCAL = "@"
"""What the pool of a single process begins with, which measures on its own machine (fleet.local).

No fleet's pool is called so, and a fleet sees nothing of such pools: neither their nodes nor their jobs.
"""


class NodeState(StrEnum):
    """`ready` may get jobs; `quarantined` may not until a health probe passes (or an admin releases it)."""

    READY = "ready"
    QUARANTINED = "quarantined"


class Node(Spec):
    """One machine with devices, as its worker registered it. `name` is unique in the whole fleet.

    `pool` is the name of the cluster that it belongs to. `slots` are the devices that the worker found,
    `topology` the place in the network ("rack1/switch2"), by which ranks are ordered. `address` is where the
    other nodes reach it. `environment_key` is the fingerprint's without the hostname: nodes of one gang agree in it.
    `lost_after_s`: silent for so long it is lost; its worker's settings say that, and how often it is heard of.
    `session` is the worker process that registered last; an older one is evicted. It is empty once that worker has
    ended in order: the node gets nothing until one registers again. `heartbeat_at` is
    renewed only by a task that the worker consumed or by the renewal of a lease. `failures` counts jobs in a row that
    failed by the node's fault. `world_id` names the warm ranks that it holds; empty without. `commands` are the
    programs that its operator allows to be run there.
    """

    name: Name
    pool: Name
    address: str
    topology: str = ""
    device: Device
    slots: int
    nics: int = 1
    cores: int = 0
    memory_bytes: int = 0
    fingerprint_key: str = ""
    environment_key: str = ""
    session: str
    state: NodeState = NodeState.READY
    reason: str = ""
    failures: int = 0
    world_id: str = ""
    lost_after_s: Annotated[float, Field(gt=0)] = 60.0
    commands: tuple[CommandOffer, ...] = ()
    registered_at: datetime
    heartbeat_at: datetime


class JobPurpose(StrEnum):
    """Why a probe runs: for a tuning's profile, as one of its trials, to judge a node, or to check an old winner."""

    PROFILE = "profile"
    TRIAL = "trial"
    HEALTH = "health"
    REGRESSION = "regression"


class JobState(StrEnum):
    """queued -> granted (its nodes are leased) -> reported (every member has answered) -> ended.

    A job that is cancelled while queued has ended; while granted, its members are told to stop and report.
    """

    QUEUED = "queued"
    GRANTED = "granted"
    REPORTED = "reported"
    ENDED = "ended"


class MemberState(StrEnum):
    """leased -> running -> reported | lost (its lease ran out)."""

    LEASED = "leased"
    RUNNING = "running"
    REPORTED = "reported"
    LOST = "lost"


class RankReport(Spec):
    """How one rank of a job ended: a report of the probe module, or a failure.

    `stopped`: a rank hung because its process was stopped (SIGSTOP); among silent ranks it is the cause.
    """

    rank: int
    report: dict[str, Any] | None = None
    failure: FailureKind | None = None
    message: str = ""
    log_path: str | None = None
    log_tail: str = ""
    stopped: bool = False


class MemberReport(Spec):
    """What one node reports of its share of a job.

    `kept_warm` says that its ranks live on as the job's world. `setup_s` is the time until its ranks were ready,
    `wall_s` until it reported. A node that could not even start ranks reports no ranks and a `failure`. `ordered`: the
    failure is why it was told to stop (see MemberOrder), not one of its own.
    """

    ranks: tuple[RankReport, ...] = ()
    failure: FailureKind | None = None
    message: str = ""
    ordered: bool = False
    log_tail: str = ""
    kept_warm: bool = False
    setup_s: Seconds = 0.0
    wall_s: Seconds = 0.0
    log_dir: str = ""


class JobMember(Spec):
    """One node's part in a job. `index` orders the gang: its ranks are index * gpus_per_node and on."""

    node: Name
    index: int
    address: str
    state: MemberState = MemberState.LEASED
    expires_at: datetime
    report: MemberReport | None = None


class Job(Spec):
    """One probe on a gang of nodes. A retry is another job with `attempt` + 1 and the same `trial_id`.

    `cluster` describes the gang (`nodes` of them, all at once). `token` is the fencing token: it
    grows with every grant in the database, and nothing that carries another one is written. `world_id` names the
    ranks to form (or, where `warm`, to use again). `only_node` binds a health probe to its node; `avoid` are nodes that
    an earlier attempt failed on.
    """

    id: str
    purpose: JobPurpose
    pool: Name
    cluster: ClusterSpec
    request: ProbeRequest
    tuning_id: str | None = None
    trial_id: str | None = None
    principal: str = ""
    environment_key: str = ""
    only_node: str = ""
    avoid: tuple[str, ...] = ()
    attempt: Count = 1
    deadline_s: Annotated[float, Field(gt=0, le=LONGEST_S)]
    state: JobState = JobState.QUEUED
    cancelled: bool = False
    token: int = 0
    world_id: str = ""
    warm: bool = False
    endpoint: str = ""  # host:port of the store that rank 0 hosts, once it does
    progress: ProbeProgress | None = None
    members: tuple[JobMember, ...] = ()
    failure: FailureKind | None = None
    message: str = ""
    created_at: datetime
    granted_at: datetime | None = None
    ended_at: datetime | None = None


class MemberOrder(Spec):
    """What a member is told when it renews its lease: go on, or stop and why (`failure` says what that is).

    `measured`: another node of the gang knows the speed of the program that they run together, and has ended its part.
    """

    go_on: bool
    measured: bool = False
    failure: FailureKind | None = None
    reason: str = ""
    endpoint: str = ""


class EventKind(StrEnum):
    """What a tuning's log of events holds."""

    STATE = "state"
    TRIAL_STARTED = "trial_started"
    TRIAL_ENDED = "trial_ended"
    PROBE_ENDED = "probe_ended"
    JOB_GRANTED = "job_granted"
    JOB_RETRIED = "job_retried"


class TuningEvent(Spec):
    """One line of a tuning's log; `id` grows over all tunings."""

    id: int
    tuning_id: str
    kind: EventKind
    at: datetime
    data: dict[str, Any]


class Role(StrEnum):
    """What an API key may do: each role may do what those before it may."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether this role may do what `other` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class ApiKey(Spec):
    """An API key without its secret, which is stored as a hash only. `name` is the principal."""

    id: str
    name: Name
    role: Role
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NodeIncident(Spec):
    """Something that a node did: a failure by its fault, a slow health probe, ranks that straggle."""

    node: Name
    at: datetime
    kind: str
    message: str
    job_id: str = ""
