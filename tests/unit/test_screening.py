"""Cheap trials before whole ones: what they carry over, what they save, and that they never decide."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand
from autotune.catalog import model as preset
from autotune.cost.framework import TORCH
from autotune.errors import InputError
from autotune.search.core import TRIAL_STEPS, Search
from autotune.search.fidelity import Fidelity, Setting, fewer_layers, fewer_micro_batches
from autotune.search.measurement import Measurement
from autotune.search.physics import PARAMETERS, behaviour
from autotune.search.screening import ScreenedTrial, Screening
from autotune.search.space import legal_plans
from autotune.specs import Failure, FailureKind, Plan, Schedule, Space, Workload

MODEL, CLUSTER = preset("gpt2-xl"), cluster_from_shorthand("a100-80gb-sxm:1x8")
WORK = Workload(seq_len=1024, global_batch=512)
SETTING = Setting(model=MODEL, cluster=CLUSTER, workload=WORK, profile=None, framework=TORCH, own_sd=0.05)
WHOLE = Fidelity(layers=MODEL.layers, global_batch=WORK.global_batch)
BLANK = dict.fromkeys(PARAMETERS, (0.0, 0.0))
TRUTH = np.array([0.2, -0.1, 0.5, 0.3, 0.4, 0.2, 0.0])
"""The parameters of the cluster that the tests run on."""


def true_s(plan: Plan, fidelity: Fidelity) -> float:
    return float(np.exp(behaviour(SETTING.estimates(plan, fidelity), TRUTH).log_time[0]))


def run(trial: ScreenedTrial) -> tuple[Measurement, float]:
    """(what a trial measures, the GPU-seconds it costs): a set-up of one second and its steps."""
    step_s = true_s(trial.plan, trial.fidelity or WHOLE)
    speed = trial.workload.tokens_per_step / step_s / CLUSTER.devices
    return Measurement(tokens_per_s_per_gpu=speed, setup_s=1.0), CLUSTER.devices * (1.0 + TRIAL_STEPS * step_s)


def test_fewer_micro_batches_fill_the_pipeline_once() -> None:
    plan = Plan(tp=1, pp=4, dp=2, micro_batch=2)
    assert fewer_micro_batches(MODEL, WORK, plan) == Fidelity(layers=MODEL.layers, global_batch=4 * 2 * 2)
    assert fewer_micro_batches(MODEL, WORK.model_copy(update={"global_batch": 28}), plan) is None  # 7 micro-batches


def test_fewer_layers_leave_each_chunk_one() -> None:
    plan = Plan(tp=2, pp=2, dp=2, vpp=2, schedule=Schedule.INTERLEAVED)
    assert fewer_layers(MODEL, WORK, plan) == Fidelity(layers=4, global_batch=WORK.global_batch)
    assert fewer_layers(MODEL.model_copy(update={"layers": 46}), WORK, plan) is None  # unequal chunks
    assert fewer_layers(preset("tiny-moe"), WORK, Plan()) is None


@pytest.mark.parametrize("reduce", [fewer_micro_batches, fewer_layers])
def test_known_parameters_carry_a_cheap_trial_over_exactly(reduce) -> None:  # type: ignore[no-untyped-def]
    plan = Plan(tp=2, pp=2, dp=2, micro_batch=2)
    fidelity = reduce(MODEL, WORK, plan)
    known = {name: (float(TRUTH[i]), 0.0) for i, name in enumerate(PARAMETERS)}
    ratio = SETTING.ratio(plan, fidelity, known)
    assert true_s(plan, fidelity) * np.exp(ratio.log_mean) == pytest.approx(true_s(plan, WHOLE))


def test_what_both_steps_have_alike_leaves_no_doubt() -> None:
    """Whatever is wrong with everything cancels in the ratio; what only whole steps hold much of does not."""
    plan = Plan(tp=1, pp=1, dp=8, micro_batch=1)
    fidelity = fewer_micro_batches(MODEL, WORK, plan)
    assert fidelity is not None
    doubts = {name: SETTING.ratio(plan, fidelity, {**BLANK, name: (0.0, 0.5)}).log_sd for name in ("all", "gradients")}
    assert doubts["all"] == pytest.approx(SETTING.ratio(plan, fidelity, BLANK).log_sd)
    assert doubts["gradients"] > 1.1 * doubts["all"]


def searched(trials: int, *, cheap: bool) -> tuple[Search, float, int]:
    """(the search after so many whole trials, GPU-seconds, cheap trials)."""
    plans = legal_plans(MODEL, CLUSTER, WORK, space=Space(zero_stage=(1,), micro_batch=(1, 2, 4)))
    search, spent, screened = Search(MODEL, CLUSTER, WORK, plans=plans), 0.0, 0
    screening = Screening(search, own_sd=0.05)
    while search.trials < trials:
        if cheap:
            trial = screening.ask()
        else:
            plan = search.ask()
            trial = plan and ScreenedTrial(plan=plan, model=MODEL, workload=WORK, fidelity=None)
        assert trial is not None
        result, gpu_s = run(trial)
        spent += gpu_s
        screened += trial.fidelity is not None
        screening.tell(trial, result, gpu_s=gpu_s)
    return search, spent, screened


def test_cheap_trials_never_decide() -> None:
    search, _, screened = searched(6, cheap=True)
    assert screened > 0
    assert len(search.observations) == 6 + screened
    assert search.trials == len(search.standings()) == 6
    best = search.best
    assert best is not None
    speed = WORK.tokens_per_step / true_s(best.plan, WHOLE) / CLUSTER.devices
    assert best.tokens_per_s_per_gpu == pytest.approx(speed)


def test_a_plan_stays_open_after_a_cheap_trial() -> None:
    search = Search(MODEL, CLUSTER, WORK, plans=[Plan(dp=8), Plan(tp=2, dp=4)])
    search.tell(Plan(dp=8), Measurement(tokens_per_s_per_gpu=9_000.0, carried_sd=0.05))
    assert search.best is None
    assert search.trials == 0
    assert {search.ask(), search.ask()} == {Plan(dp=8), Plan(tp=2, dp=4)}


def test_running_out_of_memory_cheaply_rules_the_plan_out() -> None:
    search = Search(MODEL, CLUSTER, WORK, plans=[Plan(dp=8), Plan(tp=2, dp=4)])
    screening, fidelity = Screening(search), fewer_micro_batches(MODEL, WORK, Plan(dp=8))
    assert fidelity is not None
    cheap = ScreenedTrial(plan=Plan(dp=8), model=MODEL, workload=fidelity.workload(WORK), fidelity=fidelity)
    screening.tell(cheap, Failure(kind=FailureKind.OOM, message="out of memory"))
    assert search.ask() == Plan(tp=2, dp=4)
    assert search.ask() is None


def test_a_spread_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="carried_sd"):
        Measurement(tokens_per_s_per_gpu=1.0, carried_sd=float("nan"))
