"""What a person sees while a tuning runs: its events in words, progress and a leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from autotune.cli import output
from autotune.specs import EventKind, ProbeProgress, ProbeRequest, StepRequest, TrialState, Tuning, TuningEvent

LEADERBOARD_ROWS = 8

TOLD = frozenset({EventKind.STATE, EventKind.PROBE_ENDED, EventKind.TRIAL_ENDED})
"""Events that get a line where each follows at once from the one before: what is queued there, runs."""


class TuneView:
    """Shows a tuning of this machine: live on a terminal, a line an event elsewhere. Use as a context manager.

    Args:
        console: where to (standard error, so that standard output holds only the answer).
        tuning: what runs.
        live: redraw in place; else one line for each thing that ended.
    """

    def __init__(self, console: Console, tuning: Tuning, *, live: bool) -> None:
        self._console, self._tuning = console, tuning
        self._ended: list[dict[str, Any]] = []
        self._trial = ""
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self._now: TaskID = self._progress.add_task("starting ranks", total=None)
        self._live = Live(self._render(), console=console, refresh_per_second=4, transient=True) if live else None

    def __enter__(self) -> TuneView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def on_event(self, event: TuningEvent) -> None:
        """Shows one event."""
        if event.kind is EventKind.TRIAL_STARTED:
            self._trial = f"trial {event.data['number']} {event.data['plan_key']}"
        if event.kind is EventKind.TRIAL_ENDED:
            self._ended.append(event.data)
        if event.kind in TOLD:
            self._console.print(event_text(event), soft_wrap=True)
        self._redraw()

    def on_progress(self, request: ProbeRequest, progress: ProbeProgress) -> None:
        """Shows what is being measured, and how far it is."""
        what = self._trial if isinstance(request, StepRequest) else f"probe {probe_text(request.to_data())}"
        seconds = f" {output.seconds_text(progress.seconds)}" if progress.seconds is not None else ""
        description, total = f"{what} | {progress.phase}{seconds}", progress.total or None
        if progress.phase == "start":
            self._progress.reset(self._now, description=what, total=None)
        else:
            self._progress.update(self._now, description=description, completed=progress.done, total=total)
        self._redraw()

    def _redraw(self) -> None:
        if self._live:
            self._live.update(self._render())

    def _render(self) -> Group:
        title = f"Leaderboard of tuning {self._tuning.id}"
        return Group(self._progress, leaderboard(self._ended, title))


def event_text(event: TuningEvent) -> str:
    """One event in one line."""
    data = event.data
    match event.kind:
        case EventKind.STATE:
            return ": ".join(filter(None, (data["state"], data["stop_reason"] or data["message"])))
        case EventKind.TRIAL_STARTED:
            return f"trial {data['number']} {data['plan_key']} is queued"
        case EventKind.TRIAL_ENDED:
            return f"trial {data['number']} {data['plan_key']}: {_ended_text(data)}"
        case EventKind.PROBE_ENDED:
            return f"probe {probe_text(data['request'])}: {_failure_text(data) or 'ok'} ({data['wall_s']:.1f} s)"
        case EventKind.JOB_GRANTED:
            warm = ", warm" if data["warm"] else ""
            return f"{data['probe']} probe on {', '.join(data['nodes'])} (attempt {data['attempt']}{warm})"
        case EventKind.JOB_RETRIED:
            return f"tried again elsewhere: {_failure_text(data)}"


def probe_text(request: dict[str, Any]) -> str:
    """A probe, as data, in a few words."""
    match request["kind"]:
        case "collective":
            return f"{request['op']} over groups of {request['group_size']}, stride {request['stride']}"
        case "layer":
            return f"{request['part']} at tp {request['tp']}, micro-batch {request['micro_batch']}"
        case _:
            return f"step {output.plan_text(request['plan'])}"


def _ended_text(data: dict[str, Any]) -> str:
    reading, failure = data.get("reading"), data["failure"]
    if reading is None:
        log = f" (log {failure['log_path']})" if failure and failure["log_path"] else ""
        return _failure_text(data) + log
    pruned = ", stopped early: slower than the best" if reading["pruned"] else ""
    speed, step = output.count_text(reading["tokens_per_s_per_gpu"]), output.seconds_text(reading["step_time_s"])
    return f"{speed} tokens/s/GPU, step {step}{pruned}"


def _failure_text(data: dict[str, Any]) -> str:
    failure = data.get("failure")
    if failure is None:
        return ""
    where = f" on rank {failure['rank']}" if failure["rank"] is not None else ""
    return f"failed, {failure['kind']}{where}: {failure['message']}"


def leaderboard(ended: Sequence[dict[str, Any]], title: str, rows: int = LEADERBOARD_ROWS) -> Table:
    """Complete trials as their events tell of them, fastest first."""
    table = output.table(title, "<plan", "tokens/s/GPU", "step", "T_calc", "T_comm", "exposed", "mu", "peak memory")
    complete = [trial for trial in ended if trial["state"] == TrialState.COMPLETE]
    for trial in sorted(complete, key=lambda each: -float(each["reading"]["tokens_per_s_per_gpu"]))[:rows]:
        reading = trial["reading"]
        table.add_row(
            trial["plan_key"],
            output.count_text(reading["tokens_per_s_per_gpu"]),
            *(output.seconds_text(reading[name]) for name in ("step_time_s", "t_calc_s", "t_comm_s")),
            output.seconds_text(reading["t_comm_exposed_s"]),
            output.count_text(reading["mu"]),
            output.bytes_text(reading["peak_allocated_bytes"] or None),
        )
    return table
