"""Over two nodes on a slow link, is the fleet's winner the best plan? Measures every legal plan there and compares.

Run as root: .venv/bin/python -m benchmarks.box_exhaustive [--rate-mbit 200] [--max-trials 24]     prints JSON

In a cluster in a box (2 nodes x 4 ranks):

1. A tuning through the API, as anybody would ask for it.
2. Every legal plan of the same space once, as a tuning whose sampler is `grid`; one that is clearly slower than the
   best so far is given up early.
3. The winner and the four fastest of step 2 again, three rounds interleaved, each as a tuning of that plan alone.

The figure is the winner's mean over the best mean of step 3.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from autotune.specs import Plan
from deploy.box import Box
from deploy.box.demonstration import MODEL

SPACE = {
    "tp": [1, 2, 4, 8],
    "micro_batch": [2, 4],
    "zero_stage": [0],
    "recompute": ["none"],
    "sequence_parallel": [False],
}
ROUNDS, FINALISTS = 3, 4


class Bench:
    """Tunings in a box, numbered so that none is shared with another."""

    def __init__(self, box: Box) -> None:
        self._box, self._seed = box, 0

    def tune(self, space: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A tuning, when it has ended well."""
        self._seed += 1
        request = {"model": MODEL, "cluster": "box", "space": space, "seed": self._seed, **more}
        tuning = self._box.ask("/tunings", request)["tuning"]
        while True:
            data: dict[str, Any] = self._box.ask(f"/tunings/{tuning}")
            if data["state"] in {"done", "failed", "cancelled"}:
                break
            time.sleep(0.5)
        print(f"{data['state']}: {len(data['trials'])} trials, {data['stop_reason']}", file=sys.stderr)
        return data

    def again(self, plan: Plan) -> float:
        """One more measurement of a plan: tokens/s/GPU."""
        fields = ("tp", "pp", "vpp", "micro_batch", "zero_stage", "recompute", "sequence_parallel", "schedule")
        space = {field: [plan.to_data()[field]] for field in fields}
        return speeds(self.tune(space, budget={"max_trials": 1}))[plan]


def speeds(data: dict[str, Any]) -> dict[Plan, float]:
    """Tokens/s/GPU of each plan that was measured to the end."""
    measured = [trial for trial in data["trials"] if trial["state"] == "complete"]
    return {Plan.from_data(trial["plan"]): trial["tokens_per_s_per_gpu"] for trial in measured}


def main() -> None:
    """Runs the three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--max-trials", type=int, default=24)
    options = parser.parse_args()
    with Box(nodes=2, ranks=4, rate_mbit=options.rate_mbit) as box:
        bench = Bench(box)
        started = time.monotonic()
        tuned = bench.tune(SPACE, budget={"max_trials": options.max_trials})
        tune_s = time.monotonic() - started
        winner = Plan.from_data(tuned["best"]["plan"])
        started = time.monotonic()
        swept = bench.tune(SPACE, sampler="grid", budget={"max_trials": 1000, "min_gain": 0.0})
        sweep_s = time.monotonic() - started
        found = speeds(swept)
        finalists = list(dict.fromkeys([winner, *sorted(found, key=lambda plan: -found[plan])[:FINALISTS]]))
        rounds = [{plan: bench.again(plan) for plan in finalists} for _ in range(ROUNDS)]
    means = {plan: float(np.mean([values[plan] for values in rounds])) for plan in finalists}
    best = max(means, key=lambda plan: means[plan])
    result = {
        "rate_mbit": options.rate_mbit,
        "tune_s": tune_s,
        "tune_trials": len(tuned["trials"]),
        "exhaustive_trials": len(swept["trials"]),
        "exhaustive_s": sweep_s,
        "winner": winner.key,
        "best": best.key,
        "winner_over_best": means[winner] / means[best],
        "finalists": {plan.key: value for plan, value in means.items()},
        "swept": {plan.key: value for plan, value in sorted(found.items(), key=lambda item: -item[1])},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
