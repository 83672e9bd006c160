"""Speeds of one device: from a profile's fit, or the catalog's peaks times assumed efficiencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.framework import TORCH, Framework
from autotune.cost.table import FloatColumn
from autotune.errors import MissingMeasurementError
from autotune.specs import Basis, ClusterSpec, Device, Profile, Workload

# How much of a device's matrix rate a product of a given shape reaches.
#
# time = flops / (peak * best) * (1 + depth / k) * (1 + waves / w), with w = m*n / (128 * 128 * processors) the tiles of
# 128 x 128 a processor: a short k pays for filling and draining the pipeline of a tile, few tiles leave processors idle
# (tile and wave quantisation, NVIDIA's Matrix Multiplication Background guide, smoothed). The three constants a
# generation were fitted to 1,615-2,160 published bf16 timings each (m >= 512, n and k >= 256); leaving out all
# shapes of one m moves best and depth by under a tenth and waves by up to a quarter, and the timings left out are met
# within 4-12 % on average.

TILE = 128.0 * 128.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Shape constants of one generation. `best` is the share of the dense peak of a large product.

    `sustained` is what training keeps up of it: a benchmark of one product runs at higher clocks than hours of them.
    `attention` is the share of the peak that a fused attention kernel reaches in training, counted at half of s²: below
    what its authors measure (Dao 2023, arXiv:2307.08691), since head dims of 64-128 and the causal edge cost more.
    """

    best: float
    sustained: float
    depth: float
    waves: float
    processors: int
    attention: float

    def padding(self, m: FloatColumn | float, n: FloatColumn | float, k: FloatColumn | float) -> FloatColumn:
        """Time of an m x n x k product over that of the same FLOPs in a large one."""
        tiles = np.asarray(m, dtype=np.float64) * n / (TILE * max(self.processors, 1))
        padded: FloatColumn = (1.0 + self.depth / np.asarray(k, dtype=np.float64)) * (1.0 + self.waves / tiles)
        return padded


PLAIN = Gemm(best=0.70, sustained=1.0, depth=0.0, waves=0.0, processors=1, attention=0.70)
"""Of a device whose shapes nobody measured: one efficiency for all."""

_GENERATIONS = {
    "a100": Gemm(best=0.84, sustained=0.97, depth=107.0, waves=0.08, processors=108, attention=0.33),
    "h100": Gemm(best=0.825, sustained=0.82, depth=150.0, waves=0.11, processors=132, attention=0.20),
    "h200": Gemm(best=0.81, sustained=0.82, depth=120.0, waves=0.06, processors=132, attention=0.20),
}


def gemm_of(device: Device) -> Gemm:
    """The constants of the device's generation, PLAIN if it is none of those measured."""
    return _GENERATIONS.get(device.name.partition("-")[0], PLAIN)


MEMORY_EFFICIENCY = 0.80
"""Assumption: share of the memory bandwidth that streaming kernels reach."""


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


def _missing(cluster: ClusterSpec, what: str) -> MissingMeasurementError:
    return MissingMeasurementError(
        f"the {what} of device {cluster.device.name!r} is not in the catalog and cluster {cluster.name!r} has no "
        "profile; measure it with `autotune probe layer` (or let `autotune tune` do it)"
    )
