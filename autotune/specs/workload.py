"""Workload: how the model is trained."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import model_validator

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


class Attention(StrEnum):
    """How attention is computed: `flash` in one kernel that keeps no scores, `unfused` with scores in memory."""

    FLASH = "flash"
    UNFUSED = "unfused"


class CrossEntropy(StrEnum):
    """The loss: `eager` makes fp32 copies of the logits, `fused` writes their gradient over them.

    `gathered` is torch's own on every tp rank: the logits of all of them are collected first.
    """

    EAGER = "eager"
    FUSED = "fused"
    GATHERED = "gathered"


class Norms(StrEnum):
    """How norms are computed: `fused` in one kernel, `eager` by operations that keep fp32 copies."""

    FUSED = "fused"
    EAGER = "eager"


class Fp8Recipe(StrEnum):
    """How tensors are scaled to fp8. With `blockwise` and `mxfp8` a tensor and its transpose are two tensors."""

    DELAYED = "delayed"
    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class Workload(Spec):
    """Sequence length in tokens, global batch in sequences a step, the number formats and how some parts are computed.

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
        attention: one kernel, or scores in memory.
        cross_entropy: of the loss.
        norms: one kernel, or operations.

    What is None is as the framework that runs it has it by default (cost.framework); what is not is so whatever the
    framework.
    """

    seq_len: Count
    global_batch: Count
    dtype: DType = DType.BF16
    grad_dtype: DType | None = None
    optimizer: Optimizer = Optimizer.ADAMW
    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    master_dtype: DType | None = None
    exp_avg_dtype: DType | None = None
    exp_avg_sq_dtype: DType | None = None
    fp8_recipe: Fp8Recipe | None = None
    saved_dtype: DType | None = None
    attention: Attention | None = None
    cross_entropy: CrossEntropy | None = None
    norms: Norms | None = None

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
        """Identifies the workload: what a document of before these choices says has the key that it had."""
        data = {name: value for name, value in self.to_data().items() if name not in CHOICES or value is not None}
        return digest_of({"grad_dtype": DType.FP32.value} | data)

    @property
    def gradients(self) -> DType:
        """Of accumulated gradients where no framework says otherwise: what our step probe has."""
        return self.grad_dtype or DType.FP32

    @property
    def choices(self) -> dict[str, str]:
        """What is not left to the framework, by name."""
        data = self.to_data()
        return {name: data[name] for name in CHOICES if data[name] is not None}

    def not_probed(self) -> str:
        """What of the choices torch's own parts in our probes do not do, and what they do; empty if they do it all.

        They compute with copies of `dtype` of fp32 parameters, add gradients up and keep moments in fp32, and leave
        kernels to torch.
        """
        done: dict[str, tuple[StrEnum | None, ...]] = {
            "grad_dtype": (DType.FP32, DType.BF16, DType.FP16),
            "param_dtype": (self.dtype,),
            "reduce_dtype": (DType.FP32, DType.BF16, DType.FP16),
            "master_dtype": (DType.FP32,),
            "exp_avg_dtype": (DType.FP32,),
            "exp_avg_sq_dtype": (DType.FP32,),
            "fp8_recipe": (),
            "saved_dtype": (self.dtype,),
            "attention": (Attention.FLASH,),
            "cross_entropy": (CrossEntropy.EAGER,),
            "norms": (),
        }
        for name, values in done.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                allowed = ", ".join(item.value for item in values if item is not None) or "left to torch"
                return f"{name} {value.value}: {allowed}"
        return ""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch


def choices_of(text: str) -> dict[str, object]:
    """Reads `grad_dtype=bf16,exp_avg_dtype=fp8,...`, any of CHOICES. Raises InputError."""
    found: dict[str, object] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        key, sign, value = item.partition("=")
        if not sign or key not in CHOICES:
            raise InputError("--precision", item, "give key=value with keys " + ", ".join(CHOICES))
        if key in found:
            raise InputError("--precision", item, "each key may be given once")
        found[key] = value
    return found


CHOICES = (
    "grad_dtype", "param_dtype", "reduce_dtype", "master_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "fp8_recipe",
    "saved_dtype", "attention", "cross_entropy", "norms",
)  # fmt: skip
"""The fields of a workload that are the framework's where they are None."""
