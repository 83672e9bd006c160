"""Merging what the ranks report of one step probe. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from autotune.specs import ModelSpec, RankReading, StepReading, StepRequest
from probes.timing import half_width, is_steady


def merge(
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
