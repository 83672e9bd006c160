"""Megatron-LM's own parser takes what is exported, and its config then says what the plan says.

MEGATRON_LM names checkouts, one or more between colons, each in a folder whose name ends in its version (m0.19).
FRAMEWORKS_PYTHON is a Python with torch, numpy, triton, six, regex and transformers; else it is that of FRAMEWORKS.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.specs import FrameworkName
from tests.frameworks.varied import Run, varied

CHECKOUTS = [Path(each) for each in os.environ.get("MEGATRON_LM", "").split(":") if each]
PYTHON = os.environ.get("FRAMEWORKS_PYTHON") or f"{os.environ.get('FRAMEWORKS', '')}/programs/bin/python"
PLANS = int(os.environ.get("PLANS", "220"))
JUDGE = Path(__file__).parent / "judges" / "judge_megatron.py"

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_every_plan_is_accepted_and_means_what_it_says(checkout: Path) -> None:
    found = re.search(r"\d+\.\d+$", checkout.name)
    assert found is not None, "the folder's name ends in the version"
    target = f"megatron@{found[0]}"
    runs = list(varied(target, FrameworkName.MEGATRON, PLANS))
    asked = "".join(json.dumps(_question(run, target)) + "\n" for run in runs)
    done = subprocess.run([PYTHON, JUDGE, checkout], input=asked, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [answer["error"] for answer in answers if "error" in answer] == []
    assert len(answers) == PLANS
    for run, answer in zip(runs, answers, strict=True):
        assert _said(answer["args"], run) == _meant(run), run.plan.key


def _question(run: Run, target: str) -> dict[str, Any]:
    launch = run.exported(target)
    words = launch.argv[launch.argv.index("pretrain_gpt.py") + 1 :]
    return {"words": list(words), "environment": dict(launch.environment), "world": run.cluster.devices}


def _meant(run: Run) -> dict[str, object]:
    """The plan and what goes with it, in Megatron's names."""
    plan, model = run.plan, run.model
    return {
        "tensor_model_parallel_size": plan.tp, "pipeline_model_parallel_size": plan.pp, "data_parallel_size": plan.dp,
        "context_parallel_size": plan.cp, "micro_batch_size": plan.micro_batch,
        "virtual_pipeline_model_parallel_size": plan.vpp if plan.vpp > 1 else None,
        "expert_model_parallel_size": plan.ep if model.experts else 1,
        "expert_tensor_parallel_size": plan.expert_tp if model.experts else plan.tp,
        "global_batch_size": run.workload.global_batch, "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
        "recompute_granularity": None if plan.recompute.value == "none" else plan.recompute.value,
        "use_distributed_optimizer": plan.zero_stage > 0, "use_megatron_fsdp": plan.zero_stage > 1,
        "overlap_grad_reduce": True, "overlap_param_gather": plan.zero_stage > 0,
        "grad_reduce_in_bf16": run.workload.gradients.value == "bf16", "moe_grouped_gemm": model.experts > 0,
        "num_layers": model.layers, "ffn_hidden_size": model.ffn, "num_experts": model.experts or None,
    }  # fmt: skip


def _said(args: dict[str, Any], run: Run) -> dict[str, object]:
    return {name: args[name] for name in _meant(run)}
