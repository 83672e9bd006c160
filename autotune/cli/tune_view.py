"""What a person sees while a tuning runs, and its result: progress, a leaderboard, the final table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from autotune.cli import output
from autotune.cli.tunings import print_best_reasons
from autotune.specs import (
    CollectiveRequest,
    LayerRequest,
    Plan,
    ProbeProgress,
    ProbeRequest,
    StepReading,
    Trial,
    TrialState,
    Tuning,
)
from autotune.tuning.events import Event, ProbeEnded, ProbeStarted, Progressed, StateChanged, TrialEnded, TrialStarted

LEADERBOARD_ROWS = 8
FINAL_ROWS = 12


class TuneView:
    """Shows events: live on a terminal, a line an event elsewhere. Use as a context manager.

    Args:
        console: where to (standard error, so that standard output holds only the answer).
        tuning: what runs.
        live: redraw in place; else one line for each thing that ended.
    """

    def __init__(self, console: Console, tuning: Tuning, *, live: bool) -> None:
        self._console, self._tuning = console, tuning
        self._trials: list[Trial] = []
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

    def on_event(self, event: Event) -> None:
        """Shows one event."""
        match event:
            case StateChanged(tuning=tuning):
                self._line(f"{tuning.state.value}" + (f": {tuning.stop_reason}" if tuning.stop_reason else ""))
            case ProbeStarted(request=request, remaining=remaining):
                self._describe(f"probe {probe_text(request)} ({remaining} left)")
            case ProbeEnded(request=request, outcome=outcome):
                end = f"failed, {outcome.failure.kind}: {outcome.failure.message}" if outcome.failure else "ok"
                self._line(f"probe {probe_text(request)}: {end} ({outcome.wall_s:.1f} s)")
            case TrialStarted(trial=trial):
                self._describe(f"trial {trial.number} {trial.plan.key}")
            case TrialEnded():
                self._trials.append(event.trial)
                self._line(trial_text(event.trial))
            case Progressed(progress=progress):
                self._progressed(progress)
        if self._live:
            self._live.update(self._render())

    def _describe(self, text: str) -> None:
        self._progress.reset(self._now, description=text, total=None)

    def _progressed(self, progress: ProbeProgress) -> None:
        seconds = f" {output.seconds_text(progress.seconds)}" if progress.seconds is not None else ""
        total = progress.total or None
        base = str(self._progress.tasks[0].description).split(" | ")[0]
        self._progress.update(
            self._now, description=f"{base} | {progress.phase}{seconds}", completed=progress.done, total=total
        )

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _render(self) -> Group:
        ended = [trial for trial in self._trials if trial.state is TrialState.COMPLETE]
        return Group(self._progress, leaderboard(ended, f"Leaderboard of tuning {self._tuning.id}"))


def probe_text(request: ProbeRequest) -> str:
    """A probe in a few words."""
    if isinstance(request, CollectiveRequest):
        return f"{request.op.value} over groups of {request.group_size}, stride {request.stride}"
    if isinstance(request, LayerRequest):
        return f"{request.part.value} at tp {request.tp}, micro-batch {request.micro_batch}"
    return f"step {request.plan.key}"


def trial_text(trial: Trial) -> str:
    """A trial's end in one line."""
    head = f"trial {trial.number} {trial.plan.key}: "
    if trial.reading is not None:
        reading = trial.reading
        pruned = ", stopped early: slower than the best" if reading.pruned else ""
        return (
            f"{head}{output.count_text(reading.tokens_per_s_per_gpu)} tokens/s/GPU, "
            f"step {output.seconds_text(reading.step_time_s)}{pruned}"
        )
    failure = trial.failure
    where = f" on rank {failure.rank}" if failure and failure.rank is not None else ""
    log = f" (log {failure.log_path})" if failure and failure.log_path else ""
    return f"{head}failed, {failure.kind.value}{where}: {failure.message}{log}" if failure else f"{head}running"


def leaderboard(trials: Sequence[Trial], title: str, rows: int = LEADERBOARD_ROWS) -> Table:
    """Complete trials, fastest first."""
    table = output.table(title, "<plan", "tokens/s/GPU", "step", "T_calc", "T_comm", "exposed", "mu", "peak memory")
    ranked = sorted((t for t in trials if t.reading is not None), key=lambda t: -_reading(t).tokens_per_s_per_gpu)
    for trial in ranked[:rows]:
        reading = _reading(trial)
        table.add_row(trial.plan.key, *_measured_cells(reading), output.bytes_text(reading.peak_allocated_bytes))
    return table


def _reading(trial: Trial) -> StepReading:
    assert trial.reading is not None
    return trial.reading


def _measured_cells(reading: StepReading) -> tuple[str, ...]:
    return (
        output.count_text(reading.tokens_per_s_per_gpu),
        output.seconds_text(reading.step_time_s),
        output.seconds_text(reading.t_calc_s),
        output.seconds_text(reading.t_comm_s),
        output.seconds_text(reading.t_comm_exposed_s),
        output.count_text(reading.mu),
    )


def final_table(trials: Sequence[Trial], rows: int | None = FINAL_ROWS) -> Table:
    """The first `rows` trials (None: all), measured beside estimated; what failed last, with its cause."""
    table = output.table(
        "Trials (measured | estimated)",
        "#", "<plan", "<state", "tokens/s/GPU", "est.", "step", "est.", "T_calc", "T_comm", "exposed", "mu",
        "peak mem", "est.",
    )  # fmt: skip
    for trial in sorted(trials, key=_order)[:rows]:
        estimate, reading = trial.estimate, trial.reading
        state = trial.state.value if trial.failure is None else trial.failure.kind.value
        measured = _measured_cells(reading) if reading else ("-",) * 6
        table.add_row(
            str(trial.number), trial.plan.key, state,
            measured[0], output.count_text(estimate.tokens_per_s_per_gpu if estimate else None),
            measured[1], output.seconds_text(estimate.step_time_s if estimate else None),
            *measured[2:],
            output.bytes_text(reading.peak_allocated_bytes) if reading else "-",
            output.bytes_text(estimate.peak_memory_bytes) if estimate else "-",
        )  # fmt: skip
    return table


def _order(trial: Trial) -> tuple[int, float]:
    rank = {TrialState.COMPLETE: 0, TrialState.PRUNED: 1}.get(trial.state, 2)
    return rank, -(trial.reading.tokens_per_s_per_gpu if trial.reading else 0.0)


def print_result(console: Console, tuning: Tuning, trials: Sequence[Trial], data: dict[str, Any], own: str) -> None:
    """The final table, the winner with its evidence, why it won, and how to run it."""
    console.print(final_table(trials))
    if len(trials) > FINAL_ROWS:
        console.print(f"(+{len(trials) - FINAL_ROWS} more: autotune show {tuning.id})")
    console.print(
        f"Tuning {tuning.id} is {tuning.state.value}: {tuning.stop_reason or tuning.message}. "
        f"{data['gpu_s_spent']:.0f} GPU-seconds spent.",
    )
    best = data["best"]
    if best is None:
        return
    (low, high), seconds = best["interval"], output.seconds_text
    console.print(f"\nBest plan: {Plan.from_data(best['plan']).key}", style="bold")
    console.print(
        f"  {output.count_text(best['tokens_per_s_per_gpu'])} tokens/s/GPU (95 % interval {output.count_text(low)} to "
        f"{output.count_text(high)}, {output.runs_text(best['repeats'])}), step {seconds(best['step_time_s'])}: "
        f"T_calc {seconds(best['t_calc_s'])}, T_comm {seconds(best['t_comm_s'])} "
        f"({seconds(best['t_comm_exposed_s'])} exposed), mu {output.count_text(best['mu'])}, "
        f"peak memory {output.bytes_text(best['peak_memory_bytes'])} ({best['memory_source']})",
        soft_wrap=True,
    )
    print_best_reasons(console, data)
    console.print(f"\nMeasure it again:  {own}", soft_wrap=True)
    console.print(f"Launch arguments:  autotune best --tuning {tuning.id} --for megatron", soft_wrap=True)
