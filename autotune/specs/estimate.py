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
    data-parallel communication that no computation hides.
    """

    compute: float
    tp: float
    ep: float
    cp: float
    pp_p2p: float
    bubble: float
    dp_exposed: float
    optimizer: float


class BytesByPart(Spec):
    """Peak bytes on the worst pipeline stage, by part; they sum to `Estimate.peak_memory_bytes`."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float


class Estimate(Spec):
    """Seconds and bytes of one plan by named part.

    `mfu` counts model FLOPs only (causal attention at half of s²) over the device's dense peak; None where no
    peak is known. `worst_stage` is the pipeline stage (0-based) with the largest memory.
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
