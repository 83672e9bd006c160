"""Varied legal plans, and what their exports mean to the frameworks themselves."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.parameters import total_parameters
from autotune.cost.table import PlanTable
from autotune.errors import IllegalPlanError
from autotune.frameworks import launch_arguments
from autotune.frameworks.arguments import ExportRequest, LaunchArguments
from autotune.frameworks.deepspeed import gradients
from autotune.search.space import legal_plans
from autotune.specs import Plan, Recompute, Space, Workload

EVERYTHING = Space(recompute=tuple(Recompute))
HERE = Path(__file__).parent / "frameworks"


@dataclass(frozen=True)
class Exported:
    """A plan that a framework was given."""

    run: ExportRequest
    launch: LaunchArguments


def varied(table: PlanTable, count: int, seed: int) -> Iterator[Plan]:
    """Up to `count` plans of a table, of as many kinds as there are."""
    kinds = defaultdict(list)
    rows = list(range(len(table)))
    random.Random(seed).shuffle(rows)
    for row in rows[: 50 * count]:
        plan = table.plan(row)
        kind = (
            plan.tp > 1, plan.pp > 1, plan.dp > 1, plan.cp > 1, plan.ep > 1, plan.vpp > 1, plan.zero_stage,
            plan.recompute, plan.schedule, plan.sequence_parallel,
        )  # fmt: skip
        kinds[kind].append(plan)
    given = 0
    while kinds and given < count:
        for kind in list(kinds):
            yield kinds[kind].pop()
            given += 1
            if not kinds[kind]:
                del kinds[kind]
            if given == count:
                return


def exports(
    target: str, cases: Sequence[tuple[str, str, Workload]], count: int, space: Space = EVERYTHING, seed: int = 0
) -> tuple[list[Exported], dict[str, int]]:
    """Exports of `count` plans of each case that the target takes, and how often it gave which reason for refusing."""
    found, refused = [], defaultdict[str, int](int)
    for preset, shorthand, workload in cases:
        spec, cluster = model(preset), cluster_from_shorthand(shorthand)
        table = legal_plans(spec, cluster, workload, space)
        given = 0
        for plan in varied(table, 40 * count, seed):
            try:
                launch = launch_arguments(target, spec, cluster, workload, plan)
            except IllegalPlanError as error:
                refused[str(error).rpartition(": ")[2]] += 1
                continue
            found.append(
                Exported(
                    ExportRequest(model=spec, cluster=cluster, workload=workload, plan=plan, version=launch.version),
                    launch,
                )
            )
            given += 1
            if given == count:
                break
    return found, dict(refused)


def read(python: str, reader: str, found: list[Exported]) -> list[dict[str, Any]]:
    """What the framework makes of each: `means` or `refused`."""
    lines = [
        json.dumps({"argv": each.launch.argv, "files": each.launch.files(), "world": each.run.cluster.devices})
        for each in found
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # DeepSpeed compiles there, and waits for ever for a lock that a killed run left.
        "TORCH_EXTENSIONS_DIR": str(Path(python).parents[1] / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [python, str(HERE / reader)], input="\n".join(lines), capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(found), done.stderr[-3000:]
    return answers


def stages(layers: int, chunks: int) -> list[int]:
    """Layers of each stage, longer ones first."""
    return [layers // chunks + (chunk < layers % chunks) for chunk in range(chunks)]


def meant(run: ExportRequest, target: str) -> dict[str, Any]:
    """What the plan says, in the words of the readers."""
    plan, workload = run.plan, run.workload
    m = run.micro_batches
    added = gradients(run) if target == "deepspeed" else workload.gradients
    # The Trainer's FSDP reduces in the format of computation, as the note of its export says.
    reduced = workload.dtype if target == "transformers" and plan.zero_stage > 1 else workload.gradients
    recompute = {Recompute.OP: "selective op"}.get(plan.recompute, plan.recompute.value)
    return {
        "parameters": total_parameters(run.model), "layers": stages(run.model.layers, plan.pp * plan.vpp),
        "seq_len": workload.seq_len, "global_batch": workload.global_batch, "micro_batch": plan.micro_batch,
        "micro_batches": m, "rounds": 1 if plan.pp > 1 else m, "schedule": plan.schedule.value, "tp": plan.tp,
        "pp": plan.pp, "cp": plan.cp, "dp": plan.dp, "ep": plan.ep, "etp": plan.expert_tp,
        "sequence_parallel": plan.sequence_parallel, "zero": plan.zero_stage,
        "shards": plan.dp * plan.cp if plan.zero_stage else 1, "compute": workload.dtype.value,
        "reduce": (workload.reduce_dtype or reduced).value, "grads": added.value,
        "recompute": recompute, "optimizer": workload.optimizer.value,
    }  # fmt: skip


def mistaken(found: list[Exported], answers: list[dict[str, Any]]) -> list[str]:
    """Every launch that the framework refuses or takes for something else."""
    wrong = []
    for each, answer in zip(found, answers, strict=True):
        where, wanted = f"{each.run.model.name} {each.run.plan.key}", meant(each.run, each.launch.target)
        if "refused" in answer:
            wrong.append(f"{where}: {answer['refused']}")
            continue
        said = answer["means"]
        differs = {key: (value, wanted[key]) for key, value in said.items() if value != wanted[key]}
        if differs:
            wrong.append(f"{where}: " + ", ".join(f"{key} is {a}, not {b}" for key, (a, b) in differs.items()))
    return wrong
