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
_LATER = (*_ROUTING, "mixers", "mlp_layers", "moe_every", "expert_hidden", "post_norms", "attention_gate", "indexer")
"""Fields that models of before they were known do not have in their key."""


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


class Recurrence(StrEnum):
    """How a linear-attention layer carries its state along the sequence.

    `mamba2` (arXiv:2405.21060), `gated_delta` (arXiv:2412.06464), `lightning` (arXiv:2401.04658).
    """

    MAMBA2 = "mamba2"
    GATED_DELTA = "gated_delta"
    LIGHTNING = "lightning"


class LinearAttention(Spec):
    """A layer whose work grows with the sequence, not with its square; its state is `heads` x `key_dim` x `head_dim`.

    `key_heads` of `key_dim` are the keys' and queries' (Mamba-2: its groups and its state), `heads` of `head_dim` the
    values'. `conv_kernel` 0 means no convolution before it.
    """

    recurrence: Recurrence
    heads: Count
    head_dim: Count
    key_heads: Count
    key_dim: Count
    conv_kernel: CountOrZero = 0


class Mixer(Spec):
    """How `layers` of a model's layers mix tokens, where that is not full attention of the model's own shape.

    `window` > 0: a token attends to the last `window` tokens, or with `chunked` to those since the last multiple of it.
    `linear`: by linear attention. Neither: not at all, as a layer that is an MLP alone.
    """

    layers: Count
    window: CountOrZero = 0
    chunked: bool = False
    linear: LinearAttention | None = None


class Indexer(Spec):
    """DeepSeek's sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): `heads` cheap heads of `head_dim`
    choose the `top_k` tokens that a token attends to, in `layers` of the layers; the others take the same ones.
    """

    heads: Count
    head_dim: Count
    top_k: Count
    layers: Count


class RouterScore(StrEnum):
    """What a router makes of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class Constants(Spec):
    """What a launch has to say of a model and what changes neither its speed nor its memory; None is not known.

    Args:
        rope_base: of rotary positions (theta).
        rope_scaling: factor by which Llama 3.1 stretches them.
        norm_epsilon: of all norms.
        router_groups: of experts; with `expert_nodes` a token goes to the best of them (DeepSeek's n_group).
        router_score: what the router's logits become.
        router_bias: whether a bias that no gradient reaches balances the experts.
        router_scale: factor on the weights of a token's experts.
    """

    rope_base: Annotated[float, Field(gt=0, le=1e12)] | None = None
    rope_scaling: Annotated[float, Field(gt=0, le=1e6)] | None = None
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = None
    router_groups: Count | None = None
    router_score: RouterScore | None = None
    router_bias: bool | None = None
    router_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None


class ModelSpec(Spec):
    """A decoder-only transformer.

    `ffn` is the MLP's inner width; `gated` MLPs have three matrices, others two. `tied` shares the embedding
    with the output head. With `experts` > 0 the MLP of each layer after the first `dense_layers` is a mixture
    of `experts` MLPs of width `expert_ffn`, `top_k` of them active for a token, plus `shared_experts` that are
    always active; the first `dense_layers` keep the dense `ffn`. `expert_nodes` > 0: the experts of a token lie on at
    most so many nodes, and each of these gets it once (node-limited routing, DeepSeek-V3, arXiv:2412.19437, section
    2.1.2). `expert_capacity` > 0: an expert takes at most so many times the mean number of tokens; the rest is dropped.
    Of the layers after the dense ones each `moe_every`-th is a mixture. `expert_hidden` > 0: routed experts work on a
    projection to that width.

    `mixers` says which layers do not mix tokens by full attention, and how many; they are taken to be spread evenly.
    `mlp_layers` > 0: only so many layers have an MLP, the others mix alone. `post_norms`: a norm after each block too.
    `attention_gate`: queries come with a gate for the context, which doubles their projection. `constants` are what a
    launch needs beside the shape.
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
    mixers: tuple[Mixer, ...] = ()
    mlp_layers: CountOrZero = 0
    moe_every: Count = 1
    expert_hidden: CountOrZero = 0
    post_norms: bool = False
    attention_gate: bool = False
    indexer: Indexer | None = None
    constants: Constants = Constants()
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
            if isinstance(data.get("mixers"), list):  # a list is what a document has
                data["mixers"] = tuple(data["mixers"])
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            allowed = f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            raise mismatch("kv_heads", self.kv_heads, allowed)
        if self.experts:
            self._check_experts()
        else:
            for name in ("top_k", "expert_ffn", "shared_experts", "dense_layers", "expert_hidden", *_ROUTING):
                if getattr(self, name):
                    raise mismatch(name, getattr(self, name), f"{name} needs experts > 0")
            if self.moe_every > 1:
                raise mismatch("moe_every", self.moe_every, "moe_every needs experts > 0")
        if self.position is Position.LEARNED and not self.max_positions:
            raise mismatch("max_positions", self.max_positions, "learned positions need max_positions")
        self._check_layers()
        return self

    def _check_layers(self) -> None:
        mixed = sum(mixer.layers for mixer in self.mixers)
        for name, count in (("mixers", mixed), ("mlp_layers", self.mlp_layers)):
            if count > self.layers:
                raise mismatch(name, count, f"{name} are of {count} layers, the model has {self.layers}")
        if any(mixer.linear is not None and mixer.window for mixer in self.mixers):
            raise mismatch("mixers", "linear with a window", "a mixer has a window or is linear, not both")
        if self.mlp_layers and self.dense_layers:
            raise mismatch("mlp_layers", self.mlp_layers, "it goes without dense_layers: all MLPs are of one kind")
        if self.indexer is not None and self.indexer.layers > self.layers:
            raise mismatch("indexer", self.indexer.layers, f"indexer.layers must not exceed layers ({self.layers})")

    @property
    def uniform(self) -> bool:
        """Whether all layers are alike but for dense ones before mixtures: what frameworks' plain models can say."""
        plain = not (self.mixers or self.mlp_layers or self.indexer or self.expert_hidden)
        return plain and self.moe_every == 1 and not self.post_norms and not self.attention_gate

    def _check_experts(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise mismatch("top_k", self.top_k, f"a mixture of experts needs 1 <= top_k <= experts ({self.experts})")
        if not self.expert_ffn:
            raise mismatch("expert_ffn", self.expert_ffn, "a mixture of experts needs expert_ffn")
        if self.dense_layers > self.layers:
            allowed = f"dense_layers ({self.dense_layers}) must not exceed layers ({self.layers})"
            raise mismatch("dense_layers", self.dense_layers, allowed)
        if self.moe_every > 1 and self.dense_layers:
            raise mismatch("moe_every", self.moe_every, "it goes without dense_layers")

    @property
    def key(self) -> str:
        """Identifies the shape, whatever its name, source or constants."""
        fields = type(self).model_fields
        unsaid = {name for name in _LATER if getattr(self, name) == fields[name].default}
        return self.digest(without=frozenset({"name", "source", "constants", *unsaid}))
