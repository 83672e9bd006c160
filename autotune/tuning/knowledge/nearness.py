"""Nearness: how far a known entry is from a question, and what differs.

Distances are in nats of throughput: roughly the standard deviation that a figure carried over gains. An entry of the
same model on another number of devices is nearer than one of another model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.specs import ClusterSpec, ModelSpec, NearEntry, Workload

A_DOUBLING = {"devices": 0.05, "seq_len": 0.06, "global_batch": 0.03, "parameters": 0.10}
"""What each doubling (or halving) adds."""

OTHER_MODEL, OTHER_NODE_SIZE, IMPORTED = 0.15, 0.10, 0.05

MOST_NEAR = 1.5
"""An entry farther than this says nothing about the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A known entry, how far it is, and what differs, in words."""

    entry: NearEntry
    distance: float
    differs: tuple[str, ...]


def nearest(
    entries: Sequence[NearEntry],
    model: ModelSpec,
    parameters: float,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    limit: int = 3,
) -> list[Near]:
    """The nearest of the entries, nearest first; none that is too far. Newer ones first where equally far.

    Args:
        entries: candidates on the same device and dtype (KnowledgeStore.best_near).
        model: asked for.
        parameters: its number of parameters.
        cluster: asked for.
        workload: asked for.
        limit: how many.
    """
    key = model.key
    found = [_near(entry, key, parameters, cluster, workload) for entry in entries]
    close = [item for item in found if item.distance <= MOST_NEAR]
    return sorted(close, key=lambda item: (item.distance, -item.entry.measured_at.timestamp()))[:limit]


def _near(entry: NearEntry, model_key: str, parameters: float, cluster: ClusterSpec, workload: Workload) -> Near:
    numbers = {
        "devices": (entry.devices, cluster.devices, "GPUs"),
        "seq_len": (entry.seq_len, workload.seq_len, "tokens a sequence"),
        "global_batch": (entry.global_batch, workload.global_batch, "sequences a step"),
    }
    distance, differs = 0.0, []
    for name, (known, asked, unit) in numbers.items():
        if known != asked:
            distance += A_DOUBLING[name] * abs(math.log2(known / asked))
            differs.append(f"{known} {unit} instead of {asked}")
    if entry.model_key != model_key:
        distance += OTHER_MODEL + A_DOUBLING["parameters"] * abs(math.log2(entry.parameters / parameters))
        differs.append(
            f"model {entry.model_name} ({entry.parameters / 1e9:.3g} B parameters, not {parameters / 1e9:.3g})"
        )
    if entry.gpus_per_node != cluster.gpus_per_node and min(entry.devices, cluster.devices) > 1:
        distance += OTHER_NODE_SIZE
        differs.append(f"{entry.gpus_per_node} GPUs a node instead of {cluster.gpus_per_node}")
    if entry.source != "measured":
        distance += IMPORTED
        differs.append(f"imported from {entry.source}")
    return Near(entry=entry, distance=distance, differs=tuple(differs))
