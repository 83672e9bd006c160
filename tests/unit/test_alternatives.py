"""The samplers that ours is compared with: the same finite set, each plan once."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from autotune.errors import InputError
from autotune.search.sampler import SamplerName, alternative
from autotune.specs import Plan

# No product of the parameters: tp 4 only without ZeRO, micro-batch 8 only with tp 1.
PLANS = [
    Plan(tp=tp, dp=8 // tp, micro_batch=micro_batch, zero_stage=zero)
    for tp, micro_batch, zero in itertools.product((1, 2, 4), (1, 2, 8), (0, 1))
    if not (tp == 4 and zero) and not (micro_batch == 8 and tp > 1)
]
OTHERS = [name for name in SamplerName if name is not SamplerName.PLAN]
has_torch = importlib.util.find_spec("torch") is not None


def walk(name: SamplerName, seed: int, plans: list[Plan]) -> list[Plan]:
    """All plans in the order asked; a larger micro-batch is faster, tp 1 with the largest fails."""
    sampler = alternative(name, plans, seed=seed)
    asked = []
    while (plan := sampler.ask()) is not None:
        asked.append(plan)
        failed = plan.tp == 1 and plan.micro_batch == 8
        sampler.tell(plan, None if failed else 1000.0 * plan.micro_batch - plan.tp)
    return asked


@pytest.mark.parametrize("name", OTHERS)
def test_every_plan_is_asked_once_and_a_seed_repeats_itself(name: SamplerName) -> None:
    if name is SamplerName.GP and not has_torch:
        with pytest.raises(InputError, match="needs torch"):
            alternative(name, PLANS, seed=0)
        return
    asked = walk(name, 3, PLANS)
    assert len(asked) == len(PLANS)
    assert set(asked) == set(PLANS)
    assert walk(name, 3, list(reversed(PLANS))) == asked


@pytest.mark.parametrize("name", [SamplerName.TPE, SamplerName.RANDOM])
def test_another_seed_is_another_order(name: SamplerName) -> None:
    assert walk(name, 0, PLANS) != walk(name, 1, PLANS)


def test_the_rule_takes_small_tp_pp_then_large_micro_batches() -> None:
    plans = [Plan(tp=2, dp=4, micro_batch=8), Plan(dp=8), Plan(dp=8, micro_batch=2), Plan(pp=2, dp=4, micro_batch=1)]
    assert walk(SamplerName.RULE, 0, plans) == [plans[2], plans[1], plans[0], plans[3]]


def test_the_grid_is_nested_loops() -> None:
    plans = [Plan(tp=2, dp=4), Plan(dp=8, micro_batch=2), Plan(dp=8, zero_stage=1), Plan(dp=8)]
    assert walk(SamplerName.GRID, 0, plans) == [plans[3], plans[2], plans[1], plans[0]]


def test_random_draws_are_uniform() -> None:
    firsts = [walk(SamplerName.RANDOM, seed, PLANS[:4])[0] for seed in range(400)]
    counts = [firsts.count(plan) for plan in PLANS[:4]]
    assert sum(counts) == 400
    assert min(counts) > 70  # 100 expected, 3.5 standard deviations


@pytest.mark.parametrize("name", OTHERS)
def test_results_of_plans_asked_elsewhere_are_learned_and_never_asked(name: SamplerName) -> None:
    """A tuning that goes on in another process; telling twice, or of a plan that is no choice, changes nothing."""
    if name is SamplerName.GP and not has_torch:
        return
    told = {PLANS[0]: 900.0, PLANS[3]: None}
    for plans in (PLANS, PLANS[:1]):
        sampler = alternative(name, plans, seed=0)
        for plan, speed in (*told.items(), *told.items(), (Plan(tp=8), 1.0)):
            sampler.tell(plan, speed)
        asked = []
        while (plan := sampler.ask()) is not None:
            asked.append(plan)
        assert set(asked) == set(plans) - set(told)


@pytest.mark.parametrize("name", OTHERS)
def test_several_plans_may_be_in_flight(name: SamplerName) -> None:
    if name is SamplerName.GP and not has_torch:
        return
    sampler = alternative(name, PLANS, seed=0)
    asked = [plan for _ in PLANS if (plan := sampler.ask()) is not None]
    assert set(asked) == set(PLANS)
    for plan in asked:
        sampler.tell(plan, 100.0)
    assert sampler.ask() is None


def test_a_single_plan_needs_no_sampler() -> None:
    assert walk(SamplerName.TPE, 0, PLANS[:1]) == PLANS[:1]


def test_ours_is_no_alternative() -> None:
    with pytest.raises(InputError, match="alternative"):
        alternative(SamplerName.PLAN, PLANS, seed=0)
