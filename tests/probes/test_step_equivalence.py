"""Every legal plan on eight real ranks trains as one process does: the same losses for the same seed and batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_ranks import cpu_cluster
from training_plans import RANKS, legal_plans, step_request

from autotune.specs import Plan
from probes.launch import LocalProber

TOLERANCE = 1e-5  # relative, fp32; plans differ by 1e-7, what training changes in these steps is 1e-2


@pytest.fixture(scope="module")
def eight(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProber]:
    with LocalProber(cpu_cluster(RANKS), log_dir=tmp_path_factory.mktemp("eight")) as prober:
        yield prober


@pytest.fixture(scope="module")
def one(_rank_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProber]:
    with LocalProber(cpu_cluster(1), log_dir=tmp_path_factory.mktemp("one")) as prober:
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


@pytest.mark.parametrize("plan", legal_plans(), ids=lambda plan: plan.key)
def test_a_plan_trains_as_one_process_does(eight: LocalProber, alone: tuple[float, ...], plan: Plan) -> None:
    assert losses(eight, plan) == pytest.approx(alone, rel=TOLERANCE)
