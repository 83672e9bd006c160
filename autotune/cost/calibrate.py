"""Calibration: a profile of one cluster from collective readings, layer readings and whole trials. Milliseconds.

All fits minimise relative errors, so that small and large sizes count alike, and keep every parameter physical
(latencies at least zero, rates positive).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from scipy.optimize import nnls

from autotune.cost.capacity import device_overhead_bytes
from autotune.cost.estimate import estimate, memory_table
from autotune.cost.framework import TORCH
from autotune.cost.network import Network, geometry, ring_steps, ring_traffic
from autotune.cost.speeds import PLAIN, attention_of, core_over_products, gemm_of, generation_of
from autotune.cost.table import Floats, PlanTable
from autotune.cost.work import reading_work
from autotune.errors import InputError, MissingMeasurementError
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    ComputeFit,
    Device,
    LayerReading,
    LinkFit,
    ModelSpec,
    Profile,
    StepReading,
    Trial,
    TrialState,
    Workload,
)

RATE_SD = 0.25
"""A link reaches its catalog rate times LINK_EFFICIENCY within about this factor (ln)."""

LATENCY_SD = 1.5
"""Latencies are known to a factor of about four and a half (ln): hosts, switches and transports differ."""

OVERHEAD_TRIALS = 3
"""Peaks of this many trials are needed to tell a fixed overhead from a scale."""


def fit_links(cluster: ClusterSpec, readings: Sequence[CollectiveReading]) -> tuple[LinkFit, ...]:
    """alpha-beta of each (op, group_size, stride) that was read; time = alpha * steps + traffic / bandwidth."""
    layouts: dict[tuple[CollectiveOp, int, int], list[CollectiveReading]] = {}
    for reading in readings:
        if reading.time_s > 0:
            layouts.setdefault((reading.op, reading.group_size, reading.stride), []).append(reading)
    return tuple(_link(cluster, *layout, found) for layout, found in layouts.items())


def _link(
    cluster: ClusterSpec, op: CollectiveOp, size: int, stride: int, readings: Sequence[CollectiveReading]
) -> LinkFit:
    times = np.array([reading.time_s for reading in readings])
    traffic = ring_traffic(op, size) * np.array([float(reading.size_bytes) for reading in readings])
    terms = np.column_stack([np.full(len(times), float(ring_steps(op, size))), traffic])
    sizes = {reading.size_bytes for reading in readings}
    found = _one_size(cluster, op, size, stride, readings) if len(sizes) == 1 else None
    (latency_s, s_per_byte), error = found or relative_fit(terms, times, positive=1)
    return LinkFit(
        op=op,
        group_size=size,
        stride=stride,
        crosses_nodes=geometry(cluster.domain, cluster.devices, size, stride).crosses_nodes,
        latency_s=latency_s,
        bytes_per_s=1.0 / s_per_byte,
        relative_error=error,
        readings=len(readings),
    )


def _one_size(
    cluster: ClusterSpec, op: CollectiveOp, size: int, stride: int, readings: Sequence[CollectiveReading]
) -> tuple[tuple[float, ...], float] | None:
    """(latency, seconds a byte) from readings of one size, which cannot tell them apart: the figures of the vendor's
    systems with such devices, moved as little as their uncertainties allow (RATE_SD, LATENCY_SD in ln).

    Not those of this cluster: with a faster link on paper more of the same reading would be taken for latency, and
    plans with small messages would be slower for it. None without a figure of either kind.
    """
    try:
        prior = Network(_as_sold(cluster)).cost(op, size, stride)
    except MissingMeasurementError:
        return None
    time_s = float(np.median([reading.time_s for reading in readings]))
    moved = prior.s_per_byte * readings[0].size_bytes
    rates = np.linspace(-4.0 * RATE_SD, 4.0 * RATE_SD, 801)
    latency = np.maximum(time_s - moved * np.exp(rates), 1e-3 * prior.alpha_s)
    total = np.log((latency + moved * np.exp(rates)) / time_s)
    cost = (rates / RATE_SD) ** 2 + (np.log(latency / prior.alpha_s) / LATENCY_SD) ** 2 + (total / 0.02) ** 2
    best = int(np.argmin(cost))
    s_per_byte = max(time_s - float(latency[best]), 0.1 * time_s) / readings[0].size_bytes
    spread = float(np.median(np.abs(np.array([reading.time_s for reading in readings]) / time_s - 1.0)))
    return (float(latency[best]) / ring_steps(op, size), s_per_byte / ring_traffic(op, size)), spread


def _as_sold(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the links that its vendor's systems have for such devices, where they are known."""
    usual = generation_of(cluster.device)
    if not usual.link_bytes_per_s:
        return cluster
    links: dict[str, object] = {"intra": cluster.intra.model_copy(update={"bytes_per_s": usual.link_bytes_per_s})}
    if cluster.inter is not None:
        links["inter"] = cluster.inter.model_copy(update={"bytes_per_s": usual.nic_bytes_per_s})
    return cluster.model_copy(update={**links, "nics_per_node": cluster.gpus_per_node})


def fit_compute(items: Sequence[tuple[ModelSpec, Workload, LayerReading]], device: Device | None = None) -> ComputeFit:
    """Launch time, FLOP rate and byte rate of the device from layer readings, communication excluded.

    `bytes_per_s` is None where no memory-bound share shows.

    Raises:
        InputError: no reading with a time above zero.
    """
    gemm = gemm_of(device) if device else PLAIN
    found = [
        pair
        for model, workload, reading in items
        for pair in reading_work(model, workload, reading, gemm, probe_core(device, model, workload))
    ]
    found = [(work, seconds) for work, seconds in found if seconds > 0]
    if not any(work.flops > 0 for work, _ in found):
        raise InputError("layer readings", len(items), "at least one of a layer or head with a time above zero")
    terms = np.array([(work.kernels, work.flops, work.bytes) for work, _ in found])
    (launch_s, s_per_flop, s_per_byte), error = relative_fit(terms, np.array([s for _, s in found]), positive=1)
    return ComputeFit(
        flops_per_s=1.0 / s_per_flop,
        launch_s=launch_s,
        bytes_per_s=1.0 / s_per_byte if s_per_byte > 0 else None,
        relative_error=error,
        readings=len(items),
    )


def probe_core(device: Device | None, model: ModelSpec, workload: Workload) -> float:
    """What a FLOP of the attention core costs in our probes, over one of a product."""
    if device is None:
        return 1.0
    attention = attention_of(device, TORCH.attention)
    return core_over_products(device, attention, model, workload.seq_len, TORCH.current)


def fit_profile(
    cluster: ClusterSpec,
    fingerprint_key: str,
    collective_readings: Sequence[CollectiveReading],
    layer_items: Sequence[tuple[ModelSpec, Workload, LayerReading]],
    trials: Sequence[tuple[ModelSpec, Workload, Trial]],
) -> Profile:
    """Everything that the readings say of one cluster; what was not measured stays absent."""
    profile = Profile(
        cluster_key=cluster.key,
        fingerprint_key=fingerprint_key,
        links=fit_links(cluster, collective_readings),
        compute=fit_compute(layer_items, cluster.device) if layer_items else None,
    )
    done = [
        (model, workload, trial, trial.reading)
        for model, workload, trial in trials
        if trial.state is TrialState.COMPLETE and trial.reading is not None
    ]
    return profile.model_copy(update={**_step_scale(cluster, profile, done), **_memory(cluster, done)})


Done = Sequence[tuple[ModelSpec, Workload, Trial, StepReading]]


def _step_scale(cluster: ClusterSpec, profile: Profile, done: Done) -> dict[str, object]:
    """Measured / estimated step time over complete trials: the geometric mean."""
    try:
        ratios = [
            reading.step_time_s / estimate(model, cluster, workload, trial.plan, profile).step_time_s
            for model, workload, trial, reading in done
        ]
    except MissingMeasurementError:
        return {}  # nothing to scale: estimates of time are not possible with these readings
    return {"step_scale": geometric_mean(ratios), "step_scale_trials": len(ratios)} if ratios else {}


def _memory(cluster: ClusterSpec, done: Done) -> dict[str, object]:
    """measured peak = scale * estimated tensors + overhead, over complete trials."""
    context = device_overhead_bytes(cluster, None)
    pairs = [
        (
            float(max(reading.peak_reserved_bytes, reading.peak_allocated_bytes)),
            float(memory_table(model, cluster, workload, PlanTable.of([trial.plan])).peak_memory_bytes[0]) - context,
        )
        for model, workload, trial, reading in done
    ]
    pairs = [(measured, estimated) for measured, estimated in pairs if measured > 0]
    if not pairs:
        return {}
    if len(pairs) < OVERHEAD_TRIALS:
        return {"memory_scale": geometric_mean([measured / estimated for measured, estimated in pairs])}
    terms = np.array([(1.0, estimated) for _, estimated in pairs])
    (overhead, scale), _ = relative_fit(terms, np.array([measured for measured, _ in pairs]), positive=1)
    return {"memory_scale": scale, "memory_overhead_bytes": overhead}


def relative_fit(terms: Floats, values: Floats, *, positive: int) -> tuple[tuple[float, ...], float]:
    """Non-negative least squares of values ~ terms @ x in relative error.

    Where the best fit leaves out the term at `positive`, that of the sets of terms (there are at most three) that have
    it; that term alone always qualifies.

    Args:
        terms: (readings, terms), non-negative.
        values: (readings,), positive.
        positive: the term whose coefficient must not be zero.

    Returns:
        (coefficients, median absolute relative error).
    """
    scaled = terms / values[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0  # columns are brought to one size, for accuracy
    others = [i for i in range(terms.shape[1]) if i != positive]
    best, least = np.zeros(terms.shape[1]), np.inf
    for count in range(len(others) + 1):
        for extra in combinations(others, count):
            chosen = [positive, *extra]
            solution, residual = nnls((scaled / norms)[:, chosen], np.ones(len(scaled)))
            if solution[0] > 0 and residual < least * (1.0 - 1e-9):
                best, least = np.zeros(terms.shape[1]), residual
                best[chosen] = solution
    best /= norms
    error = float(np.median(np.abs(scaled @ best - 1.0)))
    return tuple(float(x) for x in best), error


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean of factors: as much over as under."""
    return float(np.exp(np.mean(np.log(list(ratios)))))
