"""How true the memory estimate is on published runs of the sources that constants were chosen on, fitted and left out.

python -m benchmarks.runs_memory RUNS.csv

By source: how far peaks are off, and whether runs that worked or ran out of memory are said to fit; with all constants,
and for the one source that any were fitted on with the neutral values in their place. Then what can be used of a
device, fitted without each model of that source and judged on it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.special import log_ndtr

from autotune.backtest.runs import Run, RunStatus, read_runs
from autotune.catalog.published import published_cluster
from autotune.cost.capacity import context_bytes
from autotune.cost.estimate import estimate
from autotune.cost.framework import Framework, framework_of
from autotune.specs import Estimate
from benchmarks.outside_memory import Judged, percent, print_reliability, print_sources

FITTED = "hf_ultrascale"
SHARES, SPREADS = np.arange(0.80, 1.10, 0.005), (0.05, 0.08, 0.10, 0.12, 0.15, 0.20)


def neutral(framework: Framework) -> Framework:
    """A framework without what was fitted to the peaks of its runs."""
    return replace(
        framework, logit_scale=1.0, piped_logit_scale=1.0, gathers_kept=0.0, fragmentation=0.0, fragmentation_by_tp=0.0
    )


def judged(runs: Sequence[Run], *, left_out: bool) -> list[Judged]:
    """Each plan of a source once for each way in which it ended."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for number, run in enumerate(runs):
        key = run.source, run.model.name, run.cluster.key, run.workload, run.plan, run.status
        if key in seen or run.status is RunStatus.FAIL:
            continue
        seen.add(key)
        framework = framework_of(run.source)
        framework = neutral(framework) if left_out and run.source == FITTED else framework
        one = estimate(run.model, run.cluster, run.workload, run.plan, framework=framework)
        found.append(
            Judged(
                source=run.source, row=number, worked=run.status is RunStatus.OK,
                peak_bytes=run.reserved_bytes or run.allocated_bytes or 0.0, allocated=True, estimate=one,
            )
        )  # fmt: skip
    return found


def print_left_out(runs: Sequence[Run]) -> None:
    """What can be used, fitted on all models of the source but one and judged on that one."""
    needs: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for run in runs:
        if run.source == FITTED and run.status is not RunStatus.FAIL:
            one = estimate(run.model, run.cluster, run.workload, run.plan, framework=framework_of(run.source))
            needs[run.model.name].append((_need(one, run), run.status is RunStatus.OK))
    print(f"\n{'left out':16}{'usable':>8}{'spread':>8}{'not to fit':>12}{'recall':>8}")
    for name in ("", *needs):
        others = [item for model, items in needs.items() if model != name for item in items]
        share, spread = fit(np.array([need for need, _ in others]), np.array([ok for _, ok in others]))
        judge = needs[name] if name else others
        worked = np.array([need for need, ok in judge if ok])
        failed = np.array([need for need, ok in judge if not ok])
        figures = f"{percent(worked > share):>12}{percent(failed > share):>8}"
        print(f"{name or 'none':16}{share:8.3f}{spread:8.2f}{figures}")


def _need(found: Estimate, run: Run) -> float:
    context = context_bytes(run.cluster)
    return ((found.needed_bytes or 0.0) - context) / (run.cluster.device.memory_bytes - context)


def fit(needs: np.ndarray, worked: np.ndarray) -> tuple[float, float]:
    """(the share that can be used, spread) of the greatest likelihood."""
    best, chosen = -np.inf, (1.0, 0.1)
    for share in SHARES:
        for spread in SPREADS:
            below = (np.log(share) - np.log(needs)) / spread
            likelihood = float(log_ndtr(np.where(worked, below, -below)).sum())
            if likelihood > best:
                best, chosen = likelihood, (float(share), spread)
    return chosen


def main() -> None:
    """Prints the tables."""
    runs, _ = read_runs(Path(sys.argv[1]), published_cluster, skip_bad=True)
    for left_out in (False, True):
        print(f"\n{'left out' if left_out else 'fitted'}")
        rows = judged(runs, left_out=left_out)
        print_sources([row for row in rows if not left_out or row.source == FITTED])
    print_reliability(rows)
    print_left_out(runs)


if __name__ == "__main__":
    main()
