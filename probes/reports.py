"""What the reports of all ranks amount to: the readings of a collective sweep, of a layer, of a step. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

import numpy as np

from autotune.errors import InputError
from autotune.specs import (
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    LayerReading,
    LayerRequest,
    ModelSpec,
    RankReading,
    StepReading,
    StepRequest,
)
from probes.timing import half_width, is_steady


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


def merge_collective(
    request: CollectiveRequest, reports: Mapping[int, dict[str, Any]]
) -> tuple[CollectiveReading, ...]:
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


def merge_layer(request: LayerRequest, reports: Mapping[int, dict[str, Any]]) -> tuple[LayerReading]:
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
            forward_p10_s=float(np.quantile(forward_s, 0.1)),
            forward_p90_s=float(np.quantile(forward_s, 0.9)),
            backward_p10_s=float(np.quantile(backward_s, 0.1)),
            backward_p90_s=float(np.quantile(backward_s, 0.9)),
            forward_calc_s=median(forward_s) * (1.0 - forward_share),
            backward_calc_s=median(backward_s) * (1.0 - backward_share),
            saved_bytes=max(rank["saved_bytes"] for rank in ranks),
            peak_bytes=max(rank["peak_bytes"] for rank in ranks),
            parameter_bytes=max(rank["parameter_bytes"] for rank in ranks),
            memory_source=ranks[0]["memory_source"],
        ),
    )


def layer_calc_s(report: Mapping[str, Any]) -> float:
    """Seconds that one rank computed, forward and backward, of its report of a layer probe: medians over iterations."""
    forward_s = median(report["forward_s"]) * (1.0 - report["forward_exposed_share"])
    return float(forward_s + median(report["backward_s"]) * (1.0 - report["backward_exposed_share"]))


def merge_step(
    request: StepRequest, reports: Mapping[int, dict[str, Any]], peak_flops_per_s: float | None
) -> tuple[StepReading]:
    """The one reading of a step probe.

    `step_time_s` is the median over timed steps of the slowest rank's time. The interval is the 95 % t-interval of the
    mean of the steps' tokens/s/GPU, of no width for a single step. `steady` is `timing.is_steady` with the request's
    target as tolerance.

    Args:
        request: what was asked.
        reports: by rank, what `step.run` returned.
        peak_flops_per_s: the device's dense peak for the dtype; None leaves the MFU out.
    """
    ordered = [report for _, report in sorted(reports.items())]
    first, plan, workload = ordered[0], request.plan, request.workload
    times_s = first["step_times_s"]
    rates = [workload.tokens_per_step / (time_s * plan.world_size) for time_s in times_s]
    step_time_s = median(times_s)
    tokens_per_s_per_gpu = workload.tokens_per_step / (step_time_s * plan.world_size)
    half = half_width(rates)
    mfu = None
    if peak_flops_per_s is not None:
        mfu = tokens_per_s_per_gpu * model_flops_per_token(request.model, workload.seq_len) / peak_flops_per_s
    return (
        StepReading(
            tokens_per_s_per_gpu=tokens_per_s_per_gpu,
            interval_tokens_per_s_per_gpu=(max(0.0, fmean(rates) - half), fmean(rates) + half),
            step_time_s=step_time_s,
            step_times_s=tuple(times_s),
            warmup_times_s=tuple(first["warmup_times_s"]),
            steady=is_steady(times_s, request.target_relative_interval),
            mfu=mfu,
            peak_allocated_bytes=max(report["memory"]["allocated_bytes"] for report in ordered),
            peak_reserved_bytes=max(report["memory"]["reserved_bytes"] for report in ordered),
            memory_source=first["memory"]["source"],
            losses=tuple(first["losses"]),
            pruned=first["pruned"],
            setup_s=max(report["setup_s"] for report in ordered),
            ranks=tuple(_rank_reading(report) for report in ordered),
            **_traced(ordered),
        ),
    )


def _traced(reports: list[dict[str, Any]]) -> dict[str, float | None]:
    """Means over ranks of the traced step; all None without a trace."""
    traces = [report["trace"] for report in reports]
    if any(trace is None for trace in traces):
        return dict.fromkeys(("traced_step_s", "t_calc_s", "t_comm_s", "t_comm_exposed_s", "mu"))
    calc_s, comm_s = fmean(trace["calc_s"] for trace in traces), fmean(trace["comm_s"] for trace in traces)
    return {
        "traced_step_s": traces[0]["step_s"],
        "t_calc_s": calc_s,
        "t_comm_s": comm_s,
        "t_comm_exposed_s": fmean(trace["exposed_s"] for trace in traces),
        "mu": comm_s / calc_s if calc_s else None,
    }


def _rank_reading(report: dict[str, Any]) -> RankReading:
    trace = report["trace"] or {}
    return RankReading(
        rank=report["rank"],
        stage=report["stage"],
        hostname=report["hostname"],
        t_calc_s=trace.get("calc_s"),
        t_comm_s=trace.get("comm_s"),
        t_comm_exposed_s=trace.get("exposed_s"),
        comm_s_by_op=trace.get("comm_s_by_op", {}),
        peak_allocated_bytes=report["memory"]["allocated_bytes"],
        peak_reserved_bytes=report["memory"]["reserved_bytes"],
    )


def model_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """FLOPs of forward and backward for one token of a dense model, recomputation not counted.

    6·P + 12·L·s·a·d·½ with P the parameters of all matrices but the embedding (PaLM, arXiv:2204.02311, appendix B,
    with causal attention at half of s²). The cost model counts the same way; probes may not import it.
    """
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    mlp = (3 if model.gated else 2) * model.hidden * model.ffn
    matrices = model.layers * (attention + mlp) + model.vocab * model.hidden
    return 6.0 * matrices + 6.0 * model.layers * seq_len * model.heads * model.head_dim
