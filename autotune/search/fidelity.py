"""Cheaper trials: the same plan with fewer micro-batches a step or fewer layers, and what they say of the whole step.

The measured time is carried over by the calibrated estimate: full = measured * estimate(full) / estimate(cheaper), with
the uncertainty that the parameters leave in that ratio: what both steps have alike cancels. A cheaper trial can only
rank a plan, never declare it best (search.core).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.estimate import EstimateTable, estimate_table
from autotune.cost.framework import Framework
from autotune.cost.table import PlanTable
from autotune.search.physics import PARAMETERS, behaviour
from autotune.specs import ClusterSpec, ModelSpec, Plan, Profile, Workload

OWN_SD = 0.2
"""What a carried-over time is off by beyond the parameters (ln), as benchmarks/cheaper_trials.py found on a busy
machine (BENCHMARKS.md). So much says little of a plan: a quiet cluster must be measured before cheap trials pay."""

LEAST_MICRO_BATCHES = 2
LEAST_SAVING = 0.5
"""A step that is cheaper by less than this share saves nothing worth a second set-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How much of the step a trial runs: a model of so many layers, so many sequences a step."""

    layers: int
    global_batch: int

    def model(self, full: ModelSpec) -> ModelSpec:
        """The model that the trial runs."""
        return full.model_copy(update={"layers": self.layers})

    def workload(self, full: Workload) -> Workload:
        """The workload that the trial runs."""
        return full.model_copy(update={"global_batch": self.global_batch})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """ln(full step / cheaper step) and its standard deviation."""

    log_mean: float
    log_sd: float


def fewer_micro_batches(model: ModelSpec, workload: Workload, plan: Plan) -> Fidelity | None:
    """As many micro-batches as fill the pipeline once, two at least; None where that saves too little.

    The model, the memory in flight of 1F1B and all shapes stay the same.
    """
    whole = workload.global_batch // (plan.dp * plan.micro_batch)
    few = max(plan.pp, LEAST_MICRO_BATCHES)
    if few > (1.0 - LEAST_SAVING) * whole:
        return None
    return Fidelity(layers=model.layers, global_batch=few * plan.dp * plan.micro_batch)


def fewer_layers(model: ModelSpec, workload: Workload, plan: Plan) -> Fidelity | None:
    """One layer a pipeline chunk, two without a pipeline; None where that saves too little or layers differ."""
    chunks = plan.pp * plan.vpp
    few = max(chunks, 2)
    if model.experts or model.layers % chunks or few > (1.0 - LEAST_SAVING) * model.layers:
        return None
    return Fidelity(layers=few, global_batch=workload.global_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the trials are of, what the estimates know, and what a carried-over time is off by beyond that (ln)."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile | None
    framework: Framework
    own_sd: float = OWN_SD

    def estimates(self, plan: Plan, fidelity: Fidelity) -> EstimateTable:
        """Of one plan at that fidelity."""
        model, workload = fidelity.model(self.model), fidelity.workload(self.workload)
        return estimate_table(model, self.cluster, workload, PlanTable.of([plan]), self.profile, self.framework)

    def ratio(self, plan: Plan, fidelity: Fidelity, calibration: dict[str, tuple[float, float]]) -> Ratio:
        """Carries a time of that fidelity over to the full step.

        Args:
            plan: the plan of both.
            fidelity: of the measured one.
            calibration: mean and standard deviation of each parameter (Belief.calibration).
        """
        whole = Fidelity(layers=self.model.layers, global_batch=self.workload.global_batch)
        mean = np.array([calibration[name][0] for name in PARAMETERS])
        spread = np.array([calibration[name][1] for name in PARAMETERS])
        full, part = (behaviour(self.estimates(plan, item), mean) for item in (whole, fidelity))
        apart = (full.slopes - part.slopes)[0] * spread
        return Ratio(
            log_mean=float(full.log_time[0] - part.log_time[0]),
            log_sd=float(np.hypot(np.linalg.norm(apart), self.own_sd)),
        )
