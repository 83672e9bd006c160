"""A launcher to be killed: `launcher.py warm|cold LOG_DIR` runs an endless probe and prints its processes' ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from local_ranks import cpu_cluster

from autotune.catalog import smallest
from autotune.specs import CollectiveOp, CollectiveRequest, DType, Plan, StepRequest, Workload
from probes.launch import LocalProber

WARM = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024,), iterations=10**9)
COLD = StepRequest(
    model=smallest(), workload=Workload(seq_len=32, global_batch=4, dtype=DType.FP32), plan=Plan(dp=2), cold=True,
    warmup_steps=10**9,
)  # fmt: skip


def main(mode: str, log_dir: Path) -> None:
    with LocalProber(cpu_cluster(2), log_dir=log_dir) as prober:
        request = COLD if mode == "cold" else WARM
        prober.run(request, deadline_s=200, on_progress=lambda _: print(json.dumps(prober.pids), flush=True))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
