"""Does the event simulation of pipeline schedules say what real pipelines on gloo ranks take? Prints JSON.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/pipeline_schedules.py [--steps 5]

Real steps of the tiny model, unequal stages among them; each stage's forwards and backwards are timed on one clock. The
simulation replays the step with what each of them took, so that ranks that share cores (and other work beside) lengthen
both alike: what is left of `measured_over_simulated` is messages and waking up. `closed_over_simulated` is what the
estimate's closed form makes of the stages' mean times against the simulation of the same means.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROBES = Path(__file__).parent.parent / "tests" / "probes"
sys.path.insert(0, str(PROBES))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROBES), os.environ.get("PYTHONPATH", "")]))

from local_ranks import cpu_cluster  # noqa: E402

from autotune.cost.pipeline import (  # noqa: E402
    idle_1f1b,
    simulated_s,
)
from autotune.specs import Plan, Schedule  # noqa: E402
from probes.launch import RankPool  # noqa: E402

Key = tuple[bool, int, int]
CASES = [
    (Schedule.GPIPE, 2, 1, 4, 8), (Schedule.ONE_F_ONE_B, 2, 1, 4, 8), (Schedule.ONE_F_ONE_B, 2, 1, 5, 8),
    (Schedule.INTERLEAVED, 2, 2, 4, 8), (Schedule.ONE_F_ONE_B, 4, 1, 4, 8), (Schedule.ONE_F_ONE_B, 4, 1, 6, 8),
]  # fmt: skip
"""(schedule, stages, chunks a rank, layers, micro-batches); 5 layers on 2 stages and 6 on 4 are unequal."""

WIDE = {"hidden": 256, "ffn": 1024}
"""So that a forward takes tens of milliseconds, and waking up little of it."""


def steps_of(pool: RankPool, folder: Path, case: tuple[Schedule, int, int, int, int], steps: int) -> list[list[list]]:  # type: ignore[type-arg]
    """By step and stage: (forward?, micro-batch, chunk, start, end). The first step is left out."""
    schedule, pp, vpp, layers, micro_batches = case
    plan = Plan(pp=pp, vpp=vpp, schedule=schedule, micro_batch=4)
    request = {
        "kind": "check", "plan": plan.to_data(), "steps": steps + 1, "model": {"layers": layers, **WIDE},
        "workload": {"global_batch": 4 * micro_batches, "seq_len": 128},
    }  # fmt: skip
    deadline = time.monotonic() + 300
    if not pool.lives and (failure := pool.form(deadline=deadline, log_dir=folder).failure) is not None:
        raise SystemExit(failure.message)
    gathered = pool.run("schedule_checks", request, deadline=deadline, log_dir=folder)
    if gathered.failure is not None:
        raise SystemExit(gathered.failure.message)
    reports = [gathered.reports[rank]["steps"] for rank in range(pp)]
    return [[report[number] for report in reports] for number in range(1, steps + 1)]


def replayed_s(stages: list[list], pp: int, vpp: int) -> float:  # type: ignore[type-arg]
    """The step with what each forward and backward really took, in the order in which it was really done."""
    done: dict[Key, float] = {}
    at, clock, parts = [0] * pp, [0.0] * pp, pp * vpp
    while any(at[stage] < len(stages[stage]) for stage in range(pp)):
        for stage in range(pp):
            while at[stage] < len(stages[stage]):
                forward, number, chunk, start, end = stages[stage][at[stage]]
                part = chunk * pp + stage
                needs = (forward, number, part - 1 if forward else part + 1)
                if not forward and part == parts - 1:
                    needs = (True, number, part)
                free = forward and part == 0
                if not free and needs not in done:
                    break
                clock[stage] = max(clock[stage], 0.0 if free else done[needs]) + end - start
                done[forward, number, part] = clock[stage]
                at[stage] += 1
    return max(clock)


def measured_s(stages: list[list]) -> float:  # type: ignore[type-arg]
    """From the first forward to the last backward."""
    return float(
        max(item[4] for stage in stages for item in stage) - min(item[3] for stage in stages for item in stage)
    )


def means(stages: list[list], vpp: int, *, forward: bool) -> list[list[float]]:  # type: ignore[type-arg]
    """Mean seconds of a forward (backward) by stage and chunk."""
    return [
        [statistics.fmean(e - s for f, _, c, s, e in stage if f == forward and c == chunk) for chunk in range(vpp)]
        for stage in stages
    ]


def closed_s(
    forward: list[list[float]], backward: list[list[float]], case: tuple[Schedule, int, int, int, int]
) -> float:
    """The estimate's closed form for these stages."""
    schedule, pp, vpp, _, m = case
    heads = np.array([sum(row) for row in forward])
    own = heads + np.array([sum(row) for row in backward])
    if schedule is Schedule.ONE_F_ONE_B:
        behind = np.arange(pp)[::-1].astype(np.float64)
        idle = idle_1f1b(np.full(pp, float(m)), behind, own, heads, np.cumsum(own) - own, np.full(pp, own.sum()))
        return float((m * own + idle).max())
    return float(m * own.max() + (own.sum() - own.max()) / vpp)


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for pp in (2, 4):
            pool = RankPool(cpu_cluster(pp), pp)
            for case in (item for item in CASES if item[1] == pp):
                found = steps_of(pool, Path(folder), case, options.steps)
                vpp = case[2]
                ratios = [measured_s(step) / replayed_s(step, pp, vpp) for step in found]
                busy = [sum(e - s for stage in step for _, _, _, s, e in stage) / pp for step in found]
                fast = min(found, key=measured_s)
                forward, backward = (means(fast, vpp, forward=kind) for kind in (True, False))
                simulated = simulated_s(case[0], forward, backward, case[4])
                rows.append({
                    "schedule": case[0].value, "stages": pp, "chunks": vpp, "layers": case[3], "micro_batches": case[4],
                    "measured_s": statistics.median(measured_s(step) for step in found),
                    "measured_over_simulated": statistics.median(ratios),
                    "idle_measured": statistics.median(1 - b / measured_s(s) for b, s in zip(busy, found, strict=True)),
                    "idle_simulated": statistics.median(
                        1 - b / replayed_s(s, pp, vpp) for b, s in zip(busy, found, strict=True)
                    ),
                    "closed_over_simulated": closed_s(forward, backward, case) / simulated,
                })  # fmt: skip
            pool.close()
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
