"""Measurement: what a caller who runs plans in a framework of their own tells of one run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured run of a plan.

    Args:
        tokens_per_s_per_gpu: global batch * sequence length / (seconds a step * devices).
        relative_noise: half width of its 95 % interval over the mean.
        peak_bytes: the most that the allocator reserved on any rank; None if unknown, which teaches nothing of memory.
        setup_s: seconds from the start to the first step; None if unknown.
        carried_sd: of a figure that a cheaper trial was carried over to (search.screening): its standard deviation
            (ln). The plan can be asked for again, and is not best by this. None for a whole trial.

    Raises:
        InputError: a figure that no run can have.
    """

    tokens_per_s_per_gpu: float
    relative_noise: float = 0.0
    peak_bytes: float | None = None
    setup_s: float | None = None
    carried_sd: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tokens_per_s_per_gpu) and self.tokens_per_s_per_gpu > 0):
            raise InputError("tokens_per_s_per_gpu", self.tokens_per_s_per_gpu, "must be finite and above 0")
        for name in ("relative_noise", "peak_bytes", "setup_s", "carried_sd"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(name, value, "must be finite and at least 0")
