"""Tuning and Trial: a request, its budget and state; one plan that was really run for it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from autotune.specs.base import MOST_GPU_S, Seed, Spec
from autotune.specs.cluster import ClusterSpec
from autotune.specs.estimate import Estimate
from autotune.specs.measurement import Failure, StepReading
from autotune.specs.model import Count, ModelSpec
from autotune.specs.plan import Module, Plan, Recompute, Schedule
from autotune.specs.workload import Workload

MAX_TRIALS = 100_000
"""As many plans as a search weighs."""

GpuSeconds = Annotated[float, Field(gt=0, le=MOST_GPU_S)]


class TuningState(StrEnum):
    """queued -> profiling -> searching -> done; failed and cancelled are ends too."""

    QUEUED = "queued"
    PROFILING = "profiling"
    SEARCHING = "searching"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in {TuningState.DONE, TuningState.FAILED, TuningState.CANCELLED}


class TrialState(StrEnum):
    """running -> complete | pruned | failed."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


class SamplerName(StrEnum):
    """Ways to choose the next plan. `plan` is ours; the others are there to compare with (search.sampler)."""

    PLAN = "plan"
    TPE = "tpe"
    GP = "gp"
    RANDOM = "random"
    GRID = "grid"
    RULE = "rule"


class Space(Spec):
    """Which plans a tuning may consider: the allowed values of each field. None means every legal value.

    Two fields are wider than that: `op` is tried only where `recompute` names it, and selective recomputation of other
    modules than the attention core only where `recompute_modules` names them.
    """

    tp: tuple[Count, ...] | None = None
    pp: tuple[Count, ...] | None = None
    cp: tuple[Count, ...] | None = None
    ep: tuple[Count, ...] | None = None
    vpp: tuple[Count, ...] | None = None
    micro_batch: tuple[Count, ...] | None = None
    zero_stage: tuple[Annotated[int, Field(ge=0, le=3)], ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    schedule: tuple[Schedule, ...] | None = None
    recompute_modules: tuple[tuple[Module, ...], ...] | None = None


class Budget(Spec):
    """When to stop: whichever comes first. `min_gain` is the expected relative gain of going on (0.01: one percent)."""

    gpu_s: GpuSeconds | None = None
    max_trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] | None = None
    min_gain: Annotated[float, Field(ge=0, le=100)] = 0.01


class Tuning(Spec):
    """A request and where it stands.

    `pool` is the fleet's pool whose nodes measure for it; empty for a tuning that one process runs on its own
    machine. `principal` is who asked for it. `history` is the source of imported runs that it learns from.
    """

    id: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    space: Space = Space()
    budget: Budget = Budget()
    seed: Seed = 0
    cold: bool = False
    sampler: SamplerName = SamplerName.PLAN
    history: str = ""
    pool: str = ""
    principal: str = ""
    state: TuningState = TuningState.QUEUED
    message: str = ""
    stop_reason: str = ""
    owner: str = ""
    gpu_s_spent: float = 0.0
    created_at: datetime
    updated_at: datetime


class Trial(Spec):
    """One plan that was really run. `number` counts from 0 within its tuning."""

    id: str
    tuning_id: str
    number: int
    plan: Plan
    state: TrialState
    estimate: Estimate | None = None
    reading: StepReading | None = None
    failure: Failure | None = None
    fingerprint_key: str = ""
    gpu_s: float = 0.0
    setup_s: float = 0.0
    owner: str = ""
    started_at: datetime
    finished_at: datetime | None = None
