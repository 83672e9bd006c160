"""Speeds of one device: from a profile's fit, or the catalog's peaks times assumed efficiencies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autotune.cost.framework import TORCH, Framework
from autotune.cost.table import FloatColumn
from autotune.errors import MissingMeasurementError
from autotune.specs import Attention, Basis, ClusterSpec, Device, DeviceKind, DType, ModelSpec, Profile, Workload

# How much of a device's matrix rate a product of a given shape reaches.
#
# time = flops / (peak * best) * (1 + depth / k) * (1 + waves / w), with w = m*n / (128 * 128 * processors) the tiles of
# 128 x 128 a processor: a short k pays for filling and draining the pipeline of a tile, few tiles leave processors idle
# (tile and wave quantisation, NVIDIA's Matrix Multiplication Background guide, smoothed). The three constants a
# generation were fitted to 1,615 published bf16 timings on A100 and 4,320 on H100 and H200 (m >= 512, n and k >= 256);
# leaving out all shapes of one m moves best and depth by under a tenth and waves by up to a quarter, and the timings
# left out are met within 4-12 % on average.

TILE = 128.0 * 128.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Shape constants of one generation. `best` is the share of the dense peak of a large product."""

    best: float
    depth: float
    waves: float
    processors: int

    def padding(self, m: FloatColumn | float, n: FloatColumn | float, k: FloatColumn | float) -> FloatColumn:
        """Time of an m x n x k product over that of the same FLOPs in a large one."""
        tiles = np.asarray(m, dtype=np.float64) * n / (TILE * max(self.processors, 1))
        padded: FloatColumn = (1.0 + self.depth / np.asarray(k, dtype=np.float64)) * (1.0 + self.waves / tiles)
        return padded


PLAIN = Gemm(best=0.70, depth=0.0, waves=0.0, processors=1)
"""Of a device whose shapes nobody measured: one efficiency for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The attention core in one fused kernel: the share of the 16-bit peak that forward + backward reach together,
    counted at half of s², for heads of 128 and long sequences; `half` is the length at which it is half of that."""

    share: float
    half: float

    def reached(self, seq_len: float, head_dim: float) -> float:
        """The share of the peak for this length and head: narrow heads have as many exponentials for fewer products."""
        return self.share * seq_len / (seq_len + self.half) * head_dim / (head_dim + HEAD) * (128.0 + HEAD) / 128.0


HEAD = 40.0
"""Heads of 64 reach 0.8 of the rate of heads of 128 (Dao 2023, arXiv:2307.08691, figures 5-7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What devices of one architecture have in common.

    Args:
        gemm: how efficiency depends on shape.
        sustained: what training keeps up of it: a benchmark of one product runs at higher clocks than hours of them.
        sustained_before: the same with the libraries of the architecture's first years.
        fp8: speed of a large product in 8 bits over one in 16, where the peak doubles.
        cores: fused attention kernels that run on it.
        link_bytes_per_s: what the vendor's systems have of NVLink for each device, one direction; 0 if unknown.
        nic_bytes_per_s: the same between nodes.
    """

    gemm: Gemm
    sustained: float
    sustained_before: float
    fp8: float
    cores: dict[Attention, Core]
    link_bytes_per_s: float = 0.0
    nic_bytes_per_s: float = 0.0

    def kept(self, *, current: bool) -> float:
        """`sustained` of today's libraries or of the first ones."""
        return self.sustained if current else self.sustained_before


# Attention: FlashAttention on A100 reaches about a third of the peak in training; FlashAttention-2 190 TFLOP/s on A100
# and 335 on H100 (Dao 2023, arXiv:2307.08691, figures 5 and 6), FlashAttention-3 about 640 forward and 480 backward on
# H100 (Shah et al. 2024, arXiv:2407.08608, figures 5 and 6), all causal with heads of 128; cuDNN 9 as much as that.
_FLASH = {Attention.FLASH: Core(share=0.35, half=300.0), Attention.FLASH2: Core(share=0.60, half=400.0)}
_FLASH_ON_HOPPER = {Attention.FLASH: Core(share=0.19, half=300.0), Attention.FLASH2: Core(share=0.33, half=600.0)}
UNKNOWN = Generation(gemm=PLAIN, sustained=1.0, sustained_before=1.0, fp8=1.7, cores={})
"""Of devices whose kernels nobody timed."""

VOLTA = Generation(
    gemm=Gemm(best=0.75, depth=107.0, waves=0.08, processors=80), sustained=0.97, sustained_before=0.97, fp8=1.0,
    cores={}, link_bytes_per_s=150e9, nic_bytes_per_s=6.25e9,
)  # fmt: skip
AMPERE = Generation(
    gemm=Gemm(best=0.84, depth=107.0, waves=0.08, processors=108), sustained=0.96, sustained_before=0.96, fp8=1.0,
    cores={**_FLASH, Attention.CUDNN: Core(share=0.60, half=400.0)},
    link_bytes_per_s=300e9, nic_bytes_per_s=25e9,
)  # fmt: skip
HOPPER = Generation(
    gemm=Gemm(best=0.82, depth=140.0, waves=0.09, processors=132), sustained=0.92, sustained_before=0.79, fp8=1.7,
    cores={
        **_FLASH_ON_HOPPER,
        Attention.FLASH3: Core(share=0.52, half=1000.0),
        Attention.CUDNN: Core(share=0.52, half=1000.0),
    },
    link_bytes_per_s=450e9, nic_bytes_per_s=50e9,
)  # fmt: skip
BLACKWELL = Generation(
    gemm=Gemm(best=0.80, depth=200.0, waves=0.12, processors=148), sustained=0.88, sustained_before=0.88, fp8=1.7,
    cores={**_FLASH_ON_HOPPER, Attention.CUDNN: Core(share=0.50, half=1500.0)},
    link_bytes_per_s=450e9, nic_bytes_per_s=50e9,
)  # fmt: skip

CDNA = Generation(
    gemm=Gemm(best=0.60, depth=150.0, waves=0.10, processors=304), sustained=0.95, sustained_before=0.95, fp8=1.9,
    cores={Attention.FLASH2: Core(share=0.26, half=600.0)},
    link_bytes_per_s=448e9, nic_bytes_per_s=50e9,
)  # fmt: skip
"""AMD's: 620 TFLOP/s in bf16 and 990 in fp8 of an MI300X's 1,307 and 2,615, as benchmarks of 2024 publish."""

BLACKWELL_FLOPS, HOPPER_FLOPS, LEAST_HOPPER_FLOPS = 2.25e15, 0.9894e15, 0.6e15
"""Dense 16-bit peaks of a B200 and an H100, and the one at which a device without fp8 counts as a Hopper."""


@lru_cache(maxsize=64)
def _between(peak: float) -> Generation:
    """A device between an H100 and a B200: what share of its peak it reaches falls as the peak grows, so that more
    FLOP/s are never slower."""
    way = min(max(math.log(peak / HOPPER_FLOPS) / math.log(BLACKWELL_FLOPS / HOPPER_FLOPS), 0.0), 1.0)

    def mixed(old: float, new: float) -> float:
        return math.exp((1.0 - way) * math.log(old) + way * math.log(new))

    old, new = HOPPER.gemm, BLACKWELL.gemm
    cores = {
        name: Core(share=mixed(core.share, other.share), half=mixed(core.half, other.half))
        for name, core in HOPPER.cores.items()
        if (other := BLACKWELL.cores.get(name)) is not None
    }
    return replace(
        HOPPER if way < 1.0 else BLACKWELL,
        gemm=Gemm(
            best=mixed(old.best, new.best),
            depth=mixed(old.depth, new.depth),
            waves=mixed(old.waves, new.waves),
            processors=round(mixed(old.processors, new.processors)),
        ),
        sustained=mixed(HOPPER.sustained, BLACKWELL.sustained),
        sustained_before=mixed(HOPPER.sustained_before, BLACKWELL.sustained_before),
        cores=(HOPPER.cores | cores) if way < 1.0 else cores,
    )


def generation_of(device: Device) -> Generation:
    """The architecture behind a device's figures, whatever its name: no bf16 before Ampere, no fp8 before Hopper."""
    peaks = device.peak_flops_per_s
    peak = peaks.get(DType.BF16) or peaks.get(DType.FP16)
    if device.kind is DeviceKind.CPU or peak is None:
        return UNKNOWN
    if device.kind is DeviceKind.ROCM:
        return CDNA
    if peak > HOPPER_FLOPS:
        return _between(peak)
    if peak >= LEAST_HOPPER_FLOPS or DType.FP8 in peaks:
        return HOPPER
    return AMPERE if DType.BF16 in peaks else VOLTA


def gemm_of(device: Device) -> Gemm:
    """The shape constants of the device's generation."""
    return generation_of(device).gemm


def attention_of(device: Device, wanted: Attention) -> Attention:
    """The kernel that the wanted one means on this device: where it has none, an older one or the scores in memory."""
    cores = generation_of(device).cores
    if wanted is Attention.UNFUSED or wanted in cores or device.kind is DeviceKind.CPU:
        return wanted
    older = [item for item in (Attention.FLASH2, Attention.FLASH) if item in cores]
    return older[0] if older else Attention.UNFUSED


def core_over_products(device: Device, attention: Attention, model: ModelSpec, seq_len: float, current: bool) -> float:
    """Time of a FLOP in the fused attention core over that of one in a large product of 16 bits.

    Args:
        device: decides the generation; 1 where nobody timed its kernels.
        attention: the kernel (`attention_of`).
        model: for the width of its heads.
        seq_len: tokens that a rank's queries look back on.
        current: with today's libraries, or with those of the architecture's first years.
    """
    generation = generation_of(device)
    core = generation.cores.get(attention)
    if core is None:
        return 1.0
    latent = model.latent_attention
    head = float(model.head_dim if latent is None else latent.v_head_dim)
    return generation.gemm.best * generation.kept(current=current) / core.reached(seq_len, head)


MEMORY_EFFICIENCY = 0.80
"""Assumption: share of the memory bandwidth that streaming kernels reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Device time = kernels * gap_s + flops * s_per_flop + bytes * s_per_byte; host time = kernels * launch_s.

    A GPU works through what the host has launched: the slower of the two sets the pace. With `queued` false (a CPU,
    or a fit whose launches are in its device time) both add up. `traffic` multiplies the counted bytes of small
    kernels; a fit has it in its rate. `share` is the part of its full speed at which a device computes while all of
    its node do: below 1 for CPU ranks that share too few cores. Fits were made under that load. `s_per_flop_16` is of
    what an 8-bit recipe leaves in 16 bits (attention, the head); `core` the time of a FLOP in the attention core over
    that of one in a product of 16 bits, `fused` whether the core is one kernel.
    """

    launch_s: float
    gap_s: float
    s_per_flop: float
    s_per_flop_16: float
    s_per_byte: float
    traffic: float
    queued: bool
    share: float
    gemm: Gemm
    core: float
    fused: bool
    basis: Basis


def speeds_of(
    cluster: ClusterSpec,
    model: ModelSpec,
    workload: Workload,
    profile: Profile | None,
    framework: Framework = TORCH,
) -> Speeds:
    """The speeds to estimate with.

    Raises:
        MissingMeasurementError: no fit, and the catalog has no peak for the dtype or no memory bandwidth.
    """
    generation = generation_of(cluster.device)
    gemm, attention = generation.gemm, attention_of(cluster.device, framework.attention)
    core = core_over_products(cluster.device, attention, model, workload.seq_len, framework.current)
    fused = attention is not Attention.UNFUSED
    if profile is not None and profile.compute is not None:
        fit = profile.compute
        return Speeds(
            launch_s=fit.launch_s,
            gap_s=0.0,
            s_per_flop=1.0 / fit.flops_per_s,
            s_per_flop_16=1.0 / fit.flops_per_s,
            s_per_byte=1.0 / fit.bytes_per_s if fit.bytes_per_s else 0.0,
            traffic=1.0,
            queued=False,
            share=core_share(cluster),
            gemm=gemm,
            core=core,
            fused=fused,
            basis=Basis.PROFILE,
        )
    peak = peak_flops_per_s(cluster, workload)
    if peak is None:
        raise _missing(cluster, f"peak FLOPs in {workload.dtype.value}")
    if cluster.device.memory_bytes_per_s is None:
        raise _missing(cluster, "memory bandwidth")
    wide = _wide_peak(cluster.device, workload.dtype) or peak / 2.0
    reached = gemm.best * generation.kept(current=framework.current)
    narrow = generation.fp8 * peak / (2.0 * wide) if workload.dtype is DType.FP8 else 1.0
    return Speeds(
        launch_s=framework.kernel_s,
        gap_s=framework.device_gap_s,
        s_per_flop=1.0 / (wide * reached * narrow),
        s_per_flop_16=1.0 / (wide * reached),
        s_per_byte=1.0 / (cluster.device.memory_bytes_per_s * MEMORY_EFFICIENCY),
        traffic=framework.traffic,
        queued=True,
        share=core_share(cluster),
        gemm=gemm,
        core=core,
        fused=fused,
        basis=Basis.CATALOG,
    )


def _wide_peak(device: Device, dtype: DType) -> float | None:
    """The peak of the dtype, for 8 bits that of what stays in 16."""
    peaks = device.peak_flops_per_s
    return peaks.get(DType.BF16) or peaks.get(DType.FP16) if dtype is DType.FP8 else peaks.get(dtype)


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
