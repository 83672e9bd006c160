"""The environment of a rank, read on that rank."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from autotune.specs import Fingerprint
from probes.context import RankContext
from probes.launch.placement import SECRET_WORDS

_LIBRARIES = ("numpy", "triton", "flash-attn", "transformer-engine", "apex", "deepspeed", "xformers")
_SPEED_PREFIXES = (
    "CUBLAS_", "CUDA_", "CUDNN_", "FI_", "GLOO_", "GOMP_", "HIP_", "HSA_", "KMP_", "MALLOC_", "MKL_", "NCCL_",
    "NVIDIA_TF32", "OMP_", "PYTORCH_", "RCCL_", "ROCR_", "TORCH_", "UCX_",
)  # fmt: skip
_NVIDIA_SMI_S = 20.0


def run(_: object, context: RankContext) -> dict[str, Any]:
    """A probe: returns the Fingerprint of this rank's environment as plain data."""
    return read(context).to_data()


def read(context: RankContext) -> Fingerprint:
    """Reads everything that can be read; what cannot be stays empty."""
    on_cuda = context.device.type == "cuda"
    smi = _nvidia_smi(context.local_rank) if on_cuda else {}
    return Fingerprint(
        hostname=context.hostname,
        device_name=torch.cuda.get_device_name(context.device) if on_cuda else cpu_name(),
        device_count=torch.cuda.device_count() if on_cuda else context.world_size,
        device_memory_bytes=_memory_bytes(context),
        driver=smi.pop("driver_version", "") or _amd_driver(),
        runtime=_runtime() if on_cuda else "cpu",
        collective_library=_collective_library(context.backend),
        torch=torch.__version__,
        python=platform.python_version(),
        libraries=_libraries(),
        os=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        cpu_cores=len(os.sched_getaffinity(0)),
        clocks=_clocks(smi),
        environment=speed_environment(dict(os.environ)) | _torch_threads(),
    )


def speed_environment(environment: dict[str, str]) -> dict[str, str]:
    """The variables of an environment that change speed, without any that could be a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_SPEED_PREFIXES) and not any(word in name for word in SECRET_WORDS)
    }


def cpu_name() -> str:
    """The CPU's model name, or its architecture where the kernel does not tell a name."""
    names = _cpuinfo("model name")
    return names[0] if names else platform.machine()


def _cpuinfo(field: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(field) and ":" in line]


def _memory_bytes(context: RankContext) -> int:
    if context.device.type == "cuda":
        return int(torch.cuda.get_device_properties(context.device).total_memory)
    return context.memory_limit_bytes or psutil.virtual_memory().total


def _runtime() -> str:
    return f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"


def _collective_library(backend: str) -> str:
    if backend != "nccl":
        return backend
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    name = "rccl" if torch.version.hip else "nccl"
    return f"{name} {'.'.join(str(part) for part in version)}"


def _libraries() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _torch_threads() -> dict[str, str]:
    return {
        "torch.num_threads": str(torch.get_num_threads()),
        "torch.num_interop_threads": str(torch.get_num_interop_threads()),
    }


def _clocks(smi: dict[str, str]) -> dict[str, float]:
    """MHz by clock name: nvidia-smi's, and the mean over cores of what the kernel tells of the CPU."""
    clocks = {name.removeprefix("clocks."): _mhz(value) for name, value in smi.items() if name.startswith("clocks.")}
    cores_mhz = [_mhz(value) for value in _cpuinfo("cpu MHz")]
    known = [mhz for mhz in cores_mhz if mhz is not None]
    if known:
        clocks["cpu"] = sum(known) / len(known)
    return {name: mhz for name, mhz in clocks.items() if mhz is not None}


def _mhz(text: str) -> float | None:
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None


def _nvidia_smi(local_rank: int) -> dict[str, str]:
    """Driver and clocks of the rank's GPU as nvidia-smi prints them; empty where there is none."""
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    uuid = str(torch.cuda.get_device_properties(local_rank).uuid)
    device = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    query = [command, f"--id={device}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.stdout.split(",")), strict=False))


def _amd_driver() -> str:
    try:
        return Path("/sys/module/amdgpu/version").read_text(encoding="ascii").strip()
    except OSError:
        return ""
