"""Whole backtests: nothing leaks, the report has its figures, and the published runs give the published ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs_file import failed, four, group_of, row, write
from store_records import CLUSTER, FINGERPRINT, WORKLOAD, step_reading, trial, tuning

from autotune.backtest.groups import Group, group_runs
from autotune.backtest.replay import Replay
from autotune.backtest.report import BacktestSettings, Calibration, backtest, report_data
from autotune.backtest.runs import read_runs
from autotune.catalog.published import published_cluster
from autotune.cli.main import main
from autotune.errors import InputError
from autotune.search.sampler import SamplerName
from autotune.specs import ClusterSpec
from storage import SqlStore, open_store
from storage.frames import export

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "runs.csv"
TOKENS_PER_S = WORKLOAD.tokens_per_step / (step_reading().step_time_s * CLUSTER.devices)
KEYS = [
    "group", "plans", "ok", "trials_to_95", "trials_to_98", "first_pick", "first_status", "regret_top1",
    "regret_top3", "kendall", "mape", "coverage", "mem_mape", "oom_recall", "oom_false_alarm",
]  # fmt: skip


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Exit status, the JSON object and what standard error says."""
    with pytest.raises(SystemExit) as ended:
        main(["backtest", *arguments, "--json"])
    printed = capsys.readouterr()
    return int(str(ended.value.code)), json.loads(printed.out), printed.err


def grid(folder: Path) -> Group:
    """Twelve plans of tp and micro-batch, the fastest in the middle."""
    rows = [
        row(tp=tp, dp=8 // tp, micro_batch=2**b, tokens_per_s_per_gpu=9000 - 900 * abs(tp - 2) - 700 * abs(b - 1))
        for tp in (1, 2, 4)
        for b in range(4)
    ]
    return group_of(folder, *rows)


@pytest.mark.parametrize("sampler", [SamplerName.PLAN, SamplerName.TPE])
def test_what_was_not_asked_for_cannot_change_the_search(tmp_path: Path, sampler: SamplerName) -> None:
    group = grid(tmp_path)
    asked = Replay(group).run(sampler, seed=0, most=5, least=5).asked
    assert len(asked) == len(set(asked)) == 5
    hidden = tuple(
        item if i in asked else replace(item, tokens_per_s_per_gpu=item.tokens_per_s_per_gpu * 0.9)
        for i, item in enumerate(group.outcomes)
    )
    assert Replay(replace(group, outcomes=hidden)).run(sampler, seed=0, most=5, least=5).asked == asked


def test_what_was_told_is_all_that_a_forecast_knows(tmp_path: Path) -> None:
    group = grid(tmp_path)
    outcomes = tuple(
        replace(item, tokens_per_s_per_gpu=item.tokens_per_s_per_gpu / (1 if i in (1, 6) else 3))
        for i, item in enumerate(group.outcomes)
    )
    prior, told, other = (
        Replay(found).forecast(asked, taught=False)
        for found, asked in ((group, ()), (group, (1, 6)), (replace(group, outcomes=outcomes), (1, 6)))
    )
    assert told.tokens_per_s_per_gpu.tolist() == other.tokens_per_s_per_gpu.tolist()
    assert (told.tokens_per_s_per_gpu != prior.tokens_per_s_per_gpu).all()
    assert np.flatnonzero(told.told).tolist() == [1, 6]


def test_the_order_of_the_file_does_not_matter(tmp_path: Path) -> None:
    rows = [*four(), *four(tp=2, dp=4), *four(tp=4, dp=2)]
    settings = BacktestSettings()
    reports = [
        report_data(backtest([group_of(tmp_path, *found)], settings), [], settings) for found in (rows, rows[::-1])
    ]
    assert reports[0] == reports[1]


def test_without_calibration_the_search_follows_its_prior(tmp_path: Path) -> None:
    replay = Replay(grid(tmp_path))
    prior = replay.forecast((), taught=False).tokens_per_s_per_gpu
    asked = replay.run(SamplerName.PLAN, seed=0, most=None, least=12, tell=False).asked
    assert list(asked) == sorted(range(12), key=lambda i: -prior[i])


def test_the_report_has_the_named_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.csv", [*four(), *four(group="h"), row(group="bad", gpu="H900")])
    code, data, errors = command(capsys, str(path), "--skip-bad")
    assert (code, errors) == (0, "")
    assert [list(group)[:15] for group in data["groups"]] == [KEYS, KEYS]
    assert [group["group"] for group in data["groups"]] == ["g", "h"]
    assert (data["groups"][0]["plans"], data["groups"][0]["ok"]) == (4, 3)
    assert set(KEYS[1:]) <= set(data["summary"])
    assert list(data["modes"]) == ["none", "told"]
    assert [item["where"] for item in data["skipped"]] == [f"{path}, row 10"]
    for key in KEYS[1:6]:
        assert data["summary"][key] == pytest.approx(sum(group[key] for group in data["groups"]) / 2)


def test_bad_input_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.csv", [row(), row(tp=3)])
    code, data, errors = command(capsys, str(path))
    assert (code, data["error"]["what"]) == (2, f"{path}, row 3, column num_gpus")
    assert len(errors.splitlines()) == 1
    for option in (("--sampler", "best"), ("--calibration", "much"), ("--group", "h"), ("--min-ok", "9")):
        code, data, _ = command(capsys, str(path), "--skip-bad", *option)
        assert (code, "error" in data) == (2, True)


def test_a_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["backtest", str(write(tmp_path / "a.csv", four())), "--sampler", "rule"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "mean of 1" in printed
    assert "out of" not in printed


def test_parts_of_the_learning_are_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(tp=tp, dp=8 // tp, micro_batch=b, tokens_per_s_per_gpu=9000 // tp) for tp in (1, 2, 4) for b in (1, 2, 4)
    ]
    path = str(write(tmp_path / "a.csv", [*rows, failed("oom", micro_batch=8)]))
    _, full, _ = command(capsys, path)
    code, bare, _ = command(capsys, path, "--without", "residual", "--without", "calibration", "--without", "p-fits")
    assert code == 0
    assert bare["settings"]["learning"] == {"calibration": False, "residual": False, "p_fits": False}
    assert bare["modes"]["none"]["mape"] == full["modes"]["none"]["mape"]
    assert full["summary"]["mape"] < bare["summary"]["mape"]
    assert command(capsys, path, "--without", "luck")[0] == 2
    with pytest.raises(SystemExit):
        main(["backtest", path, "--without", "p-fits"])
    assert "without p-fits" in capsys.readouterr().out


def test_a_seed_repeats_itself(tmp_path: Path) -> None:
    def report(seed: int, repeat: int) -> dict[str, Any]:
        settings = BacktestSettings(sampler=SamplerName.RANDOM, seed=seed, repeat=repeat)
        return report_data(backtest([grid(tmp_path)], settings), [], settings)["summary"]

    assert report(0, 4) == report(0, 4)
    assert report(0, 1) != report(1, 1)
    both = [report(seed, 1)["trials_to_95"] for seed in (0, 1)]
    assert report(0, 2)["trials_to_95"] == pytest.approx(sum(both) / 2)


def sizes(folder: Path) -> list[Group]:
    """One model on 8, 16 and 32 GPUs, and another model on 8: all plans are about a third as fast as estimated."""
    rows = []
    for gpus, shape in ((8, {}), (16, {}), (32, {}), (8, {"layers": "6", "params_b": "0.08"})):
        for micro_batch, speed in ((1, 12_000), (2, 24_000), (4, 40_000)):
            for zero in (0, 1):
                csv_row = {"num_gpus": gpus, "dp": gpus, "global_batch": 128, "micro_batch": micro_batch, **shape}
                name = f"{gpus} {shape.get('layers', '12')}"
                rows.append(row(group=name, zero_stage=zero, tokens_per_s_per_gpu=speed, **csv_row))
    runs, _ = read_runs(write(folder / "sizes.csv", rows), published_cluster)
    return group_runs(runs)[0]


def test_history_comes_from_small_clusters_of_the_same_model(tmp_path: Path) -> None:
    groups = sizes(tmp_path)
    settings = BacktestSettings(calibration=Calibration.HISTORY, train_gpus=16, told_trials=0)
    reports = backtest(groups, settings)
    assert [(report.group.name, report.transfers) for report in reports] == [("32 12", 12)]
    modes = reports[0].modes
    # The transfer is the same factor everywhere, so most of it carries over.
    assert modes[Calibration.HISTORY].mape < 0.5 * modes[Calibration.NONE].mape
    every = backtest(groups, BacktestSettings(calibration=Calibration.HISTORY))
    assert [report.transfers for report in every] == [18, 12, 12, 18]  # a plan that two groups have is one transfer


def test_larger_groups_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one group"):
        backtest(sizes(tmp_path), BacktestSettings(calibration=Calibration.HISTORY, train_gpus=32))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as opened:
        opened.create_tuning(tuning())
        key = opened.put_fingerprint(FINGERPRINT)
        for number in range(2):
            opened.start_trial(trial(number))
            opened.finish_trial(
                f"tuning-1-{number}",
                reading=step_reading(TOKENS_PER_S),
                failure=None,
                outcome_gpu_s=1.0,
                setup_s=0.5,
                fingerprint_key=key,
            )
        yield opened


def test_exported_runs_can_be_replayed(store: SqlStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = export(store, "runs", "csv", tmp_path / "runs.csv")
    speeds = {"peak_flops_per_s": {"bf16": 3e14}, "memory_bytes_per_s": 2e12}
    known = {"device": {**CLUSTER.device.to_data(), **speeds}, "inter": {"name": "ib", "bytes_per_s": 25e9}}
    (tmp_path / "cluster.yaml").write_text(ClusterSpec.from_data({**CLUSTER.to_data(), **known}).to_yaml())
    code, data, errors = command(capsys, str(path), "--cluster", str(tmp_path / "cluster.yaml"))
    assert (code, errors) == (0, "")
    assert data["summary"]["first_pick"] == 1.0


@pytest.fixture(scope="module")
def published() -> list[Group]:
    runs, skipped = read_runs(SHARED, published_cluster, sources=["hf_ultrascale"])
    assert len(runs) == 767
    # A pipeline of 32 stages for 16 layers, which failed.
    assert [item.where.rpartition(", ")[2] for item in skipped] == ["row 768"]
    return group_runs(runs, min_ok=8)[0]


@pytest.mark.shared
def test_the_published_runs_are_read_whole() -> None:
    for source, rows, count in (("vtrain_single", 720, 72), ("vtrain_multi", 73, 2), ("llm_foundry", 109, 108)):
        runs, skipped = read_runs(SHARED, published_cluster, sources=[source])
        assert (len(runs), skipped) == (rows, [])
        assert len({run.group for run in runs}) == count


@pytest.mark.shared
@pytest.mark.parametrize(
    ("sampler", "repeat", "trials", "tolerance"),
    # Published for these groups: random 15.2, the rule 7.0.
    [(SamplerName.RANDOM, 15, 15.2, 1.5), (SamplerName.RULE, 1, 7.0, 0.7)],
)
def test_the_published_references_are_reached(
    published: list[Group], sampler: SamplerName, repeat: int, trials: float, tolerance: float
) -> None:
    settings = BacktestSettings(sampler=sampler, repeat=repeat, told_trials=0)
    data = report_data(backtest(published, settings), [], settings)
    assert data["settings"]["judged_groups"] == 18
    assert data["summary"]["trials_to_95"] == pytest.approx(trials, abs=tolerance)
