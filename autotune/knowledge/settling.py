"""Settling: which probes and trials would turn an estimate into a measurement, and what they would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.search.profiling import missing_probes, needed_probes
from autotune.search.space import legal_plans, runtime_of
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    CollectiveRequest,
    LayerReading,
    LayerRequest,
    ModelSpec,
    Plan,
    ProbeRequest,
    Workload,
)

TRIALS = 3
"""Trials that settle a question as a rule: the carried plan's, and those of what comes close to it."""

SETTLE_GAIN = 0.02
"""A question is settled when less than this is expected of further trials."""

START_S = 10.0
"""Seconds until ranks are ready, once. An assumption: it is measured with every probe and shown with it."""

PROBE_S = 2.0
"""Seconds of a collective or layer probe on warm ranks. An assumption like START_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What would settle a question.

    Args:
        probes: that the profile still lacks.
        plans: to try first.
        trials: how many trials are taken to be enough.
        gpu_s: estimated GPU-seconds of it all.
    """

    probes: Sequence[ProbeRequest]
    plans: Sequence[Plan]
    trials: int
    gpu_s: float

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "probes": [_described(probe) for probe in self.probes],
            "plans": [plan.to_data() for plan in self.plans],
            "trials": self.trials,
            "gpu_s": self.gpu_s,
            "source": "estimate",
        }


def settlement(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    plan: Plan,
    trial_gpu_s: float,
    collective_readings: Sequence[CollectiveReading] = (),
    layer_readings: Sequence[LayerReading] = (),
) -> Settlement:
    """The probes that a tuning would run first, and trials of the plan that is expected to win.

    Args:
        model: asked for.
        cluster: asked for.
        workload: asked for.
        plan: expected to be the best.
        trial_gpu_s: expected cost of one trial of it.
        collective_readings: what is known of the cluster already.
        layer_readings: the same.
    """
    table = legal_plans(model, cluster, workload, runtime=runtime_of(workload))
    needed = needed_probes(model, cluster, workload, table) if len(table) else ()
    missing = missing_probes(needed, collective_readings, layer_readings, ())
    probes_s = START_S + PROBE_S * len(missing)
    return Settlement(
        probes=missing,
        plans=[plan],
        trials=TRIALS,
        gpu_s=cluster.devices * probes_s + TRIALS * trial_gpu_s,
    )


def _described(probe: ProbeRequest) -> dict[str, Any]:
    """A probe in the words that `autotune probe` takes."""
    if isinstance(probe, CollectiveRequest):
        return {"probe": "collective", "op": probe.op.value, "group_size": probe.group_size, "stride": probe.stride}
    if isinstance(probe, LayerRequest):
        return {"probe": "layer", "part": probe.part.value, "tp": probe.tp, "micro_batch": probe.micro_batch}
    return {"probe": probe.kind}
