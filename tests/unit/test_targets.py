"""The framework that must run the plan is an input: its rules, its version, and what the answer says without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command
from store_records import CLUSTER, FINGERPRINT, MODEL, step_reading, trial, tuning

from autotune.api.requests import WorkloadRequest, asked_workload, find_workload
from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import IllegalPlanError, InputError, UnknownNameError
from autotune.frameworks import launch_arguments, record_of, target_of, targets
from autotune.knowledge.recording import remember
from autotune.specs import FrameworkName, Plan, Schedule, TuningState, Workload
from autotune.tuning.report import best_answer, tuning_answer
from autotune.tuning.targets import refusal, with_target
from storage import SqlStore, open_store

LLAMA, SIXTEEN = model("llama3.2-1b"), cluster_from_shorthand("h100-80gb-sxm:2x8")
WORK = Workload(seq_len=4096, global_batch=64)
ASKED = ("--model", "llama3.2-1b", "--cluster", "h100-80gb-sxm:2x8", "--seq-len", 4096, "--global-batch", 64)
GPIPE, ONE_F = Plan(pp=2, dp=4, schedule=Schedule.GPIPE), Plan(pp=2, dp=4)


def test_a_target_is_stored_with_its_version_and_its_record() -> None:
    given = with_target({"seq_len": 4096, "global_batch": 64, "target": "torchtitan"})
    workload = Workload.from_data(given)
    assert workload.target == str(target_of("torchtitan"))
    assert workload.framework is FrameworkName.FSDP
    assert (workload.key != WORK.key, workload.of_any_software()) == (True, WORK)
    assert with_target({"framework": "nanotron"}) == {"framework": "nanotron"}
    with pytest.raises(InputError, match=r"framework.*'nemo'.*leave it out: megatron@.* has megatron's habits"):
        with_target({"target": "megatron", "framework": "nemo"})
    with pytest.raises(UnknownNameError, match="horovod"):
        with_target({"target": "horovod"})


def test_the_api_takes_a_target_in_a_question_and_in_a_body() -> None:
    asked = asked_workload(4096, 64, None, None, None, None, "torchtitan")
    body = WorkloadRequest.from_data({"seq_len": 4096, "global_batch": 64, "target": "torchtitan"})
    for given in (asked, body):
        workload = find_workload(LLAMA, SIXTEEN, given)
        assert (workload.target, workload.framework) == (str(target_of("torchtitan")), FrameworkName.FSDP)
    with pytest.raises(InputError, match="leave it out"):
        asked_workload(4096, 64, None, FrameworkName.NEMO, None, None, "torchtitan")


@pytest.mark.parametrize("target", targets())
def test_every_target_has_a_record_and_is_listed_only_what_it_runs(autotune: Command, target: str) -> None:
    data = autotune("plan", *ASKED, "--for", target, "--top", 8, "--all", "--json").data
    workload = Workload.from_data(data["workload"])
    assert workload.framework is record_of(target)
    assert len(data["plans"]) == 8
    for each in data["plans"]:  # raises for a plan that it does not run
        launch_arguments(target, LLAMA, SIXTEEN, workload, Plan.from_data(each["plan"]))
    assert data["frameworks"] == [
        {"target": workload.target, "reason": None, "plan": data["plans"][0]["plan"], "tokens_per_s_per_gpu": None}
    ]


def test_a_plan_that_the_target_refuses_is_refused_with_the_reason(autotune: Command) -> None:
    for plan, reason in (("pp=2,schedule=gpipe", "it has no GPipe schedule"), ("pp=2,zero_stage=2", "exclude each")):
        done = autotune("estimate", *ASKED, "--plan", plan, "--for", "megatron")
        assert (done.status, reason in done.err) == (2, True)
    assert autotune("estimate", *ASKED, "--plan", "pp=2,schedule=gpipe").status == 0
    assert "deepspeed: it has no interleaved" in str(
        refusal("deepspeed", LLAMA, SIXTEEN, WORK, Plan(pp=2, vpp=2, dp=8, schedule=Schedule.INTERLEAVED))
    )


def test_a_ranking_says_which_frameworks_run_its_first_plan(autotune: Command) -> None:
    done = autotune("plan", *ASKED, "--zero-stage", 1, "--pp", 1, "--tp", 1, "--json")
    reasons = {each["target"].partition("@")[0]: each["reason"] for each in done.data["frameworks"]}
    assert set(reasons) == set(targets())
    assert reasons["megatron"] is None
    assert "shards gradients too" in reasons["torchtitan"]
    assert "The first runs in megatron@" in autotune("plan", *ASKED, "--zero-stage", 1, "--pp", 1, "--tp", 1).out


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'a.db'}"


@pytest.fixture
def store(url: str) -> SqlStore:
    """A tuning that GPipe has won."""
    found = open_store(url)
    found.put_fingerprint(FINGERPRINT)
    asked = tuning("first", state=TuningState.DONE)
    found.create_tuning(asked)
    for number, (plan, speed) in enumerate(((GPIPE, 1000.0), (ONE_F, 900.0))):
        running = trial(number, "first", plan)
        found.start_trial(running)
        found.finish_trial(
            running.id, reading=step_reading(speed), failure=None, outcome_gpu_s=1.0, setup_s=0.1,
            fingerprint_key=FINGERPRINT.key,
        )  # fmt: skip
    remember(found, asked)
    return found


def test_a_winner_is_offered_only_with_commands_that_run_it(store: SqlStore, autotune: Command, url: str) -> None:
    data = tuning_answer(store, store.tuning("first"))
    found = {each["target"].partition("@")[0]: each for each in data["frameworks"]}
    assert found["nanotron"]["plan"] == GPIPE.to_data() or found["nanotron"]["plan"] is None
    assert found["megatron"]["reason"] == "megatron: it has no GPipe schedule: use 1f1b"
    assert found["megatron"]["plan"] == ONE_F.to_data()
    assert found["megatron"]["tokens_per_s_per_gpu"] == pytest.approx(900.0)
    shown = autotune("show", "first", "--db", url).out
    assert "Not in megatron@" in shown
    assert "--for torchtitan" not in shown


def test_the_launch_is_of_the_fastest_plan_that_the_target_runs(store: SqlStore) -> None:
    launch = best_answer(store, store.tuning("first"), "megatron")["launch"]
    assert launch["notes"][0].startswith(f"This is {ONE_F.key}, the fastest measured plan that megatron runs.")
    assert launch["argv"][launch["argv"].index("--pipeline-model-parallel-size") + 1] == "2"
    with pytest.raises(IllegalPlanError, match=r"torchtitan runs none of the 2 measured plans: .*--for torchtitan"):
        best_answer(store, store.tuning("first"), "torchtitan")


def test_what_is_known_of_any_framework_counts_if_the_target_runs_it(
    store: SqlStore, autotune: Command, url: str
) -> None:
    ours = MODEL.model_copy(update={"name": "ours", "ffn": 176})
    store.put_model(ours)
    store.put_cluster(CLUSTER)
    mine = tuning("second", state=TuningState.DONE, model=ours)
    store.create_tuning(mine)
    running = trial(0, "second", ONE_F)
    store.start_trial(running)
    store.finish_trial(
        running.id, reading=step_reading(800.0), failure=None, outcome_gpu_s=1.0, setup_s=0.1,
        fingerprint_key=FINGERPRINT.key,
    )  # fmt: skip
    remember(store, mine)
    question = ("--model", "ours", "--cluster", "pair", "--seq-len", 128, "--global-batch", 16, "--dtype", "bf16")
    data = autotune("best", *question, "--for", "megatron", "--db", url, "--json").data
    assert data["known"]["plan"] == ONE_F.to_data()
    assert data["launch"]["target"] == "megatron"
    other = autotune("best", *question, "--for", "torchtitan", "--db", url, "--json").data
    assert (other["known"], other["workload"]["target"]) == (None, str(target_of("torchtitan")))
