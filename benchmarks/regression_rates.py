"""False alarms and found losses of the nightly regression, with noise that was measured on this machine.

    python benchmarks/regression_rates.py measure noise.json   # real step probes of the tiny preset, a few minutes
    python benchmarks/regression_rates.py simulate noise.json  # thousands of checks with that noise

`measure` takes windows as a check does (autotune.regression.protocol), in several visits with fresh ranks, and
writes every speed. `simulate` draws the measured windows again, and windows with noise of three stated sizes, normal
and with heavier tails, and counts verdicts: of unchanged plans, and of plans that lost 5 % and 10 %.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from autotune.catalog import smallest
from autotune.catalog.workloads import workload
from autotune.regression.protocol import measured, next_request, order_of, windows_of
from autotune.regression.verdict import BASELINE_WINDOWS, REPEATS, judge
from autotune.regression.windows import Noise, Window, noise_of
from autotune.regression.windows import level as level_of
from autotune.specs import BestEntry, ClusterSpec, Plan
from autotune.specs.regression import CheckMeasurement, CheckRole, VerdictKind
from probes.launch import LocalProber

VISITS, WINDOWS = 8, 2
CHECKS, BLOCK = 1000, 200
LOSSES = (0.0, 0.05, 0.10)
VISITS_BEFORE, PLANS = (1, 5, 10), (1, 16)
RANKS = 2


def machine() -> ClusterSpec:
    """This machine as CPU ranks."""
    device = {"name": "cpu-rank", "kind": "cpu", "memory_bytes": 1 << 30}
    data = {"name": "here", "nodes": 1, "gpus_per_node": RANKS, "device": device, "intra": {"name": "loopback"}}
    return ClusterSpec.from_data(data)


def entry() -> BestEntry:
    """The tiny preset, data parallel."""
    cluster, model = machine(), smallest()
    asked = workload(model, cluster, {"seq_len": None, "global_batch": None, "dtype": None})
    return BestEntry(
        model=model, parameters=1.0, cluster=cluster, workload=asked, plan=Plan(dp=RANKS), tokens_per_s_per_gpu=5000.0,
        interval=(900.0, 1100.0), repeats=1, peak_bytes=None, measured_at=datetime.now(UTC),
    )  # fmt: skip


def measure(path: Path) -> None:
    """Real windows of every role, by visit."""
    of = entry()
    visits: list[list[dict[str, list[float]]]] = []
    for number in range(VISITS):
        done: list[CheckMeasurement] = []
        before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as logs, LocalProber(of.cluster, log_dir=Path(logs)) as prober:
            wanted_count = WINDOWS * len(order_of(of))
            while (wanted := next_request(of, done, again=len(done) < wanted_count)) is not None:
                done.append(measured(wanted, prober.run(wanted.request, deadline_s=300.0), datetime.now(UTC)))
        found = [{role.value: list(speeds) for role, speeds in window.speeds.items()} for window in windows_of(done)]
        visits.append(found)
        load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
        print(f"visit {number}: {len(found)} windows, {load}, {noises(visits)}", flush=True)
        data = {"at": datetime.now(UTC).isoformat(), "cores": os.cpu_count(), "load": os.getloadavg(), "visits": visits}
        path.write_text(json.dumps(data, indent=1) + "\n")


def noises(visits: list[list[dict[str, list[float]]]], role: CheckRole = CheckRole.WINNER) -> Noise:
    """What the measured windows of a role teach."""
    return noise_of([series(visits, role)])


def series(visits: list[list[dict[str, list[float]]]], role: CheckRole) -> list[Window]:
    """The windows of a role, as ln speed."""
    return [
        Window(visit=str(number), logs=tuple(float(np.log(speed)) for speed in window[role.value]))
        for number, visit in enumerate(visits)
        for window in visit
    ]


class Simulation:
    """Windows with given noise: normal, or with the tails of Student's t with three degrees of freedom."""

    def __init__(self, noise: Noise, *, heavy: bool, seed: int) -> None:
        self.noise, self.heavy, self.random = noise, heavy, np.random.default_rng(seed)

    def visit(self, name: str, count: int, level: float) -> list[Window]:
        """Some windows of one visit."""
        night = level + self.noise.visits * self.random.normal()
        return [self.window(name, night) for _ in range(count)]

    def window(self, name: str, level: float) -> Window:
        """Five repeats."""
        own = self.random.standard_t(3, REPEATS) / np.sqrt(3.0) if self.heavy else self.random.normal(size=REPEATS)
        centre = level + self.noise.between * self.random.normal()
        return Window(visit=name, logs=tuple(float(value) for value in centre + self.noise.within * own))

    def history(self, visits: int, baseline_windows: int) -> list[Window]:
        """A plan's first check and `visits` - 1 good ones."""
        found = self.visit("0", baseline_windows, 0.0)
        for number in range(1, visits):
            found += self.visit(str(number), 1, 0.0)
        return found

    def check(
        self, loss: float, visits: int, plans: int = 1, baseline_windows: int = BASELINE_WINDOWS
    ) -> tuple[VerdictKind, int]:
        """A check of a plan that lost something after so many good visits: verdict and windows.

        The noise is learned from so many plans of its cluster.
        """
        baseline, *others = (self.history(visits, baseline_windows) for _ in range(plans))
        noise = noise_of([baseline, *others])
        level = float(np.log1p(-loss)) + self.noise.visits * self.random.normal()
        now = [self.window("now", level)]
        while (verdict := judge(baseline, now, noise)).again:
            now.append(self.window("now", level))
        return verdict.kind, len(now)


class Resampled(Simulation):
    """Windows that were measured, drawn again: with their tails and bad moments. Only visits are normal noise.

    A window's deviation from its visit's mean is widened by what the mean takes from it.
    """

    def __init__(self, visits: list[list[dict[str, list[float]]]], *, seed: int) -> None:
        logs = [[np.log(window[CheckRole.WINNER.value]) for window in visit] for visit in visits]
        means = [float(np.mean([level_of([_bare(window)]) for window in visit])) for visit in logs]
        widened = [float(np.sqrt(len(visit) / max(len(visit) - 1, 1))) for visit in logs]
        self.windows = [
            window - mean + (wide - 1.0) * (level_of([_bare(window)]) - mean)
            for visit, mean, wide in zip(logs, means, widened, strict=True)
            for window in visit
        ]
        between = float(np.std([level_of([_bare(window)]) for window in self.windows]))
        apart = float(np.var(means, ddof=1)) - between**2 / float(np.mean([len(visit) for visit in logs]))
        within = float(np.median([np.std(window, ddof=1) for window in self.windows]))
        noise = Noise(within=within, between=between, visits=float(np.sqrt(max(apart, 0.0))), freedom=0)
        super().__init__(noise, heavy=False, seed=seed)

    def window(self, name: str, level: float) -> Window:
        """One of the measured ones."""
        drawn = self.windows[self.random.integers(len(self.windows))]
        return Window(visit=name, logs=tuple(float(value) for value in level + drawn))


def _bare(logs: np.ndarray) -> Window:
    return Window(visit="", logs=tuple(map(float, logs)))


def simulate(path: Path) -> None:
    """Tables of verdicts."""
    data = json.loads(path.read_text())
    drawn = Resampled(data["visits"], seed=1)
    print(f"noise of {data['at']} on {data['cores']} cores at load {data['load'][0]:.1f}: {drawn.noise}\n")
    cases = {
        "within 0.5 %, windows 0.3 %, visits 0.2 %": Noise(within=0.005, between=0.003, visits=0.002, freedom=0),
        "within 1 %, windows 0.5 %, visits 0.5 %": Noise(within=0.01, between=0.005, visits=0.005, freedom=0),
        "within 2 %, windows 1 %, visits 0.5 %": Noise(within=0.02, between=0.01, visits=0.005, freedom=0),
    }
    headings = ("noise", "tails", "earlier visits", "loss", "unchanged", "worse", "better", "cannot tell", "windows")
    print("| " + " | ".join([*headings, "most worse in 200"]) + " |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for plans in PLANS:
        for visits in (*VISITS_BEFORE, 20):
            for loss in LOSSES:
                simulation = Resampled(data["visits"], seed=1)
                name = f"windows as measured, {plans} plan{'s'[: plans > 1]}"
                print(row(name, "as measured", simulation, visits=visits, loss=loss, plans=plans), flush=True)
    for name, noise in cases.items():
        for heavy in (False, True):
            for visits in VISITS_BEFORE:
                for loss in LOSSES:
                    tails = "heavy" if heavy else "normal"
                    print(
                        row(name, tails, Simulation(noise, heavy=heavy, seed=1), visits=visits, loss=loss), flush=True
                    )
    usual = Noise(within=0.01, between=0.005, visits=0.002, freedom=0)
    print(
        "\n| windows of the first check | 5 % losses found the night after (within 1 %, windows 0.5 %, visits 0.2 %) |"
    )
    print("|---|---|")
    for count in (1, 2, 4, 8):
        simulation = Simulation(usual, heavy=False, seed=count)
        found = [simulation.check(0.05, 1, baseline_windows=count)[0] for _ in range(CHECKS // 4)]
        print(f"| {count} | {found.count(VerdictKind.WORSE) / len(found):.1%} |")


def row(name: str, tails: str, simulation: Simulation, *, visits: int, loss: float, plans: int = 1) -> str:
    """One line: shares of verdicts, mean windows, and the most `worse`, wrong or right, in any block of 200 checks."""
    found = [simulation.check(loss, visits, plans) for _ in range(CHECKS)]
    kinds = Counter(kind for kind, _ in found)
    alarms = [kind is VerdictKind.WORSE for kind, _ in found]
    blocks = [sum(alarms[start : start + BLOCK]) for start in range(0, CHECKS, BLOCK)]
    share = [f"{kinds[kind] / CHECKS:.2%}" for kind in VerdictKind if kind is not VerdictKind.BASELINE]
    unchanged, better, worse, cannot = share
    windows = np.mean([count for _, count in found])
    csv_row = [name, tails, str(visits), f"{loss:.0%}", unchanged, worse, better, cannot]
    return "| " + " | ".join([*csv_row, f"{windows:.2f}", str(max(blocks))]) + " |"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {"measure": measure, "simulate": simulate}[sys.argv[1]](Path(sys.argv[2]))
