"""Where, with which environment and what to do a rank is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.specs import DeviceKind

# What a rank is given of the launcher's environment: what Python, compilers, maths and network libraries read. Anything
# else stays behind, and so do the addresses and passwords of the fleet, API keys and a cloud's credentials.
_NAMES = {
    "CC", "CXX", "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "LOGNAME", "PATH", "TEMP",
    "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME",
}  # fmt: skip
_PREFIXES = (
    "AMD_", "CONDA_", "CUBLAS_", "CUDA_", "CUDNN_", "FI_", "GLOO_", "GOMP_", "GPU_", "HIP_", "HSA_", "IBV_", "KMP_",
    "LC_", "MALLOC_", "MIOPEN_", "MKL_", "MLX5_", "NCCL_", "NVIDIA_", "NVTE_", "NVSHMEM_", "OFI_", "OMP_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "RCCL_", "RDMAV_", "ROCBLAS_", "ROCM_", "ROCR_", "SHARP_", "TORCH", "TRITON_", "UCX_",
)  # fmt: skip
SECRET_WORDS = ("TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH", "_KEY", "COOKIE")
"""A variable with one of these in its name could be a secret, whatever its prefix."""

_PARENT_DEATH = Path(__file__).with_name("parent_death.py")
# Enough for autograd, gloo and Python threads; see parent_death._limit_stacks.
_CPU_STACK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one rank is started: on this machine directly, or inside a network namespace.

    `command_prefix` goes before the rank's command (`("ip", "netns", "exec", "name")`); `environment` is added to
    the rank's environment; `address` is where the other ranks reach this one (only rank 0's is used, for the
    rendezvous store).
    """

    command_prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What a rank is told when it starts. `memory_bytes` is the CPU device's memory, None elsewhere."""

    rank: int
    world_size: int
    local_rank: int
    kind: DeviceKind
    memory_bytes: int | None
    log_path: str
    store_host: str = ""

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-able data."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankConfig:
        """The reverse of `to_data` after a trip through JSON."""
        return cls(**{**data, "kind": DeviceKind(data["kind"])})


def rank_environment(kind: DeviceKind, ranks: int, placement: Placement) -> dict[str, str]:
    """The environment of a rank: what it may have of the launcher's, defaults for what is unset, then the placement's.

    Defaults are gloo on the loopback device (all ranks are on one machine unless placed elsewhere) and, for CPU
    ranks, OMP_NUM_THREADS = cores / ranks, at least 1, because ranks that each use every core measure only contention.
    """
    environment = clean_environment()
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if kind is DeviceKind.CPU:
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    environment.update(placement.environment)
    return environment


def clean_environment() -> dict[str, str]:
    """This process's environment as another program may have it: what libraries read, and nothing of ours."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name for word in SECRET_WORDS)
    }


def dying_with_parent(command: list[str], kind: DeviceKind) -> list[str]:
    """The command so that it dies with the thread of this process that starts it."""
    stack_bytes = _CPU_STACK_BYTES if kind is DeviceKind.CPU else 0
    return [sys.executable, "-I", "-S", str(_PARENT_DEATH), str(os.getpid()), str(stack_bytes), *command]
