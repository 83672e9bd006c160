"""`autotune probe check`: every probe on real ranks, estimates beside measurements."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commands import Command

AUTOTUNE = (sys.executable, "-c", "from autotune.cli.main import main; main()")


@pytest.mark.slow
def test_every_probe_runs_and_stands_beside_its_estimate(autotune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert autotune("cluster", "discover", "--ranks", "2", "--memory-gib", "0.5", "--out", "pair.yaml").status == 0
    done = autotune("probe", "check", "--cluster", "pair.yaml", "--seq-len", "32", "--global-batch", "4", "--json")
    assert done.status == 0
    assert done.data["ok"]
    kinds = {probe["request"]["kind"] for probe in done.data["probes"]}
    assert kinds == {"collective", "layer"}
    plans = [step["plan"] for step in done.data["steps"]]
    assert len({(plan["tp"], plan["pp"]) for plan in plans}) > 1
    for step in done.data["steps"]:
        assert step["measured"]["step_time_s"] > 0
        assert step["calibrated_estimate"]["basis"] == "profile"
        assert step["catalog_estimate"] is None  # no peak is known for a CPU


@pytest.mark.gpu
@pytest.mark.timeout(480)
def test_on_gpus_the_self_check_passes() -> None:
    run = subprocess.run([*AUTOTUNE, "probe", "check", "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
