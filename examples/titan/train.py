"""torchtitan's own training on CPU ranks: its train.main(); only torch.cpu gets what it asks of a device module.

    torchrun --nproc-per-node 2 train.py --job.config_file titan.toml

With GPUs none of this is needed: the command's second word is then torchtitan's own train.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._utils
from autotune_callback import StepTimer


class _Properties:
    name = "cpu"
    total_memory = 8 << 30
    major = 0


torch.set_num_threads(1)
torch.cpu.get_device_properties = lambda *args, **more: _Properties()
torch.cpu.get_device_name = lambda *args, **more: "cpu"
torch.cpu.memory_stats = lambda *args, **more: {}
for _name in ("reset_peak_memory_stats", "empty_cache", "set_device"):
    setattr(torch.cpu, _name, lambda *args, **more: None)
torch.cpu.current_device = lambda: 0
torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.tools.utils as tools

tools.get_peak_flops = lambda *args: 1e12

from torch.distributed.fsdp import FSDPModule
from torchtitan import train

_divide = FSDPModule.set_gradient_divide_factor


def _sum(self: FSDPModule, factor: float) -> None:
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


FSDPModule.set_gradient_divide_factor = _sum
_step = train.Trainer.train_step
_timer = StepTimer()


def _timed(self: Any, data: Any) -> Any:
    found = _step(self, data)
    _timer.step()
    return found


train.Trainer.train_step = _timed

if __name__ == "__main__":
    train.main(train.Trainer)
