"""`autotune tune --command` with the plain example: a tuning whose trials run it, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from commands import Command

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain" / "plain.yaml"
CLUSTER = """
name: two-ranks
nodes: 1
gpus_per_node: 2
node_cores: 2
device: {name: cpu-rank, kind: cpu, memory_bytes: 2147483648}
intra: {name: loopback}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_plain_script_is_tuned(cluster: str, autotune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = autotune(
        "tune", "--command", str(EXAMPLE), "--cluster", cluster, "--seq-len", "32", "--micro-batch", "4,8",
        "--zero-stage", "0", "--schedule", "1f1b", "--max-trials", "4", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    plans = {(trial["plan"]["pp"], trial["plan"]["micro_batch"]): trial["state"] for trial in done.data["trials"]}
    assert len(plans) >= 3
    assert {"complete", "pruned"} >= set(plans.values())
    assert done.data["best"]["memory_source"] == "not told"
    assert done.data["best"]["peak_memory_bytes"] is None
    assert done.data["request"]["workload"]["command"].startswith("plain@")


def test_what_the_program_cannot_run_is_refused_before_anything_is_started(cluster: str, autotune: Command) -> None:
    refused = {
        ("--tp", "2"): "command plain can run 1",
        ("--dtype", "bf16"): "command plain always has fp32",
        ("--model", "tiny"): "command plain always trains plain-gpt",
        ("--framework", "megatron"): "with --command its file says that",
    }
    for options, complaint in refused.items():
        done = autotune("tune", "--command", str(EXAMPLE), "--cluster", cluster, *options)
        assert done.status == 2, done.err
        assert complaint in done.err
    done = autotune("tune", "--command", "no-such", "--cluster", cluster)
    assert (done.status, "known: none yet" in done.err) == (2, True)
