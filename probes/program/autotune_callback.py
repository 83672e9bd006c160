"""Tells autotune how long the steps of a training program take. Standard library only; copy it where you need it.

    from autotune_callback import StepTimer          # a loop of your own
    timer = StepTimer()
    for batch in loader:
        ...
        timer.step(loss)                             # once after each optimizer step

    from autotune_callback import hf_callback        # Hugging Face Trainer
    trainer = Trainer(..., callbacks=[hf_callback()])

    from autotune_callback import lightning_callback
    trainer = lightning.Trainer(..., callbacks=[lightning_callback()])

autotune puts a copy of this file on PYTHONPATH and the directory to write to in AUTOTUNE_METRICS. Without the latter
nothing is written, so the lines may stay where they are. A step is the time from the end of the one before; the first
has none.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from typing import Any


class StepTimer:
    """Writes a line a step. Does nothing outside a trial of autotune."""

    def __init__(self) -> None:
        directory = os.environ.get("AUTOTUNE_METRICS")
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        self._file = None
        if directory:
            self._file = open(os.path.join(directory, f"rank-{int(rank)}.jsonl"), "a", buffering=1)  # noqa: SIM115
        self._last: float | None = None
        self._number = 0

    def step(self, loss: Any = None) -> None:
        """One optimizer step is over. `loss` may be a number or a tensor of one."""
        if self._file is None:
            return
        torch: Any = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
        now, last, self._last = time.monotonic(), self._last, time.monotonic()
        self._number += 1
        if last is None:
            return
        line: dict[str, Any] = {"step": self._number, "time_s": now - last, "at_s": now}
        if loss is not None:
            value = float(loss)
            line["loss"] = value if math.isfinite(value) else None
        if cuda:
            line["memory_bytes"] = torch.cuda.max_memory_reserved()
        self._file.write(json.dumps(line) + "\n")


def hf_callback() -> Any:
    """A TrainerCallback for Hugging Face's Trainer."""
    timer = StepTimer()

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        timer.step()

    base = importlib.import_module("transformers").TrainerCallback
    return type("AutotuneCallback", (base,), {"on_step_end": on_step_end})()


def lightning_callback() -> Any:
    """A Callback for Lightning's Trainer."""
    timer, last = StepTimer(), [0]

    def on_train_batch_end(self: Any, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > last[0]:  # not a micro-batch that is only accumulated
            last[0] = trainer.global_step
            timer.step()

    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = importlib.import_module("pytorch_lightning").Callback
    return type("AutotuneCallback", (base,), {"on_train_batch_end": on_train_batch_end})()
