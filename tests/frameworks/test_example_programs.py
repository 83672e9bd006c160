"""Tunings whose trials run the examples: whole frameworks on CPU ranks. FRAMEWORKS names the folder of environments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Command

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(3600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLUSTER = """
name: two-ranks
nodes: 1
gpus_per_node: 2
node_cores: 2
device: {name: cpu-rank, kind: cpu, memory_bytes: 4294967296}
intra: {name: loopback}
"""


@dataclass(frozen=True, slots=True)
class Example:
    """A command, the environment of its framework, and plans that it is to be measured under."""

    command: str
    environment: str
    plans: tuple[str, ...]
    more: tuple[str, ...] = ()


RUNS = {
    "hf": Example("hf/hf.yaml", "programs", ("micro_batch=4", "micro_batch=2,recompute=full")),
    "deepspeed": Example(
        "deepspeed/deepspeed.yaml",
        "programs",
        (
            "micro_batch=4",
            "micro_batch=4,zero_stage=1",
            "micro_batch=4,zero_stage=2",
            "micro_batch=4,zero_stage=3",
            "tp=2,micro_batch=4",
            "pp=2,micro_batch=4",
        ),
    ),
    "mcore": Example(
        "mcore/mcore.yaml",
        "programs",
        (
            "tp=2,micro_batch=4",
            "pp=2,micro_batch=4",
            "pp=2,vpp=2,micro_batch=4",
            "micro_batch=4,zero_stage=1",
        ),
        ("--model", "tiny"),
    ),
    "titan": Example(
        "titan/titan.yaml",
        "torchtitan-0.2",
        (
            "micro_batch=4",
            "micro_batch=4,zero_stage=3",
            "tp=2,sequence_parallel=true,micro_batch=4",
            "pp=2,micro_batch=4",
        ),
    ),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def use(monkeypatch: pytest.MonkeyPatch, environment: str) -> None:
    """Makes `python` the interpreter of that environment."""
    folder = os.environ.get("FRAMEWORKS")
    if folder is None:
        pytest.skip("FRAMEWORKS is not set: make test-frameworks")
    monkeypatch.setenv("PATH", f"{folder}/{environment}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)


@pytest.mark.parametrize("name", RUNS)
def test_plans_of_a_framework_are_measured(
    name: str, cluster: Path, autotune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS[name]
    use(monkeypatch, run.environment)
    failed = {}
    for plan in run.plans:
        done = autotune(
            "probe", "step", "--command", str(EXAMPLES / run.command), "--cluster", str(cluster), "--plan", plan,
            "--deadline-s", "1200", "--json", *run.more,
        )  # fmt: skip
        if done.status:
            failed[plan] = done.out + done.err
    assert failed == {}


@pytest.mark.parametrize("name", RUNS)
def test_a_tuning_of_a_framework(name: str, cluster: Path, autotune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS[name]
    use(monkeypatch, run.environment)
    done = autotune(
        "tune", "--command", str(EXAMPLES / run.command), "--cluster", str(cluster), "--max-trials", "8", "--json",
        *run.more,
    )  # fmt: skip
    assert done.status == 0, done.err
    assert done.data["state"] == "done"
    assert done.data["best"]["tokens_per_s_per_gpu"] > 0
    assert sum(trial["state"] == "complete" for trial in done.data["trials"]) >= 3
