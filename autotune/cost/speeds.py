"""Speeds of one device: from a profile's fit, or the catalog's peaks times assumed efficiencies."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import MissingMeasurementError
from autotune.specs import Basis, ClusterSpec, DeviceKind, Profile, Workload

MATMUL_EFFICIENCY = 0.70
"""Assumption: share of the dense peak that large matrix products and fused attention reach in a layer."""

MEMORY_EFFICIENCY = 0.80
"""Assumption: share of the memory bandwidth that streaming kernels reach."""

LAUNCH_S = 4e-6
"""Assumption: seconds a kernel costs beyond its work, on a GPU fed by PyTorch."""

DEVICE_OVERHEAD_BYTES = 2.0e9
"""Assumption: what a GPU rank loses to the context, the collective library's channels and library workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """time = kernels * launch_s + flops * s_per_flop + bytes * s_per_byte."""

    launch_s: float
    s_per_flop: float
    s_per_byte: float
    basis: Basis


def speeds_of(cluster: ClusterSpec, workload: Workload, profile: Profile | None) -> Speeds:
    """The speeds to estimate with.

    Raises:
        MissingMeasurementError: no fit, and the catalog has no peak for the dtype or no memory bandwidth.
    """
    if profile is not None and profile.compute is not None:
        fit = profile.compute
        return Speeds(
            launch_s=fit.launch_s,
            s_per_flop=1.0 / fit.flops_per_s,
            s_per_byte=1.0 / fit.bytes_per_s if fit.bytes_per_s else 0.0,
            basis=Basis.PROFILE,
        )
    peak = peak_flops_per_s(cluster, workload)
    if peak is None:
        raise _missing(cluster, f"peak FLOPs in {workload.dtype.value}")
    if cluster.device.memory_bytes_per_s is None:
        raise _missing(cluster, "memory bandwidth")
    return Speeds(
        launch_s=LAUNCH_S,
        s_per_flop=1.0 / (peak * MATMUL_EFFICIENCY),
        s_per_byte=1.0 / (cluster.device.memory_bytes_per_s * MEMORY_EFFICIENCY),
        basis=Basis.CATALOG,
    )


def peak_flops_per_s(cluster: ClusterSpec, workload: Workload) -> float | None:
    """The vendor's dense peak of the workload's dtype, None if not known."""
    return cluster.device.peak_flops_per_s.get(workload.dtype)


def device_overhead_bytes(cluster: ClusterSpec, profile: Profile | None) -> float:
    """Bytes of a rank beside its tensors: the context, which no allocator sees (assumed), and what a profile adds."""
    context = 0.0 if cluster.device.kind is DeviceKind.CPU else DEVICE_OVERHEAD_BYTES
    return context + (profile.memory_overhead_bytes if profile else 0.0)


def _missing(cluster: ClusterSpec, what: str) -> MissingMeasurementError:
    return MissingMeasurementError(
        f"the {what} of device {cluster.device.name!r} is not in the catalog and cluster {cluster.name!r} has no "
        "profile; measure it with `autotune probe layer` (or let `autotune tune` do it)"
    )
