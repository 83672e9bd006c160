"""The cold mode with a real torchrun: answers, failures, and that nobody survives a kill -9 of anybody."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_ranks import AMPLE_S, HERE, RANK_MEMORY_BYTES, assert_gone, cpu_cluster

from autotune.specs import CollectiveOp, CollectiveRequest, FailureKind
from probes.launch.gathering import Gathered
from probes.launch.pool import StartError
from probes.launch.torchrun import ColdTrial

ENDLESS = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024,), iterations=10**9)


def hazard(log_dir: Path, kind: str, **request: Any) -> Gathered:
    with ColdTrial(cpu_cluster(2), 2, log_dir) as trial:
        gathered = trial.run("hazards", {"kind": kind, **request}, deadline=time.monotonic() + AMPLE_S)
        processes = [psutil.Process(pid) for pid in trial.pids if psutil.pid_exists(pid)]
    assert_gone(processes, 0)
    return gathered


def strike(log_dir: Path, choose: Callable[[list[psutil.Process]], psutil.Process]) -> Gathered:
    """Runs an endless probe and kills one of its processes (torchrun, then the ranks) once it is measuring."""
    processes: list[psutil.Process] = []
    with ColdTrial(cpu_cluster(2), 2, log_dir) as trial:

        def note(_: int, message: dict[str, Any]) -> None:
            if message["type"] == "progress":
                processes.extend(psutil.Process(pid) for pid in trial.pids)
                choose(processes).send_signal(signal.SIGKILL)

        gathered = trial.run("probes.collective", ENDLESS.to_data(), deadline=time.monotonic() + AMPLE_S, on_note=note)
    assert len(processes) == 3
    assert_gone(processes, 0)
    return gathered


def test_answers_by_rank(tmp_path: Path) -> None:
    gathered = hazard(tmp_path, "nothing")
    assert gathered.failure is None
    assert {rank: report["rank"] for rank, report in gathered.reports.items()} == {0: 0, 1: 1}


def test_out_of_memory(tmp_path: Path) -> None:
    failure = hazard(tmp_path, "tensor", rank=1, bytes=RANK_MEMORY_BYTES + (16 << 20)).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.OOM, 1)


def test_kill_9_of_a_rank(tmp_path: Path) -> None:
    failure = strike(tmp_path, lambda processes: processes[2]).failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.message) == (FailureKind.CRASH, 1, "rank 1 was killed by SIGKILL")


def test_kill_9_of_torchrun(tmp_path: Path) -> None:
    failure = strike(tmp_path, lambda processes: processes[0]).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.CRASH, None)
    assert failure.message == "torchrun was killed by SIGKILL"


def test_kill_9_of_the_launcher_leaves_nobody(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, str(HERE / "launcher.py"), "cold", str(tmp_path)], stdout=-1) as launcher:
        assert launcher.stdout is not None
        processes = [psutil.Process(pid) for pid in json.loads(launcher.stdout.readline())]
        assert len(processes) == 3
        processes[2].suspend()  # it cannot notice by itself
        launcher.kill()
    assert_gone(processes)


def test_start_ends_at_its_deadline(tmp_path: Path) -> None:
    with ColdTrial(cpu_cluster(1), 1, tmp_path) as trial:
        torchrun = psutil.Process(trial.pids[0])
        with pytest.raises(StartError, match="0 of 1 ranks were up at the deadline"):
            trial.run("hazards", {"kind": "nothing"}, deadline=time.monotonic() + 0.1)
    assert_gone([torchrun], 0)
