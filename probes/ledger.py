"""The memory of a trial on one rank: how much tensors took at most, and how much the process or allocator held.

On CUDA both are the caching allocator's own counters. On CPU `TensorAccount` adds up tensor storages. That costs time,
so it ends with the untimed steps, by when the peak is known: the optimizer's state exists from the end of the
first step on, and each later step repeats the second.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from probes.account import TensorAccount

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Peaks of one rank in bytes, what was live when the account closed, and where the figures come from."""

    allocated_bytes: int
    reserved_bytes: int
    live_bytes: int
    source: str


class Ledger(Protocol):
    """Keeps account of one trial's memory."""

    def open(self) -> None:
        """Starts, before anything of the trial exists."""

    def close(self) -> None:
        """Stops what would disturb timing. May be called twice."""

    def reading(self) -> MemoryReading:
        """The peaks; call it while the trial's tensors still live, after `close`."""


class DeviceLedger:
    """The counters of CUDA's caching allocator, over all steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self) -> None:
        """Resets the peaks to what is held now."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Nothing: counting costs no time."""

    def reading(self) -> MemoryReading:
        """Peaks since `open`."""
        return MemoryReading(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            live_bytes=torch.cuda.memory_allocated(self._device),
            source=memory_source(self._device),
        )


class TensorLedger:
    """The account of tensor storages on CPU; reserved is the growth of the process's resident set at its highest."""

    def __init__(self) -> None:
        self._account = TensorAccount()
        self._resident_bytes = 0

    def open(self) -> None:
        """Starts the account at zero and resets the kernel's high-water mark of the resident set (proc(5))."""
        _CLEAR.write_text("5")
        self._resident_bytes = _status_bytes("VmRSS")
        self._account.open()

    def close(self) -> None:
        """Ends the account."""
        self._account.close()

    def reading(self) -> MemoryReading:
        """Peaks since `open`."""
        return MemoryReading(
            allocated_bytes=self._account.peak_bytes,
            reserved_bytes=max(0, _status_bytes("VmHWM") - self._resident_bytes),
            live_bytes=self._account.live_bytes,
            source=memory_source(torch.device("cpu")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What some work left allocated, and its highest point, both above what was there before; in bytes."""

    live_bytes: int
    peak_bytes: int


def growth_of(device: torch.device, work: Callable[[], object]) -> Growth:
    """Runs `work` once under account; what it returns lives until the account is closed."""
    if device.type == "cuda":
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = work()
        live_bytes, peak_bytes = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        del kept
        return Growth(live_bytes=live_bytes - before_bytes, peak_bytes=peak_bytes - before_bytes)
    account = TensorAccount()
    account.open()
    try:
        kept = work()
    finally:
        account.close()
    growth = Growth(live_bytes=account.live_bytes, peak_bytes=account.peak_bytes)
    del kept
    return growth


def make_ledger(device: torch.device) -> Ledger:
    """The ledger for a device."""
    return DeviceLedger(device) if device.type == "cuda" else TensorLedger()


def memory_source(device: torch.device) -> str:
    """Where the figures for a device come from, in words."""
    if device.type == "cuda":
        return "CUDA caching allocator"
    return "cpu tensor ledger; reserved: growth of the resident set"


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} has no {field}")
    return int(found.group(1)) * 1024
