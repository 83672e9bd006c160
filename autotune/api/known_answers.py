"""The shapes of answers about what is known, for the OpenAPI document: best plans, and what was measured."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from autotune.api.answers import BestAnswer, Launch, Miss, RunnerUp
from autotune.specs import (
    CollectiveOp,
    CollectiveReading,
    Estimate,
    LayerPart,
    LayerReading,
    NearEntry,
    Plan,
    Spec,
    Workload,
)


class KnownRunnerUp(RunnerUp):
    """The plan that came closest, and whether the two can be told apart."""

    too_close: bool


class KnownEntry(Spec):
    """The best plan that was measured for one model, cluster and workload in one environment.

    `source` is `measured`, or the name of an import. `superseded_at` is set when a later entry took its place.
    `memory_margin` is the share of a device's memory that the worst rank left free.
    """

    id: int
    model: str
    parameters: float
    cluster: str
    devices: int
    workload: Workload
    plan: Plan
    tokens_per_s_per_gpu: float
    interval: list[float]
    repeats: int
    peak_bytes: int | None
    memory_source: str
    memory_margin: float | None
    runner_up: KnownRunnerUp | None
    too_close: bool
    reason: str
    source: str
    tuning_id: str | None
    fingerprint_key: str
    environment_key: str
    measured_at: datetime
    superseded_at: datetime | None


class NearestEntry(NearEntry):
    """An entry for another question: how far that is, and in what it differs."""

    distance: float
    differs: list[str]


class EnvironmentChange(Spec):
    """One thing in the environment that has changed since it was measured; empty where it was or is not there."""

    name: str
    then: str
    now: str


class NeededProbe(Spec):
    """A probe in the words of `autotune probe`: of a collective operation, or of a part of the model."""

    probe: str
    op: CollectiveOp | None = None
    group_size: int | None = None
    stride: int | None = None
    part: LayerPart | None = None
    tp: int | None = None
    micro_batch: int | None = None


class Settlement(Spec):
    """What would settle a question by measuring, at what cost. An estimate."""

    probes: list[NeededProbe]
    plans: list[Plan]
    trials: int
    gpu_s: float
    source: Literal["estimate"]


class KnownPage(Spec):
    """Best-known entries, newest first."""

    entries: list[KnownEntry]
    next: str | None


class CarriedPlan(Spec):
    """An estimate for what was asked from what was measured elsewhere, with its interval of 90 %."""

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: list[float]
    interval_probability: float
    p_fits: float
    estimate: Estimate | None
    trial_gpu_s: float
    source: Literal["estimate"]


class KnownAnswer(Spec):
    """What is known for a model, a cluster and a workload.

    `known` is the entry for exactly that, `stale` what of the environment changed since, `others` further entries.
    Where there is none: `nearest` others, the estimate `carried` over from them, and what would `settle` it; where no
    plan fits, `misses` are those that nearly do. `tuning` is the tuning with the fastest trial of exactly that, which
    may still run.
    """

    model: str
    cluster: str
    devices: int
    workload: Workload
    known: KnownEntry | None
    stale: list[EnvironmentChange]
    others: list[KnownEntry]
    nearest: list[NearestEntry]
    carried: CarriedPlan | None
    carried_why_not: str | None
    misses: list[Miss] | None
    settle: Settlement | None
    tuning: BestAnswer | None
    launch: Launch | None


class Measured(Spec):
    """Where a measurement is from: the probe or trial, its log, and the environment."""

    id: int
    probe_run_id: str | None
    tuning_id: str | None
    measured_at: datetime | None
    log_path: str | None
    cluster_key: str
    fingerprint_key: str
    hostname: str
    device_name: str
    device_count: int
    driver: str
    runtime: str
    collective_library: str
    torch: str


class CollectiveMeasurement(Measured, CollectiveReading):
    """One size of a sweep of a collective operation."""


class LayerMeasurement(Measured, LayerReading):
    """One part of a model at one shape."""

    model_key: str
    workload_key: str


class StepMeasurement(Measured):
    """Steps of training under a plan: means over them, of the traced one, and peaks of the worst rank."""

    trial_id: str | None
    plan_key: str | None
    tokens_per_s_per_gpu: float
    interval_low_tokens_per_s_per_gpu: float
    interval_high_tokens_per_s_per_gpu: float
    repeats: int
    step_time_s: float
    steady: bool
    traced_step_s: float | None
    t_calc_s: float | None
    t_comm_s: float | None
    t_comm_exposed_s: float | None
    mu: float | None
    mfu: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    memory_source: str
    pruned: bool
    setup_s: float


class MeasurementPage(Spec):
    """Measurements of one kind with their provenance, by id."""

    measurements: list[CollectiveMeasurement] | list[LayerMeasurement] | list[StepMeasurement]
    next: str | None
