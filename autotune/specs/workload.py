"""Workload: how the model is trained."""

from __future__ import annotations

from enum import StrEnum

from autotune.errors import InputError
from autotune.specs.base import Spec
from autotune.specs.model import Count


class DType(StrEnum):
    """Number formats. The value is the spelling in files and on the command line."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def size_bytes(self) -> int:
        """Bytes of one number."""
        return {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[self.value]


class Optimizer(StrEnum):
    """The optimizer: AdamW keeps two fp32 moments a parameter, SGD with momentum one."""

    ADAMW = "adamw"
    SGD = "sgd"


class FrameworkName(StrEnum):
    """Training frameworks whose habits are known (cost.framework). `torch` is our own step probe: eager PyTorch.

    `megatron` is Megatron-LM of 2023 and later with Transformer Engine, `nemo` and `megatron-bridge` are NVIDIA's
    recipes on top of it; `megatron-2021` and `megatron-deepspeed` are of before fused attention; `fsdp` is fully
    sharded data parallelism in PyTorch (torchtitan, fms-fsdp, Automodel), `jax` the same compiled by XLA (MaxText,
    PaxML), `deepspeed` ZeRO around a model of Hugging Face.
    """

    TORCH = "torch"
    MEGATRON = "megatron"
    NEMO = "nemo"
    MEGATRON_BRIDGE = "megatron-bridge"
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


class Norms(StrEnum):
    """How norms are computed: `fused` in one kernel, `eager` by operations in fp32."""

    FUSED = "fused"
    EAGER = "eager"


class Workload(Spec):
    """Sequence length in tokens, global batch in sequences a step, the number formats, and what software trains.

    `dtype` is the compute (and parameter) dtype, `grad_dtype` that of accumulated and reduced gradients
    (fp32 is the default of Megatron-LM and nanotron). `framework` runs the plan. What of its kernels is None is as it
    has them by default: `attention`, `norms`, whether the collectives of tensor parallelism (`tp_overlap`) and the
    exchange of experts (`ep_overlap`) run beside computation.
    """

    seq_len: Count
    global_batch: Count
    dtype: DType = DType.BF16
    grad_dtype: DType = DType.FP32
    optimizer: Optimizer = Optimizer.ADAMW
    framework: FrameworkName = FrameworkName.TORCH
    attention: Attention | None = None
    norms: Norms | None = None
    tp_overlap: bool | None = None
    ep_overlap: bool | None = None

    @property
    def key(self) -> str:
        """Identifies the workload; one that says nothing of its software has the key of before it could."""
        unsaid = {name for name in KERNELS if getattr(self, name) is None}
        if self.framework is FrameworkName.TORCH:
            unsaid.add("framework")
        return self.digest(without=frozenset(unsaid))

    def of_any_software(self) -> Workload:
        """What is trained, without a word on what trains it."""
        return self.model_copy(update={"framework": FrameworkName.TORCH, **dict.fromkeys(KERNELS)})

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch


KERNELS = ("attention", "norms", "tp_overlap", "ep_overlap")
"""The fields of a workload that are the framework's own where they are None."""


def read_kernels(text: str) -> dict[str, object]:
    """Reads `attention=flash3,norms=eager,...` as fields of a workload.

    Raises:
        InputError: no such field, a field twice, or no value.
    """
    data: dict[str, object] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, sign, value = item.partition("=")
        if not sign or not value or key not in KERNELS or key in data:
            raise InputError("kernels", item, "give key=value, each key once, with keys " + ", ".join(KERNELS))
        data[key] = value == "true" if value in {"true", "false"} else value
    return data
