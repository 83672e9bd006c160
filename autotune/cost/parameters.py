"""Exact parameter counts of a ModelSpec, by what tensor and expert parallelism can divide."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.specs import ModelSpec, Norm, Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters (or matrix parameters) by how they are divided over ranks.

    `sharded` is divided by tp, `whole` is on every rank of a tp group (norms, router, latent projections,
    biases of row-parallel layers), `experts` is divided by tp and ep.
    """

    sharded: int = 0
    whole: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.sharded + self.whole + self.experts

    def __add__(self, other: Share) -> Share:
        return Share(
            sharded=self.sharded + other.sharded,
            whole=self.whole + other.whole,
            experts=self.experts + other.experts,
        )


def norm_parameters(model: ModelSpec) -> int:
    """Parameters of one norm over the hidden dim: a scale, and a bias for LayerNorm."""
    return model.hidden * (2 if model.norm is Norm.LAYERNORM else 1)


def attention_matrices(model: ModelSpec) -> Share:
    """Matrix parameters of one attention block: q, k, v and output projections, or those of latent attention."""
    latent, h = model.latent_attention, model.hidden
    if latent is None:
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        return Share(sharded=2 * h * queries + 2 * h * keys)
    heads_dim = model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    up = model.heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank
    output = model.heads * latent.v_head_dim * h
    down = h * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    query_down = h * latent.q_lora_rank
    query_up = (latent.q_lora_rank or h) * heads_dim
    return Share(sharded=query_up + up + output, whole=down + query_down)


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


def layer_parameters(model: ModelSpec, *, moe: bool) -> Share:
    """All parameters of one layer, dense or a mixture of experts."""
    base = attention_matrices(model) + attention_vectors(model) + Share(whole=2 * norm_parameters(model))
    if not moe:
        return base + mlp_parameters(model, model.ffn)
    shared = mlp_parameters(model, model.shared_experts * model.expert_ffn) if model.shared_experts else Share()
    experts = model.experts * mlp_parameters(model, model.expert_ffn).total
    return base + shared + Share(whole=model.hidden * model.experts, experts=experts)


def layer_matrices(model: ModelSpec, *, moe: bool) -> Share:
    """Matrix parameters of one layer that are active for a token (`experts`: of its top_k experts)."""
    attention = attention_matrices(model)
    if not moe:
        return attention + Share(sharded=mlp_matrices(model, model.ffn))
    return attention + Share(
        sharded=mlp_matrices(model, model.shared_experts * model.expert_ffn),
        whole=model.hidden * model.experts,
        experts=model.top_k * mlp_matrices(model, model.expert_ffn),
    )


def embedding_parameters(model: ModelSpec) -> Share:
    """The token embedding (divided by tp along the vocabulary) and learned positions (whole)."""
    positions = model.max_positions * model.hidden if model.position is Position.LEARNED else 0
    return Share(sharded=model.vocab * model.hidden, whole=positions)


def head_parameters(model: ModelSpec) -> Share:
    """The final norm and the output matrix; a tied matrix is counted here too (see `total_parameters`)."""
    return Share(sharded=model.vocab * model.hidden, whole=norm_parameters(model))


def layer_counts(model: ModelSpec) -> tuple[int, int]:
    """How many layers are (dense, mixtures of experts)."""
    return (model.dense_layers, model.layers - model.dense_layers) if model.experts else (model.layers, 0)


def total_parameters(model: ModelSpec) -> int:
    """All parameters of the model; a tied embedding once."""
    dense, moe = layer_counts(model)
    layers = dense * layer_parameters(model, moe=False).total
    layers += moe * layer_parameters(model, moe=True).total if moe else 0
    tied = model.vocab * model.hidden if model.tied else 0
    return layers + embedding_parameters(model).total + head_parameters(model).total - tied


def active_parameters(model: ModelSpec) -> int:
    """Parameters that work for one token: all but the experts it is not routed to."""
    _, moe = layer_counts(model)
    idle = (model.experts - model.top_k) * mlp_parameters(model, model.expert_ffn).total if moe else 0
    return total_parameters(model) - moe * idle
