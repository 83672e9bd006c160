"""The memory of a trial on one rank: how much tensors took at most, and how much the process or allocator held.

On CUDA both are the caching allocator's own counters. On CPU `TensorAccount` adds up tensor storages. That costs time,
so it ends with the untimed steps, by when the peak is known: the optimizer's state exists from the end of the
first step on, and each later step repeats the second.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# TensorAccount: the bytes of all CPU tensor storages that come and go while it is open.
#
# Every operator's results are seen through torch's dispatcher, releases through weak references, whichever thread lets
# go last (gloo's threads often do). FSDP frees and refills storages by resizing them, so resizing is watched too.
# What an operator allocates and frees within itself is not seen.


class TensorAccount:
    """Counts from `open` to `close`; both figures keep their last value afterwards.

    Storages that existed before count as nothing, also when they go. Only one account can be open at a time.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._mode: Any = _Watch(self)
        self._resize: Callable[..., Any] | None = None

    def open(self) -> None:
        """Starts counting on this thread."""
        resize = self._resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, *sizes: Any) -> Any:
            result = resize(storage, *sizes)
            self._set(storage, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        self._mode.__enter__()

    def close(self) -> None:
        """Stops counting. May be called twice, or without `open`."""
        if self._resize is None:
            return
        self._mode.__exit__(None, None, None)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._resize = None
        self._known.clear()  # weak references that are gone call nobody back

    def meet(self, tensor: Tensor) -> None:
        """Takes note of a tensor that an operator made."""
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._set(storage, storage.nbytes())

    def _set(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        key = storage._cdata
        known = self._known.get(key)
        gone = weakref.ref(storage, lambda _: self._leave(key)) if known is None else known[0]
        self._known[key] = (gone, size_bytes)
        self._change(size_bytes - (0 if known is None else known[1]))

    def _leave(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._change(-known[1])

    def _change(self, signed_bytes: int) -> None:
        self.live_bytes += signed_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows an account the tensors that operators make; DTensors are left to their local operators."""

    def __init__(self, account: TensorAccount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._account = account
        self._makes: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        makes = self._makes.get(func)
        if makes is None:
            # Views and in-place operators, whose results alias their arguments by their schema, make nothing.
            makes = self._makes[func] = all(part.alias_info is None for part in func._schema.returns)
        if makes:
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, Tensor):
                    self._account.meet(part)
        return result


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
