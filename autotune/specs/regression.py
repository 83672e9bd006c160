"""What a regression check is made of: its measurements, windows and result, and the incidents that follow from it."""

from __future__ import annotations

import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from autotune.specs.base import MOST_PER_S, Name, Spec
from autotune.specs.knowledge import BestEntry
from autotune.specs.measurement import FailureKind, Seconds

Speed = Annotated[float, Field(gt=0, le=MOST_PER_S)]


CHECK_JOB = "check-"
"""What the ids of a check's jobs begin with; its id and the measurement's number follow."""


class CheckRole(StrEnum):
    """What one measurement of a check is of: the plan's step, or a control that no plan has an influence on."""

    WINNER = "winner"  # tokens/s/GPU of a step
    LINK_INSIDE = "link_inside"  # bus bandwidth of an all-reduce inside each node
    LINK_ACROSS = "link_across"  # the same over one rank of each node
    KERNELS = "kernels"  # 1 / seconds that one layer computes, forward and backward


class VerdictKind(StrEnum):
    """What a check found of a plan's speed."""

    BASELINE = "baseline"  # there was nothing to compare with; from now on there is
    UNCHANGED = "unchanged"
    BETTER = "better"
    WORSE = "worse"
    CANNOT_TELL = "cannot_tell"


class CauseKind(StrEnum):
    """Why a plan became slower."""

    LINK_INSIDE = "link_inside"
    LINK_ACROSS = "link_across"
    KERNELS = "kernels"
    MEMORY = "memory"
    RANK = "rank"
    NODE = "node"
    SOFTWARE = "software"
    PLAN = "plan"
    CANNOT_TELL = "cannot_tell"


class CheckState(StrEnum):
    """running -> done | abandoned (it was interrupted for so long that its windows cannot be compared)."""

    RUNNING = "running"
    DONE = "done"
    ABANDONED = "abandoned"


class RankTrace(Spec):
    """One rank's computing time in traced steps, and where it ran."""

    rank: int
    hostname: str
    calc_s: Seconds
    peak_bytes: int = 0


class StepTrace(Spec):
    """Where the time of a traced step went: means over ranks, and each rank's computing."""

    step_s: Seconds
    calc_s: Seconds
    comm_s: Seconds
    exposed_s: Seconds
    ranks: tuple[RankTrace, ...] = ()


class CheckMeasurement(Spec):
    """One probe of a check. `speed` is in the role's unit; None after a failure. `number` counts from 0."""

    number: int
    window: int
    role: CheckRole
    at: datetime
    gpu_s: Seconds
    speed: Speed | None = None
    trace: StepTrace | None = None
    peak_bytes: int | None = None
    failure: FailureKind | None = None
    message: str = ""


class CheckWindow(Spec):
    """One window of a check: repeated speeds by role, and the traces' medians."""

    at: datetime
    speeds: dict[CheckRole, tuple[Speed, ...]]
    trace: StepTrace | None = None
    peak_bytes: int | None = None


class ControlChange(Spec):
    """A control now against the baseline: relative change of its speed, with interval, and whether it is slower.

    `step_effect` is by how much (ln) the step becomes slower from it: at least, at most at the measured change, and at
    most at the far end of the interval. `known` is False without a baseline.
    """

    role: CheckRole
    effect: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    slower: bool = False
    known: bool = True
    step_effect: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Attribution(Spec):
    """Why a plan is slower. `subject` names the link, rank, node, or what of the software; `text` is for people."""

    kind: CauseKind
    subject: str = ""
    text: str
    controls: tuple[ControlChange, ...] = ()
    changed: tuple[str, ...] = ()


class CheckResult(Spec):
    """The end of a check.

    `effect` is the relative change of throughput, `interval` holds it with the probability that docs/regression.md
    states; `within`, `between` and `visits` are the noise (standard deviations of ln). `retune_reason` says why a
    challenger may now win; empty: none may.
    """

    verdict: VerdictKind
    effect: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    windows: tuple[CheckWindow, ...] = ()
    baseline_windows: int = 0
    baseline_since: datetime | None = None
    within: float = 0.0
    between: float = 0.0
    visits: float = 0.0
    tokens_per_s_per_gpu: float | None = None
    peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    cause: Attribution | None = None
    message: str = ""
    retune_reason: str = ""


class Check(Spec):
    """One check of one best-known entry. `series` names its plan for its question, whatever the environment.

    `pool` is the fleet's pool that measures; empty for a machine of its own. `owner` is the process that measures.
    `gpu_s` is what was spent, `budget_gpu_s` what was left for it and for a tuning after it.
    """

    id: str
    entry_id: int
    series: str
    cluster_key: str
    pool: str = ""
    fingerprint_key: str = ""
    environment_key: str = ""
    owner: str = ""
    state: CheckState = CheckState.RUNNING
    budget_gpu_s: float | None = None
    gpu_s: float = 0.0
    started_at: datetime
    ended_at: datetime | None = None
    result: CheckResult | None = None
    tuning_id: str | None = None


def series_of(entry: BestEntry) -> str:
    """Names a plan for a question: its checks are comparable."""
    return series_of_keys(entry.model.key, entry.cluster.key, entry.workload.key, entry.plan.key)


def series_of_keys(model: str, cluster: str, workload: str, plan: str) -> str:
    """The same from the keys."""
    return hashlib.sha256(f"{model}|{cluster}|{workload}|{plan}".encode()).hexdigest()[:16]


class CheckCandidate(Spec):
    """A current entry that may be checked, with what the choice depends on.

    `tuned` counts the tunings of its question. `check_gpu_s` is what its last check cost, None before the first.
    """

    entry_id: int
    series: str
    model_name: str
    cluster_name: str
    fingerprint_key: str
    environment_key: str
    devices: int
    step_s: Seconds
    measured_at: datetime
    tuned: int = 0
    checked_at: datetime | None = None
    check_gpu_s: float | None = None
    open_incident: bool = False


class Incident(Spec):
    """Something that made plans slower, told once when it begins and once when all of them have recovered.

    `key` is the cause's: of one cluster for what concerns all its plans (a link, a node), else the plan's. `series` are
    the plans that it made slower and that have not recovered, `entries` all that it ever did.
    """

    id: int = 0
    key: str
    kind: CauseKind
    subject: str = ""
    message: str
    check_id: str
    opened_at: datetime
    recovered_at: datetime | None = None
    series: tuple[str, ...] = ()
    entries: tuple[int, ...] = ()


class AlertEvent(StrEnum):
    """What is told of an incident."""

    OPENED = "opened"
    RECOVERED = "recovered"


class AlertChannel(StrEnum):
    """Where it is told."""

    WEBHOOK = "webhook"
    EMAIL = "email"


class Alert(Spec):
    """One message to one channel. `key` is the same however often it is sent: receivers recognise repeats by it."""

    key: Name
    incident: Incident
    event: AlertEvent
    channel: AlertChannel
    at: datetime
    attempts: int = 0
    due_at: datetime
    sent_at: datetime | None = None
    error: str = ""
