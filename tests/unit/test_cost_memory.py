"""Bytes by part against counts made by hand and orders of work that are written out."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate, memory_table
from autotune.cost.framework import TORCH
from autotune.cost.memory import MemoryModel, layer_tensors
from autotune.cost.parameters import total_parameters
from autotune.cost.pipeline import Stage, StageSlots, chunk_layers, cut_by_cost, in_flight, stage_slots, stages
from autotune.cost.table import SCHEDULES, Layouts, PlanTable, Shapes, pieces
from autotune.specs import BytesByPart, DType, ModelSpec, Optimizer, Plan, Recompute, Schedule, Workload

GPT3 = model("gpt3-175b")
LLAMA = model("llama2-7b")
GPT3_WORK = Workload(seq_len=2048, global_batch=64, dtype=DType.FP16)


def bytes_of(spec: ModelSpec, workload: Workload, plan: Plan) -> BytesByPart:
    cluster = cluster_from_shorthand(f"a100-80gb-sxm:1x{plan.world_size}")
    return estimate(spec, cluster, workload, plan).bytes


def layer_bytes(workload: Workload, plan: Plan) -> float:
    """Kept bytes of one layer of GPT-3 for one micro-batch: of two models that differ by one layer on one stage."""
    one = GPT3.model_copy(update={"layers": 1})
    two = GPT3.model_copy(update={"layers": 2})
    return bytes_of(two, workload, plan).activations - bytes_of(one, workload, plan).activations


# Korthikanti et al. 2022, section 4: 34·s·b·h, s·b·h·(10 + 24/t), 34·s·b·h/t and 2·s·b·h. We leave out the masks of
# the two dropouts (2·s·b·h, whole without sequence parallelism), and add a fused kernel's log-sum-exp (4 a token and
# head).
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "whole", "divided", "kernel"),
    [
        (1, False, Recompute.NONE, 10, 24, 4),
        (8, False, Recompute.NONE, 10, 24, 4),
        (8, True, Recompute.NONE, 0, 34, 4),
        (8, True, Recompute.SELECTIVE, 0, 34, 0),
        (8, False, Recompute.FULL, 2, 0, 0),
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_activations_of_a_layer_are_korthikantis(
    tp: int, sequence_parallel: bool, recompute: Recompute, whole: int, divided: int, kernel: int, micro_batch: int
) -> None:
    plan = Plan(tp=tp, micro_batch=micro_batch, sequence_parallel=sequence_parallel, recompute=recompute)
    sbh = GPT3_WORK.seq_len * micro_batch * GPT3.hidden
    masks = 0 if recompute is Recompute.FULL else 2 * sbh / (tp if sequence_parallel else 1)
    log_sum_exp = kernel * GPT3_WORK.seq_len * micro_batch * GPT3.heads / tp
    expected = sbh * (whole + divided / tp) - masks + log_sum_exp
    assert layer_bytes(GPT3_WORK, plan) == pytest.approx(expected, rel=1e-9)


def test_grouped_queries_and_gated_mlp_by_hand() -> None:
    """Llama-3 8B: 4 hidden inputs, q 4096, k and v 1024 each, context 4096, MLP 4 x 14336; log-sum-exp of 32 heads."""
    found = layer_tensors(model("llama3-8b"), Workload(seq_len=8, global_batch=1), moe=False).total
    assert found.whole == 2 * 4 * 4096
    assert found.sharded == 2 * (4096 + 2 * 1024 + 4096 + 4 * 14336) + 4 * 32


@pytest.mark.parametrize(
    ("dtype", "optimizer", "expected"),
    [
        (DType.BF16, Optimizer.ADAMW, 12),
        (DType.FP32, Optimizer.ADAMW, 8),
        (DType.FP32, Optimizer.SGD, 4),
        (DType.BF16, Optimizer.SGD, 8),
    ],
)
def test_optimizer_bytes_a_parameter(dtype: DType, optimizer: Optimizer, expected: int) -> None:
    workload = Workload(seq_len=8, global_batch=8, dtype=dtype, optimizer=optimizer)
    assert TORCH.optimizer_bytes(workload) == expected


@pytest.mark.parametrize(
    ("zero_stage", "parameters", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)],
)
def test_zero_divides_what_it_says(zero_stage: int, parameters: int, gradients: int, optimizer: int) -> None:
    """Rajbhandari et al. 2020, figure 1, with fp32 gradients: 2, 4 and 12 bytes a parameter."""
    theta = total_parameters(LLAMA)
    found = bytes_of(LLAMA, Workload(seq_len=512, global_batch=8), Plan(dp=8, zero_stage=zero_stage))
    assert found.parameters == pytest.approx(2 * theta / parameters)
    assert found.gradients == pytest.approx(4 * theta / gradients)
    assert found.optimizer == pytest.approx(12 * theta / optimizer)


def test_experts_are_divided_by_ep_and_zero_by_the_rest() -> None:
    spec = model("mixtral-8x7b")
    workload = Workload(seq_len=512, global_batch=8)
    experts = 32 * 8 * 3 * 4096 * 14336
    rest = total_parameters(spec) - experts
    found = bytes_of(spec, workload, Plan(dp=8, ep=4, zero_stage=1))
    assert found.parameters == pytest.approx(2 * (rest + experts / 4))
    assert found.optimizer == pytest.approx(12 * (rest / 8 + experts / 4 / 2))


def test_logits_of_the_loss_and_gpipes_many() -> None:
    """s·b·V/t in 16 bits, its fp32 copy and the fp32 gradient; GPipe keeps the first two of each micro-batch."""
    tiny = ModelSpec.from_data(
        {
            "name": "flat", "layers": 2, "hidden": 8, "heads": 2, "ffn": 8, "gated": False, "vocab": 4096,
            "tied": False, "norm": "rmsnorm",
        }
    )  # fmt: skip
    workload = Workload(seq_len=16, global_batch=4)
    one = 16 * 4096 / 2
    found = bytes_of(tiny, workload, Plan(tp=2, pp=2, schedule=Schedule.ONE_F_ONE_B))
    assert found.logits == one * (2 + 4 + 4)
    assert bytes_of(tiny, workload, Plan(tp=2, pp=2, schedule=Schedule.GPIPE)).logits == one * (4 * (2 + 4) + 4)


def test_tied_embedding_is_on_both_ends_but_once_on_one_rank() -> None:
    spec = model("gpt2")
    embedding = spec.vocab * spec.hidden
    workload = Workload(seq_len=128, global_batch=8)
    assert bytes_of(spec, workload, Plan()).parameters == 2 * total_parameters(spec)
    table = PlanTable.of([Plan(pp=12)])
    layouts = Layouts.of(table)
    memory = MemoryModel(spec, workload, layouts, stage_slots(spec, layouts), Shapes.of(table, layouts, workload))
    first, last = memory.parameters.dense[0][0], memory.parameters.dense[-1][0]
    layer = (total_parameters(spec) - embedding - spec.max_positions * spec.hidden - 2 * spec.hidden) / 12
    assert first == layer + embedding + spec.max_positions * spec.hidden
    assert last == layer + embedding + 2 * spec.hidden


def order_of_work(schedule: Schedule, stage: int, pp: int, vpp: int, m: int) -> list[int]:
    """+1 for a forward of one chunk, -1 for a backward, in the order of Megatron-LM's schedules."""
    work = m * vpp
    if schedule is Schedule.GPIPE:
        return [1] * m + [-1] * m
    warm_up = pp - stage - 1 if schedule is Schedule.ONE_F_ONE_B else 2 * (pp - stage - 1) + (vpp - 1) * pp
    warm_up = min(warm_up, work)
    return [1] * warm_up + [1, -1] * (work - warm_up) + [-1] * warm_up


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "m"),
    [
        (Schedule.GPIPE, 4, 1, 8),
        (Schedule.ONE_F_ONE_B, 4, 1, 8),
        (Schedule.ONE_F_ONE_B, 4, 1, 2),
        (Schedule.INTERLEAVED, 4, 3, 8),
        (Schedule.INTERLEAVED, 4, 2, 4),
        (Schedule.INTERLEAVED, 2, 2, 2),
    ],
)
def test_in_flight_is_the_peak_of_the_order_of_work(schedule: Schedule, pp: int, vpp: int, m: int) -> None:
    for stage in range(pp):
        kept = int(np.cumsum(order_of_work(schedule, stage, pp, vpp, m)).max())
        columns = [np.array([float(x)]) for x in (stage, pp, vpp, m)]
        code = np.array([SCHEDULES.index(schedule)], dtype=np.int8)
        assert in_flight(*columns, code)[0] * vpp == pytest.approx(kept)


@pytest.mark.parametrize(
    ("layers", "head", "chunks", "sizes"),
    [
        (28, 3.56, 2, [16, 12]),
        (28, 3.56, 8, [4, 4, 4, 4, 4, 4, 4, 0]),
        (32, 2.21, 4, [9, 9, 8, 6]),
        (16, 4.0, 2, [10, 6]),
    ],
)
def test_a_chunk_is_full_once_its_share_is_reached(layers: int, head: float, chunks: int, sizes: list[int]) -> None:
    """The head counts as so many layers. Of these cuts the first three were seen in nanotron's runs."""
    assert cut_by_cost(layers, chunks, head) == sizes


def test_layers_are_spread_as_evenly_as_can_be() -> None:
    assert chunk_layers(10, 4) == [3, 3, 2, 2]
    held = stages(1, 9, 2, 2)
    assert [(stage.dense_layers, stage.moe_layers) for stage in held] == [(1, 4), (0, 5)]


@pytest.mark.parametrize("name", ["llama2-7b", "deepseek-v2-lite", "gpt2", "tiny-moe"])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_worst_stage_is_the_worst_of_all_stages(name: str, schedule: Schedule) -> None:
    """The candidates never miss: every stage is tried here, with uneven layers and each kind of plan."""
    spec = model(name)
    vpp = 2 if schedule is Schedule.INTERLEAVED else 1
    for pp in {2, 3, 4, spec.layers // vpp} - {1}:
        if pp * vpp > spec.layers:
            continue
        plans = [
            Plan(pp=pp, dp=2, vpp=vpp, schedule=schedule, micro_batch=b, zero_stage=zero, recompute=recompute)
            for b in (1, 4)
            for zero in (0, 1, 3)
            for recompute in Recompute
        ]
        table = PlanTable.of(plans)
        workload = Workload(seq_len=256, global_batch=64)
        layouts = Layouts.of(table)
        held = stages(*_layer_kinds(spec), pp, vpp)
        every = StageSlots(
            *(np.array([[float(x)] for x in column]) for column in zip(*(_facts(s) for s in held), strict=True)),
            heavy=len(held),
        )
        shapes = Shapes.of(table, layouts, workload)
        _, rows = next(pieces(table, layouts, shapes, workload))
        parts, stage = MemoryModel(spec, workload, layouts, stage_slots(spec, layouts), shapes).peak(rows)
        full_parts, full_stage = MemoryModel(spec, workload, layouts, every, shapes).peak(rows)
        assert sum(parts.values()) == pytest.approx(sum(full_parts.values()))
        assert stage.tolist() == full_stage.tolist()


def _layer_kinds(spec: ModelSpec) -> tuple[int, int]:
    return (spec.dense_layers, spec.layers - spec.dense_layers) if spec.experts else (spec.layers, 0)


def _facts(stage: Stage) -> tuple[float, ...]:
    return tuple(float(getattr(stage, field.name)) for field in fields(Stage))


def test_last_stage_is_worst_where_the_loss_is_large() -> None:
    spec = model("llama3-8b")
    workload = Workload(seq_len=4096, global_batch=64)
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    plan = Plan(pp=8, micro_batch=8, recompute=Recompute.FULL)
    assert estimate(spec, cluster, workload, plan).worst_stage == 7
    assert estimate(spec, cluster, workload, plan.model_copy(update={"recompute": Recompute.NONE})).worst_stage == 0


def test_memory_needs_no_speeds() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    unknown = cluster.model_copy(update={"device": cluster.device.model_copy(update={"peak_flops_per_s": {}})})
    table = PlanTable.of([Plan(dp=8, zero_stage=2), Plan(tp=2, pp=2, dp=2)])
    workload = Workload(seq_len=512, global_batch=64)
    found = memory_table(LLAMA, unknown, workload, table)
    assert found.peak_memory_bytes[0] == estimate(LLAMA, cluster, workload, table.plan(0)).peak_memory_bytes


def test_backward_of_one_layer_and_the_loss_take_turns() -> None:
    """Full recomputation: L inputs of 2·s·b·h, and the larger of the loss and a layer made again with gradients."""
    workload = Workload(seq_len=2048, global_batch=8)
    spec = LLAMA.model_copy(update={"vocab": 8})
    tokens, h, f = 2048, spec.hidden, spec.ffn
    layer = tokens * (2 * (4 * h + 4 * h + 4 * f) + 4 * spec.heads + 2 * 3 * f)
    found = bytes_of(spec, workload, Plan(recompute=Recompute.FULL))
    ends = 2 * tokens * 2 * h
    assert found.activations == pytest.approx(tokens * 2 * h * spec.layers + ends + layer - found.logits)
    loss_rules = bytes_of(LLAMA.model_copy(update={"vocab": 10**6}), workload, Plan(recompute=Recompute.FULL))
    assert loss_rules.activations == pytest.approx(tokens * 2 * h * spec.layers + ends)
