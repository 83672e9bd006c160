"""Every plan that a program of the user's own can run, measured one by one, and a tuning of it: how good is its winner?

    python -m benchmarks.programs examples/plain/plain.yaml --cluster FILE [--space '{"pp": [1]}'] [--json]

Every plan is measured once; the fastest few and the winner are measured again, in turns, so that what else the machine
does meets all of them alike. The winner is judged by the median of those repeats, not by what its tuning measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import closing
from statistics import median

from autotune.cli.inputs import Inputs, read_program, read_program_inputs
from autotune.ports.store import Prober
from autotune.search.ranking import best_of
from autotune.search.space import legal_plans, runtime_of
from autotune.specs import Budget, Plan, Space, StepReading, StepRequest
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
    parser.add_argument("--space", default="{}", help="JSON: only these values of the plans that the program can run")
    parser.add_argument("--finalists", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of each finalist")
    parser.add_argument("--max-trials", type=int, default=12)
    parser.add_argument("--plans", type=int, default=1000, help="refuse more than this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    program = read_program(options.command)
    inputs = read_program_inputs(program.offer, model=options.model, cluster=options.cluster, given={}, db=None)
    model, cluster, workload = inputs.model, inputs.cluster, inputs.workload
    space = program.offer.narrowed(Space.from_data(json.loads(options.space), "space"))
    table = legal_plans(model, cluster, workload, space=space, runtime=runtime_of(workload))
    plans = [table.plan(row) for row in range(len(table))]
    if len(plans) > options.plans:
        sys.exit(f"{len(plans)} plans")
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOTUNE_LOG_DIR"] = home
        store = open_store(f"sqlite:///{home}/a.db")
        limits = Budget(max_trials=options.max_trials)
        tuning = submit(store, tuning_of(model, cluster, workload, space=space, budget=limits))
        with closing(open_local(store, cluster, file=program.file)) as fleet:
            ended = fleet.run(tuning.id, lambda event: print(event.kind.value, file=sys.stderr))
        trials = store.trials(ended.id)
        winner = best_of(trials, cluster)
        if winner is None:
            sys.exit(f"the tuning measured nothing: {ended.message}")
        mine = winner.ranked.plan
        with closing(open_prober(cluster, program.file)) as prober:
            once = {plan: speed for plan in plans if (speed := speed_of(prober, inputs, plan)) is not None}
            fastest = sorted(once, key=lambda plan: -once[plan])[: options.finalists]
            finalists: dict[Plan, list[float]] = {plan: [] for plan in dict.fromkeys([*fastest, mine])}
            for _ in range(options.repeats):
                for plan, speeds in finalists.items():
                    speed = speed_of(prober, inputs, plan)
                    speeds.extend([] if speed is None else [speed])
    found = {plan: median(speeds) for plan, speeds in finalists.items() if speeds}
    best = max(found, key=lambda plan: found[plan])
    answer = {
        "command": workload.command,
        "plans": len(plans),
        "failed": len(plans) - len(once),
        "trials": len(trials),
        "gpu_s": ended.gpu_s_spent,
        "winner": mine.key,
        "best": best.key,
        "share": found.get(mine, 0.0) / found[best],
        "once": {plan.key: speed for plan, speed in sorted(once.items(), key=lambda item: -item[1])},
        "finalists": {plan.key: speeds for plan, speeds in finalists.items()},
    }
    if options.json:
        print(json.dumps(answer, indent=1))
    else:
        for plan, speed in found.items():
            print(f"{speed:10,.0f} tokens/s/GPU  {plan.key}")
        print(f"winner {mine.key} after {len(trials)} trials: {answer['share']:.1%} of the best of {len(plans)}")
    return 0


def speed_of(prober: Prober, inputs: Inputs, plan: Plan) -> float | None:
    """Tokens/s/GPU of a trial of the plan, which has no rival; None if it failed."""
    request = StepRequest(model=inputs.model, workload=inputs.workload, plan=plan)
    outcome = prober.run(request.model_copy(update=PROGRAM_STEPS), deadline_s=DEADLINE_S)
    speed = next((each.tokens_per_s_per_gpu for each in outcome.readings if isinstance(each, StepReading)), None)
    said = f"{speed:,.0f} tokens/s/GPU" if speed is not None else outcome.failure and outcome.failure.message
    load = os.getloadavg()[0]
    print(f"{plan.key}: {said} ({outcome.wall_s:.0f} s, load {load:.1f})", file=sys.stderr, flush=True)
    return speed


if __name__ == "__main__":
    sys.exit(main())
