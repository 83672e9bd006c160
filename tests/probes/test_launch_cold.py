"""Cold trials on real ranks: fresh ones each time, their answers and failures, and that nobody survives a kill -9."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from local_ranks import AMPLE_S, HERE, assert_gone, cpu_cluster

from autotune.specs import FailureKind, ModelSpec, Plan, ProbeOutcome, ProbeProgress, StepReading, StepRequest, Workload
from probes.launch import LocalProber

SHAPE = {"layers": 2, "heads": 4, "gated": True, "tied": False, "norm": "rmsnorm"}
SMALL = ModelSpec.from_data({"name": "small", **SHAPE, "hidden": 64, "ffn": 128, "vocab": 256})
# The optimizer states of 34 million parameters take 400 MB of the 512 MB; activations of the last stage do not fit.
WIDE = ModelSpec.from_data({"name": "wide", **SHAPE, "hidden": 256, "ffn": 1024, "vocab": 65536})
REQUEST = StepRequest(
    model=SMALL, plan=Plan(dp=2), workload=Workload.from_data({"seq_len": 32, "global_batch": 4, "dtype": "fp32"}),
    warmup_steps=2, min_steps=1, max_steps=2, cold=True,
)  # fmt: skip
ENDLESS = REQUEST.model_copy(update={"warmup_steps": 10**9})


@pytest.fixture
def prober(_rank_environment: None, tmp_path: Path) -> Iterator[LocalProber]:
    with LocalProber(cpu_cluster(2), log_dir=tmp_path) as opened:
        yield opened


def watched(prober: LocalProber, request: StepRequest) -> tuple[ProbeOutcome, list[int]]:
    """What came of a request, and the ranks that ran it, none of which is left."""
    seen: list[int] = []
    outcome = prober.run(request, deadline_s=AMPLE_S, on_progress=lambda _: seen.extend(prober.pids))
    assert prober.pids == []
    assert not any(psutil.pid_exists(pid) for pid in seen)
    return outcome, list(dict.fromkeys(seen))


@pytest.mark.slow
def test_each_trial_has_ranks_of_its_own(prober: LocalProber) -> None:
    prober.fingerprint()
    warm = prober.pids
    runs = [watched(prober, REQUEST) for _ in range(2)]
    for outcome, _ in runs:
        assert outcome.failure is None
        (reading,) = outcome.readings
        assert isinstance(reading, StepReading)
        assert [rank.rank for rank in reading.ranks] == [0, 1]
    ranks = {pid for _, pids in runs for pid in pids}
    assert len(ranks | set(warm)) == 6


def test_out_of_memory(prober: LocalProber) -> None:
    workload = Workload.from_data({"seq_len": 512, "global_batch": 8, "dtype": "fp32"})
    changes = {"model": WIDE, "workload": workload, "plan": Plan(pp=2, micro_batch=4)}
    failure = watched(prober, REQUEST.model_copy(update=changes))[0].failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.stage) == (FailureKind.OOM, 1, 1)


def test_kill_9_of_a_rank(prober: LocalProber) -> None:
    ranks: list[psutil.Process] = []

    def strike(_: ProbeProgress) -> None:
        if not ranks:
            ranks.extend(psutil.Process(pid) for pid in prober.pids)
            ranks[1].send_signal(signal.SIGKILL)

    failure = prober.run(ENDLESS, deadline_s=AMPLE_S, on_progress=strike).failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.message) == (FailureKind.CRASH, 1, "rank 1 was killed by SIGKILL")
    assert len(ranks) == 2
    assert_gone(ranks, 0)


def test_kill_9_of_the_launcher_leaves_nobody(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, str(HERE / "launcher.py"), "cold", str(tmp_path)], stdout=-1) as launcher:
        assert launcher.stdout is not None
        ranks = [psutil.Process(pid) for pid in json.loads(launcher.stdout.readline())]
        assert len(ranks) == 2
        ranks[1].suspend()  # it cannot notice by itself
        launcher.kill()
    assert_gone(ranks)


def test_start_ends_at_its_deadline(prober: LocalProber) -> None:
    outcome = prober.run(REQUEST, deadline_s=0.1)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.UNAVAILABLE
    assert "at the deadline" in outcome.failure.message
    assert prober.pids == []
