"""Software: what runs a plan, as far as it decides speed and memory: the framework and its kernels."""

from __future__ import annotations

from enum import StrEnum

from autotune.specs.base import Spec


class FrameworkName(StrEnum):
    """Training frameworks whose habits are known. `torch` is our own step probe: eager PyTorch.

    `megatron` is Megatron-LM, NeMo and Megatron-Bridge of 2023 and later, with Transformer Engine; `megatron-2021` and
    `megatron-deepspeed` are of before fused attention; `fsdp` is fully sharded data parallelism in PyTorch (torchtitan,
    llm-foundry, fms-fsdp, Automodel), `jax` the same compiled by XLA (MaxText, PaxML), `deepspeed` ZeRO without tensor
    or pipeline parallelism of its own.
    """

    TORCH = "torch"
    MEGATRON = "megatron"
    MEGATRON_2021 = "megatron-2021"
    MEGATRON_DEEPSPEED = "megatron-deepspeed"
    NANOTRON = "nanotron"
    FSDP = "fsdp"
    JAX = "jax"
    DEEPSPEED = "deepspeed"


class Attention(StrEnum):
    """How the attention core is computed: with the scores in memory, or by a fused kernel of some generation."""

    UNFUSED = "unfused"
    FLASH = "flash"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    CUDNN = "cudnn"


class Software(Spec):
    """The framework that runs a plan and its kernels; None is what the framework takes on the device.

    `attention` is the kernel of the attention core, `fused_norms` whether a norm is one kernel, `tp_overlap` whether
    the collectives of tensor parallelism run beside the matrix products that they feed (user buffers, asynchronous
    TP), `ep_overlap` whether the exchange of experts runs beside computation.
    """

    framework: FrameworkName = FrameworkName.TORCH
    attention: Attention | None = None
    fused_norms: bool | None = None
    tp_overlap: bool | None = None
    ep_overlap: bool | None = None

    @property
    def key(self) -> str:
        """A short canonical name: the framework, and what was said beside it."""
        said = [(name, value) for name, value in self.to_data().items() if name != "framework" and value is not None]
        return ".".join([self.framework.value, *(f"{name}-{value}".lower() for name, value in said)])
