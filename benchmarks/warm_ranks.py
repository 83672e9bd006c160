"""What a trial's set-up costs on warm ranks and on fresh ones, at 4 and 8 CPU ranks. Prints JSON.

Set-up is the time from the request to the start of the first training step, as the launcher sees it: on warm ranks the
groups and the model, cold also the interpreters, torch and the default group. The warm ranks' own start, which is paid
once a tuning, is given beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from autotune.specs import ClusterSpec, ModelSpec, Plan, ProbeProgress, StepRequest, Workload
from probes.launch import LocalProber

WARM_TRIALS, COLD_TRIALS = 7, 3
DEADLINE_S = 600.0
MODEL = {
    "name": "tiny", "layers": 2, "hidden": 64, "heads": 8, "ffn": 256, "gated": True, "vocab": 512, "tied": False,
    "norm": "rmsnorm",
}  # fmt: skip


def request(ranks: int, *, cold: bool) -> StepRequest:
    """A training step so small that set-up is nearly all there is; tp 2, pp 2 and dp make groups of every kind."""
    model, workload = ModelSpec.from_data(MODEL), Workload.from_data({"seq_len": 32, "global_batch": 8})
    plan = Plan(tp=2, pp=2, dp=ranks // 4)
    return StepRequest(
        model=model, workload=workload, plan=plan, warmup_steps=0, min_steps=1, max_steps=1, trace=False, cold=cold
    )


def setup_s(prober: LocalProber, asked: StepRequest) -> float:
    """Runs one trial; seconds until its first step started. Ends the benchmark if the trial fails."""
    first_step_s: list[float] = []

    def note(progress: ProbeProgress) -> None:
        if progress.seconds is not None and not first_step_s:
            first_step_s.append(time.perf_counter() - start_s - progress.seconds)

    start_s = time.perf_counter()
    outcome = prober.run(asked, deadline_s=DEADLINE_S, on_progress=note)
    if outcome.failure is not None:
        sys.exit(f"{asked.plan.key}: {outcome.failure.message}")
    return first_step_s[0]


def measure(ranks: int, log_dir: Path) -> dict[str, object]:
    """Warm and cold set-up at one number of ranks."""
    device = {"name": "cpu-rank", "kind": "cpu", "memory_bytes": 1 << 30}
    cluster = ClusterSpec.from_data(
        {"name": "here", "nodes": 1, "gpus_per_node": ranks, "device": device, "intra": {"name": "loopback"}}
    )
    with LocalProber(cluster, log_dir=log_dir) as prober:
        start_s = time.perf_counter()
        prober.fingerprint()
        pool_s = time.perf_counter() - start_s
        first_s = setup_s(prober, request(ranks, cold=False))
        warm_s = [setup_s(prober, request(ranks, cold=False)) for _ in range(WARM_TRIALS)]
        cold_s = [setup_s(prober, request(ranks, cold=True)) for _ in range(COLD_TRIALS)]
    warm, cold = statistics.median(warm_s), statistics.median(cold_s)
    return {
        "ranks": ranks,
        "warm_s": round(warm, 3),
        "warm_range_s": [round(min(warm_s), 3), round(max(warm_s), 3)],
        "cold_s": round(cold, 3),
        "cold_range_s": [round(min(cold_s), 3), round(max(cold_s), 3)],
        "warm_share_of_cold": round(warm / cold, 4),
        "first_warm_trial_s": round(first_s, 3),
        "start_of_warm_ranks_s": round(pool_s, 3),
    }


def main() -> None:
    """Measures at 4 and 8 ranks."""
    with tempfile.TemporaryDirectory(prefix="autotune-warm-ranks-") as directory:
        print(json.dumps([measure(ranks, Path(directory)) for ranks in (4, 8)], indent=2))


if __name__ == "__main__":
    main()
