"""The readings of probes for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.cli import output
from autotune.cli.tune_view import probe_text
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    LayerReading,
    ProbeOutcome,
    ProbeRequest,
    StepReading,
)


def outcome_data(request: ProbeRequest, outcome: ProbeOutcome) -> dict[str, Any]:
    """One probe of the object that --json prints."""
    return {"request": request.to_data(), **outcome.to_data()}


def print_outcomes(cluster: ClusterSpec, requests: Sequence[ProbeRequest], outcomes: Sequence[ProbeOutcome]) -> None:
    """Tables of what was measured; failures with their cause and log."""
    console = output.console()
    readings = [reading for outcome in outcomes for reading in outcome.readings]
    for render in (_collective_table, _layer_table, _step_table):
        found = render(readings, cluster)
        if found is not None:
            console.print(found)
    for request, outcome in zip(requests, outcomes, strict=True):
        failure = outcome.failure
        if failure is not None:
            where = "" if failure.rank is None else f" on rank {failure.rank}"
            console.print(
                f"{probe_text(request.to_data())}: failed, {failure.kind.value}{where}: {failure.message}"
                f" (log: {failure.log_path})",
            )
    console.print(f"{sum(outcome.gpu_s for outcome in outcomes):.1f} GPU-seconds spent")


def _collective_table(readings: Sequence[object], cluster: ClusterSpec) -> Any:
    rows = [reading for reading in readings if isinstance(reading, CollectiveReading)]
    if not rows:
        return None
    table = output.table(
        f"Collectives on {cluster.name} (median of the slowest rank; 10th and 90th percentile)",
        "<op", "group", "stride", "size", "time", "p10", "p90", "algbw", "busbw",
    )  # fmt: skip
    for row in rows:
        times = (row.time_s, row.time_p10_s, row.time_p90_s)
        table.add_row(
            row.op.value, str(row.group_size), str(row.stride), output.bytes_text(row.size_bytes),
            *map(output.seconds_text, times),
            output.rate_text(row.algbw_bytes_per_s), output.rate_text(row.busbw_bytes_per_s),
        )  # fmt: skip
    return table


def _layer_table(readings: Sequence[object], cluster: ClusterSpec) -> Any:
    rows = [reading for reading in readings if isinstance(reading, LayerReading)]
    if not rows:
        return None
    table = output.table(
        f"Layers on {cluster.name} (medians; memory: {rows[0].memory_source})",
        "<part", "tp", "micro-batch", "<recompute", "forward", "computing", "backward", "computing",
        "saved", "peak", "parameters",
    )  # fmt: skip
    for row in rows:
        times = (row.forward_s, row.forward_calc_s, row.backward_s, row.backward_calc_s)
        sizes = (row.saved_bytes, row.peak_bytes, row.parameter_bytes)
        table.add_row(
            row.part.value, str(row.tp), str(row.micro_batch), row.recompute.value,
            *map(output.seconds_text, times), *map(output.bytes_text, sizes),
        )  # fmt: skip
    return table


def _step_table(readings: Sequence[object], cluster: ClusterSpec) -> Any:
    rows = [reading for reading in readings if isinstance(reading, StepReading)]
    if not rows:
        return None
    table = output.table(f"Training steps on {cluster.name}", "<figure", "<measured")
    for row in rows:
        for name, value in _step_figures(row):
            table.add_row(name, value)
    return table


def _step_figures(row: StepReading) -> list[tuple[str, str]]:
    low, high = row.interval_tokens_per_s_per_gpu
    steady = "steady" if row.steady else "not steady yet"
    return [
        (
            "tokens/s/GPU",
            f"{output.count_text(row.tokens_per_s_per_gpu)} "
            f"(95 % interval {output.count_text(low)} to {output.count_text(high)})",
        ),
        ("step time", f"{output.seconds_text(row.step_time_s)} over {len(row.step_times_s)} steps, {steady}"),
        ("T_calc", output.seconds_text(row.t_calc_s)),
        ("T_comm", f"{output.seconds_text(row.t_comm_s)}, {output.seconds_text(row.t_comm_exposed_s)} exposed"),
        ("mu = T_comm / T_calc", output.count_text(row.mu)),
        ("MFU", output.percent_text(row.mfu)),
        ("peak memory of a rank", f"{output.bytes_text(row.peak_allocated_bytes)} ({row.memory_source})"),
        ("reserved", output.bytes_text(row.peak_reserved_bytes)),
        ("loss", f"{row.losses[0]:.4f} -> {row.losses[-1]:.4f}" if row.losses else "-"),
        ("set-up", output.seconds_text(row.setup_s)),
    ]
