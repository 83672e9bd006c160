"""Memory as a cause, and how the peak of a plan changed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.specs import BestEntry
from autotune.specs.regression import Attribution, CauseKind, CheckWindow

FULL = 0.97
"""From this share of a device's memory on an allocator flushes and begins anew without failing, and steps slow down."""


def peak_of(windows: Sequence[CheckWindow]) -> int | None:
    """The worst rank's peak in any window."""
    return max((window.peak_bytes for window in windows if window.peak_bytes is not None), default=None)


def memory_cause(entry: BestEntry, baseline: Sequence[CheckWindow], now: Sequence[CheckWindow]) -> Attribution | None:
    """Memory that is full now and was not; None otherwise."""
    before_bytes, now_bytes = peak_of(baseline), peak_of(now)
    limit = FULL * entry.cluster.device.memory_bytes
    if before_bytes is None or now_bytes is None or not before_bytes < limit <= now_bytes:
        return None
    total = entry.cluster.device.memory_bytes
    text = f"the worst rank holds {now_bytes / total:.0%} of its memory now, and {before_bytes / total:.0%} before"
    return Attribution(kind=CauseKind.MEMORY, subject="memory of the worst rank", text=text)


def out_of_memory(message: str) -> Attribution:
    """The cause of a plan that does not run any more."""
    return Attribution(
        kind=CauseKind.MEMORY, subject="memory of the worst rank", text=f"it ran out of memory: {message}"
    )
