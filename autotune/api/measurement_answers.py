"""The shapes of measurements, for the OpenAPI document: what was read, of what, and in which environment."""

from __future__ import annotations

from datetime import datetime

from autotune.specs import CollectiveReading, LayerReading, Spec


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
