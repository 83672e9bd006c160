"""Is the winner of a default tuning the best plan? Measures every legal plan of the same space and compares.

Run: .venv/bin/python benchmarks/exhaustive.py [--ranks 4] [--max-trials 24] [--out FILE | --sweep FILE]     prints JSON

1. `autotune tune` with its defaults, in a fresh database.
2. Every legal plan once, in random order, by the same step probe; one that is 1.5 times slower than the best so far
   is given up early.
3. The winner and the five fastest of step 2 again, three rounds interleaved, so that all meet the same noise.

The figure is the winner's mean over the best mean of step 3.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from autotune.catalog import smallest
from autotune.cli.inputs import read_workload
from autotune.search.space import Runtime, legal_plans
from autotune.specs import Budget, ClusterSpec, ModelSpec, Plan, StepReading, StepRequest, Workload
from autotune.tuning.report import tuning_data
from autotune.tuning.request import submit, tuning_of
from autotune.wiring import open_local
from probes.discover import discover
from probes.launch import LocalProber
from storage import open_store


class Bench:
    """One model, cluster and workload, and the measuring of any plan."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, workload: Workload, logs: Path) -> None:
        self.model, self.cluster, self.workload, self.logs = model, cluster, workload, logs

    def measure(self, prober: LocalProber, plan: Plan, give_up_step_s: float | None) -> StepReading | None:
        """One step probe; None on failure."""
        request = StepRequest(
            model=self.model, workload=self.workload, plan=plan, give_up_step_s=give_up_step_s, trace=False
        )
        outcome = prober.run(request, deadline_s=300.0)
        if outcome.failure is not None:
            print(f"{plan.key}: {outcome.failure.kind}: {outcome.failure.message}", file=sys.stderr)
        return next((item for item in outcome.readings if isinstance(item, StepReading)), None)

    def sweep(self, prober: LocalProber, plans: list[Plan]) -> dict[Plan, float]:
        """Tokens/s/GPU of every plan that was not given up."""
        found: dict[Plan, float] = {}
        give_up_s: float | None = None
        for i, plan in enumerate(plans):
            reading = self.measure(prober, plan, give_up_s)
            if reading is not None and not reading.pruned:
                found[plan] = reading.tokens_per_s_per_gpu
                give_up_s = 1.5 * min(reading.step_time_s, (give_up_s or np.inf) / 1.5)
            if i % 20 == 0:
                print(f"{i}/{len(plans)} plans, {len(found)} measured", file=sys.stderr)
        return found

    def rounds(self, prober: LocalProber, plans: list[Plan], count: int) -> dict[Plan, float]:
        """The mean of `count` interleaved measurements of each plan."""
        values: dict[Plan, list[float]] = {plan: [] for plan in plans}
        for _ in range(count):
            for plan in plans:
                reading = self.measure(prober, plan, None)
                if reading is not None:
                    values[plan].append(reading.tokens_per_s_per_gpu)
        return {plan: float(np.mean(found)) for plan, found in values.items() if found}


def main() -> None:
    """Runs the three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--max-trials", type=int, default=24)
    parser.add_argument("--out", type=Path, help="also write every measured plan's tokens/s/GPU to this JSON file")
    parser.add_argument("--sweep", type=Path, help="take step 2 from a file that --out wrote on this machine")
    options = parser.parse_args()
    model, cluster = smallest(), discover(options.ranks)
    workload = read_workload(model, cluster, seq_len=None, global_batch=None, dtype=None)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, cluster, workload, Path(folder))
        store = open_store(f"sqlite:///{folder}/bench.db")
        started = time.monotonic()
        tuning = submit(store, tuning_of(model, cluster, workload, budget=Budget(max_trials=options.max_trials)))
        with closing(open_local(store, cluster)) as fleet:
            ended = fleet.run(tuning.id)
        tune_s = time.monotonic() - started
        data = tuning_data(ended, store.trials(tuning.id))
        winner = Plan.from_data(data["best"]["plan"])
        table = legal_plans(model, cluster, workload, runtime=Runtime.TORCH)
        plans = [table.plan(i) for i in range(len(table))]
        random.Random(0).shuffle(plans)
        with LocalProber(cluster, log_dir=Path(folder)) as prober:
            started = time.monotonic()
            if options.sweep is None:
                found = bench.sweep(prober, plans)
            else:
                earlier = json.loads(options.sweep.read_text())
                found = {plan: earlier[plan.key] for plan in plans if plan.key in earlier}
            sweep_s = time.monotonic() - started
            fastest = sorted(found, key=lambda plan: -found[plan])[:5]
            finalists = list(dict.fromkeys([winner, *fastest]))
            means = bench.rounds(prober, finalists, 3)
    best = max(means, key=lambda plan: means[plan])
    result = {
        "legal_plans": len(plans),
        "tune_s": tune_s,
        "tune_trials": len(data["trials"]),
        "tune_gpu_s": data["gpu_s_spent"],
        "exhaustive_s": sweep_s if options.sweep is None else None,
        "winner": winner.key,
        "best": best.key,
        "winner_over_best": means[winner] / means[best],
        "finalists": {plan.key: value for plan, value in means.items()},
    }
    if options.out is not None:
        options.out.write_text(json.dumps({plan.key: value for plan, value in found.items()}, indent=2))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
