"""The framework is an input: its habits are behind the estimate, and only plans that it runs are listed."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.cost.framework import FRAMEWORKS, NANOTRON, TORCH, framework_for
from autotune.cost.pipeline import chunk_with_ends
from autotune.errors import InputError
from autotune.frameworks import deepspeed, megatron, nanotron, nemo, torchtitan
from autotune.frameworks.arguments import ExportRequest
from autotune.search.core import Search
from autotune.search.space import illegal_reason, legal_plans
from autotune.specs import Attention, FrameworkName, Norms, Plan, Recompute, Schedule, Workload
from autotune.specs.workload import read_kernels

LLAMA = model("llama3.2-1b")
CLUSTER = cluster_from_shorthand("h100-80gb-sxm:2x8")
WORK = Workload(seq_len=4096, global_batch=32)


def under(framework: FrameworkName, **kernels: object) -> Workload:
    return Workload.from_data(WORK.to_data() | {"framework": framework.value, **kernels})


def test_every_name_has_its_record() -> None:
    assert {item.value for item in FrameworkName} == set(FRAMEWORKS)


def test_the_workloads_framework_is_behind_the_estimate() -> None:
    plan = Plan(dp=16, zero_stage=1)
    told = estimate(LLAMA, CLUSTER, under(FrameworkName.NANOTRON), plan)
    assert told == estimate(LLAMA, CLUSTER, WORK, plan, framework=NANOTRON)
    assert told.framework == "nanotron"
    assert told.step_time_s != estimate(LLAMA, CLUSTER, WORK, plan).step_time_s


def test_a_search_assumes_the_workloads_framework() -> None:
    found = Search(LLAMA, CLUSTER, under(FrameworkName.MEGATRON), plans=[Plan(dp=16, zero_stage=1)])
    assert found.estimates.framework.name == "megatron"


def test_kernels_are_the_workloads_where_it_names_them() -> None:
    said = under(FrameworkName.TORCH, **read_kernels("attention=flash3, norms=eager,tp_overlap=true"))
    assert (said.attention, said.norms, said.tp_overlap) == (Attention.FLASH3, Norms.EAGER, True)
    found = framework_for(said)
    assert (found.attention, found.fused_norms, found.tp_exposed) == (Attention.FLASH3, False, 0.5)
    assert framework_for(WORK) == TORCH


@pytest.mark.parametrize("text", ["flash=3", "attention", "attention=", "norms=eager,norms=fused"])
def test_kernels_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="each key once"):
        read_kernels(text)


def test_a_workload_that_says_nothing_of_software_keeps_its_key() -> None:
    assert WORK.key == "4c78ca47ee6adb98"  # of before frameworks could be said
    others = {under(item).key for item in FrameworkName} | {under(FrameworkName.TORCH, attention="flash2").key}
    assert len(others) == len(FrameworkName) + 1
    assert under(FrameworkName.NANOTRON, attention="flash2").of_any_software() == WORK


EXPORTERS = {
    FrameworkName.NANOTRON: nanotron,
    FrameworkName.MEGATRON: megatron,
    FrameworkName.NEMO: nemo,
    FrameworkName.DEEPSPEED: deepspeed,
    FrameworkName.FSDP: torchtitan,
}


@pytest.mark.parametrize(("framework", "exporter"), EXPORTERS.items())
def test_what_is_listed_for_a_framework_is_exported_to_it(framework: FrameworkName, exporter: ModuleType) -> None:
    work = under(framework)
    table = legal_plans(LLAMA, CLUSTER, work)
    assert len(table) > 50
    for i in range(0, len(table), 5):  # raises for a plan that the framework does not run
        run = ExportRequest(
            model=LLAMA, cluster=CLUSTER, workload=work, plan=table.plan(i), version=exporter.VERSIONS[0]
        )
        exporter.export(run)


REFUSED = [
    (FrameworkName.NANOTRON, Plan(pp=8, dp=2, micro_batch=4), "at least pp - 1 = 7 micro-batches a step, not 4"),
    (FrameworkName.NANOTRON, Plan(dp=16, zero_stage=2), "ZeRO-0 and ZeRO-1, not 2"),
    (FrameworkName.NANOTRON, Plan(dp=16, recompute=Recompute.SELECTIVE), "whole layers only"),
    (FrameworkName.MEGATRON, Plan(pp=4, dp=4, schedule=Schedule.GPIPE), "no GPipe schedule"),
    (FrameworkName.MEGATRON, Plan(pp=4, dp=4, zero_stage=3), "exclude each other"),
    (FrameworkName.FSDP, Plan(dp=16, zero_stage=1), "zero_stage 2 or 3"),
    (FrameworkName.DEEPSPEED, Plan(tp=2, pp=2, dp=4), "AutoTP"),
]


@pytest.mark.parametrize(("framework", "plan", "reason"), REFUSED)
def test_a_plan_that_a_framework_does_not_run_is_refused_with_its_reason(
    framework: FrameworkName, plan: Plan, reason: str
) -> None:
    found = illegal_reason(LLAMA, CLUSTER, under(framework), plan)
    assert found is not None
    assert found.startswith(framework.value)
    assert reason in found
    assert illegal_reason(LLAMA, CLUSTER, WORK, plan) is None


def test_a_kernel_that_a_device_does_not_run_is_refused() -> None:
    ampere, work = cluster_from_shorthand("a100-80gb-sxm:2x8"), under(FrameworkName.MEGATRON, attention="flash3")
    reason = illegal_reason(LLAMA, ampere, work, Plan(dp=16))
    assert reason == "attention flash3 does not run on a100-80gb-sxm"
    assert illegal_reason(LLAMA, CLUSTER, work, Plan(dp=16)) is None


def test_megatron_counts_the_ends_of_llama_405b_as_layers() -> None:
    """126 layers in 64 chunks of two: published with tp8.pp8.vpp8 (NeMo's recipe), one layer less at either end."""
    spec, cluster = model("llama3.1-405b"), cluster_from_shorthand("h100-80gb-sxm:64x8")
    work = Workload(seq_len=8192, global_batch=256, framework=FrameworkName.MEGATRON)
    plan = Plan(
        tp=8, pp=8, dp=4, cp=2, vpp=8, zero_stage=1, sequence_parallel=True, schedule=Schedule.INTERLEAVED
    )  # fmt: skip
    assert illegal_reason(spec, cluster, work, plan) is None
    assert legal_plans(spec, cluster, work).find(plan) is not None
    run = ExportRequest(model=spec, cluster=cluster, workload=work, plan=plan, version=megatron.VERSIONS[0])
    assert "--account-for-loss-in-pipeline-split" in megatron.export(run).argv
    assert chunk_with_ends(126, 64) == [1, *[2] * 62, 1]
    assert chunk_with_ends(10, 4) == [2, 3, 3, 2]
    assert chunk_with_ends(12, 4) == [3] * 4
    assert np.sum(chunk_with_ends(13, 4)) == 13
