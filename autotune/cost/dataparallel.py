"""Data-parallel communication of a step: by ZeRO stage, for dense parameters and experts, and what stays exposed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.framework import Framework
from autotune.cost.layouts import Layouts
from autotune.cost.memory import StageParameters
from autotune.cost.network import Network
from autotune.cost.pipeline import StageSlots
from autotune.cost.rows import Rows
from autotune.cost.table import FloatColumn
from autotune.cost.work import BACKWARD_SHARE, stored_bytes
from autotune.specs import CollectiveOp, ModelSpec, Workload


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
    """Costs of the collectives over dp*cp (dense parameters) and dp*cp/ep ranks (experts).

    There is one collective a layer and one for the embedding or head, or one a bucket: each pays the latency.
    """
    layers = (slots.dense_layers + slots.moe_layers).max(axis=0, initial=0.0) + 1.0
    buckets = layers
    if framework.bucket_bytes:
        held = (parameters.dense + parameters.experts).max(axis=0, initial=0.0)
        buckets = np.ceil(held * stored_bytes(workload.dtype) / framework.bucket_bytes)
    gradient, stored = framework.gradient_bytes(workload), stored_bytes(workload.dtype)
    groups = [(parameters.dense, layouts.shards, layouts.tp)]
    if model.experts:
        groups.append((parameters.experts, layouts.shards / layouts.ep, layouts.tp * layouts.ep))

    def worst(op: CollectiveOp, size_bytes: int, collectives: FloatColumn) -> FloatColumn:
        total = np.zeros(len(layouts))
        for held, size, stride in groups:
            alpha, beta = network.columns(op, size, stride)
            total += alpha * collectives + size_bytes * held.max(axis=0, initial=0.0) * beta
        return total

    return GradientCosts(
        worst(CollectiveOp.ALL_REDUCE, gradient, buckets),
        worst(CollectiveOp.REDUCE_SCATTER, gradient, layers),
        worst(CollectiveOp.ALL_GATHER, stored, layers),
        _tied(model, gradient, layouts, network),
    )


def _tied(model: ModelSpec, gradient_bytes: int, layouts: Layouts, network: Network) -> FloatColumn:
    """Seconds of the exchange between first and last stage; zero where there is nothing to exchange."""
    if not model.tied:
        return np.zeros(len(layouts))
    block = layouts.tp * layouts.cp * layouts.dp
    size = np.where(layouts.pp > 1, 2.0, 1.0)
    alpha, beta = network.columns(CollectiveOp.ALL_REDUCE, size, np.maximum(block * (layouts.pp - 1), 1.0))
    return alpha + beta * (model.vocab * model.hidden * gradient_bytes) / layouts.tp


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
