"""Checks and incidents as data, as cells of a table, and as a report with plots, in Markdown or one HTML file."""

from __future__ import annotations

import html as escaping
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.shown import as_markdown

if TYPE_CHECKING:
    from autotune.ports.regression import RegressionStore
    from autotune.specs import BestEntry
    from autotune.specs.regression import Check, CheckResult, Incident

MAX_CHECKS, MAX_INCIDENTS = 400, 50
COLOURS = {
    "baseline": "#777777", "unchanged": "#2a7f3f", "better": "#1f5fa8", "worse": "#b3261e", "cannot_tell": "#c08a00",
}  # fmt: skip
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:left}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}.scroll{overflow-x:auto}svg{max-width:100%;height:auto}"""


def check_data(check: Check, entry: BestEntry) -> dict[str, Any]:
    """A check without its single measurements."""
    result = check.result
    return {
        "id": check.id,
        "entry": check.entry_id,
        "model": entry.model.name,
        "cluster": entry.cluster.name,
        "plan": entry.plan.key,
        "state": check.state.value,
        "started_at": check.started_at.isoformat(),
        "ended_at": check.ended_at.isoformat() if check.ended_at else None,
        "gpu_s": check.gpu_s,
        "environment_key": check.environment_key,
        "tuning": check.tuning_id,
        "result": None if result is None else result_data(result),
    }


def result_data(result: CheckResult) -> dict[str, Any]:
    """A result with the number of its windows instead of what they hold."""
    data = result.to_data()
    return {**data, "windows": len(result.windows), "memory_change": memory_change(result)}


def memory_change(result: CheckResult) -> float | None:
    """The relative change of the worst rank's peak; None where it is not known."""
    before, now = result.baseline_peak_bytes, result.peak_bytes
    return now / before - 1.0 if before and now is not None else None


def check_cells(check: Check, entry: BestEntry) -> dict[str, str]:
    """A check as a row of a table: the text under each heading."""
    result = check.result
    compared = result is not None and result.baseline_windows > 0
    memory = None if result is None else memory_change(result)
    return {
        "entry": str(check.entry_id),
        "model": entry.model.name,
        "cluster": entry.cluster.name,
        "plan": entry.plan.key,
        "checked (UTC)": f"{check.started_at:%Y-%m-%d %H:%M}",
        "verdict": result.verdict.value.replace("_", " ") if result else "-",
        "throughput": f"{result.effect:+.1%}" if result and compared else "-",
        "interval": "{:+.1%} to {:+.1%}".format(*result.interval) if result and compared else "-",
        "memory": "-" if memory is None else f"{memory:+.1%}",
        "cause": cause_text(result) if result else "-",
        "GPU-s": f"{check.gpu_s:.0f}",
    }


def incident_cells(incident: Incident) -> dict[str, str]:
    """An incident as a row of a table."""
    recovered = incident.recovered_at
    return {
        "incident": str(incident.id),
        "opened (UTC)": f"{incident.opened_at:%Y-%m-%d %H:%M}",
        "recovered (UTC)": f"{recovered:%Y-%m-%d %H:%M}" if recovered else "open",
        "cause": incident.kind.value.replace("_", " "),
        "what": incident.message,
        "entries": ", ".join(map(str, incident.entries)),
    }


def cause_text(result: CheckResult) -> str:
    """The cause in a few words; empty where there is none."""
    cause = result.cause
    if cause is None:
        return ""
    return cause.subject or cause.kind.value.replace("_", " ")


def explanations(checks: Sequence[Check]) -> list[str]:
    """A sentence for each check that needs one."""
    found = []
    for check in checks:
        result = check.result
        if result is None:
            continue
        if result.cause is not None:
            found.append(f"Entry {check.entry_id}: {result.message}. {sentence(result.cause.text)}")
        elif result.verdict.value in {"cannot_tell", "baseline"}:
            found.append(f"Entry {check.entry_id}: {result.message}")
        if result.retune_reason:
            found.append(f"Entry {check.entry_id}: another plan may win now: {result.retune_reason}")
    return found


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


# The report: verdicts, incidents, and every plan's history as a plot.


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One plan with its checks, oldest first; the last one is its present verdict."""

    entry: BestEntry
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is reported."""

    at: datetime
    stories: Sequence[Story]
    incidents: Sequence[Incident]


def read_report(store: RegressionStore) -> Report:
    """The report as of now."""
    from autotune.specs.regression import CheckState

    stories = []
    for candidate in store.check_candidates():
        checks = store.checks(series=candidate.series, state=CheckState.DONE, limit=MAX_CHECKS)[::-1]
        if checks:
            stories.append(Story(entry=store.best_entry(candidate.entry_id), checks=checks))
    return Report(at=datetime.now(UTC), stories=stories, incidents=store.incidents_page(limit=MAX_INCIDENTS))


NOT_REPORTED, NOTHING = ("memory", "GPU-s"), "No plan was checked yet."


def verdict_rows(report: Report) -> list[dict[str, str]]:
    """The present verdicts."""
    rows = [check_cells(story.checks[-1], story.entry) for story in report.stories]
    return [{name: cell for name, cell in row.items() if name not in NOT_REPORTED} for row in rows]


def to_markdown(report: Report, *, beside: Path | None) -> tuple[str, dict[Path, str]]:
    """Markdown, and the plots that it shows as .svg files beside that file; without a file none."""
    plots: dict[Path, str] = {}
    parts = [
        f"# Regression report, {report.at:%Y-%m-%d %H:%M} UTC",
        "",
        *_markdown_table(verdict_rows(report)),
    ]
    for story in report.stories:
        parts += [
            "",
            f"## Entry {story.entry.id}: {as_markdown(title(story))}",
            "",
            *map(as_markdown, explanations(story.checks[-1:])),
        ]
        if beside is not None:
            file = beside.with_name(f"{beside.stem}-entry-{story.entry.id}.svg")
            plots[file] = plot(story)
            parts += ["", f"![history of entry {story.entry.id}]({file.name})"]
    if report.incidents:
        parts += ["", "## Incidents", "", *_markdown_table([incident_cells(item) for item in report.incidents])]
    return "\n".join(parts) + "\n", plots


def to_html(report: Report) -> str:
    """One file with everything in it, plots too; it loads nothing."""
    parts = [f"<h1>{_heading(report)}</h1>", _html_table(verdict_rows(report))]
    for story in report.stories:
        parts.append(f"<h2>Entry {story.entry.id}: {escaping.escape(title(story))}</h2>")
        parts += [f"<p>{escaping.escape(line)}</p>" for line in explanations(story.checks[-1:])]
        parts.append(plot(story))
    if report.incidents:
        parts += ["<h2>Incidents</h2>", _html_table([incident_cells(item) for item in report.incidents])]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Regression report</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _heading(report: Report) -> str:
    return f"Regression report, {report.at:%Y-%m-%d %H:%M} UTC"


def title(story: Story) -> str:
    """What is trained where, and how."""
    entry, workload = story.entry, story.entry.workload
    return (
        f"{entry.model.name} on {entry.cluster.name}, sequence {workload.seq_len}, {workload.global_batch} sequences "
        f"a step, {workload.dtype.value}: {entry.plan.key}"
    )


def plot(story: Story) -> str:
    """Throughput of every window of every check over time, as SVG; the colour is the check's verdict."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("report", "plots", "they need matplotlib: pip install 'autotune[report]'") from None
    from autotune.specs.regression import CheckRole

    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    axes = figure.subplots()
    for kind, colour in COLOURS.items():
        points = [
            (window.at, sum(speeds) / len(speeds))
            for check in story.checks
            if check.result is not None and check.result.verdict.value == kind
            for window in check.result.windows
            for speeds in [window.speeds.get(CheckRole.WINNER, ())]
            if speeds
        ]
        if points:
            moments, levels = zip(*points, strict=True)
            axes.plot(moments, levels, "o", color=colour, markersize=4, label=kind.replace("_", " "))
    axes.set_ylabel("tokens/s/GPU")
    axes.grid(alpha=0.25)
    axes.margins(y=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")
    figure.autofmt_xdate()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _markdown_table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return [NOTHING]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return ["| " + " | ".join(as_markdown(cell) for cell in line) + " |" for line in lines]


def _html_table(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return f"<p>{NOTHING}</p>"

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escaping.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row.values(), "td") for row in rows)
    return f'<div class="scroll"><table>\n{line(rows[0], "th")}\n{body}\n</table></div>'
