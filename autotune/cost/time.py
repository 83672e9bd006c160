"""Seconds of one optimizer step by part, on the critical path of the slowest pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.dataparallel import exposed, gradient_costs
from autotune.cost.layouts import Layouts
from autotune.cost.memory import StageParameters, optimizer_bytes
from autotune.cost.network import Network
from autotune.cost.parameters import layer_counts
from autotune.cost.pipeline import StageSlots
from autotune.cost.rows import Rows
from autotune.cost.speeds import Speeds
from autotune.cost.table import FloatColumn
from autotune.cost.work import (
    CORE_PASSES,
    EXPERT_LOAD_FACTOR,
    MATMUL_PASSES,
    embedding_work,
    head_work,
    layer_work,
    stored_bytes,
)
from autotune.specs import CollectiveOp, ModelSpec, SecondsByPart, Workload

TIME_PARTS = tuple(SecondsByPart.model_fields)

CP_OVERLAP = 0.5
"""Assumption: at most this share of the ring exchange hides under the attention core."""

# Collectives a layer and micro-batch by recompute code: two forward and two backward, forward's paid again by full.
PAIRS = np.array([4.0, 4.0, 6.0])
# Ring exchanges in units of the forward one (keys and values; backward also moves their gradients).
RINGS = np.array([3.0, 4.0, 4.0])


@dataclass(frozen=True, eq=False, slots=True)
class Parts:
    """Seconds of one micro-batch's forward + backward in one piece of the model (a layer, or an end of it)."""

    compute: FloatColumn
    tp: FloatColumn
    cp: FloatColumn
    ep: FloatColumn
    total: FloatColumn


class TimeModel:
    """The seconds of the plans of one table; built once, applied piece by piece."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        layouts: Layouts,
        slots: StageSlots,
        parameters: StageParameters,
        network: Network,
        speeds: Speeds,
    ) -> None:
        self._model, self._workload, self._speeds = model, workload, speeds
        self._layouts, self._slots = layouts, slots
        one = np.ones(len(layouts))
        self._all_reduce = network.columns(CollectiveOp.ALL_REDUCE, layouts.tp, one)
        gather = network.columns(CollectiveOp.ALL_GATHER, layouts.tp, one)
        scatter = network.columns(CollectiveOp.REDUCE_SCATTER, layouts.tp, one)
        self._gather_scatter = (gather[0] + scatter[0], gather[1] + scatter[1])
        self._ring = network.columns(CollectiveOp.SEND_RECV, layouts.cp, layouts.tp)
        self._exchange = network.columns(CollectiveOp.ALL_TO_ALL, layouts.ep, layouts.tp)
        block = layouts.tp * layouts.cp * layouts.dp
        self._message = network.columns(CollectiveOp.SEND_RECV, layouts.pp, block)
        self._gradients = gradient_costs(model, workload, layouts, slots, parameters, network)
        self._held = (parameters.dense.max(axis=0), parameters.experts.max(axis=0))

    def step(self, rows: Rows) -> dict[str, FloatColumn]:
        """Seconds of a step by part."""
        ends = self._embedding(rows), self._head(rows)
        dense, moe = layer_counts(self._model)
        kinds = [self._layer(rows, moe=False)] if dense else []
        kinds += [self._layer(rows, moe=True)] if moe else []
        counts, slowest = self._slowest(rows, kinds, ends)
        pieces = [*kinds, *ends]
        whole = _weighted([*[n for n in (dense, moe) if n], 1, 1], [piece.total for piece in pieces])
        m, layout = rows.micro_batches, rows.layout

        def part(name: str) -> FloatColumn:
            return _weighted(counts, [getattr(piece, name) for piece in pieces])

        compute = part("compute")
        vpp, pp = self._layouts.vpp[layout], self._layouts.pp[layout]
        return {
            "compute": m * compute,
            "tp": m * part("tp"),
            "ep": m * part("ep"),
            "cp": m * part("cp"),
            "pp_p2p": self._messages(rows, m * vpp + pp - 1.0),
            "bubble": (whole - slowest) / vpp,
            "dp_exposed": exposed(self._gradients, rows, compute),
            "optimizer": self._optimizer(rows),
        }

    def _layer(self, rows: Rows, *, moe: bool) -> Parts:
        """One layer."""
        work, speeds = layer_work(self._model, self._workload, moe=moe), self._speeds
        passes, tokens = MATMUL_PASSES[rows.recompute], rows.tokens
        by_tp = work.sharded_flops * speeds.s_per_flop + work.sharded_bytes * speeds.s_per_byte
        weights = (
            work.sharded_weight_bytes / self._layouts.tp
            + work.expert_weight_bytes / (self._layouts.tp * self._layouts.ep)
            + work.whole_weight_bytes
        )
        fixed = weights * speeds.s_per_byte + work.kernels * speeds.launch_s
        spread = work.whole_bytes * speeds.s_per_byte / rows.spread
        once = tokens * (by_tp / rows.tp + work.whole_flops * speeds.s_per_flop + spread) + fixed[rows.layout]
        core = CORE_PASSES[rows.recompute] * (tokens * (work.core_flops * speeds.s_per_flop / rows.tp))
        compute = passes * once + core
        pairs = PAIRS[rows.recompute]
        tp = pairs * self._tp_collective(rows)
        cp = self._ring_exposed(rows, core)
        ep = pairs * self._expert_exchange(rows) if moe else np.zeros(1)
        return Parts(compute, tp, cp, ep, compute + tp + cp + ep)

    def _tp_collective(self, rows: Rows) -> FloatColumn:
        """An all-reduce of one micro-batch's hidden states; with sequence parallelism all-gather + reduce-scatter."""
        size = rows.tokens * (stored_bytes(self._workload.dtype) * self._model.hidden)
        sp = rows.sequence_parallel
        alpha = np.where(sp, self._gather_scatter[0][rows.layout], self._all_reduce[0][rows.layout])
        return alpha + size * np.where(sp, self._gather_scatter[1][rows.layout], self._all_reduce[1][rows.layout])

    def _ring_exposed(self, rows: Rows, core_s: FloatColumn) -> FloatColumn:
        """Exchange of keys and values around the context-parallel ring, less what the attention core hides.

        Liu et al. 2023 (arXiv:2310.01889): c-1 steps, each of the block's keys and values.
        """
        latent = self._model.latent_attention
        width = 2 * self._model.kv_heads * self._model.head_dim
        if latent is not None:
            width = self._model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
        steps = (self._layouts.cp - 1.0)[rows.layout]
        block = rows.tokens * (stored_bytes(self._workload.dtype) * width) / rows.tp
        once = steps * (self._ring[0][rows.layout] + block * self._ring[1][rows.layout])
        total = RINGS[rows.recompute] * once
        return total - np.minimum(CP_OVERLAP * total, core_s)

    def _expert_exchange(self, rows: Rows) -> FloatColumn:
        """One all-to-all of the routed copies of a micro-batch's hidden states; the hottest expert sets the pace."""
        size = stored_bytes(self._workload.dtype) * self._model.hidden * self._model.top_k * EXPERT_LOAD_FACTOR
        return self._exchange[0][rows.layout] + rows.tokens / rows.spread * size * self._exchange[1][rows.layout]

    def _embedding(self, rows: Rows) -> Parts:
        traffic, kernels = embedding_work(self._model, self._workload, rows.tokens, rows.tp)
        compute = traffic * self._speeds.s_per_byte + kernels * self._speeds.launch_s
        return self._end(compute, self._tp_collective(rows))

    def _head(self, rows: Rows) -> Parts:
        """Final norm, output matrix and loss; tp ranks exchange the loss's maxima, sums and targets in fp32."""
        flops, traffic, kernels = head_work(self._model, self._workload, rows.tokens, rows.tp)
        once = flops * self._speeds.s_per_flop + traffic * self._speeds.s_per_byte + kernels * self._speeds.launch_s
        loss = 3.0 * self._all_reduce[0][rows.layout] + rows.tokens * (12.0 * self._all_reduce[1])[rows.layout]
        return self._end(3.0 * once, self._tp_collective(rows) + loss)

    @staticmethod
    def _end(compute: FloatColumn, tp: FloatColumn) -> Parts:
        nothing = np.zeros(1)
        return Parts(compute, tp, nothing, nothing, compute + tp)

    def _slowest(
        self, rows: Rows, kinds: list[Parts], ends: tuple[Parts, Parts]
    ) -> tuple[list[FloatColumn], FloatColumn]:
        """(how often the slowest stage holds each piece, its seconds a micro-batch)."""
        dense, moe = layer_counts(self._model)
        slots = self._slots
        columns = [slots.dense_layers] if dense else []
        columns += [slots.moe_layers] if moe else []
        columns += [slots.first, slots.last]
        pieces = [*kinds, *ends]
        best: list[FloatColumn] = []
        slowest = np.full(1, -1.0)
        for slot in range(len(slots)):
            counts = [column[slot][rows.layout] for column in columns]
            total = _weighted(counts, [piece.total for piece in pieces])
            if best:
                swap = total > slowest
                counts = [np.where(swap, new, old) for new, old in zip(counts, best, strict=True)]
            best, slowest = counts, np.maximum(slowest, total)
        return best, slowest

    def _messages(self, rows: Rows, hops: FloatColumn) -> FloatColumn:
        """Sends to the next stage and back, m*v of each a rank and p-1 more to fill and drain the pipeline."""
        size = rows.tokens * (stored_bytes(self._workload.dtype) * self._model.hidden) / rows.spread
        return 2.0 * hops * (self._message[0][rows.layout] + size * self._message[1][rows.layout])

    def _optimizer(self, rows: Rows) -> FloatColumn:
        """Memory-bound: reads gradients and state, writes state and parameters, of the rank's shard."""
        shards = self._layouts.shards
        per_parameter = (
            self._workload.grad_dtype.size_bytes
            + 2.0 * optimizer_bytes(self._workload)
            + stored_bytes(self._workload.dtype)
        )
        dense, experts = self._held
        kept = (dense + experts)[rows.layout]
        divided = (dense / shards + experts * self._layouts.ep / shards)[rows.layout]
        seconds: FloatColumn = np.where(rows.zero_stage >= 1, divided, kept) * (per_parameter * self._speeds.s_per_byte)
        return seconds


def _weighted(counts: Sequence[FloatColumn | int], columns: Sequence[FloatColumn]) -> FloatColumn:
    """The sum of the columns, each times its count."""
    total: FloatColumn = counts[0] * columns[0]
    for count, column in zip(counts[1:], columns[1:], strict=True):
        total = total + count * column
    return total
