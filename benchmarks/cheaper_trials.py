"""Do cheaper trials say what the whole step takes, and what do they save? Real step probes on this machine.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/cheaper_trials.py [--ranks 4] [--plans 12] [--rounds 2]  prints JSON

A profile of this machine is made as a tuning makes it. Then plans drawn from the legal space are run whole, with fewer
micro-batches and with fewer layers (search.fidelity), in turn, round after round. `error` is |carried over / whole - 1|
of the step times of one round; `again` is the same of two whole runs, which no extrapolation can beat. `first_kept` is
whether the plan that is fastest whole is also the fastest of those carried over, and `regret` what choosing by them
would lose.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from autotune.catalog import smallest
from autotune.cli.inputs import read_workload
from autotune.cost.calibrate import fit_profile
from autotune.cost.framework import TORCH
from autotune.search.fidelity import Fidelity, Setting, fewer_layers, fewer_micro_batches
from autotune.search.physics import PARAMETERS
from autotune.search.space import Runtime, legal_plans
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    LayerReading,
    ModelSpec,
    Plan,
    Profile,
    StepReading,
    StepRequest,
    Workload,
)
from autotune.tuning.profiling import needed_probes
from probes.discover import discover
from probes.launch import LocalProber

KINDS: dict[str, Callable[[ModelSpec, Workload, Plan], Fidelity | None]] = {
    "micro_batches": fewer_micro_batches,
    "layers": fewer_layers,
}


def profiled(prober: LocalProber, model: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Profile:
    """The profile that a tuning would make."""
    collectives: list[CollectiveReading] = []
    layers: list[tuple[ModelSpec, Workload, LayerReading]] = []
    for request in needed_probes(
        model, cluster, workload, legal_plans(model, cluster, workload, runtime=Runtime.TORCH)
    ):
        for reading in prober.run(request, deadline_s=120.0).readings:
            if isinstance(reading, CollectiveReading):
                collectives.append(reading)
            elif isinstance(reading, LayerReading):
                layers.append((model, workload, reading))
    return fit_profile(cluster, "benchmark", collectives, layers, [])


def measured(prober: LocalProber, setting: Setting, plan: Plan, fidelity: Fidelity) -> tuple[float, float, float]:
    """(seconds a step, GPU-seconds of the trial, of which before the first step)."""
    request = StepRequest(
        model=fidelity.model(setting.model), workload=fidelity.workload(setting.workload), plan=plan, trace=False
    )
    outcome = prober.run(request, deadline_s=300.0)
    reading = next((item for item in outcome.readings if isinstance(item, StepReading)), None)
    if reading is None:
        raise SystemExit(f"{plan.key}: {outcome.failure}")
    return reading.step_time_s, outcome.gpu_s, outcome.setup_s * setting.cluster.devices


def rounds(prober: LocalProber, setting: Setting, plans: list[Plan], count: int) -> list[dict[str, object]]:
    """One row a plan and round: the whole step and, of each kind, what was measured and what it is carried over to."""
    blank = dict.fromkeys(PARAMETERS, (0.0, 0.0))  # what an estimate says that no trial has taught
    whole = Fidelity(layers=setting.model.layers, global_batch=setting.workload.global_batch)
    rows: list[dict[str, object]] = []
    for turn in range(count):
        for plan in plans:
            step_s, gpu_s, setup_gpu_s = measured(prober, setting, plan, whole)
            row: dict[str, object] = {
                "plan": plan.key, "round": turn, "step_s": step_s, "gpu_s": gpu_s, "setup_gpu_s": setup_gpu_s,
            }  # fmt: skip
            for kind, reduce in KINDS.items():
                fidelity = reduce(setting.model, setting.workload, plan)
                assert fidelity is not None
                part_s, part_gpu_s, _ = measured(prober, setting, plan, fidelity)
                ratio = setting.ratio(plan, fidelity, blank)
                row[kind] = {"step_s": part_s, "gpu_s": part_gpu_s, "carried_s": part_s * math.exp(ratio.log_mean)}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def summary(rows: list[dict[str, object]], plans: list[Plan]) -> dict[str, object]:
    """Errors and savings over all rows."""
    whole = {plan.key: [row["step_s"] for row in rows if row["plan"] == plan.key] for plan in plans}
    mean = {key: statistics.fmean(values) for key, values in whole.items()}  # type: ignore[arg-type]
    found: dict[str, object] = {
        "again": statistics.fmean(abs(values[1] / values[0] - 1.0) for values in whole.values()),  # type: ignore[operator]
        "gpu_s_whole": statistics.fmean(row["gpu_s"] for row in rows),  # type: ignore[misc]
        "setup_gpu_s": statistics.fmean(row["setup_gpu_s"] for row in rows),  # type: ignore[misc]
    }
    for kind in KINDS:
        errors = [row[kind]["carried_s"] / row["step_s"] - 1.0 for row in rows]  # type: ignore[index, operator]
        carried = {
            key: statistics.fmean(row[kind]["carried_s"] for row in rows if row["plan"] == key)  # type: ignore[index]
            for key in whole
        }
        chosen, best = min(carried, key=lambda key: carried[key]), min(mean, key=lambda key: mean[key])
        found[kind] = {
            "error_mean": statistics.fmean(abs(error) for error in errors),
            "error_worst": max(errors, key=abs),
            "bias": statistics.fmean(errors),
            "gpu_s": statistics.fmean(row[kind]["gpu_s"] for row in rows),  # type: ignore[index]
            "first_kept": chosen == best,
            "regret": mean[chosen] / mean[best] - 1.0,
        }
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plans", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=None)
    options = parser.parse_args()
    model, cluster = smallest(), discover(options.ranks)
    workload = read_workload(model, cluster, seq_len=None, global_batch=options.global_batch, dtype=None)
    table = legal_plans(model, cluster, workload, runtime=Runtime.TORCH)
    legal = [table.plan(row) for row in range(len(table))]
    able = [plan for plan in legal if all(reduce(model, workload, plan) for reduce in KINDS.values())]
    plans = random.Random(0).sample(able, min(options.plans, len(able)))
    with tempfile.TemporaryDirectory() as folder, LocalProber(cluster, log_dir=Path(folder)) as prober:
        profile = profiled(prober, model, cluster, workload)
        setting = Setting(model=model, cluster=cluster, workload=workload, profile=profile, framework=TORCH)
        rows = rounds(prober, setting, plans, options.rounds)
    counts = {"legal": len(legal), "reducible": len(able), "global_batch": workload.global_batch}
    print(json.dumps({**counts, **summary(rows, plans)}, indent=2))


if __name__ == "__main__":
    main()
