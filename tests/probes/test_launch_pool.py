"""RankPool with real gloo ranks: every way a rank can fail, and that the next request finds a pool that works."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_ranks import AMPLE_S, RANK_MEMORY_BYTES, assert_gone, cpu_cluster

from autotune.errors import InputError
from autotune.specs import FailureKind
from probes.launch import Placement, RankPool
from probes.launch.failures import RankFailure, tail_of
from probes.launch.gathering import Gathered
from probes.launch.pool import rank_log


def send(pool: RankPool, log_dir: Path, kind: str, *, deadline_s: float = AMPLE_S, **request: Any) -> Gathered:
    return pool.run("hazards", {"kind": kind, **request}, deadline=time.monotonic() + deadline_s, log_dir=log_dir)


def test_ranks_stay_warm(pool: RankPool, tmp_path: Path) -> None:
    pids = pool.pids
    for number in range(2):
        gathered = send(pool, tmp_path / str(number), "nothing")
        assert gathered.failure is None
        assert gathered.reports == {0: {"rank": 0, "groups": 1}, 1: {"rank": 1, "groups": 1}}
    assert pool.pids == pids
    assert "hazard nothing on rank 1" in rank_log(tmp_path / "1", 1).read_text()


def test_ranks_lead_their_own_sessions(pool: RankPool) -> None:
    for pid in pool.pids:
        assert os.getsid(pid) == pid
        assert os.getpgid(pid) == pid


@pytest.mark.parametrize("kind", ["tensor", "objects", "backward"])
def test_memory_beyond_the_device_fails(pool: RankPool, tmp_path: Path, kind: str) -> None:
    processes = [psutil.Process(pid) for pid in pool.pids]
    gathered = send(pool, tmp_path, kind, rank=1, bytes=RANK_MEMORY_BYTES + (16 << 20))
    failure = gathered.failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.OOM, 1)
    assert pool.pids == []
    assert_gone(processes, 0)


def test_memory_within_the_device_is_given(pool: RankPool, tmp_path: Path) -> None:
    size = RANK_MEMORY_BYTES * 9 // 10
    gathered = send(pool, tmp_path, "tensor", bytes=size)
    assert gathered.failure is None
    assert [report["elements"] for report in gathered.reports.values()] == [size, size]
    assert len(pool.pids) == 2


@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        ("segfault", FailureKind.CRASH, "rank 1 was killed by SIGSEGV"),
        ("bad_alloc", FailureKind.OOM, "rank 1 was killed by SIGABRT"),
        ("exit", FailureKind.CRASH, "rank 1 exited with status 3"),
        ("bug", FailureKind.CRASH, "ValueError: the last line"),
    ],
)
def test_death_and_bug_name_the_rank(
    pool: RankPool, tmp_path: Path, kind: str, expected: FailureKind, message: str
) -> None:
    processes = [psutil.Process(pid) for pid in pool.pids]
    gathered = send(pool, tmp_path, kind, rank=1, status=3)
    assert gathered.failure == RankFailure(rank=1, kind=expected, message=message)
    assert pool.pids == []
    assert_gone(processes, 0)


def test_hang_ends_at_the_deadline_with_stacks(pool: RankPool, tmp_path: Path) -> None:
    gathered = send(pool, tmp_path, "silence", deadline_s=3, rank=1)
    assert gathered.failure is not None
    assert gathered.failure.kind is FailureKind.HANG
    assert set(gathered.failures) == {0, 1}
    assert "hazards.py" in tail_of(rank_log(tmp_path, 1))
    assert "_silence" in tail_of(rank_log(tmp_path, 1))
    assert pool.pids == []


def test_communication_error(pool: RankPool, tmp_path: Path) -> None:
    failure = send(pool, tmp_path, "timeout").failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.COMMUNICATION, 0)
    assert pool.pids == []


def test_refusal_keeps_ranks_that_all_answered(pool: RankPool, tmp_path: Path) -> None:
    pids = pool.pids
    failure = send(pool, tmp_path / "all", "refuse").failure
    assert failure is not None
    assert failure.kind is FailureKind.ILLEGAL
    assert failure.message == "hazard: 'refuse' cannot be used; nothing is"
    assert pool.pids == pids
    assert send(pool, tmp_path / "next", "nothing").failure is None


def test_refusal_by_one_rank_ends_the_ranks_that_wait_for_it(pool: RankPool, tmp_path: Path) -> None:
    failure = send(pool, tmp_path, "refuse", rank=0).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (FailureKind.ILLEGAL, 0)
    assert pool.pids == []


def test_drifting_memory_recycles_the_ranks(pool: RankPool, tmp_path: Path) -> None:
    assert send(pool, tmp_path / "first", "nothing").failure is None
    assert send(pool, tmp_path / "little", "leak", bytes=1 << 20).failure is None
    assert len(pool.pids) == 2
    gathered = send(pool, tmp_path / "much", "leak", rank=1, bytes=128 << 20)
    assert gathered.failure is None
    assert pool.pids == []


def test_start_ends_at_its_deadline(tmp_path: Path) -> None:
    pool = RankPool(cpu_cluster(1), 1)
    failure = pool.form(deadline=time.monotonic() + 0.05, log_dir=tmp_path).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.HANG, "rank 0 did not answer at the deadline")
    assert pool.pids == []
    pool.close()


def test_missing_torch_is_nothing_to_measure_with(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    placement = Placement(environment={"PYTHONPATH": str(tmp_path)})
    pool = RankPool(cpu_cluster(1), 1, placements=[placement])
    failure = pool.form(deadline=time.monotonic() + AMPLE_S, log_dir=tmp_path).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.UNAVAILABLE, "ranks need torch: no torch here")
    pool.close()


def test_one_placement_a_rank() -> None:
    with pytest.raises(InputError, match="one for each of the 2 ranks"):
        RankPool(cpu_cluster(2), 2, placements=[Placement()])


def test_ranks_get_what_libraries_read_and_nothing_of_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = (
        "AUTOTUNE_DB", "AUTOTUNE_BROKER", "AUTOTUNE_API_KEY", "AUTOTUNE_DB_FILE", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN", "HTTPS_PROXY", "NCCL_AUTH_TOKEN", "UNHEARD_OF",
    )  # fmt: skip
    wanted = ("NCCL_IB_HCA", "UCX_TLS", "FI_PROVIDER", "LC_TIME", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR")
    for name in (*secrets, *wanted):
        monkeypatch.setenv(name, "a value")
    pool = RankPool(cpu_cluster(1), 1)
    try:
        gathered = pool.form(deadline=time.monotonic() + AMPLE_S, log_dir=tmp_path)
        assert gathered.failure is None, gathered.failure
        environment = psutil.Process(pool.pids[0]).environ()
    finally:
        pool.close()
    assert set(secrets).isdisjoint(environment)
    assert {name: environment.get(name) for name in wanted} == dict.fromkeys(wanted, "a value")
    assert {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"} <= set(environment)
