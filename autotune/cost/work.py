"""What one rank computes for one micro-batch: model FLOPs, and the FLOPs, bytes moved, kernels and matrix products of a
layer, the embedding and the head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from autotune.cost.parameters import (
    attention_matrices,
    layer_counts,
    layer_matrices,
    linear_widths,
    mixers,
    mlp_share,
    norms,
)
from autotune.cost.speeds import PLAIN, Gemm
from autotune.cost.table import RECOMPUTES, FloatColumn
from autotune.specs import DType, LayerPart, LayerReading, Mixer, ModelSpec, Position, Recurrence, Workload

# Model FLOPs: what training a token needs, whatever the plan; recomputation is never counted here.

FORWARD_AND_BACKWARD = 3
"""Backward takes two matrix products for each one of forward."""


def matmul_parameters(model: ModelSpec) -> int:
    """Matrix parameters active for a token, the output head included, the embedding lookup not."""
    dense, moe = layer_counts(model)
    layers = dense * layer_matrices(model, moe=False).total
    layers += moe * layer_matrices(model, moe=True).total if moe else 0
    return round(layers + model.vocab * model.hidden)


STATE_FLOPS = {Recurrence.MAMBA2: 7.0, Recurrence.GATED_DELTA: 8.0, Recurrence.LIGHTNING: 4.0}
"""FLOPs a token and element of a linear layer's state: Megatron-LM's counts of Mamba-2's scan and of the gated delta
rule (four products; megatron/training/training.py, `num_floating_point_operations`); update and reading of the state
for lightning attention. How the sequence is cut into chunks is left out."""


def attention_width(model: ModelSpec) -> int:
    """Heads x (dim of a query + dim of a value): 2 x heads x head_dim but for latent attention."""
    latent = model.latent_attention
    if latent is None:
        return 2 * model.heads * model.head_dim
    return model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)


def core_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Forward FLOPs of a mean layer's scores and context for one token, causal: half of the full s²."""
    return sum(share * _core_flops(model, mixer, seq_len) for share, mixer in mixers(model))


def _core_flops(model: ModelSpec, mixer: Mixer | None, seq_len: int) -> float:
    if mixer is None or mixer.window:
        indexer = model.indexer
        if indexer is None:
            return 2.0 * _context(mixer, seq_len) * attention_width(model)
        chosen = _context(Mixer(layers=model.layers, window=indexer.top_k), seq_len)
        looked = seq_len * indexer.heads * indexer.head_dim * indexer.layers / model.layers
        return looked + 2.0 * chosen * attention_width(model)
    if mixer.linear is None:
        return 0.0
    return STATE_FLOPS[mixer.linear.recurrence] * mixer.linear.heads * mixer.linear.head_dim * mixer.linear.key_dim


def _context(mixer: Mixer | None, seq_len: int) -> float:
    """Tokens that a token attends to, in the mean over a sequence."""
    if mixer is None or mixer.window >= seq_len:
        return seq_len / 2.0
    window = float(mixer.window)
    return window / 2.0 if mixer.chunked else window - window * window / (2.0 * seq_len)


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


# The matrix products of a layer by shape, so that small ones are as slow as they are (cost.speeds).

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
    h, gates, share = float(model.hidden), 2.0 if model.gated else 1.0, mlp_share(model)
    found = [replace(item, count=each) for each, mixer in mixers(model) for item in _mixing(model, mixer)]
    width = float(model.shared_experts * model.expert_ffn if moe else model.ffn)
    if width:
        found += [
            Product(n=gates * width, k=h, divides="n", count=share),
            Product(n=h, k=width, divides="k", count=share),
        ]
    if moe:
        wide, inner = float(model.expert_ffn), float(model.expert_hidden or model.hidden)
        found.append(Product(n=float(model.experts), k=h, divides="none", count=share))
        found.append(Product(n=gates * wide, k=inner, divides="n", count=share, routed=True))
        found.append(Product(n=inner, k=wide, divides="k", count=share, routed=True))
        if model.expert_hidden:
            found.append(Product(n=inner, k=h, divides="none", count=2.0 * share))
    return found


def _mixing(model: ModelSpec, mixer: Mixer | None) -> list[Product]:
    if mixer is None or mixer.window:
        return _attention(model)
    if mixer.linear is None:
        return []
    enter, leave = linear_widths(mixer.linear)
    h = float(model.hidden)
    return [Product(n=float(enter), k=h, divides="n"), Product(n=h, k=float(leave), divides="k")]


def _attention(model: ModelSpec) -> list[Product]:
    h, matrices = float(model.hidden), attention_matrices(model)
    if model.latent_attention is not None:
        found = [Product(n=matrices.sharded / h, k=h, divides="n")]
        return found + ([Product(n=matrices.whole / h, k=h, divides="none")] if matrices.whole else [])
    context = float(model.heads * model.head_dim)
    return [
        Product(
            n=(2.0 if model.attention_gate else 1.0) * context + 2.0 * model.kv_heads * model.head_dim, k=h, divides="n"
        ),
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
            times = item.count * expert_load(model, ep) * tokens * model.top_k / m
        once = times * 2.0 * m * n * k
        forward += once * gemm.padding(m, n, k)
        backward += once * (gemm.padding(m, k, n) + gemm.padding(k, n, m))
    return Passes(forward, backward)


# What one rank computes for one micro-batch: FLOPs, bytes moved and kernels of a layer, the embedding and the head.
#
# The same counts are used to fit a profile (calibrate) and to apply it (estimate), so a constant factor in them is
# absorbed by the fit. All functions take floats or float columns.

Number = TypeVar("Number", float, FloatColumn)
BACKWARD_CORE = 2.5
"""A fused attention kernel recomputes the scores: five products for forward's two (arXiv:2307.08691, section 3)."""

# Passes of a training step by recompute code (none, selective, full, op), in units of one forward pass. Backward makes
# an input and a weight gradient for each product, and moves about twice forward's bytes.
MATMUL_PASSES = np.array([3.0, 3.0, 4.0, 3.5])
CORE_PASSES = np.array([1 + BACKWARD_CORE, 2 + BACKWARD_CORE, 2 + BACKWARD_CORE, 1 + BACKWARD_CORE])
BACKWARD_SHARE = 2.0 / 3.0
"""Share of forward + backward time that is backward; what gradient communication can hide under."""

NORM_TRAFFIC = 4.0
"""Passes over a hidden-sized tensor of the two norms: each reads and writes one."""

UNFUSED_NORM_BYTES = 64.0
"""Bytes an element of the hidden states that the two norms of a layer move beyond that where each of their parts is a
kernel: to fp32, square, mean, scale, back, and the weight."""

CAST_BYTES = 4.0
"""Bytes an element to make 8 bits of 16: read, and written twice, along rows and columns for the two products."""

RESIDUAL_TRAFFIC = 6.0
"""Passes over a hidden-sized tensor of the two residual additions: each reads two and writes one."""


def stored_bytes(dtype: DType) -> int:
    """Bytes of a parameter or activation as kept in memory. FP8 training keeps them in 16 bits."""
    return max(dtype.size_bytes, 2)


class Work(NamedTuple):
    """FLOPs, bytes read and written, and kernels launched."""

    flops: float
    bytes: float
    kernels: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Forward work of one layer as coefficients of tokens and tp.

    core_flops are those of the attention core, the matrix products are counted by shape;
    bytes = tokens * (sharded_bytes / tp + whole_bytes / (tp if sequence parallel else 1))
            + (sharded_weight_bytes / tp + whole_weight_bytes).
    cast_bytes make 8 bits of the products' inputs, cast_backward_bytes of their outputs' gradients; 0 in 16 bits.
    """

    core_flops: float
    sharded_bytes: float
    whole_bytes: float
    sharded_weight_bytes: float
    whole_weight_bytes: float
    expert_weight_bytes: float
    cast_bytes: float
    cast_backward_bytes: float
    kernels: float


def layer_work(model: ModelSpec, workload: Workload, *, moe: bool) -> LayerWork:
    """The coefficients of one dense layer, or of one mixture of experts (balanced but for the hottest expert)."""
    matrices = layer_matrices(model, moe=moe)
    size = stored_bytes(workload.dtype)
    wide = model.shared_experts * model.expert_ffn + model.top_k * model.expert_ffn if moe else model.ffn
    width = wide * mlp_share(model)
    activation = (5 if model.gated else 2) * width
    mixing = sum(share * _mixing_traffic(model, mixer) for share, mixer in mixers(model))
    dispatch = 4 * model.top_k * model.hidden if moe else 0
    cast = CAST_BYTES if workload.dtype is DType.FP8 else 0.0
    queries, gates = model.heads * model.head_dim, 2 if model.gated else 1
    entries = 1 + (model.top_k if moe else 0) + (1 if not moe or model.shared_experts else 0)
    inputs = entries * model.hidden + queries + width
    gradients = queries + 2 * model.kv_heads * model.head_dim + gates * width + entries * model.hidden
    return LayerWork(
        core_flops=core_flops_per_token(model, workload.seq_len),
        sharded_bytes=float(size * (activation + mixing)),
        whole_bytes=float(size * ((NORM_TRAFFIC + RESIDUAL_TRAFFIC) / 2 * norms(model) * model.hidden + dispatch)),
        sharded_weight_bytes=float(size * matrices.sharded),
        whole_weight_bytes=float(size * matrices.whole),
        expert_weight_bytes=float(size * matrices.experts // max(model.top_k, 1) * model.experts),
        cast_bytes=cast * inputs,
        cast_backward_bytes=cast * gradients,
        kernels=layer_kernels(model, moe=moe),
    )


def _mixing_traffic(model: ModelSpec, mixer: Mixer | None) -> float:
    """Elements a token that mixing reads and writes beside its products: of attention with its rotation, or linear."""
    if mixer is None or mixer.window:
        rotary = 2 * (model.heads + model.kv_heads) * model.head_dim if model.position is Position.ROPE else 0
        return rotary + attention_width(model) + 2 * model.kv_heads * model.head_dim
    return 2 * sum(linear_widths(mixer.linear)) if mixer.linear else 0


def layer_kernels(model: ModelSpec, *, moe: bool) -> float:
    """Kernels of one forward pass: norms, linears, rotation, attention, activation, residuals, routing."""
    rotary = 6 if model.position is Position.ROPE else 0
    mlp = 5 if model.gated else 3
    routing = 30 if moe else 0
    return 2.0 + 4.0 + rotary + 1.0 + mlp * (2 if moe and model.shared_experts else 1) + 2.0 + routing


def embedding_work(model: ModelSpec, workload: Workload, tokens: Number, tp: Number) -> tuple[Number, float]:
    """(bytes, kernels) of the embedding, forward + backward.

    Forward reads and writes a row a token; backward fills and adds a gradient as large as the table.
    """
    size = stored_bytes(workload.dtype)
    return tokens * (4.0 * size * model.hidden) + (3.0 * size * model.vocab * model.hidden) / tp, 4.0


def reading_work(
    model: ModelSpec, workload: Workload, reading: LayerReading, gemm: Gemm = PLAIN, core: float = 1.0
) -> list[tuple[Work, float]]:
    """(work, seconds of computation) of a layer reading: forward and backward; both in one for the embedding."""
    tokens, tp = float(workload.seq_len * reading.micro_batch), float(reading.tp)
    if reading.part is LayerPart.EMBEDDING:
        traffic, kernels = embedding_work(model, workload, tokens, tp)
        return [(Work(0.0, traffic, kernels), reading.forward_calc_s + reading.backward_calc_s)]
    if reading.part is LayerPart.HEAD:
        flops = _flops(model, head_products(model), tokens, tp, gemm)
        traffic, kernels = head_work(model, workload, tokens, tp)
        forward = Work(float(flops.forward[0]), traffic, kernels)
        backward = Work(float(flops.backward[0]), 2 * traffic, 2 * kernels)
    else:
        forward, backward = _layer_passes(model, workload, reading, tokens, gemm, core)
    return [(forward, reading.forward_calc_s), (backward, reading.backward_calc_s)]


def _flops(model: ModelSpec, products: list[Product], tokens: float, tp: float, gemm: Gemm) -> Passes:
    return product_flops(model, products, np.array([tokens]), np.array([tp]), np.ones(1), gemm)


def _layer_passes(
    model: ModelSpec, workload: Workload, reading: LayerReading, tokens: float, gemm: Gemm, core_scale: float
) -> tuple[Work, Work]:
    """(forward, backward with its recomputation) of one dense layer."""
    work, tp = layer_work(model, workload, moe=False), float(reading.tp)
    code = RECOMPUTES.index(reading.recompute)
    flops = _flops(model, layer_products(model, moe=False), tokens, tp, gemm)
    core = tokens * work.core_flops / tp * core_scale
    spread = tp if reading.sequence_parallel else 1.0
    traffic = tokens * (work.sharded_bytes / tp + work.whole_bytes / spread)
    traffic += work.sharded_weight_bytes / tp + work.whole_weight_bytes
    passes, core_passes = float(MATMUL_PASSES[code]) - 1.0, float(CORE_PASSES[code]) - 1.0
    backward = float(flops.backward[0]) + (passes - 2.0) * float(flops.forward[0])
    return (
        Work(float(flops.forward[0]) + core, traffic, work.kernels),
        Work(backward + core_passes * core, passes * traffic, passes * work.kernels),
    )


def head_products(model: ModelSpec) -> list[Product]:
    """The output matrix."""
    return [Product(n=float(model.vocab), k=float(model.hidden), divides="n")]


def head_work(model: ModelSpec, workload: Workload, tokens: Number, tp: Number) -> tuple[Number, float]:
    """(bytes, kernels) of the final norm, output matrix and loss, forward; backward is twice that.

    The loss reads and writes the logits: in the compute dtype, as an fp32 copy, and as its softmax.
    """
    size = stored_bytes(workload.dtype)
    traffic = tokens * ((2.0 * size + 12.0) * model.vocab) / tp + tokens * (2.0 * size * model.hidden)
    return traffic + (size * model.vocab * model.hidden) / tp, 6.0
