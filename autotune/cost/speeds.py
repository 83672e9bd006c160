"""Speeds of one device: from a profile's fit, or the catalog's peaks times assumed efficiencies."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.framework import TORCH, Framework
from autotune.cost.gemm import Gemm, gemm_of
from autotune.cost.table import FloatColumn
from autotune.errors import MissingMeasurementError
from autotune.specs import Basis, ClusterSpec, DeviceKind, Profile, Workload

MEMORY_EFFICIENCY = 0.80
"""Assumption: share of the memory bandwidth that streaming kernels reach."""

DEVICE_OVERHEAD_BYTES = 2.0e9
"""Assumption: what a GPU rank loses to the context, the collective library's channels and library workspaces."""


RESERVABLE = 0.84
"""Assumption: share of a device's memory less the context that can safely be reserved before allocations fail.
Successful runs of the nanotron sweep top out at 69 GiB of 80; none expected below 64 GiB ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Device time = kernels * gap_s + flops * s_per_flop + bytes * s_per_byte; host time = kernels * launch_s.

    A GPU works through what the host has launched: the slower of the two sets the pace. With `queued` false (a CPU,
    or a fit whose launches are in its device time) both add up. `traffic` multiplies the counted bytes of small
    kernels; a fit has it in its rate. `share` is the part of its full speed at which a device computes while all of
    its node do: below 1 for CPU ranks that share too few cores. Fits were made under that load.
    """

    launch_s: float
    gap_s: float
    s_per_flop: float
    s_per_byte: float
    traffic: float
    queued: bool
    share: float
    gemm: Gemm
    basis: Basis


def speeds_of(
    cluster: ClusterSpec, workload: Workload, profile: Profile | None, framework: Framework = TORCH
) -> Speeds:
    """The speeds to estimate with.

    Raises:
        MissingMeasurementError: no fit, and the catalog has no peak for the dtype or no memory bandwidth.
    """
    gemm = gemm_of(cluster.device)
    if profile is not None and profile.compute is not None:
        fit = profile.compute
        return Speeds(
            launch_s=fit.launch_s,
            gap_s=0.0,
            s_per_flop=1.0 / fit.flops_per_s,
            s_per_byte=1.0 / fit.bytes_per_s if fit.bytes_per_s else 0.0,
            traffic=1.0,
            queued=False,
            share=core_share(cluster),
            gemm=gemm,
            basis=Basis.PROFILE,
        )
    peak = peak_flops_per_s(cluster, workload)
    if peak is None:
        raise _missing(cluster, f"peak FLOPs in {workload.dtype.value}")
    if cluster.device.memory_bytes_per_s is None:
        raise _missing(cluster, "memory bandwidth")
    return Speeds(
        launch_s=framework.kernel_s,
        gap_s=framework.device_gap_s,
        s_per_flop=1.0 / (peak * gemm.best * gemm.sustained),
        s_per_byte=1.0 / (cluster.device.memory_bytes_per_s * MEMORY_EFFICIENCY),
        traffic=framework.traffic,
        queued=True,
        share=core_share(cluster),
        gemm=gemm,
        basis=Basis.CATALOG,
    )


def core_share(cluster: ClusterSpec) -> float:
    """Cores a rank, 1 at most; 1 for devices that compute on their own."""
    return 1.0 if cluster.node_cores is None else min(1.0, cluster.node_cores / cluster.gpus_per_node)


def peak_flops_per_s(cluster: ClusterSpec, workload: Workload) -> float | None:
    """The vendor's dense peak of the workload's dtype, None if not known."""
    return cluster.device.peak_flops_per_s.get(workload.dtype)


def context_bytes(cluster: ClusterSpec) -> float:
    """Bytes of a rank that no allocator sees: the context, the collective library's channels, workspaces (assumed)."""
    return 0.0 if cluster.device.kind is DeviceKind.CPU else DEVICE_OVERHEAD_BYTES


def device_overhead_bytes(cluster: ClusterSpec, profile: Profile | None) -> float:
    """Bytes of a rank beside its tensors: the context, and what a profile adds."""
    return context_bytes(cluster) + (profile.memory_overhead_bytes if profile else 0.0)


def usable_bytes(memory_bytes: float, overhead_bytes: float) -> float:
    """What an allocator can reserve of a device; without a context (a CPU rank) all of it."""
    return (memory_bytes - overhead_bytes) * RESERVABLE if overhead_bytes else float(memory_bytes)


def needed_bytes(peak_bytes: FloatColumn, overhead_bytes: float) -> FloatColumn:
    """Memory that a device must have for a peak of this size: the inverse of `usable_bytes`."""
    return (peak_bytes - overhead_bytes) / RESERVABLE + overhead_bytes if overhead_bytes else peak_bytes


def _missing(cluster: ClusterSpec, what: str) -> MissingMeasurementError:
    return MissingMeasurementError(
        f"the {what} of device {cluster.device.name!r} is not in the catalog and cluster {cluster.name!r} has no "
        "profile; measure it with `autotune probe layer` (or let `autotune tune` do it)"
    )
