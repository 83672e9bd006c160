"""Number formats, kernels and recomputed modules: their bytes, their keys, who can run and who can say them."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate, estimate_table
from autotune.cost.framework import FRAMEWORKS
from autotune.cost.memory import layer_tensors
from autotune.cost.table import PlanTable
from autotune.errors import IllegalPlanError, InputError
from autotune.frameworks import launch_arguments
from autotune.search.space import Runtime, illegal_reason, legal_plans
from autotune.specs import DType, Module, Plan, Recompute, Space, StepRequest, Workload
from autotune.specs.workload import KERNELS, PRECISION, read_precision
from probes.runnable import check_step

LLAMA = model("llama3-8b")
EIGHT = cluster_from_shorthand("h100-80gb-sxm:1x8")


def work(**changes: Any) -> Workload:
    return Workload.from_data({"seq_len": 4096, "global_batch": 64, **changes})


def state_bytes(name: str, **changes: Any) -> tuple[float, float, float]:
    """(parameter, gradient, optimizer) bytes of a parameter."""
    framework, workload = FRAMEWORKS[name], work(**changes)
    sizes = framework.parameter_bytes(workload), framework.gradient_bytes(workload), framework.optimizer_bytes(workload)
    return tuple(float(size) for size in sizes)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("framework", "changes", "expected"),
    [
        ("megatron", {}, (2, 4, 12)),
        ("nemo", {}, (2, 2, 12)),
        ("nemo", {"grad_dtype": "fp32"}, (2, 4, 12)),
        ("megatron", {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, (2, 4, 7)),
        ("megatron", {"master_dtype": "fp16"}, (2, 4, 10)),
        ("torch", {"master_dtype": "bf16"}, (2, 4, 8)),  # no master beside parameters of its format
        ("torch", {"dtype": "fp32"}, (4, 4, 8)),
        ("megatron", {"dtype": "fp8"}, (3, 4, 12)),  # bf16, and a copy in fp8
        ("nemo", {"dtype": "fp8"}, (2, 2, 12)),  # fp8, and its transpose
        ("nemo", {"dtype": "fp8", "fp8_recipe": "mxfp8"}, (2.0625, 2, 12)),
        ("torch", {"optimizer": "sgd"}, (2, 4, 8)),
    ],
)
def test_bytes_of_a_parameter(framework: str, changes: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert state_bytes(framework, **changes) == expected


def test_gradients_are_exchanged_in_a_format_of_their_own() -> None:
    framework = FRAMEWORKS["megatron"]
    assert framework.reduced_bytes(work()) == 4
    assert framework.reduced_bytes(work(reduce_dtype="bf16")) == 2
    assert framework.reduced_bytes(work(grad_dtype="bf16")) == 2
    wide, narrow = (
        estimate(LLAMA, EIGHT, work(framework="megatron", **changes), Plan(dp=8, zero_stage=1)).seconds.dp_exposed
        for changes in ({}, {"reduce_dtype": "bf16"})
    )
    assert narrow < wide


def test_a_layer_of_todays_megatron_by_hand() -> None:
    """Llama-3 8B: 4 hidden tensors; q, k, v and the context; q and k as parts of one projection; gate, up and their
    product; the log-sum-exp. In fp8 what feeds a matrix product takes one byte, and the context both."""
    megatron, queries, keys, width = FRAMEWORKS["megatron"], 4096, 1024, 14336
    found = layer_tensors(LLAMA, work(), megatron, moe=False).total
    assert found.whole == 2 * 4 * 4096
    assert found.sharded == 2 * (2 * queries + 2 * keys + queries + keys + 3 * width) + 4 * 32
    small = layer_tensors(LLAMA, work(dtype="fp8"), megatron, moe=False).total
    assert small.whole == (2 * 2 + 2 * 1) * 4096
    assert small.sharded == found.sharded + queries - width
    kept = layer_tensors(LLAMA, work(dtype="fp8", saved_dtype="bf16"), megatron, moe=False).total
    assert kept == found


def kept(spec_name: str, **changes: Any) -> float:
    spec = model(spec_name)
    return estimate(spec, EIGHT, work(framework="megatron"), Plan(dp=8, zero_stage=1, **changes)).bytes.activations


def test_modules_drop_what_they_make_again() -> None:
    selective = {"recompute": Recompute.SELECTIVE}
    tokens, layers = 4096, LLAMA.layers
    none = kept("llama3-8b")
    norms = kept("llama3-8b", **selective, recompute_modules=(Module.LAYERNORM,))
    mlp = kept("llama3-8b", **selective, recompute_modules=(Module.MLP,))
    both = kept("llama3-8b", **selective, recompute_modules=(Module.MLP, Module.LAYERNORM))
    full = kept("llama3-8b", recompute=Recompute.FULL)
    assert none > norms > mlp > both > full
    assert none - norms == pytest.approx(layers * tokens * 2 * 2 * 4096, rel=0.05)
    assert none - mlp == pytest.approx(layers * tokens * 2 * (3 * 14336 + 4096), rel=0.05)
    experts = {
        name: kept("mixtral-8x7b", **selective, recompute_modules=(name,)) for name in (Module.MOE_ACT, Module.MOE)
    }
    assert kept("mixtral-8x7b") > experts[Module.MOE_ACT] > experts[Module.MOE]


def test_making_modules_again_takes_less_than_making_the_layer_again() -> None:
    def seconds(**changes: Any) -> float:
        plan = Plan(dp=8, zero_stage=1, **changes)
        return estimate(LLAMA, EIGHT, work(framework="megatron"), plan).step_time_s

    def modules(*names: Module) -> float:
        return seconds(recompute=Recompute.SELECTIVE, recompute_modules=names)

    none, full = seconds(), seconds(recompute=Recompute.FULL)
    norms, mlp = modules(Module.LAYERNORM), modules(Module.MLP)
    both = modules(Module.MLP, Module.LAYERNORM)
    assert none < norms < mlp < both < full
    # The MLP's three products are 0.81 of a layer's parameters in matrices, and forward is a third of the whole.
    assert (mlp - none) / (full - none) == pytest.approx(0.7, abs=0.15)


def test_a_set_of_modules_has_one_spelling() -> None:
    one = Plan.parse("recompute_modules=moe_act+layernorm,dp=8")
    assert one == Plan.parse("dp=8,recompute=selective,recompute_modules=layernorm+moe_act")
    assert one.key == "tp1.pp1.dp8.mb1.zero0.rc-layernorm+moe_act"
    assert Plan(recompute=Recompute.SELECTIVE, recompute_modules=(Module.CORE_ATTN,)).recompute_modules == ()
    assert PlanTable.of([one, Plan()]).plan(0) == one
    with pytest.raises(InputError, match="modules go with recompute selective, not full"):
        Plan.parse("recompute=full,recompute_modules=mlp")


def test_modules_and_op_are_listed_where_they_are_asked_for() -> None:
    table = legal_plans(LLAMA, EIGHT, work(framework="megatron"))
    assert set(table.recompute_modules.tolist()) == {0}
    space = Space(recompute_modules=((Module.LAYERNORM,), (Module.MLP, Module.LAYERNORM)))
    found = legal_plans(LLAMA, EIGHT, work(framework="megatron"), space)
    rows = {found.plan(i).recompute_modules for i in range(len(found))}
    assert rows == {(), (Module.LAYERNORM,), (Module.LAYERNORM, Module.MLP)}
    assert 3 not in table.recompute
    op = legal_plans(LLAMA, EIGHT, work(framework="fsdp"))
    assert {op.plan(i).recompute for i in range(len(op))} == {Recompute.NONE, Recompute.OP, Recompute.FULL}
    reason = illegal_reason(LLAMA, EIGHT, work(), Plan.parse("recompute_modules=moe_act", 8))
    assert reason == "recompute_modules moe_act needs a mixture of experts"


def test_a_workload_of_before_these_choices_keeps_its_key() -> None:
    """The keys of stored entries; fp32 gradients are what nobody could leave out then."""
    assert Workload(seq_len=8, global_batch=8).key == "90a8d990907703ca"
    assert Workload(seq_len=8, global_batch=8, grad_dtype=DType.FP32).key == "90a8d990907703ca"
    assert Workload(seq_len=8, global_batch=8, grad_dtype=DType.BF16).key == "d9c4e11e995912cf"
    choices = {"exp_avg_dtype": "bf16"}, {"exp_avg_sq_dtype": "bf16"}, {"cross_entropy": "fused"}, {"framework": "nemo"}
    assert len({work().key, *(work(**choice).key for choice in choices)}) == 5
    assert set(PRECISION) | set(KERNELS) <= set(Workload.model_fields)


def test_formats_that_go_with_nothing_are_refused() -> None:
    with pytest.raises(InputError, match=r"fp8_recipe.*it goes with dtype fp8, not bf16"):
        work(fp8_recipe="mxfp8")
    with pytest.raises(InputError, match="nobody adds gradients up in fp8"):
        work(grad_dtype="fp8")
    with pytest.raises(InputError, match=r"precision.*each key once, with keys grad_dtype"):
        read_precision("grad_dtype=bf16,grad_dtype=fp32")
    with pytest.raises(InputError, match=r"precision.*attention"):
        read_precision("attention=flash")


@pytest.mark.parametrize(
    "changes",
    [
        {"exp_avg_dtype": "bf16"}, {"master_dtype": "fp16"}, {"param_dtype": "fp8"}, {"saved_dtype": "fp8"},
        {"cross_entropy": "fused"},
    ],
)  # fmt: skip
def test_the_step_probe_refuses_by_name_what_it_cannot_do(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    reason = illegal_reason(LLAMA, EIGHT, work(**changes), Plan(dp=8), Runtime.TORCH)
    assert reason is not None
    assert f"{name} {value}" in reason
    with pytest.raises(InputError, match=name):
        check_step(StepRequest(model=LLAMA, workload=work(**changes), plan=Plan(dp=8)), 8)


def test_the_step_probe_takes_what_it_can_do() -> None:
    said = work(grad_dtype="bf16", reduce_dtype="fp32", master_dtype="fp32", exp_avg_dtype="fp32", param_dtype="bf16")
    assert illegal_reason(LLAMA, EIGHT, said, Plan(dp=8), Runtime.TORCH) is None
    check_step(StepRequest(model=LLAMA, workload=said, plan=Plan(dp=8)), 8)
    modules = Plan.parse("dp=8,recompute_modules=layernorm")
    with pytest.raises(IllegalPlanError, match="layernorm"):
        check_step(StepRequest(model=LLAMA, workload=work(), plan=modules), 8)


def words(target: str, plan: Plan, **changes: Any) -> str:
    found = launch_arguments(target, LLAMA, EIGHT, work(**changes), plan)
    return " ".join(found.argv) + "\n" + found.config


SHARDED = Plan(dp=8, zero_stage=1)
NORMS = Plan(dp=8, recompute=Recompute.SELECTIVE, recompute_modules=(Module.LAYERNORM, Module.MLP))


@pytest.mark.parametrize(
    ("target", "plan", "changes", "said"),
    [
        ("megatron", SHARDED, {"exp_avg_dtype": "bf16"}, "--use-precision-aware-optimizer --exp-avg-dtype bf16"),
        ("megatron", SHARDED, {"exp_avg_sq_dtype": "fp8"}, "--exp-avg-sq-dtype fp8 --main-grads-dtype fp32"),
        ("megatron", SHARDED, {"master_dtype": "fp16"}, "--main-params-dtype fp16"),
        ("megatron", SHARDED, {"dtype": "fp8", "param_dtype": "fp8"}, "--fp8-param-gather"),
        ("megatron", SHARDED, {"dtype": "fp8", "fp8_recipe": "mxfp8"}, "--fp8-recipe mxfp8"),
        (
            "megatron",
            SHARDED,
            {"cross_entropy": "fused"},
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
        ),
        ("megatron", NORMS, {}, "--recompute-modules layernorm mlp"),
        ("nemo", NORMS, {}, "model.recompute_modules=[layernorm,mlp]"),
        ("nemo", SHARDED, {"cross_entropy": "fused"}, "model.cross_entropy_fusion_impl=te"),
        ("deepspeed", SHARDED, {"reduce_dtype": "bf16"}, '"communication_data_type": "bf16"'),
        ("torchtitan@0.2", Plan(dp=8, zero_stage=3, recompute=Recompute.OP), {}, 'selective_ac_option = "op"'),
    ],
)
def test_exports_write_what_was_chosen(target: str, plan: Plan, changes: dict[str, Any], said: str) -> None:
    assert said in words(target, plan, **changes)


@pytest.mark.parametrize(
    ("target", "plan", "changes", "reason"),
    [
        ("megatron", Plan(dp=8), {"exp_avg_dtype": "bf16"}, "needs ZeRO-1"),
        ("megatron", Plan(dp=8, recompute=Recompute.OP), {}, "by modules"),
        ("nemo", SHARDED, {"exp_avg_dtype": "bf16"}, r"nemo: workload\.exp_avg_dtype"),
        ("torchtitan", Plan(dp=8, zero_stage=3), {"exp_avg_sq_dtype": "bf16"}, r"workload\.exp_avg_sq_dtype"),
        ("torchtitan", Plan(dp=8, zero_stage=3), {"cross_entropy": "fused"}, r"workload\.cross_entropy"),
        ("deepspeed", SHARDED, {"master_dtype": "fp16"}, r"workload\.master_dtype"),
        ("nanotron", SHARDED, {"param_dtype": "fp32"}, r"workload\.param_dtype"),
        ("nanotron", Plan(dp=8, recompute=Recompute.OP), {}, "whole layers"),
    ],
)
def test_exports_refuse_by_name_what_they_cannot_say(
    target: str, plan: Plan, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(IllegalPlanError, match=reason):
        words(target, plan, **changes)


def test_p_fits_has_no_cliff_and_agrees_with_fits() -> None:
    table = legal_plans(LLAMA, EIGHT, work(framework="megatron"), Space(recompute=(Recompute.NONE,), zero_stage=(1,)))
    estimates = estimate_table(LLAMA, EIGHT, work(framework="megatron"), table)
    assert ((estimates.p_fits >= 0.5) == estimates.fits).all()
    assert (estimates.fits == (estimates.needed_bytes <= estimates.usable_bytes)).all()
    order = estimates.needed_bytes.argsort()
    assert (estimates.p_fits[order][1:] <= estimates.p_fits[order][:-1] + 1e-12).all()
    between = estimates.p_fits[(estimates.p_fits > 0.02) & (estimates.p_fits < 0.98)]
    assert len(between) > 20
