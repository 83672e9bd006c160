"""Peak bytes of a rank on the worst pipeline stage, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.framework import TORCH, Framework
from autotune.cost.parameters import embedding_parameters, head_parameters, layer_parameters
from autotune.cost.pipeline import StageSlots, in_flight
from autotune.cost.table import FULL, GPIPE, SELECTIVE, FloatColumn, Layouts, Rows
from autotune.cost.work import expert_load, stored_bytes
from autotune.specs import BytesByPart, DType, ModelSpec, Optimizer, Workload

# Bytes that a layer keeps between forward and backward, counted tensor by tensor.
#
# For LayerNorm, GELU and one key per query head the count is 32 bytes a token and hidden element in 16 bits, plus the
# fp32 log-sum-exp of a fused attention kernel (4 a token and head). Korthikanti et al. 2022 (arXiv:2205.05198, section
# 4.1) have 34: their 2 more are the masks of two dropouts, which we leave out because current models are trained
# without dropout; their 5·a·s/h is what a kernel keeps that is not fused. Statistics of the norms (8 bytes a token) are
# left out.


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
    size, h, latent = stored_bytes(workload.dtype), model.hidden, model.latent_attention
    whole = 4.0 * h  # the inputs of two norms, of the projections and of the MLP
    if latent is None:  # queries, keys, values and the context, and q and k before their norm
        norm_inputs = model.heads + model.kv_heads if model.qk_norm else 0
        attention = float((2 * model.heads + 2 * model.kv_heads + norm_inputs) * model.head_dim)
    else:  # and its compressed queries and keys, before and after their norms
        attention = 2.0 * model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
        whole += 2.0 * (latent.q_lora_rank + latent.kv_lora_rank) + latent.qk_rope_head_dim
    if moe:  # the sorted copies that go to the experts and what they give back, and fp32 scores
        whole += 2.0 * load * model.top_k * h + 8.0 * model.experts / size
    core = 4.0 * model.heads
    width = (load * model.top_k + model.shared_experts) * model.expert_ffn if moe else model.ffn
    # An MLP keeps its activation's input and output; a gated one also the second factor and the product.
    sharded = attention + (4.0 if model.gated else 2.0) * width
    return TokenBytes(
        sharded=size * sharded + core,
        whole=size * whole,
        core=core,
        entry=float(size * h),
        gradients=size * (3.0 if model.gated else 2.0) * width,
    )


def kept_bytes(layer: TokenBytes, rows: Rows) -> tuple[FloatColumn, FloatColumn]:
    """(bytes a layer keeps for one micro-batch, bytes that its backward needs for a while).

    The latter are its gradients, and with full recomputation its working set, made again.
    """
    working = rows.tokens * (layer.sharded / rows.tp + layer.whole / rows.spread)
    kept = np.where(rows.recompute == SELECTIVE, working - rows.tokens * (layer.core / rows.tp), working)
    full = rows.recompute == FULL
    gradients = rows.tokens * (layer.gradients / rows.tp)
    return np.where(full, rows.tokens * (layer.entry / rows.spread), kept), gradients + np.where(full, working, 0.0)


BYTE_PARTS = tuple(BytesByPart.model_fields)
GATHERED_LAYERS = 2.0
"""ZeRO-3 holds the layer at work and prefetches the next one."""

WORKSPACE_BYTES = 0.4e9
"""Reserved on a GPU whatever the plan: workspaces of matrix products, small tensors, half-used blocks."""

MAX_IN_FLIGHT = 10.0
"""More micro-batches in flight than this fragment memory no further (seen up to 32)."""


def optimizer_bytes(workload: Workload) -> int:
    """Optimizer state a parameter: fp32 moments (AdamW two, SGD one) and an fp32 master copy of 16-bit parameters."""
    moments = 8 if workload.optimizer is Optimizer.ADAMW else 4
    return moments + (0 if workload.dtype is DType.FP32 else 4)


@dataclass(frozen=True, eq=False)
class StageParameters:
    """Parameters of a rank by slot and layout, shape (slots, layouts): dense ones, and experts; and a layer's most."""

    dense: FloatColumn
    experts: FloatColumn
    layer: FloatColumn


def stage_parameters(model: ModelSpec, layouts: Layouts, slots: StageSlots) -> StageParameters:
    """What tp, pp and ep leave of the parameters on a rank of each candidate stage, before ZeRO divides them."""
    plain = layer_parameters(model, moe=False)
    mixed = layer_parameters(model, moe=True) if model.experts else plain
    plain_rank = plain.sharded / layouts.tp + plain.whole
    mixed_rank = mixed.sharded / layouts.tp + mixed.whole
    experts_rank = mixed.experts / (layouts.tp * layouts.ep)
    embedding, head = embedding_parameters(model), head_parameters(model)
    head_matrix = head.sharded / layouts.tp
    if model.tied:  # one rank that holds both ends holds the matrix once
        head_matrix = np.where(layouts.pp > 1, head_matrix, 0.0)
    dense = slots.dense_layers * plain_rank + slots.moe_layers * mixed_rank
    dense += slots.first * (embedding.sharded / layouts.tp + embedding.whole) + slots.last * (head_matrix + head.whole)
    largest = np.maximum(
        np.where(slots.dense_layers > 0, plain_rank, 0.0),
        np.where(slots.moe_layers > 0, mixed_rank + experts_rank, 0.0),
    )
    return StageParameters(dense, slots.moe_layers * experts_rank, largest)


Kinds = Sequence[tuple[FloatColumn, FloatColumn]]
"""(bytes kept, bytes backward needs) of one layer of each kind: dense, and mixture of experts if there are any."""

Staged = tuple[dict[str, FloatColumn], FloatColumn, FloatColumn]
"""(bytes by part, stage index, total)."""


class MemoryModel:
    """The bytes of the plans of one table; built once, applied piece by piece."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        layouts: Layouts,
        slots: StageSlots,
        framework: Framework = TORCH,
        *,
        kept_gathers: FloatColumn | None = None,
        fragments: bool = False,
    ) -> None:
        self._framework, self._kept_gathers = framework, kept_gathers
        self._fragmentation = framework.fragmentation if fragments else 0.0
        self._model, self._workload, self._layouts, self._slots = model, workload, layouts, slots
        self.parameters = stage_parameters(model, layouts, slots)
        self._dense = layer_token_bytes(model, workload, moe=False)
        self._moe = layer_token_bytes(model, workload, moe=True) if model.experts else None
        hot = float(expert_load(model, np.array([2.0]))[0])
        self._hot = layer_token_bytes(model, workload, moe=True, load=hot) if model.experts else None
        self._shards = layouts.shards
        self._expert_shards = self._shards / layouts.ep
        copied = framework.gathered_copy and workload.dtype is DType.FP32
        self._copies = np.where(self._shards > 1, 2.0, 1.0) if copied else np.ones(len(layouts))

    def peak(self, rows: Rows) -> tuple[dict[str, FloatColumn], FloatColumn]:
        """(bytes by part on the worst stage, that stage's index)."""
        kinds = [kept_bytes(self._dense, rows)]
        if self._moe is not None and self._hot is not None:
            shared = self._layouts.ep[rows.layout] > 1
            even, hot = kept_bytes(self._moe, rows), kept_bytes(self._hot, rows)
            kinds.append((np.where(shared, hot[0], even[0]), np.where(shared, hot[1], even[1])))
        best = self._stage(0, rows, kinds)
        for slot in range(1, self._slots.heavy):
            best = _larger(best, self._stage(slot, rows, kinds))
        parts, stage, _ = best
        return parts, stage

    def _stage(self, slot: int, rows: Rows, kinds: Kinds) -> Staged:
        """(bytes by part, stage index, total) of one candidate stage."""
        stage = self._slots.index[slot][rows.layout]
        parts = self._states(slot, rows)
        kept, backward = self._activations(slot, stage, rows, kinds)
        logits = self._logits(slot, rows)
        # The loss is done with before backward reaches a layer: only what this needs beyond the logits counts.
        activations = kept + self._head_inputs(slot, rows) + np.maximum(backward - logits, 0.0)
        parts["activations"] = activations
        parts["logits"] = logits
        parts["buffers"] = self._buffers(slot, rows)
        parts["gathered"] = self._gathered(slot, stage, rows)
        parts["fragmentation"] = self._fragments(stage, rows) * (kept + parts["gathered"])
        total = sum(parts.values(), np.zeros(1))
        return parts, stage, total

    def _states(self, slot: int, rows: Rows) -> dict[str, FloatColumn]:
        """Parameters, gradients and optimizer state; ZeRO-1 divides the last, 2 also gradients, 3 everything."""
        dense = self.parameters.dense[slot][rows.layout]
        divided = (self.parameters.dense[slot] / self._shards)[rows.layout]
        if self._moe is not None:
            dense = dense + self.parameters.experts[slot][rows.layout]
            divided = divided + (self.parameters.experts[slot] / self._expert_shards)[rows.layout]
        zero = rows.zero_stage
        stored, framework = stored_bytes(self._workload.dtype), self._framework
        several = (self._shards > 1)[rows.layout]
        gradient = framework.gradient_bytes(self._workload) + framework.gradient_copy * stored * several
        copies = self._copies[rows.layout]
        return {
            "parameters": stored * np.where(zero >= 3, divided, copies * dense),
            "gradients": gradient * np.where(zero >= 2, divided, dense),
            "optimizer": optimizer_bytes(self._workload) * np.where(zero >= 1, divided, dense),
        }

    def _activations(self, slot: int, stage: FloatColumn, rows: Rows, kinds: Kinds) -> tuple[FloatColumn, FloatColumn]:
        """(what the stage's layers keep of all micro-batches in flight, what one layer's backward needs)."""
        pp, vpp = self._layouts.pp[rows.layout], self._layouts.vpp[rows.layout]
        kept, backward = np.zeros(1), np.zeros(1)
        for counts, (layer_kept, layer_backward) in zip(
            (self._slots.dense_layers, self._slots.moe_layers), kinds, strict=False
        ):
            count = counts[slot][rows.layout]
            kept = kept + count * layer_kept
            backward = np.maximum(backward, np.where(count > 0, layer_backward, 0.0))
        return in_flight(stage, pp, vpp, rows.micro_batches, rows.schedule) * kept, backward

    def _gathered(self, slot: int, stage: FloatColumn, rows: Rows) -> FloatColumn:
        """Whole inputs of the attention's and the MLP's first matrices, beside the parts that a rank keeps anyway."""
        if not self._framework.gathers_kept:
            return np.zeros(1)
        share = self._framework.gathers_kept * (1.0 if self._kept_gathers is None else self._kept_gathers[rows.shape])
        pp, vpp = self._layouts.pp[rows.layout], self._layouts.vpp[rows.layout]
        layers = (self._slots.dense_layers[slot] + self._slots.moe_layers[slot])[rows.layout]
        inputs = 2.0 * stored_bytes(self._workload.dtype) * self._model.hidden * (rows.spread > 1.0)
        kept: FloatColumn = share * layers * rows.tokens * inputs
        return kept * in_flight(stage, pp, vpp, rows.micro_batches, rows.schedule)

    def _fragments(self, stage: FloatColumn, rows: Rows) -> FloatColumn:
        """What an allocator reserves beyond the activations, over them: more, the more micro-batches are in flight."""
        if not self._fragmentation:
            return np.zeros(1)
        pp, vpp = self._layouts.pp[rows.layout], self._layouts.vpp[rows.layout]
        flying = in_flight(stage, pp, vpp, rows.micro_batches, rows.schedule)
        rate = self._fragmentation + self._framework.fragmentation_by_tp * np.log2(rows.tp)
        share: FloatColumn = rate * np.log2(np.clip(flying, 1.0, MAX_IN_FLIGHT))
        return share

    def _losses(self, slot: int, rows: Rows) -> tuple[FloatColumn, FloatColumn]:
        """(tokens of a micro-batch on the last stage and 0 elsewhere, losses kept).

        Only GPipe keeps the loss of more than one micro-batch: elsewhere backward follows at once.
        """
        return self._slots.last[slot][rows.layout] * rows.tokens, np.where(
            rows.schedule == GPIPE, rows.micro_batches, 1.0
        )

    def _head_inputs(self, slot: int, rows: Rows) -> FloatColumn:
        """The inputs of the final norm and of the output matrix."""
        tokens, losses = self._losses(slot, rows)
        return losses * tokens * (2.0 * stored_bytes(self._workload.dtype) * self._model.hidden) / rows.spread

    def _logits(self, slot: int, rows: Rows) -> FloatColumn:
        """Logits in the compute dtype and their fp32 copy of each loss that is kept, and one fp32 gradient."""
        tokens, losses = self._losses(slot, rows)
        framework, pp = self._framework, self._layouts.pp[rows.layout]
        scaled = tokens * np.where(pp > 1, framework.piped_logit_scale, framework.logit_scale)
        return scaled * (losses * (stored_bytes(self._workload.dtype) + 4.0) + 4.0) * (self._model.vocab / rows.tp)

    def _buffers(self, slot: int, rows: Rows) -> FloatColumn:
        """Pipeline messages, ZeRO-3's gathered layers, a layer's full gradients under ZeRO-2 and 3, inputs gathered."""
        size, zero = stored_bytes(self._workload.dtype), rows.zero_stage
        layer = self.parameters.layer[slot][rows.layout]
        piped = np.where(self._layouts.pp > 1, 2.0 * size * self._model.hidden, 0.0)[rows.layout]
        gathered = np.where(zero >= 3, GATHERED_LAYERS * size * layer, 0.0)
        gradients = np.where(zero >= 2, self._workload.grad_dtype.size_bytes * layer, 0.0)
        workspace = WORKSPACE_BYTES if self._fragmentation else 0.0
        inputs = self._framework.gather_buffers * size * self._model.hidden * rows.tokens * (rows.spread > 1.0)
        return piped * rows.tokens / rows.spread + gathered + gradients + inputs + workspace


def _larger(one: Staged, other: Staged) -> Staged:
    """Row by row the stage with the larger total; the earlier one where they are equal."""
    parts, stage, total = one
    swap = other[2] > total
    return (
        {name: np.where(swap, other[0][name], column) for name, column in parts.items()},
        np.where(swap, other[1], stage),
        np.maximum(total, other[2]),
    )
