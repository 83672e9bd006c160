"""Transfers: what trials of another model, cluster size or workload showed of the estimate's errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.estimate import EstimateTable
from autotune.search.peaks import term_shares
from autotune.search.physics import PARAMETERS, behaviour
from autotune.search.posterior import TRANSFER_NOISE, TransferObservation
from autotune.specs import ClusterSpec, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a run of a plan showed: its speed (None where it failed), its peak (None where unknown), an OOM."""

    tokens_per_s_per_gpu: float | None
    peak_bytes: float | None
    out_of_memory: bool = False


def transfers_of(plans: Sequence[Plan], estimates: EstimateTable, shown: Sequence[Shown]) -> list[TransferObservation]:
    """Outcomes against their estimates, plan by plan.

    Args:
        plans: n plans.
        estimates: their estimates, in the same order.
        shown: what each of them showed.
    """
    slopes = behaviour(estimates, np.zeros(len(PARAMETERS))).slopes
    shares = term_shares(estimates)
    found = []
    for i, (plan, item) in enumerate(zip(plans, shown, strict=True)):
        peak, estimated = item.peak_bytes, float(estimates.reserved_bytes[i])
        if item.out_of_memory:
            peak = max(estimated, estimates.capacity_bytes)
        speed = item.tokens_per_s_per_gpu
        known = bool(peak) and (speed is not None or (peak or 0.0) > estimated)
        found.append(
            TransferObservation(
                plan=plan,
                log_speed=float(np.log(speed / float(estimates.tokens_per_s_per_gpu[i]))) if speed else None,
                slopes=tuple(slopes[i].tolist()),
                shares=tuple(shares[i].tolist()),
                log_peak=float(np.log((peak or 1.0) / estimated)) if known else None,
            )
        )
    return found


def alike(one: ClusterSpec, other: ClusterSpec) -> bool:
    """Whether two clusters have the same devices and links. The size of a node counts where both have several."""
    same_nodes = one.gpus_per_node == other.gpus_per_node or 1 in {one.nodes, other.nodes}
    return one.device == other.device and one.intra == other.intra and same_nodes


def merged(transfers: Iterable[TransferObservation]) -> list[TransferObservation]:
    """One transfer a plan: the mean over groups, with their spread as its noise."""
    by_plan: dict[Plan, list[TransferObservation]] = {}
    for item in transfers:
        by_plan.setdefault(item.plan, []).append(item)
    found = []
    for plan in sorted(by_plan, key=lambda plan: plan.key):
        items = by_plan[plan]
        speeds = [item.log_speed for item in items if item.log_speed is not None]
        peaks = [item.log_peak for item in items if item.log_peak is not None]
        spread = float(np.std(speeds)) if speeds else 0.0
        found.append(
            TransferObservation(
                plan=plan,
                log_speed=float(np.mean(speeds)) if speeds else None,
                slopes=tuple(np.mean([item.slopes for item in items], axis=0).tolist()),
                shares=tuple(np.mean([item.shares for item in items], axis=0).tolist()),
                log_peak=float(np.mean(peaks)) if peaks else None,
                noise=float(np.hypot(TRANSFER_NOISE, spread)),
            )
        )
    return found
