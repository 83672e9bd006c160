"""The self-check: every kind of probe on this machine, and the estimates beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.calibrate import fit_profile
from autotune.cost.estimate import estimate
from autotune.cost.table import PlanTable
from autotune.errors import MissingMeasurementError
from autotune.ports.store import OnProgress, Prober
from autotune.search.profiling import needed_probes
from autotune.search.space import Runtime, legal_plans
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    Estimate,
    Fingerprint,
    LayerReading,
    ModelSpec,
    Plan,
    ProbeOutcome,
    ProbeRequest,
    Profile,
    StepReading,
    StepRequest,
    Workload,
)

PROBE_DEADLINE_S = 120.0
MAX_STEPS = 6

OnProbe = Callable[[ProbeRequest], OnProgress]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """One probe: what was asked and what came of it."""

    request: ProbeRequest
    outcome: ProbeOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """A step probe beside its estimates: from the catalog (None where it has no peak), and from this run's profile."""

    plan: Plan
    outcome: ProbeOutcome
    catalog: Estimate | None
    calibrated: Estimate | None

    @property
    def reading(self) -> StepReading | None:
        """What was measured; None after a failure."""
        return next((item for item in self.outcome.readings if isinstance(item, StepReading)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """All of it. `ok` when every probe gave readings."""

    fingerprint: Fingerprint
    profile: Profile
    probes: Sequence[ProbeRun]
    steps: Sequence[StepCheck]

    @property
    def ok(self) -> bool:
        """Whether every probe gave readings."""
        outcomes = [check.outcome for check in self.probes] + [check.outcome for check in self.steps]
        return all(outcome.failure is None for outcome in outcomes)


def self_check(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, prober: Prober, on_probe: OnProbe
) -> SelfCheck:
    """Runs the probes that a tuning would, then step probes of plans that differ in what the estimate must get right.

    Raises:
        ProberError: there is nothing to measure with.
        InputError: no plan is legal.
    """
    fingerprint = prober.fingerprint()
    table = _plans(model, cluster, workload)
    probes = [_run(prober, request, on_probe) for request in needed_probes(model, cluster, workload, table)]
    profile = _profile(model, cluster, workload, fingerprint, probes)
    steps = []
    for plan in (table.plan(i) for i in range(len(table))):
        request = StepRequest(model=model, workload=workload, plan=plan)
        check = _run(prober, request, on_probe)
        steps.append(
            StepCheck(
                plan=plan,
                outcome=check.outcome,
                catalog=_estimate(model, cluster, workload, plan, None),
                calibrated=_estimate(model, cluster, workload, plan, profile),
            )
        )
    return SelfCheck(fingerprint=fingerprint, profile=profile, probes=probes, steps=steps)


def _run(prober: Prober, request: ProbeRequest, on_probe: OnProbe) -> ProbeRun:
    outcome = prober.run(request, deadline_s=PROBE_DEADLINE_S, on_progress=on_probe(request))
    return ProbeRun(request=request, outcome=outcome)


def _plans(model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> PlanTable:
    """Plans of this machine, few and different: each (tp, pp, dp), then micro-batches and recompute modes."""
    legal = legal_plans(model, cluster, workload, runtime=Runtime.TORCH)
    return legal.take(np.array(list(_spread(legal))[:MAX_STEPS], dtype=np.intp))


def _spread(legal: PlanTable) -> Iterator[int]:
    """Rows that show something new: a (tp, pp), a micro-batch or a recompute mode not seen before."""
    seen: set[tuple[str, object]] = set()
    for i in range(len(legal)):
        plan = legal.plan(i)
        shows = {("degrees", (plan.tp, plan.pp)), ("micro-batch", plan.micro_batch), ("recompute", plan.recompute)}
        if shows - seen:
            seen |= shows
            yield i


def _profile(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, fingerprint: Fingerprint, probes: Sequence[ProbeRun]
) -> Profile:
    readings = [reading for check in probes for reading in check.outcome.readings]
    collectives = [reading for reading in readings if isinstance(reading, CollectiveReading)]
    layers = [(model, workload, reading) for reading in readings if isinstance(reading, LayerReading)]
    return fit_profile(cluster, fingerprint.key, collectives, layers, [])


def _estimate(
    model: ModelSpec, cluster: ClusterSpec, workload: Workload, plan: Plan, profile: Profile | None
) -> Estimate | None:
    try:
        return estimate(model, cluster, workload, plan, profile)
    except MissingMeasurementError:
        return None
