"""RankContext: what the launcher gives to a probe that runs on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.specs import ProbeProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of an initialised default process group.

    `device` is where tensors live (`cpu` or `cuda:i`). `emit` sends progress to the launcher (rank 0 only; a no-op
    elsewhere). `memory_limit_bytes` is the enforced limit of the rank's own allocations on CPU, None on CUDA.
    """

    rank: int
    world_size: int
    local_rank: int
    hostname: str
    device: torch.device
    backend: str
    memory_limit_bytes: int | None
    emit: Callable[[ProbeProgress], None]
