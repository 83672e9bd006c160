"""Pipeline stages: which layers a stage holds, which stages can be the worst, micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.cost.parameters import layer_counts
from autotune.cost.table import GPIPE, INTERLEAVED, CodeColumn, FloatColumn, Layouts, distinct
from autotune.specs import ModelSpec, Schedule


def chunk_layers(layers: int, chunks: int) -> list[int]:
    """Layers of each of pp*vpp chunks in model order: as even as possible, the first ones one larger."""
    return [layers // chunks + (i < layers % chunks) for i in range(chunks)]


def chunk_with_ends(layers: int, chunks: int) -> list[int]:
    """As `chunk_layers`; where that is uneven and the embedding and the head, counted as a layer each, make it even,
    the first and the last chunk have one layer less (Megatron-LM, --account-for-embedding-in-pipeline-split)."""
    if layers % chunks == 0 or chunks == 1 or (layers + 2) % chunks:
        return chunk_layers(layers, chunks)
    each = (layers + 2) // chunks
    return [each - 1, *[each] * (chunks - 2), each - 1]


def cut_by_cost(layers: int, chunks: int, head_layers: float) -> list[int]:
    """Layers of each chunk where the head counts as so many layers: a chunk is full once the running total reaches its
    equal share (nanotron/models/base.py, `build_model`), so that early chunks are the larger ones and the last may hold
    the head alone. The memory that a sweep of four models reports is that of these cuts (docs/calibration.md)."""
    sizes, chunk = [0] * chunks, 0
    for done in range(1, layers + 1):
        sizes[chunk] += 1
        if chunk < chunks - 1 and done >= (layers + head_layers) * (chunk + 1) / chunks - 1e-9:
            chunk += 1
    return sizes


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline rank's share: chunks stage, stage + pp, ... (as Megatron-LM and torch interleave them)."""

    index: int
    dense_layers: int
    moe_layers: int
    first: bool
    last: bool
    dense_before: int = 0
    moe_before: int = 0

    def within(self, other: Stage) -> bool:
        """Whether `other` holds at least as much of everything."""
        return (
            other.dense_layers >= self.dense_layers
            and other.moe_layers >= self.moe_layers
            and other.first >= self.first
            and other.last >= self.last
        )


@lru_cache(maxsize=256)  # each may hold hundreds of stages; what is asked for often is in `worst_stages`
def stages(
    dense: int, moe: int, pp: int, vpp: int, head_layers: float = 0.0, moe_every: int = 1, ends: bool = False
) -> tuple[Stage, ...]:
    """All stages of a model whose first `dense` layers are dense and the other `moe` mixtures of experts; or where each
    `moe_every`-th layer is a mixture.

    With `head_layers` stages are cut by cost, the head's included; else by layers, with `ends` as `chunk_with_ends`.
    """
    cut = chunk_with_ends if ends else chunk_layers
    sizes = cut_by_cost(dense + moe, pp * vpp, head_layers) if head_layers else cut(dense + moe, pp * vpp)
    until = np.cumsum(sizes)
    before = [
        int(end) // moe_every * (moe_every - 1) + int(end) % moe_every for end in until
    ]  # dense layers up to there
    if moe_every == 1:
        before = [min(int(end), dense) for end in until]
    dense_in = [to - (before[i - 1] if i else 0) for i, to in enumerate(before)]
    found: list[Stage] = []
    dense_before = moe_before = 0
    for index in range(pp):
        held = range(index, pp * vpp, pp)
        dense_layers = sum(dense_in[i] for i in held)
        moe_layers = sum(sizes[i] for i in held) - dense_layers
        ends_here = index == 0, index == pp - 1
        found.append(Stage(index, dense_layers, moe_layers, *ends_here, dense_before, moe_before))
        dense_before, moe_before = dense_before + dense_layers, moe_before + moe_layers
    return tuple(found)


@lru_cache(maxsize=16384)
def worst_stages(
    dense: int, moe: int, pp: int, vpp: int, head_layers: float = 0.0, moe_every: int = 1, ends: bool = False
) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """(the stages that may have the most memory, those that may only set the pace).

    Of two where one holds no less, it is the earlier one that has more memory (it keeps at least as many
    micro-batches), but either may set the pace: what is left out has both a fuller stage before and one behind it.
    """
    held = stages(dense, moe, pp, vpp, head_layers, moe_every, ends)
    heavy = [stage for i, stage in enumerate(held) if not any(stage.within(other) for other in held[:i])]
    late = [stage for i, stage in enumerate(held) if not any(stage.within(other) for other in held[i + 1 :])]
    return tuple(heavy), tuple(stage for stage in late if stage not in heavy)


@dataclass(frozen=True, eq=False)
class StageSlots:
    """The candidates for the worst stage, by layout: columns of shape (slots, layouts), padded by repetition.

    Those that may have the most memory are among the first `heavy`.
    """

    index: FloatColumn
    dense_layers: FloatColumn
    moe_layers: FloatColumn
    first: FloatColumn
    last: FloatColumn
    dense_before: FloatColumn
    moe_before: FloatColumn
    heavy: int

    def __len__(self) -> int:
        return len(self.index)


def stage_slots(model: ModelSpec, layouts: Layouts, *, by_cost: bool = False, ends: bool = False) -> StageSlots:
    """The candidate stages of every layout; `by_cost` counts the head as the layers that it costs, `ends` either end as
    one where that makes stages even."""
    dense, moe = layer_counts(model)
    top = int(layouts.vpp.max(initial=1)) + 1
    codes, inverse = distinct((layouts.pp * top + layouts.vpp).astype(np.int64))
    head = 0.0
    if by_cost:  # as nanotron counts (`block_compute_costs` of its Llama): a layer has four full projections, whatever
        # the key heads, and the matrices of the MLP
        width = (3 if model.gated else 2) * (model.top_k * model.expert_ffn if model.experts else model.ffn)
        layer = 4.0 * model.heads * model.head_dim * model.hidden + width * model.hidden
        head = model.vocab * model.hidden / layer
    split = [worst_stages(dense, moe, int(code) // top, int(code) % top, head, model.moe_every, ends) for code in codes]
    most = max((len(heavy) for heavy, _ in split), default=1)
    candidates = [heavy + late for heavy, late in split]
    width = max((len(found) for found in candidates), default=1)
    rows = np.array(
        [
            [
                (s.index, s.dense_layers, s.moe_layers, s.first, s.last, s.dense_before, s.moe_before)
                for s in (*found, *[found[-1]] * (width - len(found)))
            ]
            for found in candidates
        ],
        dtype=np.float64,
    ).reshape(len(candidates), width, 7)
    index, dense_in, moe_in, first, last, dense_before, moe_before = (
        np.ascontiguousarray(column) for column in rows[inverse].transpose(2, 1, 0)
    )
    return StageSlots(index, dense_in, moe_in, first, last, dense_before, moe_before, heavy=most)


def in_flight(
    stage: FloatColumn, pp: FloatColumn, vpp: FloatColumn, micro_batches: FloatColumn, schedule: CodeColumn
) -> FloatColumn:
    """Micro-batches whose activations a stage keeps at its peak, in units of all the layers that it holds.

    GPipe m; 1F1B min(m, p - stage); interleaved min(m*v, 2(p - stage - 1) + (v-1)p + 1) chunks of the rank's v
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2; warm-up count of Megatron-LM's schedules.py).
    """
    depth = pp - stage
    interleaved = np.minimum(micro_batches * vpp, 2.0 * depth - 1.0 + (vpp - 1.0) * pp) / vpp
    kept = np.where(schedule == INTERLEAVED, interleaved, np.minimum(micro_batches, depth))
    return np.where(schedule == GPIPE, micro_batches, kept)


def idle_1f1b(
    micro_batches: FloatColumn,
    stages_behind: FloatColumn,
    own: FloatColumn,
    forward: FloatColumn,
    before: FloatColumn,
    whole: FloatColumn,
) -> FloatColumn:
    """Seconds that a stage of 1F1B waits in a step; of all stages the one with the most work and waiting sets the pace.

    The first micro-batch reaches it, and the last one goes back, through the stages before it. It is one micro-batch
    ahead for each stage behind it: it fills the time until the first backward comes to it with as many forwards, that
    between the last ones with as many backwards, and waits where these are too short. For equal stages this is the
    (p - 1)(f + b) of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2). `simulated_s` agrees within 0.1 % on
    average for stages as frameworks cut them, where m times the slowest stage and one pass through the others is 2 %
    too long, and 17 % at worst.

    Args:
        micro_batches: m.
        stages_behind: the stages that a micro-batch has yet to reach.
        own: the stage's forward + backward of one micro-batch.
        forward: the forward part of it.
        before: the sum of the stages before it.
        whole: the sum of all stages.
    """
    behind = np.maximum(whole - own - before, 0.0)
    ahead = np.minimum(stages_behind, micro_batches - 1.0)
    filling = np.maximum(behind - ahead * forward, 0.0)
    draining = ahead * np.maximum(behind / np.maximum(stages_behind, 1.0) - (own - forward), 0.0)
    idle: FloatColumn = before + filling + draining
    return idle


# Event simulation of pipeline schedules: the step time of unequal stages, which the closed forms only approximate.
#
# A stage runs its work in a fixed order; a forward waits for the stage before, a backward for the stage after
# (Narayanan et al. 2021, arXiv:2104.04473, section 2.2; the orders are those of Megatron-LM's schedules.py).


@dataclass(frozen=True, slots=True)
class Task:
    """One forward or backward of one micro-batch through one chunk of a stage."""

    forward: bool
    micro_batch: int
    chunk: int


def order(schedule: Schedule, stage: int, pp: int, vpp: int, micro_batches: int) -> list[Task]:
    """What a stage does, in order. Interleaved needs micro-batches in whole groups of pp."""
    work = micro_batches * vpp
    ahead = [_task(True, i, pp, vpp) for i in range(work)]
    back = [_task(False, i, pp, vpp) for i in range(work)]
    if schedule is Schedule.GPIPE:
        return ahead + back
    warm_up = pp - stage - 1 if schedule is Schedule.ONE_F_ONE_B else 2 * (pp - stage - 1) + (vpp - 1) * pp
    warm_up = min(warm_up, work)
    steady = [task for pair in zip(ahead[warm_up:], back, strict=False) for task in pair]
    return ahead[:warm_up] + steady + back[work - warm_up :]


def _task(forward: bool, i: int, pp: int, vpp: int) -> Task:
    """The i-th forward (backward) of a rank: groups of pp micro-batches go through its chunks in turn."""
    group, within = divmod(i, pp * vpp)
    chunk, micro_batch = divmod(within, pp)
    return Task(forward, group * pp + micro_batch if vpp > 1 else i, (chunk if forward else vpp - 1 - chunk))


def simulated_s(
    schedule: Schedule,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    micro_batches: int,
    message_s: float = 0.0,
) -> float:
    """Seconds until the last backward is done.

    Args:
        schedule: of the pipeline.
        forward_s: of one micro-batch by stage and chunk; chunk c of stage s is part c * stages + s of the model.
        backward_s: the same of the backward pass.
        micro_batches: m.
        message_s: of sending a micro-batch to a neighbour; the sender goes on at once.
    """
    pp, vpp = len(forward_s), len(forward_s[0])
    orders = [order(schedule, stage, pp, vpp, micro_batches) for stage in range(pp)]
    done: dict[tuple[bool, int, int], float] = {}  # (forward, micro-batch, part of the model) -> when
    at, clock = [0] * pp, [0.0] * pp
    left = sum(len(tasks) for tasks in orders)
    while left:
        before = left
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                task = orders[stage][at[stage]]
                ready = _ready(task, task.chunk * pp + stage, pp * vpp, done, message_s)
                if ready is None:
                    break
                took = (forward_s if task.forward else backward_s)[stage][task.chunk]
                clock[stage] = max(clock[stage], ready) + took
                done[task.forward, task.micro_batch, task.chunk * pp + stage] = clock[stage]
                at[stage] += 1
                left -= 1
        assert left < before, "the orders of the stages wait for each other"
    return max(clock)


def _ready(
    task: Task, part: int, parts: int, done: dict[tuple[bool, int, int], float], message_s: float
) -> float | None:
    """When what a task waits for has arrived; None while it is not done."""
    if task.forward:
        if part == 0:
            return 0.0
        found = done.get((True, task.micro_batch, part - 1))
    elif part == parts - 1:
        return done.get((True, task.micro_batch, part))
    else:
        found = done.get((False, task.micro_batch, part + 1))
    return None if found is None else found + message_s
