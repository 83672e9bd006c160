"""Seconds of one micro-batch's forward + backward in each piece of the model: a layer of each kind and the two ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.framework import Framework
from autotune.cost.memory import layer_tensors
from autotune.cost.network import Network
from autotune.cost.parameters import layer_counts
from autotune.cost.speeds import Speeds
from autotune.cost.table import NO_RECOMPUTE, OP, FloatColumn, Shapes, module_bits
from autotune.cost.work import (
    CORE_PASSES,
    MATMUL_PASSES,
    UNFUSED_NORM_BYTES,
    Product,
    embedding_work,
    expert_load,
    head_products,
    head_work,
    layer_products,
    layer_work,
    product_flops,
    stored_bytes,
)
from autotune.specs import CollectiveOp, DType, ModelSpec, Module, Workload

CP_OVERLAP = 0.5
"""Assumption: at most this share of the ring exchange hides under the attention core."""

# Collectives a layer and micro-batch by recompute code: two forward and two backward, forward's paid again by full.
PAIRS = np.array([4.0, 4.0, 6.0, 4.0])
# Ring exchanges in units of the forward one (keys and values; backward also moves their gradients).
RINGS = np.array([3.0, 4.0, 4.0, 3.0])

SCORE_PASSES = 11.0
"""Passes over the s x s scores that attention in parts makes forward and backward: scale, mask, softmax and dropout
write and read each of them in 16 bits (Korthikanti et al. 2022, section 4.1, lists the tensors)."""


AHEAD, AHEAD_POWER = 1.47, 3.4
"""Where and how abruptly a host gets ahead of its device (nanotron sweep: what memory of gathered inputs stays)."""


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Seconds by shape. `host` is what launching takes; it runs beside the others on a GPU, before them on a CPU."""

    compute: FloatColumn
    tp: FloatColumn
    cp: FloatColumn
    ep: FloatColumn
    host: FloatColumn
    total: FloatColumn


def joined(device_s: FloatColumn, host_s: FloatColumn, *, queued: bool) -> FloatColumn:
    """Seconds of a queue that the host fills and the device works off."""
    if not queued:
        return device_s + host_s
    low, high = np.minimum(device_s, host_s), np.maximum(device_s, host_s)
    ratio = (low / np.maximum(high, 1e-30)) ** 2
    seconds: FloatColumn = high * np.sqrt(np.sqrt(1.0 + ratio * ratio))
    return seconds


def runs_ahead(layer: Piece) -> FloatColumn:
    """How far the host is ahead of the device in a layer, 0 to 1 by shape: one half where the device takes AHEAD times
    as long as the host."""
    ratio = ((layer.compute + layer.tp) / np.maximum(layer.host, 1e-12) / AHEAD) ** AHEAD_POWER
    ahead: FloatColumn = ratio / (1.0 + ratio)
    return ahead


class PieceModel:
    """The pieces of one model on one cluster, for the shapes of one table."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        shapes: Shapes,
        network: Network,
        speeds: Speeds,
        framework: Framework,
    ) -> None:
        self._model, self._workload, self._shapes = model, workload, shapes
        self._speeds, self._framework, self._network = speeds, framework, network
        # Of selective recomputation without the attention core the rest is no pass of its own (`_made_again`).
        others = (shapes.recompute_modules != 0) & (shapes.recompute_modules & module_bits((Module.CORE_ATTN,)) == 0)
        self._recompute = np.where(others, NO_RECOMPUTE, shapes.recompute)
        one = np.ones(len(shapes))
        self._all_reduce = network.columns(CollectiveOp.ALL_REDUCE, shapes.tp, one)
        gather = network.columns(CollectiveOp.ALL_GATHER, shapes.tp, one)
        scatter = network.columns(CollectiveOp.REDUCE_SCATTER, shapes.tp, one)
        self._gather_scatter = (gather[0] + scatter[0], gather[1] + scatter[1])
        self._ring = network.columns(CollectiveOp.SEND_RECV, shapes.cp, shapes.tp)
        self._exchange = network.columns(CollectiveOp.ALL_TO_ALL, shapes.ep, shapes.expert_tp)
        if model.experts and (model.expert_nodes or framework.dispatches_once):
            rate = network.dispatched_s_per_byte(shapes.ep, shapes.expert_tp, model.top_k, model.expert_nodes)
            self._exchange = self._exchange[0], rate

    def all(self) -> list[Piece]:
        """A layer of each kind that the model has, the embedding and the head."""
        dense, moe = layer_counts(self._model)
        layers = ([self.layer(moe=False)] if dense else []) + ([self.layer(moe=True)] if moe else [])
        return [*layers, self.embedding(), self.head()]

    def layer(self, *, moe: bool) -> Piece:
        """One layer."""
        work, shapes, speeds = layer_work(self._model, self._workload, moe=moe), self._shapes, self._speeds
        passes, tokens = MATMUL_PASSES[self._recompute], shapes.tokens
        routed = [item for item in layer_products(self._model, moe=moe) if item.routed]
        others = [item for item in layer_products(self._model, moe=moe) if not item.routed]
        weights = work.sharded_weight_bytes / shapes.tp + work.whole_weight_bytes
        experts = work.expert_weight_bytes / (shapes.expert_tp * shapes.ep)
        matmul = self._products(others, weights) + (self._products(routed, experts) if moe else 0.0)
        core = self._core(work.core_flops)
        moved = tokens * (work.sharded_bytes / shapes.tp + work.whole_bytes / shapes.spread) * speeds.traffic
        if speeds.queued and not self._framework.fused_norms:
            moved = moved + tokens * (UNFUSED_NORM_BYTES * self._model.hidden) / shapes.spread
        cast = tokens / shapes.tp * (work.cast_bytes * (passes - 2.0) + work.cast_backward_bytes)
        memory = (passes * moved + cast + self._accumulation(weights + experts)) * speeds.s_per_byte
        compute = matmul + core + memory + passes * work.kernels * speeds.gap_s
        mlp = self._recomputed(Module.MOE if moe else Module.MLP)
        compute = compute + self._made_again(mlp, moe=moe)
        pairs = PAIRS[self._recompute]
        tp = (pairs + mlp) * self._tp_collective()
        ep = np.zeros(len(shapes))
        if moe:
            tp = tp * self._gathered_by_experts()
            exchange = (pairs + 2.0 * mlp) * self._expert_exchange()
            hidden = np.minimum((1.0 - self._framework.ep_exposed) * exchange, compute)
            ep = exchange - hidden
        host = passes * work.kernels * speeds.launch_s + self._collectives_host(pairs)
        return self._piece(compute, tp, self._ring_exposed(core), ep, host)

    def _recomputed(self, module: Module) -> FloatColumn:
        """1 where a module is recomputed, by shape."""
        again: FloatColumn = (self._shapes.recompute_modules & module_bits((module,)) != 0).astype(np.float64)
        return again

    def _made_again(self, mlp: FloatColumn, *, moe: bool) -> FloatColumn:
        """Seconds of what recomputed modules make again: the products of the MLP or of the experts, forward; of the
        others, which are bound by memory, what they write and read."""
        shapes, speeds = self._shapes, self._speeds
        if not shapes.recompute_modules.any():
            return np.zeros(len(shapes))
        attention = len(layer_products(self._model.model_copy(update={"ffn": 0, "shared_experts": 0}), moe=False))
        products = layer_products(self._model, moe=moe)[attention:]
        seconds = np.zeros(len(shapes))
        for item in products:
            tokens, tp = shapes.tokens, shapes.tp
            if item.routed:
                tokens, tp = tokens * shapes.expert_tp / tp, shapes.expert_tp
            flops = product_flops(self._model, [item], tokens, tp, shapes.ep, speeds.gemm)
            seconds = seconds + flops.forward * speeds.s_per_flop
        tensors = layer_tensors(self._model, self._workload, self._framework, moe=moe, flash=speeds.fused)
        written = np.zeros(len(shapes))
        for module, size in tensors.modules.items():
            if module is not Module.CORE_ATTN:
                each = shapes.tokens * (size.sharded / shapes.tp + size.whole / shapes.spread)
                written = written + self._recomputed(module) * each
        return mlp * seconds + 2.0 * written * speeds.s_per_byte

    def embedding(self) -> Piece:
        """The embedding."""
        shapes, nothing = self._shapes, np.zeros(len(self._shapes))
        traffic, kernels = embedding_work(self._model, self._workload, shapes.tokens, shapes.tp)
        compute = traffic * self._speeds.s_per_byte + kernels * self._speeds.gap_s
        host = kernels * self._speeds.launch_s + nothing
        return self._piece(compute, self._tp_collective(), nothing, nothing, host)

    def head(self) -> Piece:
        """Final norm, output matrix and loss; tp ranks exchange the loss's maxima, sums and targets in fp32."""
        shapes, nothing, speeds = self._shapes, np.zeros(len(self._shapes)), self._speeds
        traffic, kernels = head_work(self._model, self._workload, shapes.tokens, shapes.tp)
        flops = product_flops(self._model, head_products(self._model), shapes.tokens, shapes.tp, shapes.ep, speeds.gemm)
        weights = stored_bytes(self._workload.dtype) * self._model.vocab * self._model.hidden / shapes.tp
        compute = (flops.forward + flops.backward) * speeds.s_per_flop_16 + 3.0 * kernels * speeds.gap_s
        compute = compute + (3.0 * traffic + self._accumulation(weights)) * speeds.s_per_byte
        loss = 3.0 * self._all_reduce[0] + shapes.tokens * 12.0 * self._all_reduce[1]
        host = 3.0 * kernels * speeds.launch_s + nothing
        return self._piece(compute, self._tp_collective() + loss, nothing, nothing, host)

    def _piece(
        self, compute: FloatColumn, tp: FloatColumn, cp: FloatColumn, ep: FloatColumn, host: FloatColumn
    ) -> Piece:
        total = joined(compute + tp + cp + ep, host, queued=self._speeds.queued)
        return Piece(compute, tp, cp, ep, host, total)

    def _products(self, products: list[Product], weight_bytes: FloatColumn) -> FloatColumn:
        """Seconds of the products of a layer, forward and backward: those of their FLOPs, or of reading the weights
        where that takes longer. A fit was made of their sum (`work.reading_work`)."""
        shapes, speeds = self._shapes, self._speeds
        passes = MATMUL_PASSES[self._recompute]
        tokens, tp = shapes.tokens, shapes.tp
        if products and products[0].routed:  # the ranks of an expert compute what tp ranks sent to etp of them
            tokens, tp = tokens * shapes.expert_tp / tp, shapes.expert_tp
        flops = product_flops(self._model, products, tokens, tp, shapes.ep, speeds.gemm)
        seconds = (flops.forward * (passes - 2.0) + flops.backward) * speeds.s_per_flop
        reading = passes * weight_bytes * speeds.s_per_byte
        return np.maximum(seconds, reading) if speeds.queued else seconds + reading

    def _core(self, flops_per_token: float) -> FloatColumn:
        """The attention core: a fused kernel, or full scores in memory (twice the FLOPs, and their traffic)."""
        shapes, speeds = self._shapes, self._speeds
        flops = shapes.tokens * flops_per_token / shapes.tp * speeds.s_per_flop_16
        if speeds.fused:
            return CORE_PASSES[self._recompute] * flops * speeds.core
        again = np.where((self._recompute == NO_RECOMPUTE) | (self._recompute == OP), 1.0, 4.0 / 3.0)
        scores = shapes.tokens * (self._workload.seq_len * self._model.heads) / shapes.tp
        size = stored_bytes(self._workload.dtype)
        core: FloatColumn = again * (3.0 * 2.0 * flops + 2.0 * SCORE_PASSES * size * scores * speeds.s_per_byte)
        return core

    def _accumulation(self, weight_bytes: FloatColumn) -> FloatColumn:
        """Bytes of adding a micro-batch's gradient to the accumulator: it reads both, writes one, and clears."""
        if not self._framework.accumulates:
            return np.zeros(1)
        size = stored_bytes(self._workload.dtype)
        return weight_bytes / size * (2.0 * size + 2.0 * self._framework.gradient_bytes(self._workload))

    def _collectives_host(self, pairs: FloatColumn) -> FloatColumn:
        """Host seconds of a layer's tensor-parallel collectives; nothing where fitted collectives have them."""
        shapes = self._shapes
        if not self._speeds.queued:
            return np.zeros(len(shapes))
        count = np.where(shapes.sequence_parallel, 2.0 * pairs + 2.0 * self._framework.gathers_again, pairs)
        each = self._framework.collective_s + shapes.tp * self._network.host_delay_s
        return np.where(shapes.tp > 1, count * each, 0.0)

    def _tp_collective(self) -> FloatColumn:
        """An all-reduce of one micro-batch's hidden states; with sequence parallelism all-gather + reduce-scatter."""
        shapes = self._shapes
        size = shapes.tokens * (stored_bytes(self._workload.dtype) * self._model.hidden)
        sp = shapes.sequence_parallel
        again = 1.0 + 0.25 * self._framework.gathers_again
        if (
            self._workload.dtype is DType.FP8
        ):  # what is gathered is cast first (Transformer Engine); sums are of 16 bits
            again = again - 0.25
        alpha = np.where(sp, again * self._gather_scatter[0], self._all_reduce[0])
        whole = alpha + size * np.where(sp, again * self._gather_scatter[1], self._all_reduce[1])
        return whole * self._framework.tp_exposed

    def _ring_exposed(self, core_s: FloatColumn) -> FloatColumn:
        """Exchange of keys and values around the context-parallel ring, less what the attention core hides.

        Liu et al. 2023 (arXiv:2310.01889): c-1 steps, each of the block's keys and values.
        """
        latent, shapes = self._model.latent_attention, self._shapes
        width = 2 * self._model.kv_heads * self._model.head_dim
        if latent is not None:
            width = self._model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
        block = shapes.tokens * (stored_bytes(self._workload.dtype) * width) / shapes.tp
        once = (shapes.cp - 1.0) * (self._ring[0] + block * self._ring[1])
        total = RINGS[self._recompute] * once
        return total - np.minimum(CP_OVERLAP * total, core_s)

    def _gathered_by_experts(self) -> FloatColumn:
        """The collectives of tensor parallelism of a mixture over those of a dense layer, with sequence parallelism.

        Half of them are attention's. Experts on ranks of their own need none; on several ranks these gather all copies
        of the tokens that came to them.
        """
        shapes = self._shapes
        experts = np.where(shapes.expert_tp > 1, float(self._model.top_k), 0.0)
        factor: FloatColumn = np.where(shapes.sequence_parallel, 0.5 + 0.5 * experts, 1.0)
        return factor

    def _expert_exchange(self) -> FloatColumn:
        """One all-to-all of the routed copies of a micro-batch's hidden states; the hottest expert sets the pace."""
        number = float(stored_bytes(self._workload.dtype))
        if self._framework.fp8_dispatch and self._workload.dtype is DType.FP8:
            number = 1.5  # out in 8 bits, back in 16
        size = number * self._model.hidden * self._model.top_k * expert_load(self._model, self._shapes.ep)
        return self._exchange[0] + self._shapes.tokens / self._shapes.spread * size * self._exchange[1]
