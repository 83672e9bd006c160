"""The matrix products of a layer by shape, so that small ones cost what they cost (cost.gemm)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.gemm import Gemm
from autotune.cost.parameters import attention_matrices
from autotune.cost.table import FloatColumn
from autotune.specs import ModelSpec

EXPERT_LOAD_FACTOR = 1.1
"""Assumption: the hottest rank of an expert-parallel group has 10 % more tokens than the mean."""


def expert_load(model: ModelSpec, ep: FloatColumn) -> FloatColumn:
    """Tokens of the hottest rank over the mean; a capacity bounds it, and a rank with all experts has no more."""
    most = min(EXPERT_LOAD_FACTOR, model.expert_capacity) if model.expert_capacity else EXPERT_LOAD_FACTOR
    load: FloatColumn = np.where(ep > 1, most, 1.0)
    return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """tokens x `n` x `k`, `count` of them. tp divides n, k or neither; `routed` products run once an expert."""

    n: float
    k: float
    divides: str
    count: float = 1.0
    routed: bool = False


def layer_products(model: ModelSpec, *, moe: bool) -> list[Product]:
    """The products of one layer's forward pass; gate and up projections are one product, as are q, k and v."""
    h, gates = float(model.hidden), 2.0 if model.gated else 1.0
    found = _attention(model)
    width = float(model.shared_experts * model.expert_ffn if moe else model.ffn)
    if width:
        found += [Product(n=gates * width, k=h, divides="n"), Product(n=h, k=width, divides="k")]
    if moe:
        wide = float(model.expert_ffn)
        found.append(Product(n=float(model.experts), k=h, divides="none"))
        found.append(Product(n=gates * wide, k=h, divides="n", routed=True))
        found.append(Product(n=h, k=wide, divides="k", routed=True))
    return found


def _attention(model: ModelSpec) -> list[Product]:
    h, matrices = float(model.hidden), attention_matrices(model)
    if model.latent_attention is not None:
        found = [Product(n=matrices.sharded / h, k=h, divides="n")]
        return found + ([Product(n=matrices.whole / h, k=h, divides="none")] if matrices.whole else [])
    context = float(model.heads * model.head_dim)
    return [
        Product(n=context + 2.0 * model.kv_heads * model.head_dim, k=h, divides="n"),
        Product(n=h, k=context, divides="k"),
    ]


@dataclass(frozen=True, slots=True)
class Passes:
    """FLOPs as large products would need them: of the forward pass and of the two backward products."""

    forward: FloatColumn
    backward: FloatColumn


def product_flops(
    model: ModelSpec, products: list[Product], tokens: FloatColumn, tp: FloatColumn, ep: FloatColumn, gemm: Gemm
) -> Passes:
    """FLOPs of one rank for one micro-batch, padded by the shape of each product.

    Args:
        model: for its experts.
        products: of the layer or the head.
        tokens: of the micro-batch, [shapes].
        tp: [shapes].
        ep: [shapes].
        gemm: shape constants of the device.
    """
    forward, backward = np.zeros(len(tokens)), np.zeros(len(tokens))
    for item in products:
        n = item.n / tp if item.divides == "n" else np.full(len(tp), item.n)
        k = item.k / tp if item.divides == "k" else np.full(len(tp), item.k)
        m, times = tokens, np.full(len(tp), item.count)
        if item.routed:
            m = np.maximum(tokens * model.top_k * ep / model.experts, 1.0)
            times = expert_load(model, ep) * tokens * model.top_k / m
        once = times * 2.0 * m * n * k
        forward += once * gemm.padding(m, n, k)
        backward += once * (gemm.padding(m, k, n) + gemm.padding(k, n, m))
    return Passes(forward, backward)
