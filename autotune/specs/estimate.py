"""Estimate: what the cost model says of one plan. An estimate is never a measurement and says its basis."""

from __future__ import annotations

from enum import StrEnum

from autotune.specs.base import Spec


class Basis(StrEnum):
    """Where the speeds behind an estimate come from."""

    CATALOG = "catalog"
    PROFILE = "profile"


class SecondsByPart(Spec):
    """Seconds of one optimizer step on the critical path, by part; they sum to `Estimate.step_time_s`.

    `compute` includes recomputation; `bubble` is the pipeline's idle time; `dp_exposed` is the part of the
    data-parallel communication that no computation hides; `launch` is what a device waits for kernels to be launched.
    """

    compute: float
    tp: float
    ep: float
    cp: float
    pp_p2p: float
    bubble: float
    dp_exposed: float
    optimizer: float
    launch: float = 0.0


class BytesByPart(Spec):
    """Peak bytes on the worst pipeline stage, by part; they sum to `Estimate.peak_memory_bytes`.

    `gathered` are inputs of sharded matrices that a framework keeps whole between forward and backward,
    `fragmentation` is what an allocator reserves beyond all tensors.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    gathered: float = 0.0
    fragmentation: float = 0.0


class Estimate(Spec):
    """Seconds and bytes of one plan by named part.

    `mfu` counts model FLOPs only (causal attention at half of s²) over the device's dense peak; None where no
    peak is known. `worst_stage` is the pipeline stage (0-based) with the largest memory.

    `peak_memory_bytes` is all that counts against the device's memory. Of it the plan needs `needed_bytes`: the rest is
    given back before allocations fail. A plan that needs `usable_bytes` fits as often as not; `fits` says on which side
    this one is, `p_fits` how probably it fits. The allocator will have reserved `reserved_bytes`, and tensors take
    `allocated_bytes`. `step_time_interval_s` and `peak_memory_interval_bytes` hold the true value with 90 %
    probability. `framework` names the assumptions behind it all.
    """

    seconds: SecondsByPart
    bytes: BytesByPart
    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    peak_memory_bytes: float
    worst_stage: int
    fits: bool
    basis: Basis
    framework: str = ""
    step_time_interval_s: tuple[float, float] | None = None
    reserved_bytes: float | None = None
    allocated_bytes: float | None = None
    p_fits: float | None = None
    needed_bytes: float | None = None
    usable_bytes: float | None = None
    peak_memory_interval_bytes: tuple[float, float] | None = None
