"""ModelSpec: the shape of a decoder-only transformer. Shapes only; parameter and FLOP counts live in cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from autotune.specs.base import Name, Spec, mismatch

MOST = 2**31 - 1
"""The largest count: tables of plans hold counts in 32 bits, and no model or cluster comes near."""

MAX_LAYERS = 10_000
"""The plans of a model are listed up to one layer a stage: more layers would only be a longer list."""

MAX_CAPACITY = 1e6
"""Times the mean number of tokens of an expert: more is no limit."""

Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
ByteCount = Annotated[int, Field(ge=1, le=2**62)]  # a bound that floats have exactly: JSON Schemas may carry it as one


_ROUTING = ("expert_nodes", "expert_capacity")


class Norm(StrEnum):
    """The normalisation layer. LayerNorm has a bias, RMSNorm has none."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


class Position(StrEnum):
    """How positions enter: rotary (no parameters), learned (max_positions x hidden), or none."""

    ROPE = "rope"
    LEARNED = "learned"
    NONE = "none"


FILLED = ("kv_heads", "head_dim")
"""What a model's description may leave out: `heads`, and hidden / heads where that is whole."""


def _drop_filled(schema: dict[str, Any]) -> None:
    """Says in the JSON Schema, too, that these may be left out."""
    schema["required"] = [name for name in schema["required"] if name not in FILLED]


class LatentAttention(Spec):
    """DeepSeek's multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Dims in elements.

    `q_lora_rank` 0 means that queries are projected directly.
    """

    q_lora_rank: CountOrZero
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class ModelSpec(Spec):
    """A decoder-only transformer.

    `ffn` is the MLP's inner width; `gated` MLPs have three matrices, others two. `tied` shares the embedding
    with the output head. With `experts` > 0 the MLP of each layer after the first `dense_layers` is a mixture
    of `experts` MLPs of width `expert_ffn`, `top_k` of them active for a token, plus `shared_experts` that are
    always active; the first `dense_layers` keep the dense `ffn`. `expert_nodes` > 0: the experts of a token lie on at
    most so many nodes, and each of these gets it once (node-limited routing, DeepSeek-V3, arXiv:2412.19437, section
    2.1.2). `expert_capacity` > 0: an expert takes at most so many times the mean number of tokens; the rest is dropped.
    """

    model_config = ConfigDict(json_schema_extra=_drop_filled)

    name: Name
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count
    gated: bool
    vocab: Count
    tied: bool
    norm: Norm
    position: Position = Position.ROPE
    max_positions: CountOrZero = 0
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: CountOrZero = 0
    top_k: CountOrZero = 0
    expert_ffn: CountOrZero = 0
    shared_experts: CountOrZero = 0
    dense_layers: CountOrZero = 0
    expert_nodes: CountOrZero = 0
    expert_capacity: Annotated[float, Field(ge=0, le=MAX_CAPACITY)] = 0.0
    latent_attention: LatentAttention | None = None
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        if isinstance(data, dict):
            data = dict(data)
            if "kv_heads" not in data and "heads" in data:
                data["kv_heads"] = data["heads"]
            hidden, heads = data.get("hidden"), data.get("heads")
            whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0
            if "head_dim" not in data and isinstance(hidden, int) and isinstance(heads, int) and whole:
                data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            allowed = f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            raise mismatch("kv_heads", self.kv_heads, allowed)
        if self.experts:
            self._check_experts()
        else:
            for name in ("top_k", "expert_ffn", "shared_experts", "dense_layers", *_ROUTING):
                if getattr(self, name):
                    raise mismatch(name, getattr(self, name), f"{name} needs experts > 0")
        if self.position is Position.LEARNED and not self.max_positions:
            raise mismatch("max_positions", self.max_positions, "learned positions need max_positions")
        return self

    def _check_experts(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise mismatch("top_k", self.top_k, f"a mixture of experts needs 1 <= top_k <= experts ({self.experts})")
        if not self.expert_ffn:
            raise mismatch("expert_ffn", self.expert_ffn, "a mixture of experts needs expert_ffn")
        if self.dense_layers > self.layers:
            allowed = f"dense_layers ({self.dense_layers}) must not exceed layers ({self.layers})"
            raise mismatch("dense_layers", self.dense_layers, allowed)

    @property
    def key(self) -> str:
        """Identifies the shape, whatever its name or source."""
        unsaid = {
            name for name in _ROUTING if not getattr(self, name)
        }  # models of before these were known keep their key
        return self.digest(without=frozenset({"name", "source", *unsaid}))
