"""Seconds of one optimizer step by part, on the critical path of the slowest pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autotune.cost.framework import Framework
from autotune.cost.memory import StageParameters
from autotune.cost.network import Network
from autotune.cost.parameters import layer_counts
from autotune.cost.pieces import Piece, joined
from autotune.cost.pipeline import StageSlots, idle_1f1b
from autotune.cost.speeds import Speeds
from autotune.cost.table import INTERLEAVED, ONE_F_ONE_B, FloatColumn, Layouts, Rows, Shapes
from autotune.cost.work import BACKWARD_SHARE, MATMUL_PASSES, stored_bytes
from autotune.specs import CollectiveOp, ModelSpec, SecondsByPart, Workload

# Data-parallel communication of a step: by ZeRO stage, for dense parameters and experts, and what stays exposed.


@dataclass(frozen=True, eq=False)
class GradientCosts:
    """Seconds by layout, of the candidate stage with the most: one full reduction or gathering of a rank's share.

    `tied_s` is the exchange of a tied embedding's gradient between the first and the last stage.
    """

    all_reduce_s: FloatColumn
    reduce_scatter_s: FloatColumn
    all_gather_s: FloatColumn
    tied_s: FloatColumn


def gradient_costs(
    model: ModelSpec,
    workload: Workload,
    layouts: Layouts,
    slots: StageSlots,
    parameters: StageParameters,
    network: Network,
    framework: Framework,
) -> GradientCosts:
    """Costs of the collectives over dp*cp ranks (dense parameters) and tp*dp*cp/(etp*ep) ranks (experts).

    There is one collective a layer and one for the embedding or head, or one a bucket: each pays the latency.
    """
    layers = (slots.dense_layers + slots.moe_layers).max(axis=0, initial=0.0) + 1.0
    buckets = layers
    if framework.bucket_bytes:
        held = (parameters.dense + parameters.experts).max(axis=0, initial=0.0)
        buckets = np.ceil(held * stored_bytes(workload.dtype) / framework.bucket_bytes)
    gradient, stored = framework.reduced_bytes(workload), stored_bytes(workload.dtype)
    groups = [(parameters.dense, layouts.shards, layouts.tp)]
    if model.experts:
        groups.append((parameters.experts, layouts.expert_shards, layouts.expert_tp * layouts.ep))

    def worst(op: CollectiveOp, size_bytes: int, collectives: FloatColumn) -> FloatColumn:
        total = np.zeros(len(layouts))
        for held, size, stride in groups:
            alpha, beta = network.columns(op, size, stride)
            total += alpha * collectives + size_bytes * held.max(axis=0, initial=0.0) * beta
        return total

    tied = np.zeros(len(layouts))
    if model.tied:
        block, ends = layouts.tp * layouts.cp * layouts.dp, np.where(layouts.pp > 1, 2.0, 1.0)
        alpha, beta = network.columns(CollectiveOp.ALL_REDUCE, ends, np.maximum(block * (layouts.pp - 1), 1.0))
        tied = alpha + beta * (model.vocab * model.hidden * gradient) / layouts.tp
    return GradientCosts(
        worst(CollectiveOp.ALL_REDUCE, gradient, buckets),
        worst(CollectiveOp.REDUCE_SCATTER, gradient, layers),
        worst(CollectiveOp.ALL_GATHER, stored, layers),
        tied,
    )


def communication(
    costs: GradientCosts, rows: Rows, micro_batch_s: FloatColumn, framework: Framework
) -> tuple[FloatColumn, FloatColumn, FloatColumn, FloatColumn]:
    """(seconds a step, the share of them that may be hidden, the computation beside them, a tied embedding's exchange).

    ZeRO-0 all-reduces once; 1 reduce-scatters gradients and gathers parameters once; 2 reduce-scatters each
    micro-batch; 3 also gathers parameters for each forward and each backward (Rajbhandari et al. 2020,
    arXiv:1910.02054, section 7). Once a step hides under the last backward, every time under all of them.

    Args:
        costs: by layout.
        rows: the plans.
        micro_batch_s: the slowest stage's forward + backward.
        framework: how much of it may be hidden.
    """
    zero, m = rows.zero_stage, rows.micro_batches
    reductions = np.where(zero >= 2, m, 1.0)
    gathers = np.where(zero >= 3, 2.0 * m, 1.0)
    sharded = reductions * costs.reduce_scatter_s[rows.layout] + gathers * costs.all_gather_s[rows.layout]
    total = np.where(zero == 0, costs.all_reduce_s[rows.layout], sharded)
    hideable = total * np.where(zero == 0, framework.overlap, framework.overlap_sharded)
    beside = micro_batch_s * reductions * np.where(zero >= 3, 1.0, BACKWARD_SHARE)
    return total, hideable, beside, costs.tied_s[rows.layout]


TIME_PARTS = tuple(SecondsByPart.model_fields)


@dataclass(frozen=True, eq=False, slots=True)
class Terms:
    """What a step's time is made of before overlaps are taken off; seconds a step, a column each.

    step = joined(compute + exchange, host) + messages + gradients - hidden + optimizer, with hidden the least of
    `overlap` * gradients and what is beside them. Each is proportional to one thing that a cluster may do faster or
    slower than assumed, which is what trials correct (search.physics).
    """

    compute: FloatColumn
    exchange: FloatColumn
    host: FloatColumn
    messages: FloatColumn
    gradients: FloatColumn
    hideable: FloatColumn
    beside: FloatColumn
    optimizer: FloatColumn


TERMS = tuple(field.name for field in fields(Terms))


class TimeModel:
    """The seconds of the plans of one table; built once, applied piece by piece."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        layouts: Layouts,
        slots: StageSlots,
        shapes: Shapes,
        parameters: StageParameters,
        network: Network,
        speeds: Speeds,
        framework: Framework,
        pieces: list[Piece],
    ) -> None:
        self._model, self._workload, self._speeds, self._framework = model, workload, speeds, framework
        self._layouts, self._slots, self._shapes, self._pieces = layouts, slots, shapes, pieces
        dense, moe = layer_counts(model)
        self._counts = [slots.dense_layers] if dense else []
        self._counts += [slots.moe_layers] if moe else []
        self._counts += [slots.first, slots.last]
        self._before = [slots.dense_before] if dense else []
        self._before += [slots.moe_before] if moe else []
        self._before += [np.minimum(slots.index, 1.0), np.zeros_like(slots.index)]
        whole = [n for n in (dense, moe) if n] + [1, 1]
        self._whole = _weighted(whole, [piece.total for piece in self._pieces])
        block = layouts.tp * layouts.cp * layouts.dp
        self._message = network.columns(CollectiveOp.SEND_RECV, layouts.pp, block)
        # Of several stages a node only the last one's messages cross nodes; the others take what a node's stages take.
        self._crossings = network.crossings(layouts.pp, block)
        stages = np.ceil(layouts.pp / (self._crossings + 1.0))
        self._inner_message = network.columns(CollectiveOp.SEND_RECV, stages, block)
        self._delay_s = 2.0 * network.host_delay_s + framework.message_s if speeds.queued else 0.0
        self._gradients = gradient_costs(model, workload, layouts, slots, parameters, network, framework)
        self._held = (parameters.dense.max(axis=0), parameters.experts.max(axis=0))

    def step(self, rows: Rows) -> tuple[dict[str, FloatColumn], Terms]:
        """(seconds of a step by part, the terms behind them)."""
        counts, slowest, passes = self._pace(rows)
        m, layout, shape = rows.micro_batches, rows.layout, rows.shape
        vpp, pp = self._layouts.vpp[layout], self._layouts.pp[layout]

        def part(name: str) -> FloatColumn:
            return _weighted(counts, [getattr(piece, name)[shape] for piece in self._pieces])

        compute, tp, host = part("compute"), part("tp"), part("host")
        cp = part("cp") if int(self._shapes.cp.max(initial=1)) > 1 else np.zeros(1)
        ep = part("ep") if int(self._shapes.ep.max(initial=1)) > 1 else np.zeros(1)
        device = compute + tp + cp + ep
        paced = joined(device, host, queued=self._speeds.queued)
        if self._speeds.share < 1.0:
            # Ranks that share cores: while some idle, others compute faster than the fit, which was made with all busy.
            stages = self._whole[shape] / slowest
            passes = np.maximum(m * np.minimum(stages / pp, 1.0), self._speeds.share * passes)
        busy = np.minimum(m, passes)
        sent = np.where(pp > 1, m * vpp, 0.0)
        if self._framework.overlap_messages:  # what is not hidden: steady messages in part, those that fill and drain
            sent = np.where(rows.schedule == INTERLEAVED, sent * (1.0 - self._framework.overlap_messages), sent)
        messages = self._messages(rows, sent, pp - 1.0)
        gradients, hideable, beside, tied = communication(self._gradients, rows, paced, self._framework)
        optimizer = self._optimizer(rows)
        hidden = np.minimum(hideable, beside)
        # Without a queue the launches of kernels are a part of computing, and nobody waits for them.
        waits = paced - device if self._speeds.queued else np.zeros(1)
        parts = {
            "compute": busy * (paced - waits - (device - compute)),
            "tp": busy * tp,
            "ep": busy * ep,
            "cp": busy * cp,
            "pp_p2p": messages,
            "bubble": (passes - busy) * paced,
            "dp_exposed": gradients - hidden + tied,
            "optimizer": optimizer,
            "launch": busy * waits,
        }
        total = tied + optimizer
        return parts, Terms(
            passes * compute, passes * (tp + cp + ep), passes * host, messages, gradients, hideable, beside, total
        )

    def _pace(self, rows: Rows) -> tuple[list[FloatColumn], FloatColumn, FloatColumn]:
        """(how often the stage that sets the pace holds each piece, its seconds a micro-batch, the step in those)."""
        totals = [piece.total[rows.shape] for piece in self._pieces]
        whole = self._whole[rows.shape]
        best: list[FloatColumn] = []
        slowest, longest = np.ones(1), np.full(1, -1.0)
        for slot in range(len(self._slots)):
            counts = [column[slot][rows.layout] for column in self._counts]
            total = _weighted(counts, totals)
            before = _weighted([column[slot][rows.layout] for column in self._before], totals)
            seconds = self._step_by_stage(rows, self._slots.index[slot][rows.layout], total, before, whole)
            if best:
                swap = seconds > longest
                counts = [np.where(swap, new, old) for new, old in zip(counts, best, strict=True)]
                total, seconds = np.where(swap, total, slowest), np.where(swap, seconds, longest)
            best, slowest, longest = counts, total, seconds
        return best, slowest, longest / slowest

    def _step_by_stage(
        self, rows: Rows, index: FloatColumn, own: FloatColumn, before: FloatColumn, whole: FloatColumn
    ) -> FloatColumn:
        """Seconds until a stage has done its work, waiting for the others; the largest of all stages is the step's.

        GPipe waits for one whole pass, interleaving for a v-th of it.
        """
        m, pp, vpp = rows.micro_batches, self._layouts.pp[rows.layout], self._layouts.vpp[rows.layout]
        forward = own / MATMUL_PASSES[rows.recompute]
        one_f_one_b = idle_1f1b(m, pp - 1.0 - index, own, forward, before, whole)
        others = np.maximum(whole - own, 0.0) / vpp
        seconds: FloatColumn = m * own + np.where(rows.schedule == ONE_F_ONE_B, one_f_one_b, others)
        return seconds

    def _messages(self, rows: Rows, sent: FloatColumn, filling: FloatColumn) -> FloatColumn:
        """Sends to the next stage and back: m*v of each by the rank whose messages take longest, and p-1 more to fill
        and drain the pipeline, one between each two stages.
        """
        size = rows.tokens * (stored_bytes(self._workload.dtype) * self._model.hidden)
        size = size / (rows.tp if self._framework.splits_messages else rows.spread)
        across, inner = (
            alpha[rows.layout] + size * beta[rows.layout] for alpha, beta in (self._message, self._inner_message)
        )
        crossing = self._crossings[rows.layout]
        seconds = (sent + crossing) * across + (filling - crossing) * inner
        return 2.0 * (seconds + (sent + filling) * self._delay_s)

    def _optimizer(self, rows: Rows) -> FloatColumn:
        """Memory-bound: reads gradients and state, writes state and parameters, of the rank's shard."""
        shards = self._layouts.shards
        per_parameter = self._framework.optimizer_passes * (
            self._framework.gradient_bytes(self._workload)
            + 2.0 * self._framework.optimizer_bytes(self._workload)
            + stored_bytes(self._workload.dtype)
        )
        dense, experts = self._held
        kept = dense + experts
        divided = dense / shards + experts / self._layouts.expert_shards
        scale = per_parameter * self._speeds.s_per_byte
        seconds: FloatColumn = np.where(
            rows.zero_stage >= 1, (divided * scale)[rows.layout], (kept * scale)[rows.layout]
        )
        return seconds


def _weighted(counts: Sequence[FloatColumn | int], columns: Sequence[FloatColumn]) -> FloatColumn:
    """The sum of the columns, each times its count."""
    total: FloatColumn = counts[0] * columns[0]
    for count, column in zip(counts[1:], columns[1:], strict=True):
        total = total + count * column
    return total
