"""Does the search still find the best plan where the estimate is wrong, readings scatter and trials crash?

A world is a set of plans with their true speeds and peaks. Two kinds: a group of published runs (its measured speeds
are the truth, so that every plan has its real deviation from the estimate), and the legal plans of a model and cluster,
whose truth is the estimate of the framework with a deviation of 2 % of each plan's own. A scenario bends the truth of a
world, or what a trial says of it; the search is not told. A run is a whole tuning, with the repeats of its finalists,
by the functions that `autotune tune` takes its steps from. Seeds are fixed: the same code prints the same table.

    OMP_NUM_THREADS=1 python benchmarks/robustness.py ../shared/data/runs.csv [--seeds 3] [--json FILE]

`off` is the share of runs that end more than 5 % below the best plan; `stop` the median of trials until the search
stops, repeats of finalists not counted; `after` the mean of those that came after the winner; `over` the most that a
budget was exceeded by, in steps of the dearest trial.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from autotune.backtest.groups import Group, group_runs
from autotune.backtest.runs import RunStatus, read_runs
from autotune.catalog import cluster_from_shorthand, model
from autotune.catalog.published import published_cluster
from autotune.cost.calibrate import fit_profile
from autotune.cost.estimate import EstimateTable, estimate_table
from autotune.cost.framework import FRAMEWORKS, Framework, framework_of
from autotune.cost.table import Floats, PlanTable
from autotune.search.core import TRIAL_STEPS, Measurement, Search
from autotune.search.ranking import decide
from autotune.search.space import Runtime, legal_plans
from autotune.specs import (
    Budget,
    ClusterSpec,
    CollectiveReading,
    Failure,
    FailureKind,
    ModelSpec,
    Plan,
    TuningState,
    Workload,
)
from autotune.tuning.lifecycle import Facts, StepKind, next_step, search_budget

SETUP_S, SETUP_SD, CRASH_S, OWN_SD, GIB = 60.0, 0.3, 30.0, 0.02, 2**30
CLOSE = 0.95
BUDGET_TRIALS = 6.0
"""Trials of the usual cost that a limited budget is worth."""


@dataclass(frozen=True, eq=False)
class World:
    """Plans with their truth: tokens/s/GPU (0 where the plan crashes), reserved peaks (0 unknown), which are too large.

    `framework` is what the search believes runs the plans; `truth` estimates them under another cluster and readings.
    """

    name: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    table: PlanTable
    framework: Framework
    readings: Sequence[CollectiveReading]
    speeds: Floats
    peaks: Floats
    too_large: np.ndarray

    def estimated(self, cluster: ClusterSpec, readings: Sequence[CollectiveReading]) -> EstimateTable:
        """What would be believed of such a cluster."""
        profile = fit_profile(cluster, "runs", readings, [], []) if readings else None
        return estimate_table(self.model, cluster, self.workload, self.table, profile, self.framework)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is wrong: the speed of the slowest link and of computation, one ZeRO stage, memory; then each trial."""

    network: float = 1.0
    compute: float = 1.0
    zero: float = 1.0
    more_bytes: float = 0.0
    noise: float = 0.01
    outliers: float = 0.0
    crashes: float = 0.0
    budget: bool = False

    def bent(self, world: World) -> tuple[Floats, np.ndarray]:
        """True speeds and what runs out of memory."""
        speeds = world.speeds.copy()
        if self.network != 1.0 or self.compute != 1.0:
            before = world.estimated(world.cluster, world.readings).tokens_per_s_per_gpu
            cluster, readings = self._cluster(world), self._readings(world)
            speeds *= world.estimated(cluster, readings).tokens_per_s_per_gpu / before
        if self.zero != 1.0:
            stage = world.table.zero_stage[int(np.argmax(np.where(world.too_large, 0.0, speeds)))]
            speeds[world.table.zero_stage == stage] /= self.zero
        limit = 0.94 * world.cluster.device.memory_bytes
        return speeds, world.too_large | (self.more_bytes > 0.0) & (world.peaks + self.more_bytes > limit)

    def _cluster(self, world: World) -> ClusterSpec:
        cluster, device = world.cluster, world.cluster.device
        peaks = {name: value * self.compute for name, value in device.peak_flops_per_s.items()}
        name = "intra" if cluster.inter is None else "inter"
        link = getattr(cluster, name)
        assert link is not None
        link = link.model_copy(update={"bytes_per_s": link.bytes_per_s * self.network})
        device = device.model_copy(update={"peak_flops_per_s": peaks})
        return cluster.model_copy(update={"device": device, name: link})

    def _readings(self, world: World) -> list[CollectiveReading]:
        """What would have been read: the search still has what was read before."""
        slow = [item for item in world.readings if item.group_size > world.cluster.gpus_per_node] or world.readings
        return [
            item.model_copy(update={"time_s": item.time_s / self.network}) if item in slow else item
            for item in world.readings
        ]


SCENARIOS = {
    "nothing": Scenario(),
    "network / 4": Scenario(network=0.25),
    "network x 4": Scenario(network=4.0),
    "compute / 2": Scenario(compute=0.5),
    "the best ZeRO stage x 1.4": Scenario(zero=1.4),
    "noise 5 %": Scenario(noise=0.05),
    "noise 15 %": Scenario(noise=0.15),
    "10 % outliers": Scenario(outliers=0.1),
    "20 % crashes": Scenario(crashes=0.2),
    "+10 GiB": Scenario(more_bytes=10.0 * GIB),
    "budget": Scenario(budget=True),
}


@dataclass(slots=True)
class Run:
    """How one tuning went."""

    share: float = 0.0
    asked: list[Plan] = field(default_factory=list)
    after: int = 0
    over_steps: float = 0.0


def tuned(world: World, scenario: Scenario, seed: int) -> Run:
    """A whole tuning."""
    chance, found = np.random.default_rng(seed), Run()
    speeds, too_large = scenario.bent(world)
    best = float(np.where(too_large, 0.0, speeds).max())
    devices, tokens = world.cluster.devices, world.workload.tokens_per_step
    steps_gpu_s = tokens / np.maximum(speeds, 1e-9)
    usual = devices * SETUP_S + TRIAL_STEPS * float(np.median(steps_gpu_s[speeds > 0]))
    budget = Budget(gpu_s=BUDGET_TRIALS * usual if scenario.budget else None)
    profile = fit_profile(world.cluster, "runs", world.readings, [], []) if world.readings else None
    search = Search(
        world.model, world.cluster, world.workload, plans=world.table, profile=profile, framework=world.framework
    )
    spent, costs, trials = 0.0, [0.0], 0

    def measure(plan: Plan) -> tuple[Measurement | Failure, float]:
        i = world.table.find(plan)
        assert i is not None
        if too_large[i]:
            return Failure(kind=FailureKind.OOM, message="out of memory"), devices * CRASH_S
        if speeds[i] == 0.0 or chance.random() < scenario.crashes:
            return Failure(kind=FailureKind.CRASH, message="a rank died"), devices * CRASH_S
        speed = float(speeds[i] * np.exp(scenario.noise * chance.standard_normal()))
        if chance.random() < scenario.outliers:
            speed /= 3.0
        peak = float(world.peaks[i] + scenario.more_bytes) if world.peaks[i] else None
        setup_s = SETUP_S * float(np.exp(SETUP_SD * chance.standard_normal()))
        reading = Measurement(tokens_per_s_per_gpu=speed, peak_bytes=peak, setup_s=setup_s)
        return reading, devices * setup_s + TRIAL_STEPS * tokens / speed

    while True:
        ranking = search.ranking()
        limits = search_budget(budget, ranking, trial_gpu_s=max(costs))
        facts = Facts(
            state=TuningState.SEARCHING, verdict=search.verdict(limits, gpu_s_spent=spent), ranking=ranking,
            trials=trials, affordable=budget.gpu_s is None or spent + max(costs) <= budget.gpu_s, budget=budget,
        )  # fmt: skip
        step = next_step(facts)
        if step.kind not in {StepKind.TRIAL, StepKind.CONFIRM}:
            break
        plan = step.plan if step.plan is not None else search.ask()
        assert plan is not None
        if step.kind is StepKind.TRIAL:
            found.asked.append(plan)
        result, cost = measure(plan)
        search.tell(plan, result, gpu_s=cost)
        spent, trials = spent + cost, trials + 1
        costs.append(cost)
    if ranking:
        chosen = decide(ranking).best.plan
        row = world.table.find(chosen)
        assert row is not None
        found.share = float(speeds[row]) / best
        found.after = len(found.asked) - 1 - found.asked.index(chosen)
    if budget.gpu_s is not None:
        found.over_steps = (spent - budget.gpu_s) / float(steps_gpu_s[speeds > 0].max())
    return found


# Worlds.


def published(path: Path, source: str, *, least: int, most: int) -> Iterator[World]:
    """Groups of a source with so many successful plans, at most so many of them, evenly over the file."""
    runs, _ = read_runs(path, published_cluster, sources=[source], skip_bad=True)
    groups, _ = group_runs(runs, min_ok=least, skip_bad=True)
    for i in np.unique(np.linspace(0, len(groups) - 1, min(most, len(groups))).astype(int)):
        yield _world_of(groups[i])


def _world_of(group: Group) -> World:
    peaks = np.array([item.reserved_bytes or 0.0 for item in group.outcomes])
    too_large = np.array([item.status is RunStatus.OOM for item in group.outcomes])
    return World(
        group.name, group.model, group.cluster, group.workload, PlanTable.of(group.plans), framework_of(group.source),
        group.readings, group.speeds, peaks, too_large,
    )  # fmt: skip


def simulated(framework: Framework, *, seed: int = 0) -> Iterator[World]:
    """Legal plans of three models, their truth the framework's own estimate and a deviation of each plan's own."""
    asked = (("llama2-7b", "h100-80gb-sxm:2x8", 64), ("llama2-13b", "a100-80gb-sxm:4x8", 128),
             ("gpt3-1.3b", "a100-80gb-sxm:1x8", 64))  # fmt: skip
    chance = np.random.default_rng(seed)
    for name, shorthand, batch in asked:
        spec, cluster = model(name), cluster_from_shorthand(shorthand)
        workload = Workload(seq_len=2048, global_batch=batch)
        table = legal_plans(spec, cluster, workload, runtime=Runtime.TORCH)
        made = estimate_table(spec, cluster, workload, table, None, framework)
        speeds = made.tokens_per_s_per_gpu * np.exp(OWN_SD * chance.standard_normal(len(table)))
        yield World(
            f"{name} on {shorthand}", spec, cluster, workload, table, framework, (), speeds, made.reserved_bytes,
            ~made.fits,
        )  # fmt: skip


def worlds(path: Path) -> dict[str, Callable[[], list[World]]]:
    """By kind. Of the first two the framework was checked on these very runs; of the others nothing was."""
    return {
        "sweep (checked)": lambda: list(published(path, "hf_ultrascale", least=8, most=18)),
        "vTrain (checked)": lambda: list(published(path, "vtrain_single", least=8, most=12)),
        "simulated (checked)": lambda: list(simulated(framework_of("megatron_sc21"))),
        "simulated (nobody checked)": lambda: list(simulated(FRAMEWORKS["torch"])),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="kinds and scenarios with this in their name")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data: dict[str, dict[str, dict[str, float]]] = {}
    for kind, made in worlds(args.runs).items():
        some = made()
        print(f"\n{kind}: {len(some)} worlds, {args.seeds} seeds\n{'scenario':<28}{'off':>7}{'share':>8}{'stop':>6}"
              f"{'after':>7}{'over':>7}")  # fmt: skip
        for name, scenario in SCENARIOS.items():
            if args.only not in f"{kind} {name}":
                continue
            runs = [tuned(world, scenario, 1000 * i + seed) for i, world in enumerate(some)
                    for seed in range(args.seeds)]  # fmt: skip
            row = {
                "off": float(np.mean([run.share < CLOSE for run in runs])),
                "share": float(np.mean([run.share for run in runs])),
                "stop": float(np.median([len(run.asked) for run in runs])),
                "after": float(np.mean([run.after for run in runs])),
                "over": max(run.over_steps for run in runs),
            }
            data.setdefault(kind, {})[name] = row
            over = f"{row['over']:>7.1f}" if scenario.budget else ""
            print(f"{name:<28}{row['off']:>7.1%}{row['share']:>8.3f}{row['stop']:>6.1f}{row['after']:>7.1f}{over}",
                  flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
