"""Profile: calibrated speeds of one cluster under one fingerprint, fitted from measurements."""

from __future__ import annotations

from autotune.specs.base import Spec
from autotune.specs.measurement import CollectiveOp


class LinkFit(Spec):
    """alpha-beta of one operation over one group layout: time = latency_s * steps + traffic / bytes_per_s.

    steps and traffic are the ring's (PHYSICS: all-reduce 2(n-1) and 2(n-1)/n * S, and so on), so that
    `bytes_per_s` is a bus bandwidth. `crosses_nodes` tells which link level the groups of this layout use.
    """

    op: CollectiveOp
    group_size: int
    stride: int
    crosses_nodes: bool
    latency_s: float
    bytes_per_s: float
    relative_error: float
    readings: int


class ComputeFit(Spec):
    """time = kernels * launch_s + flops / flops_per_s + bytes / bytes_per_s (the last two of matrix and other work).

    Fitted over layer probes; `relative_error` is the median absolute relative residual.
    """

    flops_per_s: float
    launch_s: float
    bytes_per_s: float | None
    relative_error: float
    readings: int


class Profile(Spec):
    """What is calibrated for one cluster. A part that was never measured is absent (None or missing)."""

    cluster_key: str
    fingerprint_key: str
    links: tuple[LinkFit, ...] = ()
    compute: ComputeFit | None = None
    step_scale: float = 1.0  # measured / estimated step time over trials, geometric mean
    step_scale_trials: int = 0
    step_overhead_s: float = 0.0
    memory_overhead_bytes: float = 0.0
    memory_scale: float = 1.0
