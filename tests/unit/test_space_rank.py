"""Ranking the space: the best that fits first, and answers where nothing is legal or nothing fits."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate_table, memory_table
from autotune.errors import IllegalPlanError, NothingFitsError
from autotune.search.offline import nearest_misses, rank
from autotune.search.space import Runtime, legal_plans
from autotune.specs import Plan, Recompute, Space, Workload

LLAMA = model("llama2-7b")
WORK = Workload(seq_len=2048, global_batch=64)


def test_the_best_of_the_whole_space_come_first() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    ranking = rank(LLAMA, cluster, WORK, limit=20)
    table = legal_plans(LLAMA, cluster, WORK)
    estimates = estimate_table(LLAMA, cluster, WORK, table)
    worth = np.sort((estimates.tokens_per_s_per_gpu * estimates.p_fits)[estimates.fits])[::-1][:20]
    found = [(item.estimate.tokens_per_s_per_gpu, item.estimate.p_fits or 0.0) for item in ranking.plans]
    assert [speed * p_fits for speed, p_fits in found] == pytest.approx(worth.tolist())
    assert (ranking.legal, ranking.fitting) == (len(table), int(estimates.fits.sum()))
    assert all(item.estimate.fits for item in ranking.plans)
    assert ranking.seconds > 0
    assert ranking.estimates_per_s > 0


def test_plans_that_the_estimate_cannot_tell_apart_are_one_line() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    table = legal_plans(LLAMA, cluster, WORK)
    estimates = estimate_table(LLAMA, cluster, WORK, table)
    ranking = rank(LLAMA, cluster, WORK, limit=5, distinct=True)
    layouts = [(item.plan.tp, item.plan.pp) for item in ranking.plans]
    assert len(set(layouts)) == len(layouts) == 5
    assert any(item.alike for item in ranking.plans)
    for item in ranking.plans:
        own = np.flatnonzero((table.tp == item.plan.tp) & (table.pp == item.plan.pp) & estimates.fits)
        worth = estimates.expected[own]
        near = own[worth >= 0.95 * worth.max()]
        assert item.alike == len(near) - 1
        plans = [table.plan(int(row)) for row in near]
        assert item.plan in plans
        assert switched_on(item.plan) == min(map(switched_on, plans))


def switched_on(plan: Plan) -> int:
    return sum(
        (
            plan.cp > 1,
            plan.vpp > 1,
            plan.recompute is not Recompute.NONE,
            plan.zero_stage > 1,
            bool(plan.recompute_modules),
        )
    )


def test_a_small_space_gives_all_its_plans() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    space = Space(tp=(8,), zero_stage=(0,), sequence_parallel=(True,), micro_batch=(1, 2))
    assert len(rank(LLAMA, cluster, WORK, space, limit=100).plans) == 6


def test_nothing_legal_says_why() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    odd = Workload(seq_len=2047, global_batch=7)
    narrow = LLAMA.model_copy(update={"heads": 1, "kv_heads": 1, "layers": 1})
    with pytest.raises(IllegalPlanError, match="global_batch 7 is not divisible by dp 8"):
        rank(narrow, cluster, odd)
    with pytest.raises(IllegalPlanError, match=r"space\.tp: \[3\] .* on 8 devices takes 1, 2, 4, 8"):
        rank(LLAMA, cluster, WORK, Space(tp=(3,)))
    with pytest.raises(IllegalPlanError, match="the space excludes every legal plan"):  # each of them alone is legal
        rank(LLAMA, cluster, WORK, Space(tp=(8,), pp=(8,)))


def test_a_model_that_fits_nowhere_says_what_would_make_it_fit() -> None:
    spec, cluster = model("llama3-70b"), cluster_from_shorthand("a100-80gb-sxm:1x8")
    with pytest.raises(NothingFitsError) as caught:
        rank(spec, cluster, WORK)
    misses = caught.value.misses
    table = legal_plans(spec, cluster, WORK)
    needs = memory_table(spec, cluster, WORK, table).device_bytes
    assert misses[0]["needs_bytes"] == needs.min()
    assert misses[0]["missing_bytes"] == needs.min() - cluster.device.memory_bytes
    assert misses[0]["has_bytes"] == cluster.device.memory_bytes
    assert "3 nodes of 8" in str(misses[0]["would_fit_if"])
    # What it says is true: so many nodes fit.
    assert rank(spec, cluster_from_shorthand("a100-80gb-sxm:3x8"), Workload(seq_len=2048, global_batch=48)).fitting > 0


def test_misses_on_one_node_without_a_link_between_nodes() -> None:
    spec, cluster = model("llama3-70b"), cluster_from_shorthand("a100-80gb-sxm:1x8")
    alone = cluster.model_copy(update={"inter": None})
    table = legal_plans(spec, alone, WORK, runtime=Runtime.TORCH)
    with pytest.raises(NothingFitsError, match="3 nodes"):
        nearest_misses(spec, alone, WORK, [table], runtime=Runtime.TORCH)


def test_no_misses_where_something_fits() -> None:
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    nearest_misses(LLAMA, cluster, WORK, [legal_plans(LLAMA, cluster, WORK)])


def test_of_equally_fast_plans_the_one_with_less_memory_is_first() -> None:
    """1F1B and GPipe take the same time in the cost model; GPipe keeps more."""
    cluster = cluster_from_shorthand("a100-80gb-sxm:1x8")
    space = Space(tp=(2,), pp=(4,), vpp=(1,), micro_batch=(1,), recompute=(Recompute.FULL,), sequence_parallel=(True,))
    plans: list[Plan] = [item.plan for item in rank(LLAMA, cluster, WORK, space).plans]
    assert [plan.schedule.value for plan in plans] == ["1f1b", "gpipe"]


def test_the_fewest_nodes_are_found_between_powers_of_two() -> None:
    spec, cluster = model("gpt3-175b"), cluster_from_shorthand("a100-80gb-sxm:1x8")
    workload = Workload(seq_len=2048, global_batch=96)
    with pytest.raises(NothingFitsError) as caught:
        rank(spec, cluster, workload)
    nodes = int(str(caught.value.misses[0]["would_fit_if"]).split(", or ")[1].split()[0])

    def fits(count: int) -> bool:
        larger = cluster_from_shorthand(f"a100-80gb-sxm:{count}x8")
        needs = memory_table(spec, larger, workload, legal_plans(spec, larger, workload)).peak_memory_bytes
        return bool(needs.size and needs.min() <= larger.device.memory_bytes)

    assert [fits(count) for count in range(1, nodes + 1)] == [False] * (nodes - 1) + [True]
    assert nodes & (nodes - 1)  # no power of two
