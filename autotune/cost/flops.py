"""Model FLOPs: what training a token needs, whatever the plan; recomputation is never counted here."""

from __future__ import annotations

from autotune.cost.parameters import layer_counts, layer_matrices
from autotune.specs import ModelSpec

FORWARD_AND_BACKWARD = 3
"""Backward takes two matrix products for each one of forward."""


def matmul_parameters(model: ModelSpec) -> int:
    """Matrix parameters active for a token, the output head included, the embedding lookup not."""
    dense, moe = layer_counts(model)
    layers = dense * layer_matrices(model, moe=False).total
    layers += moe * layer_matrices(model, moe=True).total if moe else 0
    return layers + model.vocab * model.hidden


def attention_width(model: ModelSpec) -> int:
    """Heads x (dim of a query + dim of a value): 2 x heads x head_dim but for latent attention."""
    latent = model.latent_attention
    if latent is None:
        return 2 * model.heads * model.head_dim
    return model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)


def core_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Forward FLOPs of one layer's scores and context for one token, causal: half of the full s²."""
    return float(seq_len * attention_width(model))


def model_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Forward + backward FLOPs of a token: 6 x active matrix parameters + causal attention at half of s².

    6·P + 12·L·s·a·d·½ (PaLM, arXiv:2204.02311, appendix B, with the causal half).
    """
    attention = model.layers * core_flops_per_token(model, seq_len)
    return FORWARD_AND_BACKWARD * (2.0 * matmul_parameters(model) + attention)


def full_square_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """As `model_flops_per_token`, but attention counted over the full s², as Megatron-LM and PaLM publish it."""
    attention = 2 * model.layers * core_flops_per_token(model, seq_len)
    return FORWARD_AND_BACKWARD * (2.0 * matmul_parameters(model) + attention)
