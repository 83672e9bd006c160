"""Each figure of a backtest against a value worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from runs_file import CsvRow, failed, four, group_of, row

from autotune.backtest.groups import Group
from autotune.backtest.metrics import Accuracy, Forecast, accuracy_of, walk_of
from autotune.backtest.runs import RunStatus

GIB = 2**30


def judged(
    group: Group,
    speeds: Sequence[float],
    fits: Sequence[bool],
    peaks_gib: Sequence[float] = (),
    told: Sequence[int] = (),
) -> Accuracy:
    peaks = np.array(peaks_gib or [1.0] * len(speeds)) * GIB
    known = np.isin(np.arange(len(speeds)), told)
    return accuracy_of(
        group,
        Forecast(
            tokens_per_s_per_gpu=np.array(speeds, float),
            log_sd=np.full(len(speeds), 0.45),
            peak_bytes=peaks,
            fits=np.array(fits),
            safe=np.array(fits),
            told=known,
        ),
    )


@pytest.mark.parametrize(
    ("asked", "to_95", "to_98", "first_pick", "status", "oom"),
    [
        ([0, 1, 2], 2, 3, 0.7, RunStatus.OK, 0.0),
        ([2], 1, 1, 1.0, RunStatus.OK, 0.0),
        ([3, 0, 1, 2], 3, 4, 0.0, RunStatus.OOM, 0.25),
        ([0, 3], 5, 5, 0.7, RunStatus.OK, 0.5),
    ],
)
def test_a_walk_counts_every_ask(  # 7000, 9700, 10000 (the best), out of memory
    tmp_path: Path, asked: list[int], to_95: int, to_98: int, first_pick: float, status: RunStatus, oom: float
) -> None:
    walk = walk_of(group_of(tmp_path, *four()), asked, most=4)
    assert (walk.trials_to_95, walk.trials_to_98) == (to_95, to_98)
    assert (walk.first_pick, walk.first_status, walk.oom_trials) == (pytest.approx(first_pick), status, oom)


def test_a_perfect_forecast_has_no_error(tmp_path: Path) -> None:
    rows = [{**csv_row, "peak_mem_gb": "10"} if csv_row["status"] == "ok" else csv_row for csv_row in four()]
    found = judged(group_of(tmp_path, *rows), [7000, 9700, 10000, 12000], [True, True, True, False], [10, 10, 10, 90])
    assert found == Accuracy(
        regret_top1=0.0, regret_top3=0.0, kendall=1.0, mape=0.0, coverage=1.0, mem_mape=0.0, oom_recall=1.0,
        oom_false_alarm=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speeds", "fits", "top1", "top3"),
    [
        ([3, 2, 1, 0], [1, 1, 1, 1], 0.3, 0.0),
        ([3, 2, 1, 0], [0, 1, 1, 1], 0.03, 0.0),
        ([3, 2, 0, 1], [1, 1, 1, 1], 0.3, 0.03),  # the third is the one that runs out of memory
        ([1, 1, 1, 4], [1, 1, 0, 1], 1.0, 0.03),
        ([1, 2, 3, 4], [0, 0, 0, 0], 1.0, 0.0),  # nothing is believed to fit: all count
        ([1, 2, 3, 4], [0, 0, 0, 1], 1.0, 1.0),
    ],
)
def test_regret_is_what_the_first_ranked_lose(
    tmp_path: Path, speeds: list[float], fits: list[bool], top1: float, top3: float
) -> None:
    found = judged(group_of(tmp_path, *four()), np.array(speeds) + 1.0, np.array(fits, bool))
    assert (found.regret_top1, found.regret_top3) == (pytest.approx(top1), pytest.approx(top3))


def test_errors_are_of_the_ok_plans(tmp_path: Path) -> None:
    # Step times predicted twice, half and once as long: |2-1|, |0.5-1|, 0. The failed plan has none.
    found = judged(group_of(tmp_path, *four()), [3500, 19400, 10000, 1], [True] * 4)
    assert found.mape == pytest.approx(0.5)
    # ln 2 = 0.693 is within 1.645 standard deviations of 0.45, which are 0.740.
    assert found.coverage == 1.0
    far = judged(group_of(tmp_path, *four()), [3300, 19400, 10000, 1], [True] * 4)  # ln(7000 / 3300) = 0.752
    assert far.coverage == pytest.approx(2 / 3)
    # Of the pairs (7000, 9700), (7000, 10000), (9700, 10000) the last is in the wrong order.
    assert found.kendall == pytest.approx(1 / 3)


def test_kendall_counts_ties_as_tau_b_does(tmp_path: Path) -> None:
    # Concordant 2, discordant 0, of 3 pairs one tied in the forecast: 2 / sqrt(2 * 3).
    found = judged(group_of(tmp_path, *four()), [5, 6, 6, 1], [True] * 4)
    assert found.kendall == pytest.approx(2 / 6**0.5)


def test_memory_is_judged_where_the_reserved_peak_is_known(tmp_path: Path) -> None:
    rows: list[CsvRow] = [
        row(micro_batch=1, peak_mem_gb=10), row(micro_batch=2, peak_mem_gb=40), row(micro_batch=4, mem_alloc_gb=9),
        failed("oom", micro_batch=8), failed("oom", micro_batch=2, zero_stage=1), failed("fail", zero_stage=1),
    ]  # fmt: skip
    group = group_of(tmp_path, *rows)
    assert [item.plan.key for item in group.outcomes] == [
        "tp1.pp1.dp8.mb1.zero0", "tp1.pp1.dp8.mb1.zero1", "tp1.pp1.dp8.mb2.zero0", "tp1.pp1.dp8.mb2.zero1",
        "tp1.pp1.dp8.mb4.zero0", "tp1.pp1.dp8.mb8.zero0",
    ]  # fmt: skip
    found = judged(group, [5] * 6, [True, False, False, False, True, True], [12, 1, 44, 1, 77, 1])
    assert found.mem_mape == pytest.approx((0.2 + 0.1) / 2)
    assert found.oom_recall == 0.5
    assert found.oom_false_alarm == pytest.approx(1 / 3)


def test_what_a_group_cannot_judge_is_none(tmp_path: Path) -> None:
    found = judged(group_of(tmp_path, row()), [7000], [True])
    assert (found.kendall, found.mem_mape, found.oom_recall) == (None, None, None)


def test_what_was_told_is_no_error_but_may_be_picked(tmp_path: Path) -> None:
    rows = [{**csv_row, "peak_mem_gb": "10"} if csv_row["status"] == "ok" else csv_row for csv_row in four()]
    group = group_of(tmp_path, *rows)
    found = judged(group, [700, 9700, 20000, 1], [True, True, False, True], [99, 10, 12, 99], told=[0, 3])
    assert (found.mape, found.mem_mape) == (pytest.approx(0.25), pytest.approx(0.1))
    assert (found.oom_recall, found.oom_false_alarm) == (None, 0.5)
    assert found.kendall == 1.0
    assert judged(group, [9, 1, 1, 2], [True] * 4, told=[0, 3]).regret_top1 == pytest.approx(0.3)
    # The fastest forecast is of a plan that is known to run out of memory: no user would take it.
    assert judged(group, [1, 2, 3, 9], [True] * 4, told=[3]).regret_top1 == 0.0
    everything = judged(group, [7000, 9700, 10000, 1], [True] * 4, told=[0, 1, 2, 3])
    assert (everything.mape, everything.kendall, everything.regret_top1) == (None, None, 0.0)
