"""Every legal plan on eight real ranks trains as one process does: the same losses for the same seed and batch.

A few of them bring together every two choices that legal plans bring together; the others are slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from local_ranks import cpu_cluster
from training_plans import RANKS, legal_plans, step_request

from autotune.specs import Plan
from probes.launch import LocalProber

TOLERANCE = 1e-5  # relative, fp32; plans differ by 1e-7, what training changes in these steps is 1e-2
Choice = tuple[str, object]


def pairs(plan: Plan) -> set[tuple[Choice, Choice]]:
    """Every two choices that the plan makes, such as tp = 2 with ZeRO stage 3."""
    fields = {name: str(value) for name, value in plan.to_data().items()}
    return set(combinations(sorted(fields.items()), 2))


def pairwise_cover(plans: Sequence[Plan]) -> list[Plan]:
    """A few plans with every pair that occurs in `plans`: each time the first of those that add most."""
    missing = set().union(*map(pairs, plans))
    cover = []
    while missing:
        cover.append(max(plans, key=lambda plan: len(pairs(plan) & missing)))
        missing -= pairs(cover[-1])
    return cover


PLANS = legal_plans()
COVER = pairwise_cover(PLANS)


@pytest.fixture(scope="module")
def eight(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProber]:
    with LocalProber(cpu_cluster(RANKS), log_dir=tmp_path_factory.mktemp("eight")) as prober:
        yield prober


def losses(prober: LocalProber, plan: Plan, **changes: object) -> tuple[float, ...]:
    outcome = prober.run(step_request(plan, **changes), deadline_s=120)
    assert outcome.failure is None, outcome.failure
    return outcome.readings[0].losses


@pytest.fixture(scope="module")
def alone(one: LocalProber) -> tuple[float, ...]:
    return losses(one, Plan())


def test_the_steps_really_train(one: LocalProber, alone: tuple[float, ...]) -> None:
    untrained = losses(one, Plan(), learning_rate=0.0)
    assert len(alone) == 3
    assert alone[0] == untrained[0]
    for trained, still in zip(alone[1:], untrained[1:], strict=True):
        assert abs(trained - still) > 100 * TOLERANCE * still


def test_the_plans_that_always_run_hold_every_pair_of_choices() -> None:
    assert len(PLANS) == 155
    assert len(COVER) < 25
    assert set(COVER) < set(PLANS)
    assert {pair for plan in COVER for pair in pairs(plan)} == {pair for plan in PLANS for pair in pairs(plan)}
    # By hand: pp = 2 leaves room for ZeRO; only pipelines of two stages are interleaved here.
    held = set().union(*map(pairs, COVER))
    assert (("pp", "2"), ("zero_stage", "3")) in held
    assert (("schedule", "interleaved"), ("sequence_parallel", "True")) in held
    assert (("pp", "4"), ("schedule", "interleaved")) not in held


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=plan.key, marks=[] if plan in COVER else pytest.mark.slow) for plan in PLANS],
)
def test_a_plan_trains_as_one_process_does(eight: LocalProber, alone: tuple[float, ...], plan: Plan) -> None:
    assert losses(eight, plan) == pytest.approx(alone, rel=TOLERANCE)
