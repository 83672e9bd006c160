"""The backtest itself: every group replayed and judged, and the report of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from autotune.backtest.groups import Group
from autotune.backtest.metrics import Accuracy, Walk, accuracy_of
from autotune.backtest.replay import Replay, teachers, transfers_of
from autotune.backtest.runs import RunStatus, Skipped
from autotune.errors import InputError
from autotune.search.residual import EVERYTHING, Learning
from autotune.search.sampler import SamplerName
from autotune.search.transfer import merged

WITHOUT_CHANCE = frozenset({SamplerName.PLAN, SamplerName.RULE, SamplerName.GRID})
"""Samplers that a seed does not change: repeating them would show the same again."""

_BADNESS = (RunStatus.OK, RunStatus.FAIL, RunStatus.OOM)

Progress = Callable[[int, int, str], None]
"""(groups done, groups, the next one's name)"""


class Calibration(StrEnum):
    """What a search and its estimates may learn from, beside the group's collective readings.

    none: nothing. told: results that the search asked for. history: those, and all runs of other groups.
    """

    NONE = "none"
    TOLD = "told"
    HISTORY = "history"


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestSettings:
    """How to backtest.

    Args:
        sampler: chooses the trials.
        calibration: what may be learned.
        told_trials: the estimate is judged after this many trials.
        max_trials: trials a search has at most; None for all plans of the group.
        repeat: searches a group, each with its own seed; means are reported.
        seed: of the first.
        train_gpus: with history: learn from groups of the same model and kind of cluster at or under this many GPUs,
            and judge the larger ones only.
        learning: the parts of our search, and of the estimate that is judged, that learn.
        told: whether the search is told which framework made the runs.
        read: whether it gets the collective readings.
    """

    sampler: SamplerName = SamplerName.PLAN
    calibration: Calibration = Calibration.TOLD
    told_trials: int = 3
    max_trials: int | None = None
    repeat: int = 1
    seed: int = 0
    train_gpus: int | None = None
    learning: Learning = EVERYTHING
    told: bool = True
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """A group's walks, one a repeat, and the accuracy by mode, means over repeats.

    `modes` always has none and told, and history where it was asked for. `lessons` counts plans of other groups.
    """

    group: Group
    walks: tuple[Walk, ...]
    modes: dict[Calibration, Accuracy]
    transfers: int


def backtest(
    groups: Sequence[Group], settings: BacktestSettings, on_progress: Progress | None = None
) -> list[GroupReport]:
    """Replays every group that is to be judged.

    Raises:
        InputError: no group is left to judge.
    """
    with_history = settings.calibration is Calibration.HISTORY
    limit = settings.train_gpus if with_history else None
    judged = [group for group in groups if limit is None or group.cluster.devices > limit]
    if not judged:
        raise InputError("groups", 0, "at least one group is needed that the options do not leave out")
    known = {id(group): transfers_of(group) for group in groups} if with_history else {}
    reports = []
    for done, group in enumerate(judged):
        if on_progress:
            on_progress(done, len(judged), group.name)
        taught = teachers(group, groups, limit) if with_history else []
        transfers = merged(transfer for other in taught for transfer in known[id(other)])
        reports.append(
            _judge(
                Replay(group, transfers, settings.learning, told=settings.told, read=settings.read),
                settings,
                len(transfers),
            )
        )
    return reports


def _judge(replay: Replay, settings: BacktestSettings, transfers: int) -> GroupReport:
    repeats = 1 if settings.sampler in WITHOUT_CHANCE else settings.repeat
    tell = settings.calibration is not Calibration.NONE
    runs = [
        replay.run(
            settings.sampler, seed=settings.seed + i, most=settings.max_trials, least=settings.told_trials, tell=tell
        )
        for i in range(repeats)
    ]
    told = [run.asked[: settings.told_trials] for run in runs]

    def mean(taught: bool) -> Accuracy:
        found = (accuracy_of(replay.group, replay.forecast(asked, taught=taught)) for asked in told)
        return Accuracy(**_means([asdict(item) for item in found]))

    modes = {Calibration.NONE: accuracy_of(replay.group, replay.forecast((), taught=False))}
    modes[Calibration.TOLD] = mean(taught=False)
    if settings.calibration is Calibration.HISTORY:
        modes[Calibration.HISTORY] = mean(taught=True)
    return GroupReport(group=replay.group, walks=tuple(run.walk for run in runs), modes=modes, transfers=transfers)


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over the rows that have one; None where none has."""
    found = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
    return {name: float(np.mean(values)) if values else None for name, values in found.items()}


def report_data(
    reports: Sequence[GroupReport], skipped: Sequence[Skipped], settings: BacktestSettings
) -> dict[str, Any]:
    """The report as plain data: groups, their summary, the summary by mode, what was skipped, and the settings."""
    rows = [_row(report, settings.calibration) for report in reports]
    modes = [mode for mode in Calibration if mode in reports[0].modes]
    # Of first_status the share of groups where it is ok.
    numbers = [{**row, "first_status": float(row["first_status"] == RunStatus.OK.value)} for row in rows]
    named = {"group", "source"}
    return {
        "groups": rows,
        "summary": _means([{key: value for key, value in row.items() if key not in named} for row in numbers]),
        "modes": {mode.value: _means([asdict(report.modes[mode]) for report in reports]) for mode in modes},
        "skipped": [asdict(item) for item in skipped],
        "settings": {**asdict(settings), "judged_groups": len(rows)},
    }


def _row(report: GroupReport, mode: Calibration) -> dict[str, Any]:
    walks = [asdict(walk) for walk in report.walks]
    worst = max((walk.first_status for walk in report.walks), key=_BADNESS.index)
    figures = _means([{key: value for key, value in walk.items() if key != "first_status"} for walk in walks])
    return {
        "group": report.group.name,
        "plans": len(report.group.outcomes),
        "ok": report.group.ok,
        **{name: figures[name] for name in ("trials_to_95", "trials_to_98", "first_pick")},
        "first_status": worst.value,
        **asdict(report.modes[mode]),
        "oom_trials": figures["oom_trials"],
        "source": report.group.source,
        "gpus": report.group.cluster.devices,
        "lessons": report.transfers,
    }
