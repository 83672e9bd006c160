"""`autotune probe` on real ranks of this machine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from commands import Command

from autotune.specs import Fingerprint
from storage import open_store

PROBED = ("--cluster", "pair.yaml", "--db", "sqlite:///a.db", "--json")


@pytest.fixture
def pair(autotune: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, beside a file that describes two ranks on this machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert autotune("cluster", "discover", "--ranks", "2", "--memory-gib", "0.5", "--out", "pair.yaml").status == 0
    return autotune


def test_collective(pair: Command, tmp_path: Path) -> None:
    done = pair("probe", "collective", "--op", "all_reduce", "--sizes", "64KiB,1MiB", "--iterations", "3", *PROBED)
    assert done.status == 0
    (probe,) = done.data["probes"]
    assert [each["size_bytes"] for each in probe["readings"]] == [65536, 1048576]
    for each in probe["readings"]:
        assert each["algbw_bytes_per_s"] == pytest.approx(each["size_bytes"] / each["time_s"])
        assert each["busbw_bytes_per_s"] == pytest.approx(each["algbw_bytes_per_s"])  # 2(n-1)/n is 1 for n = 2
    with open_store(f"sqlite:///{tmp_path / 'a.db'}", read_only=True) as store:
        (cluster,) = store.clusters()
        assert len(store.collective_readings(cluster.key, Fingerprint.from_data(done.data["fingerprint"]).key)) == 2


def test_layer(pair: Command) -> None:
    done = pair("probe", "layer", "--tp", "2", "--seq-len", "32", "--iterations", "2", *PROBED)
    assert done.status == 0
    readings = [reading for probe in done.data["probes"] for reading in probe["readings"]]
    assert [reading["part"] for reading in readings] == ["layer", "embedding", "head"]
    assert all(reading["forward_s"] > 0 and reading["backward_s"] > 0 for reading in readings)


def test_step(pair: Command) -> None:
    request = ("--plan", "tp=2", "--seq-len", "32", "--global-batch", "4", "--max-steps", "3")
    done = pair("probe", "step", *request, *PROBED)
    assert done.status == 0
    (reading,) = done.data["probes"][0]["readings"]
    assert reading["tokens_per_s_per_gpu"] == pytest.approx(32 * 4 / reading["step_time_s"] / 2, rel=0.3)
    assert len(reading["ranks"]) == 2
    assert reading["losses"] == pytest.approx([math.log(2048)] * len(reading["losses"]), rel=0.05)  # tiny's vocabulary


def test_an_illegal_plan_is_refused_before_any_rank_starts(pair: Command) -> None:
    done = pair("probe", "step", "--plan", "tp=2,dp=2", *PROBED)
    assert done.status == 2
    assert "2" in done.data["error"]["message"]


def test_fingerprint(pair: Command) -> None:
    found = pair("probe", "fingerprint", *PROBED).data
    assert found["torch"]
    assert found["hostname"]
