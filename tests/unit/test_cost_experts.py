"""Mixtures of experts: the hottest rank sets the pace, capacity bounds it, and routing limits what crosses nodes."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.errors import InputError
from autotune.search.space import illegal_reason, legal_plans
from autotune.specs import DType, Estimate, FrameworkName, ModelSpec, Plan, Schedule, Workload

DEEPSEEK = ModelSpec.from_data(model("deepseek-v3").to_data() | {"expert_nodes": 0})
"""Without its routing limit."""
WORK = Workload(seq_len=4096, global_batch=1024)
CLUSTER = cluster_from_shorthand("h100-80gb-sxm:64x8")
WIDE = Plan(pp=16, dp=32, ep=32, zero_stage=1)


def of(spec: ModelSpec, plan: Plan = WIDE) -> Estimate:
    return estimate(spec, CLUSTER, WORK, plan)


def saying(**fields: object) -> ModelSpec:
    return ModelSpec.from_data(DEEPSEEK.to_data() | fields)


def test_routing_to_four_nodes_halves_what_eight_experts_send_across() -> None:
    """Eight copies of a token across nodes become four (DeepSeek-V3, section 2.1.2); latency stays."""
    anywhere, limited = of(DEEPSEEK).seconds.ep, of(saying(expert_nodes=4)).seconds.ep
    assert 0.5 * anywhere <= limited < 0.52 * anywhere


def test_what_is_handed_on_inside_a_node_is_not_saved() -> None:
    one, inside = of(saying(expert_nodes=1)).seconds.ep, Plan(pp=16, dp=32, ep=8, zero_stage=1)
    assert one > 0.05 * of(DEEPSEEK).seconds.ep  # an eighth would cross, but the link inside the node has all of it
    assert of(saying(expert_nodes=4), inside).seconds.ep == of(DEEPSEEK, inside).seconds.ep


def test_more_nodes_than_experts_of_a_token_limit_nothing() -> None:
    assert of(saying(expert_nodes=8)).seconds.ep == pytest.approx(of(DEEPSEEK).seconds.ep)


def test_capacity_bounds_the_hottest_rank() -> None:
    even, hot = of(saying(expert_capacity=1.0)), of(saying(expert_capacity=2.0))
    assert hot.seconds == of(DEEPSEEK).seconds  # looser than what is assumed of the hottest rank
    assert hot.seconds.ep == pytest.approx(1.1 * even.seconds.ep, rel=0.02)
    assert hot.seconds.compute > even.seconds.compute
    assert hot.bytes.activations > even.bytes.activations


def test_a_rank_with_all_experts_has_no_hottest_one() -> None:
    spec, plan = model("tiny-moe"), Plan(dp=8)
    cluster, work = cluster_from_shorthand("h100-80gb-sxm:1x8"), Workload(seq_len=512, global_batch=64)
    bounded = ModelSpec.from_data(spec.to_data() | {"expert_capacity": 1.0})
    assert estimate(spec, cluster, work, plan) == estimate(bounded, cluster, work, plan)
    shared = Plan(dp=8, ep=8)
    assert estimate(spec, cluster, work, shared).step_time_s > estimate(bounded, cluster, work, shared).step_time_s


def test_routing_needs_experts_and_models_without_it_keep_their_key() -> None:
    with pytest.raises(InputError, match="expert_nodes needs experts"):
        ModelSpec.from_data(model("llama2-7b").to_data() | {"expert_nodes": 4})
    assert saying(expert_nodes=0).key == DEEPSEEK.key != saying(expert_nodes=4).key
    later = {"mixers", "mlp_layers", "moe_every", "expert_hidden", "post_norms", "attention_gate", "indexer"}
    later |= {"expert_nodes", "expert_capacity", "constants"}
    assert DEEPSEEK.key == DEEPSEEK.digest(without=frozenset({"name", "source", *later}))


QWEN = model("qwen3-235b-a22b")
MEGATRON_WORK = Workload(seq_len=4096, global_batch=8192, framework=FrameworkName.MEGATRON)
FOLDED = Plan(
    tp=2, pp=8, dp=16, ep=32, vpp=4, zero_stage=1, sequence_parallel=True, schedule=Schedule.INTERLEAVED
)  # fmt: skip


def test_experts_are_laid_out_over_tp_and_dp_together() -> None:
    """NVIDIA's best measured plan for Qwen3-235B on 256 H100: ep 32 with tp 2 and dp 16, an expert on one rank."""
    cluster = cluster_from_shorthand("h100-80gb-sxm:32x8")
    assert illegal_reason(QWEN, cluster, MEGATRON_WORK, FOLDED) is None
    too_wide = illegal_reason(QWEN, cluster, MEGATRON_WORK, FOLDED.model_copy(update={"ep": 64}))
    assert too_wide == "tp 2 * dp 16 * cp 1 is not divisible by ep 64 * etp 1"
    fsdp = MEGATRON_WORK.model_copy(update={"framework": FrameworkName.FSDP})
    assert illegal_reason(QWEN, cluster, fsdp, FOLDED) == "dp 16 * cp 1 is not divisible by ep 32"


def test_an_expert_on_one_rank_keeps_its_exchange_inside_a_node() -> None:
    """tp 2, ep 8: with experts divided by tp their groups span two nodes, on ranks of their own one."""
    cluster, plan = cluster_from_shorthand("h100-80gb-sxm:32x8"), FOLDED.model_copy(update={"ep": 8})
    folded = estimate(QWEN, cluster, MEGATRON_WORK, plan.model_copy(update={"etp": 1}))
    divided = estimate(QWEN, cluster, MEGATRON_WORK, plan)
    assert divided == estimate(QWEN, cluster, MEGATRON_WORK, plan.model_copy(update={"etp": 2}))
    assert folded.seconds.ep < 0.6 * divided.seconds.ep
    assert folded.seconds.tp < divided.seconds.tp  # nobody gathers eight copies of a token
    assert folded.bytes.parameters > divided.bytes.parameters


def test_plans_with_experts_on_ranks_of_their_own_are_listed_for_megatron_only() -> None:
    cluster, work = cluster_from_shorthand("h100-80gb-sxm:1x8"), Workload(seq_len=512, global_batch=64)
    spec = model("tiny-moe")
    told = legal_plans(spec, cluster, work.model_copy(update={"framework": FrameworkName.MEGATRON}))
    assert (told.etp == 1).any()
    assert not legal_plans(spec, cluster, work).etp.any()
    row = int(np.flatnonzero(told.etp == 1)[0])
    assert ".etp1." in told.plan(row).key


def test_tokens_go_out_in_8_bits_and_beside_computation_where_that_is_so() -> None:
    work = WORK.model_copy(update={"dtype": DType.FP8, "framework": FrameworkName.MEGATRON_BRIDGE})
    whole = Plan(dp=512, ep=32, zero_stage=1)  # one stage, so that the same one always sets the pace
    narrow, wide = (estimate(DEEPSEEK, CLUSTER, item, whole).seconds.ep for item in (work, under_bf16(work)))
    assert narrow == pytest.approx(0.75 * wide, rel=0.02)
    beside = estimate(DEEPSEEK, CLUSTER, work.model_copy(update={"ep_overlap": True}), whole).seconds.ep
    assert 0.24 * narrow <= beside < 0.6 * narrow


def under_bf16(work: Workload) -> Workload:
    return work.model_copy(update={"dtype": DType.BF16})
