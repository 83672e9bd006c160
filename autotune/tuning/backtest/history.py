"""History: what a group may learn from other groups, as lessons on where the estimate was off."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.search import lessons
from autotune.search.belief import Lesson
from autotune.search.lessons import Shown
from autotune.specs import ClusterSpec
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
    shown = [
        Shown(
            tokens_per_s_per_gpu=item.tokens_per_s_per_gpu if item.ok else None,
            peak_bytes=item.reserved_bytes,
            out_of_memory=item.status is RunStatus.OOM,
        )
        for item in group.outcomes
    ]
    return lessons.lessons_of(group.plans, estimates, shown)


def _alike(one: ClusterSpec, other: ClusterSpec) -> bool:
    """Whether two clusters have the same devices and links. The size of a node counts where both have several."""
    same_nodes = one.gpus_per_node == other.gpus_per_node or 1 in {one.nodes, other.nodes}
    return one.device == other.device and one.intra == other.intra and same_nodes
