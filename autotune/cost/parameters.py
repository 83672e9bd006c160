"""Exact parameter counts of a ModelSpec, by what tensor and expert parallelism can divide."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.specs import LinearAttention, Mixer, ModelSpec, Norm, Position, Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters (or matrix parameters) by how they are divided over ranks.

    `sharded` is divided by tp, `whole` is on every rank of a tp group (norms, router, latent projections,
    biases of row-parallel layers), `experts` is divided by tp and ep. Fractions are those of a mean layer.
    """

    sharded: float = 0
    whole: float = 0
    experts: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.sharded + self.whole + self.experts

    def __add__(self, other: Share) -> Share:
        return Share(
            sharded=self.sharded + other.sharded,
            whole=self.whole + other.whole,
            experts=self.experts + other.experts,
        )

    def __mul__(self, times: float) -> Share:
        return Share(sharded=self.sharded * times, whole=self.whole * times, experts=self.experts * times)


def norm_parameters(model: ModelSpec) -> int:
    """Parameters of one norm over the hidden dim: a scale, and a bias for LayerNorm."""
    return model.hidden * (2 if model.norm is Norm.LAYERNORM else 1)


def mixers(model: ModelSpec) -> list[tuple[float, Mixer | None]]:
    """(share of the layers, how they mix tokens); None is full attention of the model's own shape."""
    full = model.layers - sum(mixer.layers for mixer in model.mixers)
    found: list[tuple[float, Mixer | None]] = [(full / model.layers, None)] if full else []
    return found + [(mixer.layers / model.layers, mixer) for mixer in model.mixers]


def mlp_share(model: ModelSpec) -> float:
    """The share of the layers that have an MLP."""
    return model.mlp_layers / model.layers if model.mlp_layers else 1


def mixer_matrices(model: ModelSpec, mixer: Mixer | None) -> Share:
    """Matrix parameters of one layer's mixing of tokens."""
    if mixer is None or mixer.window:
        return attention_matrices(model)
    return Share() if mixer.linear is None else Share(sharded=model.hidden * sum(linear_widths(mixer.linear)))


def linear_widths(linear: LinearAttention) -> tuple[int, int]:
    """Widths of the input and output projections of linear attention.

    In: queries and keys (Mamba-2: C and B), values and their gate, and per-head scalars: Mamba-2's step, the delta
    rule's decay and strength.
    """
    values = linear.heads * linear.head_dim
    scalars = {Recurrence.MAMBA2: 1, Recurrence.GATED_DELTA: 2, Recurrence.LIGHTNING: 0}[linear.recurrence]
    return 2 * linear.key_heads * linear.key_dim + 2 * values + scalars * linear.heads, values


def kept_by_mixing(model: ModelSpec) -> tuple[float, float]:
    """(the share of the layers that attend, elements a token that linear attention keeps in a mean layer).

    The latter are what its convolution gets and gives, and its output before and after the gate.
    """
    attending, kept = 0.0, 0.0
    for share, mixer in mixers(model):
        if mixer is None or mixer.window:
            attending += share
        elif mixer.linear is not None:
            enter, leave = linear_widths(mixer.linear)
            kept += share * (2 * enter + leave)
    return attending, kept


def attention_matrices(model: ModelSpec) -> Share:
    """Matrix parameters of one attention block: q, k, v and output projections, or those of latent attention."""
    latent, h = model.latent_attention, model.hidden
    if latent is None:
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        return Share(sharded=(3 if model.attention_gate else 2) * h * queries + 2 * h * keys)
    heads_dim = model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    up = model.heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank
    output = model.heads * latent.v_head_dim * h
    down = h * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    query_down = h * latent.q_lora_rank
    query_up = (latent.q_lora_rank or h) * heads_dim
    return Share(sharded=query_up + up + output, whole=down + query_down) + _indexer_matrices(model)


def _indexer_matrices(model: ModelSpec) -> Share:
    """A mean layer's: queries from the compressed ones, one shared key, and a weight a head."""
    indexer, latent = model.indexer, model.latent_attention
    if indexer is None:
        return Share()
    source = (latent.q_lora_rank if latent else 0) or model.hidden
    each = indexer.heads * indexer.head_dim * source + model.hidden * (indexer.head_dim + indexer.heads)
    return Share(whole=each * indexer.layers / model.layers)


def attention_vectors(model: ModelSpec) -> Share:
    """Biases and norms inside one attention block."""
    latent = model.latent_attention
    output_bias = model.hidden if model.linear_bias else 0
    if latent is not None:
        return Share(whole=latent.q_lora_rank + latent.kv_lora_rank + output_bias)
    has_bias = model.qkv_bias or model.linear_bias
    biases = (model.heads + 2 * model.kv_heads) * model.head_dim if has_bias else 0
    norms = 2 * model.head_dim * (2 if model.norm is Norm.LAYERNORM else 1) if model.qk_norm else 0
    return Share(sharded=biases, whole=output_bias + norms)


def mixer_vectors(model: ModelSpec, mixer: Mixer | None) -> Share:
    """Biases, norms and other vectors of one layer's mixing of tokens."""
    if mixer is None or mixer.window:
        return attention_vectors(model)
    linear = mixer.linear
    if linear is None:
        return Share()
    values, keys = linear.heads * linear.head_dim, linear.key_heads * linear.key_dim
    convolved = (2 * keys + values) * (linear.conv_kernel + (linear.recurrence is Recurrence.MAMBA2))
    scalars = {Recurrence.MAMBA2: 3, Recurrence.GATED_DELTA: 2, Recurrence.LIGHTNING: 0}[linear.recurrence]
    norm = linear.head_dim if linear.recurrence is Recurrence.GATED_DELTA else values
    return Share(sharded=(convolved if linear.conv_kernel else 0) + scalars * linear.heads + norm)


def norms(model: ModelSpec) -> float:
    """Norms over the hidden dim of a mean layer: one before each block, and where there are `post_norms` one after."""
    mixing = sum(share for share, mixer in mixers(model) if mixer is None or mixer.window or mixer.linear)
    return (2 if model.post_norms else 1) * (mixing + mlp_share(model))


def mlp_matrices(model: ModelSpec, width: int) -> int:
    """Matrix parameters of one MLP of that inner width: three matrices if gated, else two."""
    return (3 if model.gated else 2) * model.hidden * width


def mlp_parameters(model: ModelSpec, width: int) -> Share:
    """All parameters of one dense MLP of that inner width."""
    biases = (2 if model.gated else 1) * width if model.linear_bias else 0
    return Share(
        sharded=mlp_matrices(model, width) + biases,
        whole=model.hidden if model.linear_bias else 0,
    )


def expert_parameters(model: ModelSpec) -> float:
    """All parameters of one routed expert."""
    return mlp_parameters(model, model.expert_ffn).total * (model.expert_hidden or model.hidden) / model.hidden


def _mixing(model: ModelSpec, *, vectors: bool) -> Share:
    """Of a mean layer: layers that mix tokens in different ways are taken to be spread evenly."""
    total = Share()
    for share, mixer in mixers(model):
        total += mixer_matrices(model, mixer) * share
        total += mixer_vectors(model, mixer) * share if vectors else Share()
    return total


def _projections(model: ModelSpec) -> int:
    """Matrix parameters between the hidden dim and that of the experts, there and back."""
    return 2 * model.hidden * model.expert_hidden


def layer_parameters(model: ModelSpec, *, moe: bool) -> Share:
    """All parameters of one layer, dense or a mixture of experts; where they mix tokens differently, of a mean one."""
    base = _mixing(model, vectors=True) + Share(whole=norms(model) * norm_parameters(model))
    if not moe:
        return base + mlp_parameters(model, model.ffn) * mlp_share(model)
    shared = mlp_parameters(model, model.shared_experts * model.expert_ffn) if model.shared_experts else Share()
    whole = model.hidden * model.experts + _projections(model)
    mixture = shared + Share(whole=whole, experts=model.experts * expert_parameters(model))
    return base + mixture * mlp_share(model)


def layer_matrices(model: ModelSpec, *, moe: bool) -> Share:
    """Matrix parameters of one layer that are active for a token (`experts`: of its top_k experts)."""
    attention = _mixing(model, vectors=False)
    if not moe:
        return attention + Share(sharded=mlp_matrices(model, model.ffn)) * mlp_share(model)
    wide = mlp_matrices(model, model.expert_ffn) * (model.expert_hidden or model.hidden) / model.hidden
    mixture = Share(
        sharded=mlp_matrices(model, model.shared_experts * model.expert_ffn),
        whole=model.hidden * model.experts + _projections(model),
        experts=model.top_k * wide,
    )
    return attention + mixture * mlp_share(model)


def embedding_parameters(model: ModelSpec) -> Share:
    """The token embedding (divided by tp along the vocabulary) and learned positions (whole)."""
    positions = model.max_positions * model.hidden if model.position is Position.LEARNED else 0
    return Share(sharded=model.vocab * model.hidden, whole=positions)


def head_parameters(model: ModelSpec) -> Share:
    """The final norm and the output matrix; a tied matrix is counted here too (see `total_parameters`)."""
    return Share(sharded=model.vocab * model.hidden, whole=norm_parameters(model))


def layer_counts(model: ModelSpec) -> tuple[int, int]:
    """How many layers are (dense, mixtures of experts)."""
    moe = (model.layers - model.dense_layers) // model.moe_every if model.experts else 0
    return model.layers - moe, moe


def total_parameters(model: ModelSpec) -> int:
    """All parameters of the model; a tied embedding once."""
    dense, moe = layer_counts(model)
    layers = dense * layer_parameters(model, moe=False).total
    layers += moe * layer_parameters(model, moe=True).total if moe else 0
    tied = model.vocab * model.hidden if model.tied else 0
    return round(layers + embedding_parameters(model).total + head_parameters(model).total - tied)


def active_parameters(model: ModelSpec) -> int:
    """Parameters that work for one token: all but the experts it is not routed to."""
    _, moe = layer_counts(model)
    idle = (model.experts - model.top_k) * expert_parameters(model) * mlp_share(model) if moe else 0
    return round(total_parameters(model) - moe * idle)
