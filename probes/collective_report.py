"""Merging what the ranks measured of one collective sweep. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.errors import InputError
from autotune.specs import CollectiveOp, CollectiveReading, CollectiveRequest


def members(request: CollectiveRequest, world_size: int) -> list[list[int]]:
    """The groups of a request: `group_size` ranks, `stride` apart, which cover the world once.

    Raises:
        InputError: the groups do not divide the world, or a send_recv group is not a pair.
    """
    if request.op is CollectiveOp.SEND_RECV and request.group_size != 2:
        raise InputError("collective.group_size", request.group_size, "send_recv is between 2 ranks")
    block = request.group_size * request.stride
    if world_size % block:
        allowed = f"group_size * stride must divide the {world_size} ranks"
        raise InputError("collective.group_size, stride", [request.group_size, request.stride], allowed)
    return [
        list(range(start + offset, start + block, request.stride))
        for start in range(0, world_size, block)
        for offset in range(request.stride)
    ]


def bus_factor(op: CollectiveOp, group_size: int) -> float:
    """busbw / algbw: the share of the buffer that crosses each rank's link (nccl-tests, doc/PERFORMANCE.md)."""
    if op is CollectiveOp.SEND_RECV:
        return 1.0
    share = (group_size - 1) / group_size
    return 2 * share if op is CollectiveOp.ALL_REDUCE else share


def merge(request: CollectiveRequest, reports: Mapping[int, dict[str, Any]]) -> tuple[CollectiveReading, ...]:
    """One reading a size. The time of an iteration is the slowest rank's; all groups ran at once.

    Args:
        request: what was asked.
        reports: by rank, {"sweep": [{"size_bytes": int, "times_s": [float, ...]}, ...]}.
    """
    sweeps = [report["sweep"] for _, report in sorted(reports.items())]
    return tuple(
        _reading(request, size[0]["size_bytes"], np.array([rank["times_s"] for rank in size]))
        for size in zip(*sweeps, strict=True)
    )


def _reading(request: CollectiveRequest, size_bytes: int, times_s: np.ndarray[Any, Any]) -> CollectiveReading:
    """Args: times_s has shape (ranks, iterations)."""
    slowest_s = times_s.max(axis=0)
    p10_s, median_s, p90_s = (float(value) for value in np.percentile(slowest_s, (10, 50, 90)))
    algbw = size_bytes / median_s
    return CollectiveReading(
        op=request.op,
        group_size=request.group_size,
        stride=request.stride,
        size_bytes=size_bytes,
        iterations=len(slowest_s),
        time_s=median_s,
        time_p10_s=p10_s,
        time_p90_s=p90_s,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=algbw * bus_factor(request.op, request.group_size),
    )
