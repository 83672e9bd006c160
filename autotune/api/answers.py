"""The shapes of answers, for the OpenAPI document; and the response that carries them.

Handlers answer with plain data that the service's reports made, so that the API and `--json` of the command line say
the same. Tests compare every answer with its shape.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal

from starlette.responses import JSONResponse

from autotune.explain.findings import Severity
from autotune.explain.limits import LimitKind
from autotune.explain.losses import Source
from autotune.specs import (
    ApiKey,
    ClusterSpec,
    Estimate,
    Failure,
    Fingerprint,
    Job,
    ModelSpec,
    Node,
    NodeIncident,
    NodeState,
    Plan,
    SamplerName,
    Spec,
    TrialState,
    Tuning,
    TuningState,
    Workload,
)

# An explanation: limits, losses and what-ifs (autotune.explain.explanation).


class ExplainedLimit(Spec):
    """What bounds the best plan, and the share of its step (or of its memory) that it takes."""

    kind: LimitKind
    share: float
    source: Source
    text: str


class ExplainedPart(Spec):
    """A part of a step, in another plan and in the best one."""

    part: str
    seconds: float
    instead_of_s: float


class ExplainedLoss(Spec):
    """What another plan loses against the best one, and in which parts of the step; `slower` is a share of the step."""

    plan: Plan
    best: Plan
    change: str
    slower: float
    parts: list[ExplainedPart]
    source: Source
    refusal: str | None
    text: str


class ExplainedChange(Spec):
    """What other hardware, or another workload, would gain, and the plan that would be the best then."""

    change: str
    gain: float
    plan: Plan
    source: Literal["estimate"]
    text: str


class Explanation(Spec):
    """Limits, largest first; losses, measured ones first; what-ifs, most helpful first. Each says what it rests on."""

    limits: list[ExplainedLimit]
    losses: list[ExplainedLoss]
    what_ifs: list[ExplainedChange]


class Json(JSONResponse):
    """JSON in ASCII; numbers that are not finite are a bug and raise ValueError."""

    def render(self, content: Any) -> bytes:
        """Content as bytes."""
        return self.of(content)

    @staticmethod
    def of(content: Any) -> bytes:
        """Content as bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Miss(Spec):
    """A plan that nearly fits in memory: bytes of a device that it needs, and what would make it fit. Estimates."""

    plan: str
    needs_bytes: float
    has_bytes: int
    missing_bytes: float
    would_fit_if: str


class Problem(Spec):
    """An error (RFC 9457). `what`, `value` and `allowed` say which value cannot be used and what would be accepted."""

    type: str
    title: str
    status: int
    detail: str
    what: str | None = None
    value: str | int | float | bool | None = None
    allowed: str | None = None
    misses: list[Miss] | None = None


class TuningRow(Spec):
    """A tuning in a list: `plan` is the best so far, `trials` how many were started, `place` its place while queued."""

    tuning: str
    created_at: datetime
    model: str
    cluster: str
    state: TuningState
    message: str
    place: int | None
    trials: int
    gpu_s_spent: float
    plan: Plan | None
    tokens_per_s_per_gpu: float | None
    pool: str
    principal: str


class TuningPage(Spec):
    """Tunings, newest first."""

    tunings: list[TuningRow]
    next: str | None


class Submitted(Spec):
    """What became of a request. `created` is false where it joined a tuning that asks for the same.

    `place` counts from 1 among what the same principal has queued in that pool; null where the tuning is not queued.
    """

    tuning: str
    created: bool
    state: TuningState
    message: str
    place: int | None
    request: Tuning


class BestPlan(Spec):
    """The winner: medians over its repeats, the worst peak of memory."""

    plan: Plan
    tokens_per_s_per_gpu: float
    t_comm_s: float | None
    t_comm_exposed_s: float | None
    t_calc_s: float | None
    mu: float | None
    mfu: float | None
    step_time_s: float | None
    peak_memory_bytes: float
    memory_source: str
    repeats: int
    interval: list[float]
    too_close_to_call: list[Plan]
    preferred_because: str | None
    why: list[str]


class TrialRow(Spec):
    """One plan that was really run: measured beside estimated."""

    number: int
    plan: Plan
    state: TrialState
    failure: Failure | None
    tokens_per_s_per_gpu: float | None
    interval: list[float] | None
    step_time_s: float | None
    t_calc_s: float | None
    t_comm_s: float | None
    t_comm_exposed_s: float | None
    mu: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    estimate: Estimate | None
    gpu_s: float
    setup_s: float
    fingerprint: str


class TrialPage(Spec):
    """Trials by number."""

    trials: list[TrialRow]
    next: str | None


class FoundInPlan(Spec):
    """What is wrong or doubtful about the best plan, with figures and a remedy; an estimate (`autotune check`)."""

    rule: str
    severity: Severity
    text: str
    remedy: str
    figures: dict[str, float]
    where: str
    source: Literal["estimate"]


class InFramework(Spec):
    """Whether a framework runs the best plan, else why not; and the fastest plan that it runs, if any was measured."""

    target: str
    reason: str | None
    plan: Plan | None
    tokens_per_s_per_gpu: float | None


class TuningAnswer(Spec):
    """A tuning, its trials, its best plan and the explanation, as far as it has come.

    `place` counts from 1 among what the same principal has queued in that pool; null where the tuning is not queued.
    """

    tuning: str
    state: TuningState
    stop_reason: str
    sampler: SamplerName
    best: BestPlan | None
    explanation: Explanation | None
    trials: list[TrialRow]
    gpu_s_spent: float
    frameworks: list[InFramework]
    findings: list[FoundInPlan]
    place: int | None
    request: Tuning


class RunnerUp(Spec):
    """The second fastest plan."""

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: list[float]
    repeats: int


class Placeholder(Spec):
    """What only the user knows, and the words of the command that stand in for it."""

    name: str
    words: list[str]
    about: str


class Launch(Spec):
    """The plan as a launch of a training framework; `files` are the script of one node and its config, by name."""

    target: str
    version: str
    argv: list[str]
    environment: dict[str, str]
    config: str
    config_name: str
    placeholders: list[Placeholder]
    beside: dict[str, str] = {}
    notes: list[str]
    files: dict[str, str]


class BestAnswer(Spec):
    """The best measured plan, where and when it was measured, and the runner-up; so far, while its tuning runs."""

    tuning: str
    state: TuningState
    model: str
    cluster: str
    workload: Workload
    best: BestPlan
    measured_at: datetime
    fingerprint_key: str
    fingerprint: Fingerprint | None
    runner_up: RunnerUp | None
    frameworks: list[InFramework]
    findings: list[FoundInPlan]
    launch: Launch | None


class PlanEstimate(Spec):
    """A plan and what the cost model says of it. Nothing was measured.

    `alike` counts the other plans of its tp, pp, ep and etp that the estimate cannot tell from it.
    """

    plan: Plan
    estimate: Estimate
    alike: int


class PlansAnswer(Spec):
    """The best plans by estimate among all legal ones that are estimated to fit."""

    model: str
    cluster: str
    devices: int
    workload: Workload
    legal: int
    fitting: int
    seconds: float
    estimates_per_s: float
    basis: str
    frameworks: list[InFramework]
    findings: list[FoundInPlan]
    plans: list[PlanEstimate]


class ModelEntry(ModelSpec):
    """A model and where it comes from."""

    origin: Literal["preset", "stored"]


class ModelPage(Spec):
    """Presets and stored models, by name."""

    models: list[ModelEntry]
    next: str | None


class ClusterPage(Spec):
    """Stored clusters, by name."""

    clusters: list[ClusterSpec]
    next: str | None


class NodeRow(Node):
    """A node, why it may not get jobs (empty: it may), the job that holds it, how long ago it was heard of."""

    obstacle: str
    job: str | None
    heartbeat_age_s: float


class NodePage(Spec):
    """Nodes, by name."""

    nodes: list[NodeRow]
    next: str | None


class NodeAnswer(Spec):
    """One node and the newest of what it did."""

    node: NodeRow
    incidents: list[NodeIncident]


class NodeChanged(Spec):
    """The state that a node was put in."""

    node: str
    state: NodeState
    reason: str


class NodeForgotten(Spec):
    """The node that is not in the list any more."""

    node: str


class JobPage(Spec):
    """Jobs, oldest first."""

    jobs: list[Job]
    next: str | None


class KeyPage(Spec):
    """Keys without their secrets, by id."""

    keys: list[ApiKey]
    next: str | None


class KeyCreated(Spec):
    """A new key. This is the only time that `secret` is shown."""

    key: ApiKey
    secret: str


class Alive(Spec):
    """The API answers."""

    status: Literal["ok"]


class Health(Spec):
    """Whether the API can do its work: `degraded` answers and accepts, but nothing is sent to workers at the moment."""

    status: Literal["ok", "degraded"]
    database: Literal["ok"]
    broker: Literal["ok", "unreachable"]
