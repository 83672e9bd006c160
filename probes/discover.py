"""What this machine is, as a ClusterSpec: its GPUs, or local ranks on its CPU. Loads no torch itself.

Only facts that the machine tells are filled in. A device's peaks and its link's speed are not among them:
`autotune.catalog.gpus` adds those of a known GPU.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.errors import InputError
from autotune.specs import ClusterSpec, Device, DeviceKind, Link
from probes.launch.placement import clean_environment

_TORCH_S, _SMI_S = 120.0, 20.0
MAX_RANKS = 4096
_MEMORY_GRAIN_BYTES = 256 << 20
_NOT_KNOWN = "not known: measure it"
_DRIVER_TRACES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")
_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"rocm": torch.version.hip is not None,
                  "devices": [[each.name, each.total_memory] for each in found]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver reports it; `memory_bytes` is its total memory."""

    name: str
    memory_bytes: int
    kind: DeviceKind
    told_by: str


def discover(ranks: int | None = None, memory_bytes: int | None = None) -> ClusterSpec:
    """Describes this machine as a cluster of one node.

    With GPUs, the devices are all that torch (or, without torch, nvidia-smi) sees. Without, they are local ranks on
    the CPU: the largest power of two up to the cores, but at least 4 and at most 8, each with an equal share of
    three quarters of the memory. The share is of the total (of the machine, or of its control group), not of what
    is free at the moment, so that the same machine is the same cluster tomorrow.

    Args:
        ranks: how many devices to describe: CPU ranks, or the first of the GPUs. None means as above.
        memory_bytes: what one device may use at most. None means all of a GPU, or the share of a CPU rank.

    Raises:
        InputError: numbers that this machine cannot give, or GPUs that differ from each other.
    """
    for what, value in (("ranks", ranks), ("memory", memory_bytes)):
        if value is not None and value < 1:
            raise InputError(what, value, "give a whole number of at least 1")
    if ranks is not None and ranks > MAX_RANKS:
        raise InputError("ranks", ranks, f"at most {MAX_RANKS} ranks are described on one machine")
    found = gpus()
    return _gpu_cluster(found, ranks, memory_bytes) if found else _cpu_cluster(ranks, memory_bytes)


def gpus() -> list[Gpu]:
    """The GPUs that ranks could use here. Empty without a driver, or where torch is built without GPUs."""
    if not any(Path(trace).exists() for trace in _DRIVER_TRACES) and shutil.which("nvidia-smi") is None:
        return []
    answer = _output([sys.executable, "-P", "-c", _ASK_TORCH], _TORCH_S)
    return parse_torch(answer) if answer is not None else parse_query(_smi("--query-gpu=name,memory.total"))


def parse_torch(text: str) -> list[Gpu]:
    """The devices in what `_ASK_TORCH` prints (its last line)."""
    answer = json.loads(text.strip().splitlines()[-1])
    kind = DeviceKind.ROCM if answer["rocm"] else DeviceKind.CUDA
    return [Gpu(name=name, memory_bytes=size, kind=kind, told_by="torch") for name, size in answer["devices"]]


def parse_query(text: str) -> list[Gpu]:
    """The devices in nvidia-smi's CSV of name and memory in MiB. Lines without both are left out."""
    found = []
    for line in text.splitlines():
        name, _, size = line.rpartition(",")
        if name.strip() and size.strip().isdecimal():
            memory_bytes = int(size) << 20
            found.append(Gpu(name=name.strip(), memory_bytes=memory_bytes, kind=DeviceKind.CUDA, told_by="nvidia-smi"))
    return found


def parse_topology(text: str, devices: int) -> str:
    """How the devices of `nvidia-smi topo -m` are joined: "NVLink", "PCIe" (some pair has no NVLink), or "unknown"."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    pairs = [row[1 + other] for me, row in enumerate(rows[:devices]) for other in range(devices)
             if other != me and len(row) > devices]  # fmt: skip
    if len(rows) < devices or not pairs:
        return "unknown"
    return "NVLink" if all(pair.startswith("NV") for pair in pairs) else "PCIe"


def _gpu_cluster(found: list[Gpu], ranks: int | None, memory_bytes: int | None) -> ClusterSpec:
    names = Counter(gpu.name for gpu in found)
    if len(names) > 1:
        raise InputError(
            "devices", dict(names), "the devices of a cluster must be equal: choose some with CUDA_VISIBLE_DEVICES"
        )
    devices = ranks or len(found)
    if devices > len(found):
        raise InputError("ranks", ranks, f"this machine has {len(found)} GPUs")
    total_bytes = min(gpu.memory_bytes for gpu in found)
    if memory_bytes is not None and memory_bytes > total_bytes:
        raise InputError("memory", memory_bytes, f"a device here has {total_bytes} bytes")
    first = found[0]
    return ClusterSpec(
        name=socket.gethostname() or "localhost",
        nodes=1,
        gpus_per_node=devices,
        device=Device(
            name=first.name,
            kind=first.kind,
            memory_bytes=memory_bytes or total_bytes,
            source=f"{first.told_by} on this machine; peaks {_NOT_KNOWN}",
        ),
        intra=_gpu_link(first.kind, devices),
    )


def _gpu_link(kind: DeviceKind, devices: int) -> Link:
    if devices == 1:
        return Link(name="none", source="one device")
    if kind is DeviceKind.ROCM:
        return Link(name="unknown", source=_NOT_KNOWN)
    return Link(name=parse_topology(_smi("topo", "-m"), devices), source=f"nvidia-smi topo -m; speed {_NOT_KNOWN}")


def _cpu_cluster(ranks: int | None, memory_bytes: int | None) -> ClusterSpec:
    cores = len(os.sched_getaffinity(0))
    ranks = ranks or default_ranks(cores)
    total_bytes = min(psutil.virtual_memory().total, control_group_limit_bytes() or sys.maxsize)
    if memory_bytes is not None and memory_bytes * ranks > total_bytes:
        raise InputError("memory", memory_bytes, f"{ranks} ranks share {total_bytes} bytes here")
    return ClusterSpec(
        name=socket.gethostname() or "localhost",
        nodes=1,
        gpus_per_node=ranks,
        device=Device(
            name=cpu_name(),
            kind=DeviceKind.CPU,
            memory_bytes=memory_bytes or share_bytes(total_bytes, ranks),
            source=f"this machine: {ranks} ranks on {cores} cores; peaks {_NOT_KNOWN}",
        ),
        intra=Link(name="loopback", source=_NOT_KNOWN),
        node_cores=cores,
    )


def default_ranks(cores: int) -> int:
    """CPU ranks on a machine of that many cores: a power of two from 4 to 8, so that tp, pp and dp can all vary."""
    return 8 if cores >= 8 else 4


def share_bytes(total_bytes: int, ranks: int) -> int:
    """A rank's share of three quarters of the memory, rounded down to 256 MiB where it is larger than that."""
    share = total_bytes * 3 // 4 // ranks
    return max(share - share % _MEMORY_GRAIN_BYTES, min(share, _MEMORY_GRAIN_BYTES))


def control_group_limit_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The tightest memory limit on this process's control group and its parents (cgroups 1 and 2), None without one."""
    limits = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inner = Path(path.lstrip("/"))
        limits += [_text(base / each / file).strip() for each in (inner, *inner.parents)]
    sizes = [int(limit) for limit in limits if limit.isdecimal()]  # "max" is no limit
    return min(sizes, default=None)


def cpu_name() -> str:
    """The processor's name as the kernel tells it."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "Processor"} and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    format_ = ["--format=csv,noheader,nounits"] if arguments[0].startswith("--query") else []
    return (_output([command, *arguments, *format_], _SMI_S) if command else None) or ""


def _output(command: list[str], timeout_s: float) -> str | None:
    """What a command prints, None if it cannot be run, fails or takes too long."""
    try:
        answer = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
