"""`autotune tune` in a process of its own, on real ranks: interrupted, killed, and brought to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from autotune.specs import FailureKind, Trial, TrialState
from probes.discover import discover
from storage import open_store

SPACE = ("--tp", "1", "--pp", "1", "--micro-batch", "4,8", "--recompute", "none", "--zero-stage", "0,1,2")
WORKLOAD = ("--model", "tiny", "--seq-len", "32", "--global-batch", "16")
# Ctrl-C reaches it also where whoever started the tests has SIGINT ignored, as a shell does in the background.
PROGRAM = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from autotune.cli.main import main; main()"
AUTOTUNE = (sys.executable, "-c", PROGRAM)
WITHIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A folder with a database and a cluster file of two ranks."""

    folder: Path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'a.db'}"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"AUTOTUNE_DB": self.url, "AUTOTUNE_LOG_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*AUTOTUNE, "tune", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def trials(self) -> list[Trial]:
        with open_store(self.url, read_only=True) as store:
            return [trial for tuning in store.tunings() for trial in store.trials(tuning.id)]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "pair.yaml").write_text(discover(2, 2**29).to_yaml())
    return Home(folder=tmp_path)


@pytest.fixture
def tuning(home: Home) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `autotune tune ARGUMENTS...`; none outlives the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        running.append(home.start(*arguments))
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def running_trial(home: Home, process: subprocess.Popen[str], number: int) -> Trial:
    """A trial of at least that number, which a tuning is in the middle of."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        for trial in home.trials():
            if trial.state is TrialState.RUNNING and trial.number >= number:
                return trial
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)  # the ranks need the cores


def assert_gone(ranks: list[psutil.Process]) -> None:
    """No rank outlives its tuning."""
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []


def resume(home: Home, tuning_id: str) -> dict[str, object]:
    process = home.start("--resume", tuning_id, "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    answer: dict[str, object] = json.loads(out)
    return answer


def assert_finished(answer: dict[str, object], tuning_id: str) -> list[dict[str, object]]:
    """The object that others script against; returns its trials."""
    best, trials = answer["best"], answer["trials"]
    assert isinstance(best, dict)
    assert isinstance(trials, list)
    assert (answer["tuning"], answer["state"]) == (tuning_id, "done")
    complete = [trial for trial in trials if trial["state"] == "complete"]
    assert best["plan"] in [trial["plan"] for trial in complete]
    assert best["interval"][0] <= best["tokens_per_s_per_gpu"] <= best["interval"][1]
    assert best["mu"] == pytest.approx(best["t_comm_s"] / best["t_calc_s"], rel=0.5)
    assert best["repeats"] >= 1
    assert 0 <= best["t_comm_exposed_s"] <= best["t_comm_s"]
    assert best["peak_memory_bytes"] > 0
    spent = answer["gpu_s_spent"]
    assert isinstance(spent, float)
    assert spent >= sum(trial["gpu_s"] for trial in trials) > 0
    return trials


def test_a_tuning_is_killed_and_interrupted_and_comes_to_its_end(
    home: Home, tuning: Callable[..., subprocess.Popen[str]]
) -> None:
    killed = tuning(*WORKLOAD, "--cluster", "pair.yaml", "--max-trials", "4", *SPACE)
    assert killed.stderr is not None
    tuning_id = killed.stderr.readline().split()[1].rstrip(":")
    cut = running_trial(home, killed, 1)
    ranks = psutil.Process(killed.pid).children(recursive=True)
    assert len(ranks) >= 2
    killed.kill()
    killed.wait()
    assert_gone(ranks)

    interrupted = tuning("--resume", tuning_id)
    running_trial(home, interrupted, cut.number + 1)
    ranks = psutil.Process(interrupted.pid).children(recursive=True)
    assert len(ranks) >= 2
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130
    assert f"autotune tune --resume {tuning_id}" in err
    assert "Traceback" not in err
    assert_gone(ranks)

    first = home.trials()[0]
    trials = assert_finished(resume(home, tuning_id), tuning_id)
    assert trials[0]["tokens_per_s_per_gpu"] == (first.reading and first.reading.tokens_per_s_per_gpu)
    lost = trials[cut.number]
    assert (lost["state"], lost["plan"]) == ("failed", cut.plan.to_data())
    assert isinstance(lost["failure"], dict)
    assert lost["failure"]["kind"] == FailureKind.LOST
    again = resume(home, tuning_id)
    assert assert_finished(again, tuning_id) == trials  # a tuning that has ended is only told once more
