"""Mixtures of experts: the hottest rank sets the pace, capacity bounds it, and routing limits what crosses nodes."""

from __future__ import annotations

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.errors import InputError
from autotune.specs import Estimate, ModelSpec, Plan, Workload

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
    later |= {"expert_nodes", "expert_capacity"}
    assert DEEPSEEK.key == DEEPSEEK.digest(without=frozenset({"name", "source", *later}))
