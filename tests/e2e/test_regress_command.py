"""`autotune regress run` on real ranks of this machine."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from commands import Command

from autotune.catalog import smallest
from autotune.specs import BestEntry, ClusterSpec, DType, Plan, Workload
from autotune.specs.regression import CheckRole
from storage import open_store

CLUSTER = ClusterSpec.from_data(
    {
        "name": "here", "nodes": 1, "gpus_per_node": 2, "intra": {"name": "loopback"},
        "device": {"name": "cpu-rank", "kind": "cpu", "memory_bytes": 1 << 30},
    }
)  # fmt: skip


def known(url: str) -> int:
    """An entry of two CPU ranks, as a tuning would have left it, so slow that few steps are timed; its number."""
    with open_store(url) as store:
        entry = BestEntry(
            model=smallest(), parameters=1e6, cluster=CLUSTER, plan=Plan(dp=2), tokens_per_s_per_gpu=40.0,
            workload=Workload(seq_len=32, global_batch=4, dtype=DType.FP32), interval=(36.0, 44.0), repeats=3,
            peak_bytes=None, measured_at=datetime.now(UTC),
        )  # fmt: skip
        return store.put_best(entry).id


@pytest.mark.slow
def test_a_plan_is_checked_twice(autotune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With budgets for one window each: the second one cannot raise an alarm, whatever this machine does meanwhile."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    url = f"sqlite:///{tmp_path / 'a.db'}"
    entry = known(url)
    asked = ("regress", "run", "--entry", entry, "--budget-gpu-s", 1, "--no-retune", "--db", url, "--json")
    (first,) = autotune(*asked).data["checks"]
    assert first["result"]["verdict"] == "baseline"
    assert first["result"]["windows"] == 1
    done = autotune(*asked)
    assert done.status == 0
    (second,) = done.data["checks"]
    assert second["result"]["verdict"] in {"unchanged", "cannot_tell"}
    assert second["result"]["baseline_windows"] == 1
    with open_store(url) as store:
        measured = store.measurements(second["id"])
        assert {item.role for item in measured} == {CheckRole.WINNER, CheckRole.LINK_INSIDE, CheckRole.KERNELS}
        assert all(item.speed for item in measured)
        traces = [item.trace for item in measured if item.role is CheckRole.WINNER]
        assert all(trace is not None and len(trace.ranks) == 2 and trace.calc_s > 0 for trace in traces)
        assert second["gpu_s"] == pytest.approx(sum(item.gpu_s for item in measured))
        key = store.check(second["id"]).fingerprint_key
        assert store.collective_readings(CLUSTER.key, key)  # what controls measure is kept as any measurement is
