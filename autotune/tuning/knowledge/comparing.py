"""Two best-known entries side by side."""

from __future__ import annotations

from typing import Any

from autotune.specs import BestEntry
from autotune.tuning.knowledge.currency import changes
from autotune.tuning.knowledge_ports import KnowledgeStore


def compared(store: KnowledgeStore, one: BestEntry, other: BestEntry) -> dict[str, Any]:
    """What differs between two entries, and which is faster where their intervals tell.

    Returns `differs` (rows of name, one, other; the environment's fields among them), `faster` (the relative
    difference of the first to the second) and `verdict`, a sentence.
    """
    rows = [
        {"name": name, "one": first, "other": second}
        for name, first, second in _fields(one, other)
        if first != second or name in {"plan", "tokens/s/GPU"}
    ]
    if one.fingerprint_key and other.fingerprint_key and one.environment_key != other.environment_key:
        before, after = store.fingerprint(one.fingerprint_key), store.fingerprint(other.fingerprint_key)
        rows += [{"name": item.name, "one": item.then, "other": item.now} for item in changes(before, after)]
    faster = one.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1.0
    return {"differs": rows, "faster": faster, "verdict": _verdict(one, other, faster)}


def _fields(one: BestEntry, other: BestEntry) -> list[tuple[str, str, str]]:
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
    return [(name, first[name], second[name]) for name in first]


def _verdict(one: BestEntry, other: BestEntry, faster: float) -> str:
    asked = ("model", "cluster", "workload")
    if any(getattr(one, name) != getattr(other, name) for name in asked):
        return "the entries answer different questions: their speeds do not decide between the plans"
    if one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]:
        return f"too close to call: the intervals overlap (entry {one.id} is {faster:+.1%} of entry {other.id})"
    return f"entry {one.id} is {faster:+.1%} faster than entry {other.id}, beyond both intervals"
