"""Nearness: how far a known entry is from a question or from another entry, what differs, and whether the environment
that it was measured in is still there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.ports.store import KnowledgeStore
from autotune.specs import BestEntry, ClusterSpec, Fingerprint, ModelSpec, NearEntry, Workload
from autotune.specs.knowledge import MEASURED

# Nearness: how far a known entry is from a question, and what differs.
#
# Distances are in nats of throughput: roughly the standard deviation that a figure carried over gains. An entry of the
# same model on another number of devices is nearer than one of another model.

A_DOUBLING = {"devices": 0.05, "seq_len": 0.06, "global_batch": 0.03, "parameters": 0.10}
"""What each doubling (or halving) adds."""

OTHER_MODEL, OTHER_NODE_SIZE, IMPORTED = 0.15, 0.10, 0.05
MAX_NEAR = 1.5
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
    close = [item for item in found if item.distance <= MAX_NEAR]
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
    if entry.source != MEASURED:
        distance += IMPORTED
        differs.append(f"imported from {entry.source}")
    return Near(entry=entry, distance=distance, differs=tuple(differs))


# Currency: whether an entry was measured in the environment that is there now, and if not, what changed since.

MOMENTARY = frozenset({"hostname", "clocks"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing of the environment that is another one now. Empty text: it was not there, or could not be read."""

    name: str
    then: str
    now: str

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.name}: {self.then or 'none'} then, {self.now or 'none'} now"


def changes(then: Fingerprint, now: Fingerprint) -> list[Change]:
    """What differs between two environments, by field; entries of dictionaries by their own names."""
    found = []
    for name in Fingerprint.model_fields:
        if name in MOMENTARY:
            continue
        old, new = getattr(then, name), getattr(now, name)
        if isinstance(old, dict):
            keys = sorted(set(old) | set(new))
            found += [Change(name=key, then=str(old.get(key, "")), now=str(new.get(key, ""))) for key in keys]
        else:
            found.append(Change(name=name, then=str(old), now=str(new)))
    return [item for item in found if item.then != item.now]


# Two best-known entries side by side.


def compared(store: KnowledgeStore, one: BestEntry, other: BestEntry) -> dict[str, Any]:
    """What differs between two entries, and which is faster where their intervals tell.

    Returns `differs` (rows of name, one, other; the environment's fields among them), `faster` (the relative
    difference of the first to the second) and `verdict`, a sentence.
    """

    def texts(entry: BestEntry) -> dict[str, str]:
        margin = entry.memory_margin
        low, high = entry.interval
        return {
            "model": entry.model.name,
            "cluster": entry.cluster.name,
            "devices": str(entry.cluster.devices),
            "sequence length": str(entry.workload.seq_len),
            "global batch": str(entry.workload.global_batch),
            "dtype": entry.workload.dtype.value,
            "plan": entry.plan.key,
            "tokens/s/GPU": f"{entry.tokens_per_s_per_gpu:,.1f} ({low:,.1f} to {high:,.1f})",
            "repeats": str(entry.repeats),
            "free memory": f"{margin:.0%}" if margin is not None else "not known",
            "source": entry.source,
            "measured at": f"{entry.measured_at:%Y-%m-%d %H:%M:%S} UTC",
        }

    first, second = texts(one), texts(other)
    rows = [
        {"name": name, "one": first[name], "other": second[name]}
        for name in first
        if first[name] != second[name] or name in {"plan", "tokens/s/GPU"}
    ]
    if one.fingerprint_key and other.fingerprint_key and one.environment_key != other.environment_key:
        before, after = store.fingerprint(one.fingerprint_key), store.fingerprint(other.fingerprint_key)
        rows += [{"name": item.name, "one": item.then, "other": item.now} for item in changes(before, after)]
    faster = one.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1.0
    if any(getattr(one, name) != getattr(other, name) for name in ("model", "cluster", "workload")):
        verdict = "the entries answer different questions: their speeds do not decide between the plans"
    elif one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]:
        verdict = f"too close to call: the intervals overlap (entry {one.id} is {faster:+.1%} of entry {other.id})"
    else:
        verdict = f"entry {one.id} is {faster:+.1%} faster than entry {other.id}, beyond both intervals"
    return {"differs": rows, "faster": faster, "verdict": verdict}
