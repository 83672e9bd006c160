"""Scaling: how much of its speed a GPU keeps on larger clusters, and beyond which number more of them do not pay.

Strong scaling: the model, the batch and the sequence stay as they are. All figures are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.explain.losses import PART_WORDS, largest_parts
from autotune.explain.whatif import Setting
from autotune.search.physics import PARAMETERS, Floats, behaviour, prior_covariance
from autotune.specs import ClusterSpec, Plan

MAX_FACTOR = 64
"""Clusters up to so many times the given one are estimated, while more GPUs pay."""

MIN_MARGINAL = 0.5
"""More GPUs pay while the added ones contribute at least this share of what a GPU of the smallest cluster does."""

HALF_WIDTH_SD = 1.645
"""A 90 % interval of a normal distribution."""

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
    first_slopes: Floats = np.zeros(len(PARAMETERS))
    for cluster in _sizes(setting.cluster):
        beyond = cluster.devices > setting.cluster.devices
        if beyond and _stop(points) < len(points):
            break
        best = _best(replace(setting, cluster=cluster))
        if best is None:
            left_out.append(cluster.devices)
            if beyond and points:
                break
            continue
        point, slopes, covariance = best
        if not points:
            first_slopes = slopes
        points.append(_placed(point, points, slopes - first_slopes, covariance))
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


def _best(setting: Setting) -> tuple[ScalePoint, Floats, Floats] | None:
    """The best plan of one cluster, placed nowhere yet; the slopes of its ln(step time) by physical parameter, and how
    uncertain these are."""
    table = setting.plans()
    if not len(table):
        return None
    estimates = setting.estimates(table)
    if not estimates.fits.any():
        return None
    row = int(np.argmin(np.where(estimates.fits, estimates.step_time_s, np.inf)))
    slopes = behaviour(estimates, np.zeros(len(PARAMETERS)), np.array([row])).slopes[0]
    found = estimates.row(row)
    limit = next((f"{part} {share:.0%}" for part, share in largest_parts(found) if part != PART_WORDS["compute"]), "")
    point = ScalePoint(
        devices=setting.cluster.devices,
        nodes=setting.cluster.nodes,
        plan=table.plan(row),
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        efficiency=1.0,
        interval=(1.0, 1.0),
        marginal=None,
        limit=limit,
    )
    return point, slopes, prior_covariance(estimates)


def _placed(point: ScalePoint, before: Sequence[ScalePoint], slopes: Floats, covariance: Floats) -> ScalePoint:
    """The point with its figures relative to the first and the last one.

    Args:
        point: to be placed.
        before: the smaller ones; the first has E = 1.
        slopes: [parameters] by which the parameters move ln(step time) more here than at the first point: what moves
            both alike does not move E.
        covariance: [parameters, parameters] of the parameters.
    """
    if not before:
        return point
    first, last = before[0], before[-1]
    efficiency = point.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu
    sd = float(np.sqrt(slopes @ covariance @ slopes))
    added = point.devices * point.tokens_per_s_per_gpu - last.devices * last.tokens_per_s_per_gpu
    spread = float(np.exp(HALF_WIDTH_SD * sd))
    return replace(
        point,
        efficiency=efficiency,
        interval=(efficiency / spread, efficiency * spread),
        marginal=added / (point.devices - last.devices) / first.tokens_per_s_per_gpu,
    )
