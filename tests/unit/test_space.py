"""The plan space: every legal plan once, nothing else, and a reason with the numbers for all others."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.table import COLUMNS, PlanTable
from autotune.errors import InputError
from autotune.search.space import (
    Runtime,
    divisors,
    illegal_mask,
    illegal_reason,
    illegal_reasons,
    legal_plans,
)
from autotune.specs import DType, ModelSpec, Plan, Recompute, Schedule, Space, StepRequest, Workload
from autotune.specs.workload import FrameworkName
from probes.runnable import check_step

DENSE = ModelSpec.from_data(
    {
        "name": "six heads", "layers": 6, "hidden": 48, "heads": 6, "kv_heads": 6, "ffn": 96, "gated": True,
        "vocab": 96, "tied": False, "norm": "rmsnorm",
    }
)  # fmt: skip
MOE = DENSE.model_copy(update={"experts": 6, "top_k": 2, "expert_ffn": 48, "dense_layers": 1})
WORK = Workload(seq_len=24, global_batch=12)


def keys(table: PlanTable) -> list[str]:
    return [table.plan(i).key for i in range(len(table))]


def everything(devices: int, model_spec: ModelSpec, workload: Workload) -> PlanTable:
    """The whole product of values, legal or not."""
    rows = [
        (tp, pp, dp, cp, ep, vpp, b, zero, recompute, sp, schedule, 0, 0)
        for tp, pp, dp, cp in product(divisors(devices), repeat=4)
        if tp * pp * dp * cp == devices
        for ep in (1, 2, 3, 4, 6)
        for vpp in range(1, model_spec.layers + 1)
        for b in (1, 2, 3, 4, 5, 6, 12)
        for zero in range(4)
        for recompute in (0, 2)
        for sp in (False, True)
        for schedule in range(3)
    ]
    columns = np.array(rows).T
    blank = PlanTable.of([])
    return PlanTable(**{name: columns[i].astype(getattr(blank, name).dtype) for i, name in enumerate(COLUMNS)})


@pytest.mark.parametrize("runtime", list(Runtime))
@pytest.mark.parametrize("spec", [DENSE, MOE])
@pytest.mark.parametrize("gpus", [6, 8])
def test_the_enumeration_is_the_product_less_what_is_illegal(runtime: Runtime, spec: ModelSpec, gpus: int) -> None:
    cluster = cluster_from_shorthand(f"a100-80gb-sxm:1x{gpus}")
    space = Space(recompute=(Recompute.NONE, Recompute.FULL))
    listed = keys(legal_plans(spec, cluster, WORK, space, runtime))
    assert len(listed) == len(set(listed))
    product_table = everything(gpus, spec, WORK)
    legal = product_table.take(~illegal_mask(spec, cluster, WORK, product_table, runtime))
    plans = [legal.plan(i) for i in range(len(legal))]
    if runtime is Runtime.ANY:  # GPipe with one micro-batch is 1F1B by another name
        plans = [plan for plan in plans if not (plan.schedule is Schedule.GPIPE and plan.dp * plan.micro_batch == 12)]
    assert sorted(listed) == sorted(plan.key for plan in plans)
    assert bool(listed) == (runtime is Runtime.ANY or not spec.experts)


@pytest.mark.parametrize("gpus", [6, 8])
def test_what_is_legal_for_torch_is_what_the_step_probe_takes(gpus: int) -> None:
    """Ours may be stricter only where interleaving wants whole rounds of pp micro-batches."""
    cluster = cluster_from_shorthand(f"a100-80gb-sxm:1x{gpus}")
    table = everything(gpus, DENSE, WORK)
    table = table.take((table.recompute == 0) & (table.ep == 1))
    reasons = illegal_reasons(DENSE, cluster, WORK, table, Runtime.TORCH)
    legal = 0
    for i in range(len(table)):
        plan = table.plan(i)
        try:
            check_step(StepRequest(model=DENSE, workload=WORK, plan=plan), gpus)
        except InputError:
            assert reasons[i] is not None, plan
        else:
            excused = "which interleaved needs" in (reasons[i] or "") or "zero_stage" in (reasons[i] or "")
            assert reasons[i] is None or excused or "pp 1 has no pipeline" in reasons[i], (plan, reasons[i])
            legal += reasons[i] is None
    assert legal > 100


BASE = {"tp": 1, "pp": 1, "dp": 8, "cp": 1}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"dp": 4}, "tp 1 * pp 1 * dp 4 * cp 1 = 4 ranks, but the cluster has 8 devices"),
        ({"tp": 8, "dp": 1}, "heads 12 is not divisible by tp 8"),
        ({"dp": 1, "pp": 8, "vpp": 2, "schedule": "interleaved"}, "layers 12 are fewer than pp 8 * vpp 2"),
        ({"micro_batch": 3}, "global_batch 64 is not divisible by dp 8 * micro_batch 3"),
        ({"sequence_parallel": True}, "sequence_parallel needs tp > 1"),
        ({"tp": 4, "dp": 2, "sequence_parallel": True}, "seq_len 510 is not divisible by tp 4 * cp 1"),
        ({"cp": 4, "dp": 2}, "seq_len 510 is not divisible by 2 * cp 4"),
        ({"pp": 8, "dp": 1, "zero_stage": 1}, "zero_stage 1 shards over dp * cp ranks, and there is one"),
        ({"schedule": "gpipe"}, "pp 1 has no pipeline: the schedule must be 1f1b, not gpipe"),
        ({"pp": 2, "dp": 4, "vpp": 2}, "vpp 2 with schedule 1f1b"),
        ({"pp": 2, "dp": 4, "schedule": "interleaved"}, "vpp 1 with schedule interleaved"),
        (
            {"pp": 2, "dp": 4, "micro_batch": 16, "vpp": 2, "schedule": "interleaved"},
            "micro-batches 1 is not divisible by pp 2, which interleaved needs",
        ),
        (
            {"pp": 2, "dp": 4, "vpp": 4, "schedule": "interleaved"},
            "layers 12 is not divisible by pp 2 * vpp 4, which interleaved needs",
        ),
        ({"ep": 2}, "ep 2 needs a mixture of experts"),
    ],
)
def test_a_reason_names_the_numbers(plan: dict[str, object], reason: str) -> None:
    spec, cluster = model("gpt2"), cluster_from_shorthand("a100-80gb-sxm:1x8")
    workload = Workload(seq_len=510, global_batch=64)
    found = illegal_reason(spec, cluster, workload, Plan.from_data({**BASE, **plan}))
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        ("llama3-8b", {"tp": 16}, "kv_heads 8 is not divisible by tp 16"),
        ("mixtral-8x7b", {"dp": 16, "ep": 3}, "experts 8 is not divisible by ep 3"),
        ("mixtral-8x7b", {"pp": 4, "dp": 4, "ep": 8}, "tp 1 * dp 4 * cp 1 is not divisible by ep 8 * etp 1"),
    ],
)
def test_reasons_of_other_models(name: str, plan: dict[str, object], reason: str) -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x8")
    workload = Workload(seq_len=512, global_batch=64)
    assert illegal_reason(model(name), cluster, workload, Plan.from_data(plan)) == reason


@pytest.mark.parametrize(
    ("spec", "workload", "plan", "reason"),
    [
        (MOE, WORK, {"dp": 6}, "the step probe trains dense models only, not 6 experts"),
        (model("deepseek-v2-lite"), WORK, {"dp": 6}, "the step probe trains dense models only"),
        (
            DENSE,
            WORK.model_copy(update={"dtype": DType.FP8}),
            {"dp": 6},
            "the step probe trains in fp32, bf16 and fp16",
        ),
        (DENSE, WORK, {"cp": 3, "dp": 2}, "the step probe runs no context parallelism: cp 3"),
        (DENSE, WORK, {"pp": 2, "dp": 3, "zero_stage": 2}, "zero_stage 2 with pp 2"),
        (DENSE, WORK, {"pp": 6, "micro_batch": 4}, "micro-batches 3 are fewer than pp 6: torch's 1f1b"),
        (DENSE.model_copy(update={"vocab": 97}), WORK, {"tp": 3, "dp": 2}, "vocab 97 is not divisible by tp 3"),
    ],
)
def test_limits_of_the_step_probe(spec: ModelSpec, workload: Workload, plan: dict[str, object], reason: str) -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x6")
    found = illegal_reason(spec, cluster, workload, Plan.from_data(plan), Runtime.TORCH)
    assert found is not None
    assert found.startswith(reason)


def test_frameworks_pad_a_vocabulary_that_tp_does_not_divide() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x4")
    workload = Workload(seq_len=512, global_batch=64)
    assert model("gpt2").vocab % 4
    assert illegal_reason(model("gpt2"), cluster, workload, Plan(tp=4)) is None


def test_a_sequence_longer_than_learned_positions_has_no_legal_plan() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x4")
    workload = Workload(seq_len=2048, global_batch=64)
    assert illegal_reason(model("gpt2"), cluster, workload, Plan(dp=4)) == (
        "seq_len 2048 is longer than max_positions 1024"
    )
    assert len(legal_plans(model("gpt2"), cluster, workload)) == 0


def test_tp_wider_than_a_node_is_legal() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:2x2")
    assert illegal_reason(model("llama2-7b"), cluster, WORK, Plan(tp=4)) is None


def test_huge_degrees_are_refused_and_do_not_overflow() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x6")
    plan = Plan(tp=2**31 - 1, pp=2**31 - 1, dp=2**31 - 1, cp=2**31 - 1, micro_batch=2**31 - 1)
    reason = illegal_reason(DENSE, cluster, WORK, plan)
    assert reason is not None
    assert "but the cluster has 6 devices" in reason


def test_a_space_restricts_every_field() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    space = Space(
        tp=(1, 2), pp=(2,), cp=(1,), ep=(1,), vpp=(1,), micro_batch=(1, 2), zero_stage=(0, 1),
        recompute=(Recompute.FULL,), sequence_parallel=(False,), schedule=(Schedule.ONE_F_ONE_B,),
    )  # fmt: skip
    table = legal_plans(DENSE, cluster, Workload(seq_len=24, global_batch=16), space)
    assert sorted(keys(table)) == sorted(
        f"tp{tp}.pp2.dp{4 // tp}.mb{b}.zero{zero}.rc-full" for tp in (1, 2) for b in (1, 2) for zero in (0, 1)
    )
    assert len(legal_plans(DENSE, cluster, WORK, Space(tp=(5,)))) == 0
    assert len(legal_plans(DENSE, cluster, WORK, Space(vpp=(7,)))) == 0


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]


def test_torchs_own_pipelines_interleave_uneven_chunks_and_others_do_not() -> None:
    spec, cluster = model("gpt2"), cluster_from_shorthand("a100-80gb-sxm:1x8")
    spec = spec.model_copy(update={"tied": False})  # torchtitan ties no embedding to a head across a pipeline
    uneven = Plan(pp=2, dp=4, vpp=5, zero_stage=2, schedule=Schedule.INTERLEAVED)
    work = Workload(seq_len=512, global_batch=64, framework=FrameworkName.FSDP)
    assert illegal_reason(spec, cluster, work, uneven) is None
    assert "which interleaved needs" in (illegal_reason(spec, cluster, work.of_any_software(), uneven) or "")
