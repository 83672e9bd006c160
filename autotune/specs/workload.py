"""Workload: how the model is trained."""

from __future__ import annotations

from enum import StrEnum

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


class Workload(Spec):
    """Sequence length in tokens, global batch in sequences a step, and the number formats.

    `dtype` is the compute (and parameter) dtype, `grad_dtype` that of accumulated and reduced gradients
    (fp32 is the default of Megatron-LM and nanotron).
    """

    seq_len: Count
    global_batch: Count
    dtype: DType = DType.BF16
    grad_dtype: DType = DType.FP32
    optimizer: Optimizer = Optimizer.ADAMW

    @property
    def key(self) -> str:
        """Identifies the workload."""
        return self.digest()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch
