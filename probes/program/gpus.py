"""The memory that a program takes of this node's GPUs and how busy it keeps them, through NVML where there is one."""

from __future__ import annotations

import importlib
from statistics import fmean
from typing import Any

SAMPLE_EVERY_S = 1.0


class GpuWatch:
    """Samples the node's GPUs. Without NVML or the package nvidia-ml-py (pynvml) it says nothing.

    Args:
        nvml: the module; by default pynvml, if it is installed.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml, self._handles = nvml, list[Any]()
        self._before: list[int] = []
        self._peak: list[int] = []
        self._busy: list[float] = []
        self._due_s = 0.0
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self._before = [self._used(handle) for handle in self._handles]
        except Exception:  # noqa: BLE001 - no driver, no library, another vendor's: there is nothing to read
            self._handles = []
        self._peak = list(self._before)

    def look(self, now_s: float) -> None:
        """Takes a sample if it is time to."""
        if not self._handles or now_s < self._due_s:
            return
        self._due_s = now_s + SAMPLE_EVERY_S
        try:
            for index, handle in enumerate(self._handles):
                self._peak[index] = max(self._peak[index], self._used(handle))
            rates = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        except Exception:  # noqa: BLE001 - a GPU that fell off the bus is the program's failure to tell
            self._handles = []
            return
        self._busy.append(fmean(rates) / 100.0)

    def _used(self, handle: Any) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)

    @property
    def peak_bytes(self) -> int:
        """The most that a GPU held beyond what it held before, contexts and libraries included; 0 where unknown."""
        return max((peak - before for peak, before in zip(self._peak, self._before, strict=True)), default=0)

    @property
    def utilisation(self) -> float | None:
        """Mean share of time in which a kernel ran, over GPUs and samples; None where unknown."""
        return fmean(self._busy) if self._busy else None

    def close(self) -> None:
        """Lets go of NVML."""
        if self._handles:
            try:
                self._nvml.nvmlShutdown()
            except Exception:  # noqa: BLE001 - as above
                self._handles = []
