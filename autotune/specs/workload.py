"""Workload: how the model is trained."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from autotune.errors import InputError
from autotune.specs.base import Spec, digest_of, mismatch
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
    PaxML), `deepspeed` ZeRO around a model of Hugging Face, `scaling` Aleph Alpha's.
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
    SCALING = "scaling"


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


class CrossEntropy(StrEnum):
    """The loss: `eager` makes fp32 copies of the logits, `fused` writes their gradient over them.

    `gathered` is torch's own on every tp rank: the logits of all of them are collected first.
    """

    EAGER = "eager"
    FUSED = "fused"
    GATHERED = "gathered"


class Fp8Recipe(StrEnum):
    """How tensors are scaled to fp8. With `blockwise` and `mxfp8` a tensor and its transpose are two tensors."""

    DELAYED = "delayed"
    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


TargetName = Annotated[str, Field(pattern=r"^[a-z][a-z-]{0,30}(@[0-9][0-9.]{0,15})?$")]


class Software(Spec):
    """What trains and in which formats: the part of a workload that has a default whatever the model is."""

    grad_dtype: DType | None = None
    optimizer: Optimizer = Optimizer.ADAMW
    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    master_dtype: DType | None = None
    exp_avg_dtype: DType | None = None
    exp_avg_sq_dtype: DType | None = None
    fp8_recipe: Fp8Recipe | None = None
    saved_dtype: DType | None = None
    framework: FrameworkName = FrameworkName.TORCH
    attention: Attention | None = None
    norms: Norms | None = None
    cross_entropy: CrossEntropy | None = None
    tp_overlap: bool | None = None
    ep_overlap: bool | None = None
    target: TargetName | None = None


class Workload(Software):
    """Sequence length in tokens, global batch in sequences a step, the number formats, and what software trains.

    `dtype` is that of matrix products. `framework` runs the plan. What is None of the other formats and of the kernels
    is as the framework has it by default (cost.framework); what is not is so whatever the framework.

    Args:
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        dtype: of matrix products.
        grad_dtype: of the gradients that are accumulated.
        optimizer: which states there are.
        param_dtype: of the parameters that a step computes with.
        reduce_dtype: in which gradients are reduced between replicas.
        master_dtype: of the optimizer's own parameters; in the format of the parameters there are none.
        exp_avg_dtype: of the first moment.
        exp_avg_sq_dtype: of the second moment.
        fp8_recipe: with dtype fp8.
        saved_dtype: of the inputs of matrix products that are kept for backward.
        framework: what trains.
        attention: the kernel of the attention core.
        norms: one kernel, or operations.
        cross_entropy: of the loss.
        tp_overlap: whether the collectives of tensor parallelism run beside computation.
        ep_overlap: whether the exchange of experts does.
        command: the user's own program that trains, by name and digest (specs.command); empty: none, our step probe.
        target: the framework, NAME@VERSION, that must be able to run the plan; None for any (autotune.frameworks).
    """

    seq_len: Count
    global_batch: Count
    dtype: DType = DType.BF16
    command: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9._@-]*$")] = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fp8_recipe is not None and self.dtype is not DType.FP8:
            raise mismatch("fp8_recipe", self.fp8_recipe.value, f"it goes with dtype fp8, not {self.dtype.value}")
        for name in ("grad_dtype", "reduce_dtype"):
            if getattr(self, name) is DType.FP8:
                raise mismatch(name, "fp8", "one of fp32, bf16, fp16: nobody adds gradients up in fp8")
        return self

    @property
    def key(self) -> str:
        """Identifies the workload; one that leaves formats and software open has the key of before it could say
        them."""
        data = {name: value for name, value in self.to_data().items() if value is not None}
        if self.framework is FrameworkName.TORCH:
            del data["framework"]
        if not self.command:
            del data["command"]
        return digest_of({"grad_dtype": DType.FP32.value} | data)

    def of_any_software(self) -> Workload:
        """What is trained, without a word on what trains it."""
        return self.model_copy(
            update={"framework": FrameworkName.TORCH, "command": "", **dict.fromkeys((*KERNELS, "target"))}
        )

    @property
    def kind(self) -> str:
        """What measurements must have in common to say something of each other: matrix products, and the program."""
        return f"{self.dtype.value} by {self.command}" if self.command else self.dtype.value

    @property
    def probed(self) -> Workload:
        """As our probes of layers have it, whoever runs the plan."""
        return self.model_copy(update={"command": ""}) if self.command else self

    @property
    def gradients(self) -> DType:
        """Of accumulated gradients where no framework says otherwise: what our step probe has."""
        return self.grad_dtype or DType.FP32

    @property
    def choices(self) -> dict[str, str]:
        """The number formats that are not left to the framework, by name."""
        data = self.to_data()
        return {name: data[name] for name in PRECISION if data[name] is not None}

    def not_probed(self) -> str:
        """What of the formats torch's own parts in our probes do not do, and what they do; empty if they do it all.

        They compute with copies of `dtype` of fp32 parameters, add gradients up and keep moments in fp32, and leave
        the loss to torch.
        """
        done: dict[str, tuple[StrEnum, ...]] = {
            "grad_dtype": (DType.FP32, DType.BF16, DType.FP16),
            "param_dtype": (self.dtype,),
            "reduce_dtype": (DType.FP32, DType.BF16, DType.FP16),
            "master_dtype": (DType.FP32,),
            "exp_avg_dtype": (DType.FP32,),
            "exp_avg_sq_dtype": (DType.FP32,),
            "fp8_recipe": (),
            "saved_dtype": (self.dtype,),
            "cross_entropy": (CrossEntropy.EAGER,),
        }
        for name, values in done.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                return f"{name} {value.value}: {', '.join(values) or 'none'}"
        return ""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch


PRECISION = (
    "grad_dtype", "param_dtype", "reduce_dtype", "master_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "fp8_recipe",
    "saved_dtype",
)  # fmt: skip
KERNELS = ("attention", "norms", "cross_entropy", "tp_overlap", "ep_overlap")
"""The fields of a workload that are the framework's own where they are None."""


def read_precision(text: str) -> dict[str, object]:
    """Reads `grad_dtype=bf16,exp_avg_dtype=fp8,...` as fields of a workload. Raises as `read_kernels` does."""
    return _fields(text, "precision", PRECISION)


def read_kernels(text: str) -> dict[str, object]:
    """Reads `attention=flash3,norms=eager,...` as fields of a workload.

    Raises:
        InputError: no such field, a field twice, or no value.
    """
    return _fields(text, "kernels", KERNELS)


def _fields(text: str, what: str, known: tuple[str, ...]) -> dict[str, object]:
    data: dict[str, object] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, sign, value = item.partition("=")
        if not sign or not value or key not in known or key in data:
            raise InputError(what, item, "give key=value, each key once, with keys " + ", ".join(known))
        data[key] = value == "true" if value in {"true", "false"} else value
    return data
