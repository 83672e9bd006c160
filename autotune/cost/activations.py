"""Bytes that a layer keeps between forward and backward, counted tensor by tensor.

For LayerNorm, GELU and one key per query head the count is 32 bytes a token and hidden element in 16 bits, plus the
fp32 log-sum-exp of a fused attention kernel (4 a token and head). Korthikanti et al. 2022 (arXiv:2205.05198,
section 4.1) have 34: their 2 more are the masks of two dropouts, which we leave out because current models are trained
without dropout; their 5·a·s/h is what a kernel keeps that is not fused. Statistics of the norms (8 bytes a token)
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.rows import Rows
from autotune.cost.table import FULL, SELECTIVE, FloatColumn
from autotune.cost.work import stored_bytes
from autotune.specs import ModelSpec, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Bytes a token of one layer: `sharded` is divided by tp, `whole` only with sequence parallelism.

    `core` is the part of `sharded` that selective recomputation drops, `entry` the layer's input, which is all
    that full recomputation keeps. `gradients` is what backward through the MLP holds at once: the gradients of its
    inner tensors.
    """

    sharded: float
    whole: float
    core: float
    entry: float
    gradients: float


def layer_token_bytes(model: ModelSpec, workload: Workload, *, moe: bool, load: float = 1.0) -> TokenBytes:
    """What one layer keeps of a token, by how it is divided; `load` is the rank's routed tokens over the mean."""
    size, h = stored_bytes(workload.dtype), model.hidden
    whole = 4.0 * h + _latent_width(model)  # the inputs of two norms, of the projections and of the MLP
    if moe:  # the sorted copies that go to the experts and what they give back, and fp32 scores
        whole += 2.0 * load * model.top_k * h + 8.0 * model.experts / size
    core = 4.0 * model.heads
    width = (load * model.top_k + model.shared_experts) * model.expert_ffn if moe else model.ffn
    # An MLP keeps its activation's input and output; a gated one also the second factor and the product.
    sharded = _attention_width(model) + (4.0 if model.gated else 2.0) * width
    return TokenBytes(
        sharded=size * sharded + core,
        whole=size * whole,
        core=core,
        entry=float(size * h),
        gradients=size * (3.0 if model.gated else 2.0) * width,
    )


def _attention_width(model: ModelSpec) -> float:
    """Elements a token of queries, keys, values and the context (and of q and k before their norm)."""
    latent = model.latent_attention
    if latent is not None:
        return 2.0 * model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
    norm_inputs = model.heads + model.kv_heads if model.qk_norm else 0
    return float((2 * model.heads + 2 * model.kv_heads + norm_inputs) * model.head_dim)


def _latent_width(model: ModelSpec) -> float:
    """Elements a token of latent attention's compressed queries and keys, before and after their norms."""
    latent = model.latent_attention
    return 2.0 * (latent.q_lora_rank + latent.kv_lora_rank) + latent.qk_rope_head_dim if latent else 0.0


def kept_bytes(layer: TokenBytes, rows: Rows) -> tuple[FloatColumn, FloatColumn]:
    """(bytes a layer keeps for one micro-batch, bytes that its backward needs for a while).

    The latter are its gradients, and with full recomputation its working set, made again.
    """
    working = rows.tokens * (layer.sharded / rows.tp + layer.whole / rows.spread)
    kept = np.where(rows.recompute == SELECTIVE, working - rows.tokens * (layer.core / rows.tp), working)
    full = rows.recompute == FULL
    gradients = rows.tokens * (layer.gradients / rows.tp)
    return np.where(full, rows.tokens * (layer.entry / rows.spread), kept), gradients + np.where(full, working, 0.0)
