"""A launcher to be killed: `launcher.py warm|cold LOG_DIR` runs an endless probe and prints its processes' ids."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from local_ranks import cpu_cluster

from autotune.specs import CollectiveOp, CollectiveRequest
from probes.launch import LocalProber
from probes.launch.torchrun import ColdTrial

ENDLESS = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024,), iterations=10**9)


def main(mode: str, log_dir: Path) -> None:
    if mode == "warm":
        with LocalProber(cpu_cluster(2), log_dir=log_dir) as prober:
            prober.run(ENDLESS, deadline_s=200, on_progress=lambda _: print(json.dumps(prober.pids), flush=True))
    with ColdTrial(cpu_cluster(2), 2, log_dir) as trial:
        trial.run(
            "probes.collective",
            ENDLESS.to_data(),
            deadline=time.monotonic() + 200,
            on_note=lambda _, message: message["type"] == "progress" and print(json.dumps(trial.pids), flush=True),
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
