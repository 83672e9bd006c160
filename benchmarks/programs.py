"""Every plan that a program of the user's own can run, measured one by one, and a tuning of it: how good is its winner?

    python -m benchmarks.programs examples/plain/plain.yaml --cluster FILE [--repeats 3] [--max-trials 12] [--json]

The plans are measured in turns, so that what else the machine does meets all of them alike. The winner is judged by its
own figure among them, not by what its tuning measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median

from autotune.cli.inputs import Inputs, read_program, read_program_inputs
from autotune.search.ranking import best_of
from autotune.search.space import legal_plans, runtime_of
from autotune.specs import Budget, ClusterSpec, Plan, StepReading, StepRequest
from autotune.tuning.planner import PROGRAM_STEPS
from autotune.tuning.request import submit, tuning_of
from autotune.wiring import open_local, open_prober, open_store

DEADLINE_S = 900.0


def main() -> int:
    """Prints each plan's speed and the winner's place among them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-trials", type=int, default=12)
    parser.add_argument("--plans", type=int, default=1000, help="refuse more than this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    program = read_program(options.command)
    inputs = read_program_inputs(program.offer, model=options.model, cluster=options.cluster, given={}, db=None)
    model, cluster, workload = inputs.model, inputs.cluster, inputs.workload
    table = legal_plans(model, cluster, workload, space=program.offer.space, runtime=runtime_of(workload))
    plans = [table.plan(row) for row in range(len(table))]
    if len(plans) > options.plans:
        sys.exit(f"{len(plans)} plans")
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOTUNE_LOG_DIR"] = home
        store = open_store(f"sqlite:///{home}/a.db")
        tuning = submit(
            store,
            tuning_of(
                model, cluster, workload, space=program.offer.space, budget=Budget(max_trials=options.max_trials)
            ),
        )
        with closing(open_local(store, cluster, file=program.file)) as fleet:
            ended = fleet.run(tuning.id, lambda event: print(event.kind.value, file=sys.stderr))
        trials = store.trials(ended.id)
        winner = best_of(trials, cluster)
        if winner is None:
            sys.exit(f"the tuning measured nothing: {ended.message}")
        speeds = exhaustive(program.file, cluster, [request_of(inputs, plan) for plan in plans], options.repeats)
    found = {plan: median(each) for plan, each in zip(plans, speeds, strict=True) if each}
    best = max(found, key=lambda plan: found[plan])
    mine = winner.ranked.plan
    answer = {
        "command": workload.command,
        "plans": len(plans),
        "failed": len(plans) - len(found),
        "trials": len(trials),
        "gpu_s": ended.gpu_s_spent,
        "winner": mine.key,
        "best": best.key,
        "share": found.get(mine, 0.0) / found[best],
        "speeds": {plan.key: each for plan, each in sorted(found.items(), key=lambda item: -item[1])},
    }
    if options.json:
        print(json.dumps(answer, indent=1))
    else:
        for key, speed in answer["speeds"].items():
            print(f"{speed:10,.0f} tokens/s/GPU  {key}")
        print(f"winner {mine.key} after {len(trials)} trials: {answer['share']:.1%} of the best of {len(plans)}")
    return 0


def request_of(inputs: Inputs, plan: Plan) -> StepRequest:
    """The trial of a plan, without a rival."""
    request = StepRequest(model=inputs.model, workload=inputs.workload, plan=plan)
    return request.model_copy(update=PROGRAM_STEPS)


def exhaustive(file: Path | None, cluster: ClusterSpec, requests: list[StepRequest], repeats: int) -> list[list[float]]:
    """Speeds of each, in turns; none of one that failed."""
    speeds: list[list[float]] = [[] for _ in requests]
    with closing(open_prober(cluster, file)) as prober:
        for turn in range(repeats):
            for number, request in enumerate(requests):
                outcome = prober.run(request, deadline_s=DEADLINE_S)
                for reading in outcome.readings:
                    if isinstance(reading, StepReading):
                        speeds[number].append(reading.tokens_per_s_per_gpu)
                said = outcome.failure.message if outcome.failure is not None else f"{speeds[number][-1]:,.0f}"
                print(f"turn {turn} {request.plan.key}: {said} ({outcome.wall_s:.0f} s)", file=sys.stderr)
    return speeds


if __name__ == "__main__":
    sys.exit(main())
