"""`autotune check`: each rule finds its fault with figures of the estimate, and nothing where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from commands import Command

from autotune.catalog import cluster_from_shorthand, model
from autotune.cli.findings import of_the_file
from autotune.explain.findings import (
    RULES,
    Finding,
    Severity,
    best_neighbour,
    findings,
    without_idle_settings,
    without_overlap,
)
from autotune.explain.whatif import Setting
from autotune.frameworks.reading import ImportedPlan
from autotune.frameworks.table import Remainder, Why
from autotune.search.offline import estimated
from autotune.specs import DType, FrameworkName, Plan, Recompute, Schedule, Workload

H100 = Setting(
    model=model("llama3.1-8b"), cluster=cluster_from_shorthand("h100-80gb-sxm:2x8"),
    workload=Workload(seq_len=4096, global_batch=256),
)  # fmt: skip
PLAIN = Plan(tp=2, dp=8, micro_batch=2, zero_stage=1, sequence_parallel=True)


def of(plan: Plan, setting: Setting = H100) -> dict[str, Finding]:
    found = findings(setting, plan, estimated(setting.model, setting.cluster, setting.workload, [plan])[0])
    assert all(each.rule in RULES and each.text and each.remedy for each in found)
    return {each.rule: each for each in found}


def under(**changes: object) -> Setting:
    return replace(H100, workload=Workload.from_data(H100.workload.to_data() | changes))


def test_a_sound_plan_has_no_findings() -> None:
    assert of(PLAIN) == {}


def test_memory_is_judged_by_its_probability() -> None:
    large = of(Plan(dp=16, micro_batch=8))["does-not-fit"]
    assert (large.severity, large.figures["p_fits"] < 0.5) == (Severity.ERROR, True)
    close = of(Plan(pp=8, dp=2, micro_batch=2), under(global_batch=32))["little-headroom"]
    assert close.severity is Severity.WARNING
    assert 0.5 < close.figures["p_fits"] < 0.95


def test_tensor_parallelism_beyond_nvlink() -> None:
    found = of(Plan(tp=16, micro_batch=4, sequence_parallel=True))["tp-across-domains"]
    assert (found.figures["tp"], found.figures["domain"]) == (16, 8)
    rack = replace(H100, cluster=H100.cluster.model_copy(update={"gpus_per_domain": 16}))
    assert "tp-across-domains" not in of(Plan(tp=16, micro_batch=4, sequence_parallel=True), rack)


def test_pipelines_that_are_not_full() -> None:
    few = of(Plan(pp=8, dp=2, micro_batch=4), under(global_batch=32))
    assert few["few-micro-batches"].figures == pytest.approx({"micro_batches": 4, "pp": 8, "share": 0.51}, rel=0.05)
    assert "bubble" not in few
    bubble = of(Plan(pp=8, dp=2, micro_batch=2), under(global_batch=32))["bubble"]
    assert bubble.figures == pytest.approx({"micro_batches": 8, "pp": 8, "share": 0.34}, rel=0.05)
    assert "bubble" not in of(Plan(pp=8, dp=2, micro_batch=1))
    uneven = of(Plan(pp=16), under(global_batch=256))
    assert "uneven-stages" not in uneven
    deep = replace(H100, model=model("deepseek-v2-lite"), cluster=cluster_from_shorthand("h100-80gb-sxm:1x8"))
    assert of(Plan(pp=4, dp=2), deep)["uneven-stages"].figures == pytest.approx(
        {"layers": 27, "chunks": 4, "longest": 7, "slower": 7 * 4 / 27 - 1}
    )
    assert of(Plan(pp=2, dp=8, zero_stage=3))["zero-with-pipeline"].figures["zero_stage"] == 3


def test_communication_launches_and_formats() -> None:
    work = Workload(seq_len=512, global_batch=16)
    slow = replace(H100, cluster=cluster_from_shorthand("l40s:1x8"), workload=work)
    bound = of(Plan(tp=8, micro_batch=4, sequence_parallel=True, recompute=Recompute.FULL), slow)
    assert bound["communication-bound"].figures == pytest.approx({"mu": 0.673 / 0.284, "share": 0.673}, rel=0.05)
    assert "less tp" in bound["communication-bound"].remedy
    small = replace(H100, model=model("gpt2"), workload=Workload(seq_len=128, global_batch=256))
    assert of(Plan(dp=16, micro_batch=1), small)["launch-bound"].figures["share"] > 0.03
    full = of(PLAIN, under(dtype="fp32"))["fp32"]
    peaks = H100.cluster.device.peak_flops_per_s
    assert full.figures["ratio"] == pytest.approx(peaks[DType.BF16] / peaks[DType.FP32])
    alone = under(framework=FrameworkName.FSDP.value)
    assert "trains in fp32" in of(Plan(tp=8, pp=2, sequence_parallel=True), alone)["fp32"].text


def test_overlap_that_is_off() -> None:
    off = of(Plan(tp=8, dp=2, micro_batch=4, zero_stage=1, sequence_parallel=True), under(tp_overlap=False))
    assert off["overlap-off"].figures["gain"] > 0.03
    setting = under(framework="megatron", global_batch=16)
    lost = without_overlap(setting, Plan(dp=16, zero_stage=1), "overlap_grad_reduce", "run.sh")
    assert lost is not None
    assert (lost.rule, lost.where, lost.figures["slower"] > 0.03) == ("overlap-off", "run.sh", True)
    assert without_overlap(setting, Plan(tp=8, pp=2, sequence_parallel=True), "overlap_grad_reduce", "x") is None


def test_what_a_launch_says_beside_its_plan() -> None:
    setting, plan = under(framework="megatron", global_batch=16), Plan(dp=16, zero_stage=1)
    off = Remainder(name="overlap_grad_reduce", value="not set", where="", why=Why.NO_WORD)
    other = Remainder(name="foo_bar", value="7", where="line 3", why=Why.UNKNOWN)
    launch = ImportedPlan(
        framework="megatron", version="0.19", file="run.sh", model=H100.model, devices=16, gpus_per_node=8,
        workload=setting.workload, plan=plan, remainder=(off, other),
    )  # fmt: skip
    first, second = of_the_file(setting, launch)
    assert (first.rule, first.severity, first.where) == ("overlap-off", Severity.WARNING, "run.sh")
    assert first.text.startswith("overlap_grad_reduce is off: the step takes ")
    assert (second.rule, second.text) == ("unread-setting", "foo_bar 7: not known here")
    assert second.where == "run.sh, line 3"


def test_settings_that_do_nothing_are_no_errors() -> None:
    plan, found = without_idle_settings(Plan(pp=2, zero_stage=1, sequence_parallel=True))
    assert plan == Plan(pp=2)
    assert [(each.rule, each.severity) for each in found] == [("idle-setting", Severity.NOTE)] * 2
    assert without_idle_settings(PLAIN) == (PLAIN, [])


def test_a_fix_is_the_best_legal_plan_next_to_it() -> None:
    fix = best_neighbour(H100, Plan(dp=16, micro_batch=8))
    assert fix is not None
    assert fix.estimate.fits
    assert fix.p_fits is not None
    assert fix.p_fits < 0.5
    assert " instead of " in fix.change
    broken = best_neighbour(H100, Plan(tp=16, micro_batch=1))  # more than the key-value heads: cannot run
    assert broken is not None
    assert (broken.gain, broken.change.startswith("tp ")) == (None, True)
    assert broken.plan.model_copy(update={"tp": 16, "dp": 1}) == Plan(tp=16, micro_batch=1)
    best = best_neighbour(H100, fix.plan)
    while best is not None:  # each step is better, so that it comes to an end, from which nothing is better
        assert best.gain is not None
        fix, best = best, best_neighbour(H100, best.plan)
    assert best_neighbour(H100, fix.plan) is None


ASKED = ("--model", "llama3.1-8b", "--cluster", "h100-80gb-sxm:2x8", "--seq-len", 4096, "--global-batch")


def test_the_exit_status_says_how_grave_it_is(autotune: Command) -> None:
    sound = "tp=2,micro_batch=2,zero_stage=1,sequence_parallel=true"
    done = autotune("check", "--plan", sound, *ASKED, 256)
    assert (done.status, "Nothing is wrong" in done.out) == (0, True)
    assert autotune("check", "--plan", "pp=8,micro_batch=1", *ASKED, 32).status == 1
    done = autotune("check", "--plan", "tp=2,micro_batch=3", *ASKED, 256, "--json")
    assert done.status == 2
    (found,) = done.data["findings"]
    assert (found["rule"], found["severity"]) == ("batch-rounding", "error")
    assert "240 or 264" in found["remedy"]
    done = autotune("check", "--plan", "pp=2,schedule=gpipe", *ASKED, 256, "--for", "megatron", "--fix", "--json")
    assert done.data["findings"][0]["text"] == "megatron: it has no GPipe schedule: use 1f1b"
    assert done.data["fix"]["plan"]["schedule"] != "gpipe"


def test_findings_as_sarif(autotune: Command) -> None:
    data = autotune("check", "--plan", "pp=8,micro_batch=1", *ASKED, 32, "--sarif").data
    (run,) = data["runs"]
    assert data["version"] == "2.1.0"
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    result = next(each for each in run["results"] if each["ruleId"] == "bubble")
    assert (result["level"], rules[result["ruleIndex"]]) == ("warning", "bubble")
    assert "Remedy: less pp" in result["message"]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a launch of a framework, or a plan with --plan"),
        (("run.sh",), "name the framework of the file"),
        (("--plan", "tp=1", "--set", "A=1"), "it goes with a FILE"),
        (("--plan", "tp=1", "--sarif", "--json"), "it is JSON already"),
    ],
)
def test_wrong_input_of_check(autotune: Command, arguments: tuple[str, ...], message: str) -> None:
    done = autotune("check", *arguments)
    assert (done.status, message in done.err) == (2, True)


def test_the_same_findings_stand_in_a_ranking(autotune: Command) -> None:
    space = ("--tp", 1, "--pp", 8, "--micro-batch", 4, "--schedule", "1f1b")
    data = autotune("plan", *ASKED, 32, *space, "--json").data
    assert "bubble" in [each["rule"] for each in data["findings"]]
    first = Plan.from_data(data["plans"][0]["plan"])
    assert first.schedule is Schedule.ONE_F_ONE_B
    assert "warning bubble: the bubble takes" in autotune("plan", *ASKED, 32, *space).out
