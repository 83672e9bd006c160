"""Programs that a command runs in tests, well and badly behaved, and what runs them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_ranks import cpu_cluster

from autotune.catalog import smallest
from autotune.specs import ClusterSpec, DType, Plan, ProbeOutcome, StepRequest, Workload
from autotune.specs.command import CommandBook
from autotune.wiring import read_log_lines
from probes.launch import LocalProber

MODEL = smallest()
PATTERN = {"source": "pattern", "pattern": r"step (?P<step>\d+) (?P<speed>\S+) ms", "unit": "ms/step"}
TRAIN = "import time\nfor i in range(1, 100):\n time.sleep(0.02)\n print('step', i, 20.0 + i % 2, 'ms', flush=True)\n"


@dataclass(frozen=True, slots=True)
class Bench:
    """Writes commands into a directory and runs them for a plan of two ranks."""

    folder: Path

    def write(self, code: str, **template: Any) -> str:
        """The command whose program is this code in a fresh interpreter; returns its name and digest."""
        (self.folder / "program.py").write_text(code, encoding="utf-8")
        document = {
            "argv": [sys.executable, "{template_dir}/program.py"],
            "workload": {"seq_len": 32, "global_batch": 16, "dtype": "fp32"},
            "speed": PATTERN,
            "deadline_s": 50,
            "grace_s": 0.3,
        }
        (self.folder / "own.json").write_text(json.dumps(document | template), encoding="utf-8")
        return CommandBook(self.folder).named("own").ref

    def request(self, ref: str, **more: Any) -> StepRequest:
        workload = Workload(seq_len=32, global_batch=16, dtype=DType.FP32, command=ref)
        return StepRequest(model=MODEL, workload=workload, plan=Plan(dp=2), **more)

    def run(self, code: str, *, cluster: ClusterSpec | None = None, **template: Any) -> ProbeOutcome:
        """What comes of a trial of it."""
        return self.run_request(self.request(self.write(code, **template)), cluster)

    def run_request(self, request: StepRequest, cluster: ClusterSpec | None = None) -> ProbeOutcome:
        logs, book = self.folder / "logs", CommandBook(self.folder)
        with LocalProber(cluster or cpu_cluster(2), log_dir=logs, commands=book, read_log=read_log_lines) as prober:
            return prober.run(request, deadline_s=60.0)
