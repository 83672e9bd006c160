"""History: what a group may learn from other groups, as lessons on where the estimate was off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from autotune.search.belief import LESSON_NOISE, Lesson
from autotune.search.peaks import term_shares
from autotune.search.physics import PARAMETERS, behaviour
from autotune.specs import ClusterSpec, Plan
from autotune.tuning.backtest.groups import Group
from autotune.tuning.backtest.replay import Replay
from autotune.tuning.backtest.runs import RunStatus


def teachers(group: Group, groups: Sequence[Group], train_gpus: int | None) -> list[Group]:
    """The groups that a group may learn from: others on the same kind of cluster (devices, links, size of a node).

    Args:
        group: the one that is judged.
        groups: all.
        train_gpus: only of the same model and at or under this many GPUs.
    """
    return [
        other
        for other in groups
        if other is not group
        and _alike(other.cluster, group.cluster)
        and (train_gpus is None or (other.model.key == group.model.key and other.cluster.devices <= train_gpus))
    ]


def lessons_of(group: Group) -> list[Lesson]:
    """A group's outcomes against its own estimates, which know its collective readings only."""
    estimates = Replay(group).search(taught=False).estimates
    slopes = behaviour(estimates, np.zeros(len(PARAMETERS))).slopes
    shares = term_shares(estimates)
    found = []
    for i, item in enumerate(group.outcomes):
        peak, estimated = item.reserved_bytes, float(estimates.reserved_bytes[i])
        if item.status is RunStatus.OOM:
            peak = max(estimated, estimates.capacity_bytes)
        speed = item.tokens_per_s_per_gpu / float(estimates.tokens_per_s_per_gpu[i])
        found.append(
            Lesson(
                plan=item.plan,
                log_speed=float(np.log(speed)) if item.ok else None,
                slopes=tuple(slopes[i].tolist()),
                shares=tuple(shares[i].tolist()),
                log_peak=float(np.log(peak / estimated)) if peak and (item.ok or peak > estimated) else None,
            )
        )
    return found


def merged(lessons: Iterable[Lesson]) -> list[Lesson]:
    """One lesson a plan: the mean over groups, with their spread as its noise."""
    by_plan: dict[Plan, list[Lesson]] = {}
    for item in lessons:
        by_plan.setdefault(item.plan, []).append(item)
    return [_mean(plan, by_plan[plan]) for plan in sorted(by_plan, key=lambda plan: plan.key)]


def _mean(plan: Plan, items: Sequence[Lesson]) -> Lesson:
    speeds = [item.log_speed for item in items if item.log_speed is not None]
    peaks = [item.log_peak for item in items if item.log_peak is not None]
    spread = float(np.std(speeds)) if speeds else 0.0
    return Lesson(
        plan=plan,
        log_speed=float(np.mean(speeds)) if speeds else None,
        slopes=tuple(np.mean([item.slopes for item in items], axis=0).tolist()),
        shares=tuple(np.mean([item.shares for item in items], axis=0).tolist()),
        log_peak=float(np.mean(peaks)) if peaks else None,
        noise=float(np.hypot(LESSON_NOISE, spread)),
    )


def _alike(one: ClusterSpec, other: ClusterSpec) -> bool:
    """Whether two clusters have the same devices and links. The size of a node counts where both have several."""
    same_nodes = one.gpus_per_node == other.gpus_per_node or 1 in {one.nodes, other.nodes}
    return one.device == other.device and one.intra == other.intra and same_nodes
