"""Merging what the ranks report of one layer probe. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from autotune.specs import LayerReading, LayerRequest
from probes.timing import percentile


def merge(request: LayerRequest, reports: Mapping[int, dict[str, Any]]) -> tuple[LayerReading]:
    """The one reading of a layer probe: of each iteration the slowest rank's time, of memory the worst rank's.

    The share of exposed communication comes from a traced iteration and is that of the rank that waited least: the
    others' shares hold their waiting for that one.

    Args:
        request: what was asked.
        reports: by rank, what `layer.run` returned.
    """
    ranks = [report for _, report in sorted(reports.items())]
    forward_s = [max(times) for times in zip(*(rank["forward_s"] for rank in ranks), strict=True)]
    backward_s = [max(times) for times in zip(*(rank["backward_s"] for rank in ranks), strict=True)]
    forward_share = min(rank["forward_exposed_share"] for rank in ranks)
    backward_share = min(rank["backward_exposed_share"] for rank in ranks)
    return (
        LayerReading(
            part=request.part,
            tp=request.tp,
            micro_batch=request.micro_batch,
            recompute=request.recompute,
            sequence_parallel=request.sequence_parallel,
            iterations=request.iterations,
            forward_s=median(forward_s),
            backward_s=median(backward_s),
            forward_p10_s=percentile(forward_s, 0.1),
            forward_p90_s=percentile(forward_s, 0.9),
            backward_p10_s=percentile(backward_s, 0.1),
            backward_p90_s=percentile(backward_s, 0.9),
            forward_calc_s=median(forward_s) * (1.0 - forward_share),
            backward_calc_s=median(backward_s) * (1.0 - backward_share),
            saved_bytes=max(rank["saved_bytes"] for rank in ranks),
            peak_bytes=max(rank["peak_bytes"] for rank in ranks),
            parameter_bytes=max(rank["parameter_bytes"] for rank in ranks),
            memory_source=ranks[0]["memory_source"],
        ),
    )
