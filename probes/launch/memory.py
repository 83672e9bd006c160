"""The memory of a rank: a limit that really fails on CPU, and readings that show what a probe left behind. On ranks."""

from __future__ import annotations

import ctypes
import gc
import resource

import torch


class DataLimit:
    """RLIMIT_DATA at a baseline plus the device's memory, so that a CPU rank runs out as a GPU does.

    RLIMIT_DATA counts private writable memory (getrlimit(2), since Linux 4.7): the heap and the allocator's
    mappings, but not shared libraries. The baseline is what the interpreter, torch, the default group and the
    imported probe modules take: it plays the part of a GPU's context, outside the device's memory.
    Only the soft limit is moved, so that it can be lifted again.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._baseline_bytes = data_bytes()

    def exempt(self, grown_bytes: int) -> None:
        """Adds what a later import took to the baseline."""
        self._baseline_bytes += max(0, grown_bytes)

    def __enter__(self) -> None:
        _set_soft_limit(self._baseline_bytes + self.memory_bytes)

    def __exit__(self, *_: object) -> None:
        _set_soft_limit(resource.RLIM_INFINITY)


def _set_soft_limit(limit_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard if limit_bytes == resource.RLIM_INFINITY else limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes() -> int:
    """What RLIMIT_DATA counts, now (VmData of proc(5))."""
    return _status_bytes("VmData")


def held_bytes(device: torch.device) -> int:
    """What this rank holds after everything that can be freed has been: resident anonymous bytes on CPU, the
    device's used bytes on CUDA (communicators included, which the allocator does not see).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes - free_bytes
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("RssAnon")


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
