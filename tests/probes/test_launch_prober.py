"""LocalProber with real ranks: outcomes, progress, and that nobody survives a kill -9 of anybody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from local_ranks import AMPLE_S, HERE, assert_gone, cpu_cluster

from autotune.errors import ProberError
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    CollectiveRequest,
    FailureKind,
    ModelSpec,
    Plan,
    ProbeOutcome,
    ProbeProgress,
    StepRequest,
    Workload,
)
from probes.launch import LocalProber, Placement

SHORT = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024, 4096), iterations=3)
# Far longer than any test: it ends because somebody ends it.
ENDLESS = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=2, sizes_bytes=(1024,), iterations=10**9)


def run_endless(prober: LocalProber, sent: signal.Signals, rank: int, deadline_s: float = AMPLE_S) -> ProbeOutcome:
    """Runs the endless request and sends a signal to one rank once it is measuring."""
    assert prober.run(SHORT, deadline_s=AMPLE_S).failure is None  # the ranks are warm: the deadline is the probe's
    seen: list[psutil.Process] = []

    def strike(_: ProbeProgress) -> None:
        seen.extend(psutil.Process(pid) for pid in prober.pids)
        seen[rank].send_signal(sent)

    outcome = prober.run(ENDLESS, deadline_s=deadline_s, on_progress=strike)
    assert len(seen) == 2
    assert_gone(seen, 0)
    return outcome


def test_readings_and_costs(pair: LocalProber) -> None:
    progress: list[ProbeProgress] = []
    outcome = pair.run(SHORT, deadline_s=AMPLE_S, on_progress=progress.append)
    assert outcome.failure is None
    assert [reading.size_bytes for reading in outcome.readings] == [1024, 4096]  # type: ignore[union-attr]
    assert [(message.phase, message.done, message.total) for message in progress] == [
        ("sweep", 0, 2), ("sweep", 1, 2), ("sweep", 2, 2),
    ]  # fmt: skip
    assert outcome.gpu_s == pytest.approx(2 * outcome.wall_s)
    assert outcome.setup_s < outcome.wall_s
    assert outcome.log_path is not None
    assert {path.name for path in Path(outcome.log_path).glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}


def test_kill_9_of_a_rank(pair: LocalProber) -> None:
    failure = run_endless(pair, signal.SIGKILL, rank=1).failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.message) == (FailureKind.CRASH, 1, "rank 1 was killed by SIGKILL")
    assert pair.run(SHORT, deadline_s=AMPLE_S).failure is None


def test_a_stopped_rank_is_a_hang(pair: LocalProber) -> None:
    failure = run_endless(pair, signal.SIGSTOP, rank=0, deadline_s=3).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.HANG, 0)
    assert failure.message.startswith("rank 0 is stopped at the deadline")
    assert pair.run(SHORT, deadline_s=AMPLE_S).failure is None


def test_a_rank_that_died_between_probes_fails_none(pair: LocalProber) -> None:
    pair.run(SHORT, deadline_s=AMPLE_S)
    idle = [psutil.Process(pid) for pid in pair.pids]
    idle[1].kill()
    os.waitid(os.P_PID, idle[1].pid, os.WEXITED | os.WNOWAIT)  # it has ended; its launcher has not looked yet
    outcome = pair.run(SHORT, deadline_s=AMPLE_S)
    assert outcome.failure is None
    assert_gone(idle, 0)


def test_illegal_request_is_a_failure(pair: LocalProber) -> None:
    failure = pair.run(SHORT.model_copy(update={"group_size": 3}), deadline_s=AMPLE_S).failure
    assert failure is not None
    assert failure.kind is FailureKind.ILLEGAL
    assert "must divide the 2 ranks" in failure.message
    assert "InputError" in failure.log_tail


def test_training_beyond_the_memory_of_a_device(pair: LocalProber) -> None:
    # The optimizer states of 34 million parameters take 400 MB of the 512 MB; activations of the last stage do not fit.
    shape = {"layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "gated": True, "vocab": 65536, "tied": False}
    model = ModelSpec.from_data({"name": "wide", **shape, "norm": "rmsnorm"})
    workload = Workload.from_data({"seq_len": 512, "global_batch": 8, "dtype": "fp32"})
    request = StepRequest(model=model, workload=workload, plan=Plan(pp=2, micro_batch=4))
    failure = pair.run(request, deadline_s=AMPLE_S).failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.stage) == (FailureKind.OOM, 1, 1)
    assert "can't allocate memory" in failure.message
    assert "[Stage 1] failed to run forward" in failure.log_tail
    assert pair.run(SHORT, deadline_s=AMPLE_S).failure is None


def test_interrupted_launcher_kills_the_ranks(pair: LocalProber) -> None:
    assert pair.run(SHORT, deadline_s=AMPLE_S).failure is None
    processes = [psutil.Process(pid) for pid in pair.pids]

    def interrupt(_: ProbeProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.run(ENDLESS, deadline_s=AMPLE_S, on_progress=interrupt)
    assert_gone(processes, 0)


def test_ranks_that_do_not_come_up_in_time(tmp_path: Path) -> None:
    with LocalProber(cpu_cluster(1), log_dir=tmp_path) as prober:
        outcome = prober.run(SHORT, deadline_s=0.05)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.UNAVAILABLE
    assert outcome.setup_s == outcome.wall_s


def test_nothing_to_measure_with(tmp_path: Path) -> None:
    data = cpu_cluster(1).to_data()
    data["device"]["kind"] = "cuda"
    hidden = Placement(environment={"CUDA_VISIBLE_DEVICES": ""})
    with (
        LocalProber(ClusterSpec.from_data(data), log_dir=tmp_path, placements=[hidden]) as prober,
        pytest.raises(ProberError, match="rank 0 needs cuda device 0, torch sees 0"),
    ):
        prober.run(SHORT, deadline_s=AMPLE_S)


def test_several_nodes_are_not_one_machine(tmp_path: Path) -> None:
    data = cpu_cluster(2).to_data() | {"nodes": 2, "inter": {"name": "ethernet"}}
    with pytest.raises(ProberError, match="4 ranks on a cluster of 2 devices a node"):
        LocalProber(ClusterSpec.from_data(data), log_dir=tmp_path)


def test_close_twice_leaves_nobody(tmp_path: Path) -> None:
    prober = LocalProber(cpu_cluster(1), log_dir=tmp_path)
    prober.fingerprint()
    processes = [psutil.Process(pid) for pid in prober.pids]
    prober.close()
    assert_gone(processes, 0)
    prober.close()


def test_kill_9_of_the_launcher_leaves_no_rank(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, str(HERE / "launcher.py"), "warm", str(tmp_path)], stdout=-1) as launcher:
        assert launcher.stdout is not None
        ranks = [psutil.Process(pid) for pid in json.loads(launcher.stdout.readline())]
        assert len(ranks) == 2
        assert os.getsid(ranks[0].pid) != os.getsid(launcher.pid)
        ranks[1].suspend()  # it cannot notice by itself that its launcher is gone
        launcher.kill()
    assert_gone(ranks)


def test_the_launching_side_loads_no_torch() -> None:
    code = "import sys, probes.launch, probes.inventory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
