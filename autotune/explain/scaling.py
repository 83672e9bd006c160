"""Scaling: how much of its speed a GPU keeps on larger clusters, and beyond which number more of them do not pay.

Strong scaling: the model, the batch and the sequence stay as they are. All figures are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.cost.estimate import NINETY_PERCENT
from autotune.cost.table import Floats
from autotune.explain.losses import PART_WORDS, largest_parts
from autotune.explain.whatif import Setting
from autotune.search.physics import PARAMETERS, behaviour, prior_covariance
from autotune.specs import ClusterSpec, Plan

MAX_FACTOR = 64
"""Clusters up to so many times the given one are estimated, while more GPUs pay."""

MIN_MARGINAL = 0.5
"""More GPUs pay while the added ones contribute at least this share of what a GPU of the smallest cluster does."""

CRITERION = (
    f"more GPUs pay while those added by a step of the table contribute at least {MIN_MARGINAL:.0%} of what a GPU "
    "of the smallest cluster does"
)
INTERVAL = "90 %, from the uncertainty of the physical parameters before any trial (search.physics)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """The best plan on one number of devices. Estimates.

    Args:
        devices: N.
        nodes: that hold them.
        plan: the fastest that fits.
        tokens_per_s_per_gpu: of it.
        efficiency: E(N) = throughput at N / (N * throughput of a GPU at the smallest N that fits).
        interval: around E(N), 90 %.
        marginal: what each GPU added since the point before contributes, as a share of a GPU's throughput at the
            smallest N; None at the first.
        limit: what takes most of the step beside computing, and its share.
    """

    devices: int
    nodes: int
    plan: Plan
    tokens_per_s_per_gpu: float
    efficiency: float
    interval: tuple[float, float]
    marginal: float | None
    limit: str

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "devices": self.devices,
            "nodes": self.nodes,
            "plan": self.plan.to_data(),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "efficiency": self.efficiency,
            "interval": list(self.interval),
            "marginal": self.marginal,
            "limit": self.limit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurve:
    """The points by number of devices; numbers on which nothing is legal or fits; the last N that pays.

    `pays_up_to` is None where nothing fits at all; `at_the_end` says that it is the largest N that was estimated.
    """

    points: Sequence[ScalePoint]
    left_out: Sequence[int]
    pays_up_to: int | None
    at_the_end: bool

    @property
    def text(self) -> str:
        """What follows from the curve, in one sentence."""
        if self.pays_up_to is None:
            return "no plan fits on any number of devices that was estimated"
        if self.at_the_end:
            return f"more GPUs pay up to {self.pays_up_to}, the most that was estimated; {CRITERION}"
        return f"beyond {self.pays_up_to} GPUs more of them do not pay; {CRITERION}"

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "points": [point.to_data() for point in self.points],
            "left_out": list(self.left_out),
            "pays_up_to": self.pays_up_to,
            "at_the_end": self.at_the_end,
            "criterion": CRITERION,
            "interval": INTERVAL,
            "source": "estimate",
        }


def scaling_curve(setting: Setting) -> ScalingCurve:
    """Estimates the best plan on 1, 2, 4, ... devices of a node and then 2, 4, ... nodes.

    It ends beyond the given cluster, where more GPUs no longer pay, no plan is legal, or at MAX_FACTOR times it.

    Raises:
        MissingMeasurementError: a speed that is needed is neither measured nor in the catalog.
    """
    points: list[ScalePoint] = []
    left_out: list[int] = []
    first_slopes: Floats = np.zeros(0)
    for cluster in _sizes(setting.cluster):
        beyond = cluster.devices > setting.cluster.devices
        if beyond and _stop(points) < len(points):
            break
        here = replace(setting, cluster=cluster)
        table = here.plans()
        estimates = here.estimates(table) if len(table) else None
        row = None if estimates is None else estimates.best_row
        if estimates is None or row is None:
            left_out.append(cluster.devices)
            if beyond and points:
                break
            continue
        found = estimates.row(row)
        slopes = behaviour(estimates, np.zeros(len(PARAMETERS)), np.array([row])).slopes[0]
        if not points:
            first_slopes = slopes
        # What moves the first point and this one alike does not move E.
        more = slopes - first_slopes
        spread = float(np.exp(NINETY_PERCENT * np.sqrt(more @ prior_covariance(estimates) @ more)))
        speed, marginal = found.tokens_per_s_per_gpu, None
        first = points[0].tokens_per_s_per_gpu if points else speed
        if points:
            added = cluster.devices * speed - points[-1].devices * points[-1].tokens_per_s_per_gpu
            marginal = added / (cluster.devices - points[-1].devices) / first
        limits = (f"{part} {share:.0%}" for part, share in largest_parts(found) if part != PART_WORDS["compute"])
        points.append(
            ScalePoint(
                devices=cluster.devices,
                nodes=cluster.nodes,
                plan=table.plan(row),
                tokens_per_s_per_gpu=speed,
                efficiency=speed / first,
                interval=(speed / first / spread, speed / first * spread),
                marginal=marginal,
                limit=next(limits, ""),
            )
        )
    stop = _stop(points)
    return ScalingCurve(
        points=points,
        left_out=left_out,
        pays_up_to=points[stop - 1].devices if points else None,
        at_the_end=stop == len(points),
    )


def _stop(points: Sequence[ScalePoint]) -> int:
    """The first point whose added GPUs do not pay; the number of points if there is none."""
    pays = [point.marginal is None or point.marginal >= MIN_MARGINAL for point in points]
    return pays.index(False) if False in pays else len(points)


def _sizes(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The given cluster's smaller and larger kin; larger than a node only where there is a link between nodes."""
    devices = 1
    while devices < cluster.gpus_per_node:
        yield cluster.model_copy(update={"nodes": 1, "gpus_per_node": devices})
        devices *= 2
    most = MAX_FACTOR * cluster.nodes if cluster.inter is not None else 1
    powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
    for nodes in sorted(powers | {cluster.nodes}):
        yield cluster.model_copy(update={"nodes": nodes})
