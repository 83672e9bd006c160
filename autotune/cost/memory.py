"""Peak bytes of a rank on the worst pipeline stage, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cost.framework import TORCH, Framework
from autotune.cost.parameters import (
    embedding_parameters,
    head_parameters,
    kept_by_mixing,
    layer_parameters,
    mlp_share,
    norms,
)
from autotune.cost.pipeline import StageSlots, in_flight
from autotune.cost.table import (
    FULL,
    GPIPE,
    OP,
    SELECTIVE,
    FloatColumn,
    Layouts,
    Rows,
    Shapes,
    distinct,
    modules_of,
)
from autotune.cost.work import expert_load, stored_bytes
from autotune.specs import BytesByPart, CrossEntropy, DType, ModelSpec, Module, Workload

# Bytes that a layer keeps between forward and backward, counted tensor by tensor.
#
# For LayerNorm, GELU and one key per query head the count is 32 bytes a token and hidden element in 16 bits, plus the
# fp32 log-sum-exp of a fused attention kernel (4 a token and head). Korthikanti et al. 2022 (arXiv:2205.05198, section
# 4.1) have 34: their 2 more are the masks of two dropouts, which we leave out because current models are trained
# without dropout; their 5·a·s/h is what a kernel keeps that is not fused (`layer_tensors`). Statistics of the norms (8
# bytes a token) are left out.


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes a token: `sharded` is divided by tp, `whole` only with sequence parallelism."""

    sharded: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Size) -> Size:
        return Size(self.sharded + other.sharded, self.whole + other.whole)

    def __sub__(self, other: Size) -> Size:
        return Size(self.sharded - other.sharded, self.whole - other.whole)

    def __mul__(self, times: float) -> Size:
        return Size(self.sharded * times, self.whole * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """What one layer keeps of a token.

    `modules` is what recomputing each of them drops, `entry` the layer's input, which is all that full recomputation
    keeps, `op` what keeping every second product does. `gradients` is what backward through the MLP holds at once: the
    gradients of its inner tensors.
    """

    total: Size
    modules: dict[Module, Size]
    entry: Size
    op: Size
    gradients: Size

    def kept(self, recompute: int, modules: int) -> Size:
        """What stays between forward and backward under these codes of a table."""
        if recompute == FULL:
            return self.entry
        if recompute == OP:
            return self.op
        dropped = modules_of(modules) or (Module.CORE_ATTN,) if recompute == SELECTIVE else ()
        if Module.MOE in dropped:  # the experts' activation and the shared experts are within
            dropped = tuple(name for name in dropped if name not in {Module.MOE_ACT, Module.SHARED_EXPERTS})
        return self.total - sum((self.modules.get(name, Size()) for name in dropped), Size())


def layer_tensors(
    model: ModelSpec,
    workload: Workload,
    framework: Framework = TORCH,
    *,
    moe: bool,
    load: float = 1.0,
    flash: bool = True,
) -> LayerTensors:
    """What one layer keeps of a token, by how it is divided; `load` is the rank's routed tokens over the mean.
    Without `flash` attention's scores are in memory.

    Inputs of matrix products are kept as the framework saves them (in 8 bits with Transformer Engine's fp8), everything
    else in 16 bits.
    """
    size, saved, h = stored_bytes(workload.dtype), framework.saved_bytes(workload), float(model.hidden)
    latent, fused = model.latent_attention, framework.fused_mlp
    copied = saved < size  # what others need, too, is there in 16 bits as well
    entry = Size(whole=size * h)
    projected, down, mlps = Size(), Size(), mlp_share(model)
    attending, linear = kept_by_mixing(model)
    if latent is None:  # queries, keys and values, and q and k before their norm or as parts of one tensor
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        context, inputs = float(queries), float(queries + 2 * keys)
        again = queries + keys if model.qk_norm or framework.joint_qkv else 0
        projected = Size(sharded=size * (inputs + again))
    else:  # and its compressed queries and keys, before and after their norms
        context = float(model.heads * latent.v_head_dim)
        inputs = 2.0 * model.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim) + context
        projected = Size(sharded=size * inputs)
        compressed = latent.q_lora_rank + latent.kv_lora_rank
        down = Size(whole=(size + saved) * compressed + size * latent.qk_rope_head_dim)
    core = Size(sharded=4.0 * model.heads)  # the log-sum-exp of a fused kernel
    if not flash:  # softmax, its dropout's mask and output (Korthikanti et al. 2022, section 4.1)
        core = Size(sharded=(2.0 * size + 1.0) * model.heads * workload.seq_len)
    attention = (projected + down + core + Size(sharded=context * (size + saved * copied))) * attending
    norm = Size(whole=saved * h)  # an output of a norm; its input is the residual stream
    if not framework.fused_norms and size < 4:  # the input in fp32, and what is multiplied by the scale
        norm = Size(whole=(saved + 4.0 + size) * h)
    total = (entry + norm) * norms(model) + attention + Size(sharded=size * linear)
    gates = 2.0 if model.gated else 1.0
    kept_inputs = gates if fused or not model.gated else 3.0  # else silu's output, too

    def mlp(width: float) -> tuple[Size, Size]:
        """(an MLP's inner tensors, those of its activation)."""
        product = Size(sharded=saved * width)
        activation = product + Size(sharded=size * width * (kept_inputs - gates))
        return Size(sharded=size * width * gates) + activation, activation

    modules = {Module.CORE_ATTN: core, Module.LAYERNORM: norm + norm}
    if latent is not None:
        modules[Module.MLA_UP_PROJ] = projected
    if moe:
        routed = load * model.top_k * mlps
        experts, activation = mlp(routed * model.expert_ffn)
        shared, _ = mlp(model.shared_experts * model.expert_ffn * mlps)
        # The sorted copies that go to the experts, what they give back (where their weights are not applied before the
        # last product), and fp32 scores.
        copies = Size(whole=(saved + (0.0 if fused else size)) * routed * h + 8.0 * model.experts)
        modules |= {
            Module.MOE_ACT: activation, Module.SHARED_EXPERTS: shared, Module.MOE: experts + shared + copies,
        }  # fmt: skip
        width, total = routed * model.expert_ffn, total + experts + shared + copies
        dense_width = float(model.shared_experts * model.expert_ffn)
        backward = width + dense_width
    else:
        inner, _ = mlp(model.ffn * mlps)
        modules[Module.MLP] = inner + norm
        total, dense_width, backward = total + inner, float(model.ffn), float(model.ffn)
    products = Size(sharded=size * (inputs + gates * dense_width), whole=size * h * (2.0 if dense_width else 1.0))
    op = entry + core + Size(sharded=size * context) + Size(products.sharded / 2.0, products.whole / 2.0)
    return LayerTensors(
        total=total,
        modules=modules,
        entry=entry,
        op=op,
        gradients=Size(sharded=size * (gates + 1.0) * backward),
    )


def kept_bytes(layer: LayerTensors, shapes: Shapes) -> tuple[FloatColumn, FloatColumn]:
    """(bytes a layer keeps for one micro-batch, bytes that its backward needs for a while), by shape.

    The latter are its gradients, and what recomputation makes again.
    """
    codes, code = distinct((shapes.recompute_modules.astype(np.int64) << 2) + shapes.recompute)
    sizes = [layer.kept(int(item) & 3, int(item) >> 2) for item in codes]
    kept, total = np.array([(size.sharded, size.whole) for size in sizes]).reshape(-1, 2)[code].T, layer.total
    sharded, whole = shapes.tokens / shapes.tp, shapes.tokens / shapes.spread
    stays: FloatColumn = kept[0] * sharded + kept[1] * whole
    made = np.where(shapes.recompute == FULL, total.sharded * sharded + total.whole * whole, 0.0)
    partly = (shapes.recompute == OP) | (shapes.recompute_modules > 0)
    made = np.where(partly, total.sharded * sharded + total.whole * whole - stays, made)
    return stays, layer.gradients.sharded * sharded + made


BYTE_PARTS = tuple(BytesByPart.model_fields)
GATHERED_LAYERS = 2.0
"""ZeRO-3 holds the layer at work and prefetches the next one."""

WORKSPACE_BYTES = 0.4e9
"""Reserved on a GPU whatever the plan: workspaces of matrix products, small tensors, half-used blocks."""

MAX_IN_FLIGHT = 10.0
"""More micro-batches in flight than this fragment memory no further (seen up to 32)."""


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
    experts_rank = mixed.experts / (layouts.expert_tp * layouts.ep)
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
"""(bytes kept, bytes backward needs) of one layer of each kind, by shape or row: dense, and mixture of experts if there
are any."""

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
        shapes: Shapes,
        framework: Framework = TORCH,
        *,
        kept_gathers: FloatColumn | None = None,
        fragments: bool = False,
        flash: bool = True,
    ) -> None:
        self._framework, self._kept_gathers = framework, kept_gathers
        self._gpu = fragments
        self._fragmentation = framework.fragmentation if fragments else 0.0
        self._model, self._workload, self._layouts, self._slots = model, workload, layouts, slots
        self.parameters = stage_parameters(model, layouts, slots)
        self._kinds = [kept_bytes(layer_tensors(model, workload, framework, moe=False, flash=flash), shapes)]
        if model.experts:
            even = kept_bytes(layer_tensors(model, workload, framework, moe=True, flash=flash), shapes)
            load = float(expert_load(model, np.array([2.0]))[0])
            hot = kept_bytes(layer_tensors(model, workload, framework, moe=True, load=load, flash=flash), shapes)
            shared = shapes.ep > 1
            self._kinds.append((np.where(shared, hot[0], even[0]), np.where(shared, hot[1], even[1])))
        self._shards = layouts.shards
        self._expert_shards = layouts.expert_shards
        copied = framework.gathered_copy and workload.dtype is DType.FP32
        self._copies = np.where(self._shards > 1, 2.0, 1.0) if copied else np.ones(len(layouts))

    def peak(self, rows: Rows) -> tuple[dict[str, FloatColumn], FloatColumn]:
        """(bytes by part on the worst stage, that stage's index)."""
        kinds = [(kept[rows.shape], backward[rows.shape]) for kept, backward in self._kinds]
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
        if self._model.experts:
            dense = dense + self.parameters.experts[slot][rows.layout]
            divided = divided + (self.parameters.experts[slot] / self._expert_shards)[rows.layout]
        zero = rows.zero_stage
        workload, framework = self._workload, self._framework
        several = (self._shards > 1)[rows.layout]
        copy = framework.gradient_copy * stored_bytes(workload.dtype)
        gradient = framework.gradient_bytes(workload) + copy * several
        copies = self._copies[rows.layout]
        parameter, state = framework.parameter_bytes(workload), float(framework.optimizer_bytes(workload))
        shard, rest = (parameter, state)
        if framework.masters_sharded and workload.dtype is not DType.FP32:
            shard, rest = max(parameter, 4.0), state - 4.0  # the masters are the parameters
        return {
            "parameters": np.where(zero >= 3, shard, parameter) * np.where(zero >= 3, divided, copies * dense),
            "gradients": gradient * np.where(zero >= 2, divided, dense),
            "optimizer": np.where(zero >= 3, rest, state) * np.where(zero >= 1, divided, dense),
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
        """Logits in the compute dtype and their fp32 copy of each loss that is kept, and the fp32 gradients of one.

        A fused loss writes the gradient over the logits. torch's own keeps the logits and the fp32 log-softmax and
        makes two fp32 gradients, of the log-softmax and of its input; tensor-parallel ones make one. Where logits are
        gathered, the parts and the buffer that they arrived in are counted too: an allocator gives out pieces of such
        large blocks before it needs them whole again (an assumption).
        """
        tokens, losses = self._losses(slot, rows)
        framework, pp, size = self._framework, self._layouts.pp[rows.layout], stored_bytes(self._workload.dtype)
        kept, vocab = size + 4.0, self._model.vocab / rows.tp
        once: float | FloatColumn = 4.0 * framework.loss_gradients
        if framework.cross_entropy is CrossEntropy.FUSED:
            kept, once = float(size), 0.0
        elif framework.cross_entropy is CrossEntropy.GATHERED:
            arrived = np.where(rows.tp > 1, 2.0 * size, 0.0)
            once, vocab = 8.0 + arrived, np.full(1, float(self._model.vocab))
        scaled = tokens * np.where(pp > 1, framework.piped_logit_scale, framework.logit_scale)
        return scaled * (losses * kept + once) * vocab

    def _buffers(self, slot: int, rows: Rows) -> FloatColumn:
        """Pipeline messages, ZeRO-3's gathered layers, a layer's full gradients under ZeRO-2 and 3, inputs gathered."""
        size, zero = stored_bytes(self._workload.dtype), rows.zero_stage
        layer = self.parameters.layer[slot][rows.layout]
        piped = np.where(self._layouts.pp > 1, 2.0 * size * self._model.hidden, 0.0)[rows.layout]
        gathered = np.where(zero >= 3, GATHERED_LAYERS * size * layer, 0.0)
        gradients = np.where(zero >= 2, self._framework.gradient_bytes(self._workload) * layer, 0.0)
        workspace = WORKSPACE_BYTES if self._gpu else 0.0
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
