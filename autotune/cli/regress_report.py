"""The report: verdicts, incidents, and every plan's history as a plot, as Markdown or as one HTML file."""

from __future__ import annotations

import html as escaping
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli import output
from autotune.cli.regress_view import cause_text, explanations
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.specs import BestEntry
    from autotune.specs.regression import Check, Incident
    from storage import SqlStore

MAX_CHECKS, MAX_INCIDENTS = 400, 50
COLOURS = {
    "baseline": "#777777", "unchanged": "#2a7f3f", "better": "#1f5fa8", "worse": "#b3261e", "cannot_tell": "#c08a00",
}  # fmt: skip
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:left}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}.scroll{overflow-x:auto}svg{max-width:100%;height:auto}"""


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


def read_report(store: SqlStore) -> Report:
    """The report as of now."""
    from autotune.specs.regression import CheckState

    stories = []
    for candidate in store.check_candidates():
        checks = store.checks(series=candidate.series, state=CheckState.DONE, limit=MAX_CHECKS)[::-1]
        if checks:
            stories.append(Story(entry=store.best_entry(candidate.entry_id), checks=checks))
    return Report(at=datetime.now(UTC), stories=stories, incidents=store.incidents_page(limit=MAX_INCIDENTS))


HEADINGS = ("entry", "model", "cluster", "plan", "checked (UTC)", "verdict", "throughput", "interval", "cause")
INCIDENT_HEADINGS = ("incident", "opened (UTC)", "recovered (UTC)", "cause", "what", "entries")


def verdict_rows(report: Report) -> list[tuple[str, ...]]:
    """The present verdicts."""
    rows: list[tuple[str, ...]] = []
    for story in report.stories:
        check, entry = story.checks[-1], story.entry
        result = check.result
        assert result is not None
        low, high = result.interval
        compared = result.baseline_windows > 0
        rows.append(
            (
                str(entry.id), entry.model.name, entry.cluster.name, entry.plan.key,
                f"{check.started_at:%Y-%m-%d %H:%M}", result.verdict.value.replace("_", " "),
                f"{result.effect:+.1%}" if compared else "-", f"{low:+.1%} to {high:+.1%}" if compared else "-",
                cause_text(result),
            )
        )  # fmt: skip
    return rows


def incident_rows(report: Report) -> list[tuple[str, ...]]:
    """The newest incidents."""
    return [
        (
            str(item.id), f"{item.opened_at:%Y-%m-%d %H:%M}",
            f"{item.recovered_at:%Y-%m-%d %H:%M}" if item.recovered_at else "open",
            item.kind.value.replace("_", " "), item.message, ", ".join(map(str, item.entries)),
        )
        for item in report.incidents
    ]  # fmt: skip


def to_markdown(report: Report, *, beside: Path | None) -> str:
    """Markdown; plots are written as .svg files beside that file, or left out."""
    parts = [
        f"# Regression report, {report.at:%Y-%m-%d %H:%M} UTC",
        "",
        *_markdown_table(HEADINGS, verdict_rows(report)),
    ]
    for story in report.stories:
        parts += [
            "",
            f"## Entry {story.entry.id}: {_plain(title(story))}",
            "",
            *map(_plain, explanations(story.checks[-1:])),
        ]
        if beside is not None:
            file = beside.with_name(f"{beside.stem}-entry-{story.entry.id}.svg")
            output.write_text(file, plot(story))
            parts += ["", f"![history of entry {story.entry.id}]({file.name})"]
    if report.incidents:
        parts += ["", "## Incidents", "", *_markdown_table(INCIDENT_HEADINGS, incident_rows(report))]
    return "\n".join(parts) + "\n"


def to_html(report: Report) -> str:
    """One file with everything in it, plots too; it loads nothing."""
    parts = [f"<h1>{_heading(report)}</h1>", _html_table(HEADINGS, verdict_rows(report))]
    for story in report.stories:
        parts.append(f"<h2>Entry {story.entry.id}: {escaping.escape(title(story))}</h2>")
        parts += [f"<p>{escaping.escape(line)}</p>" for line in explanations(story.checks[-1:])]
        parts.append(plot(story))
    if report.incidents:
        parts += ["<h2>Incidents</h2>", _html_table(INCIDENT_HEADINGS, incident_rows(report))]
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


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def _plain(text: str) -> str:
    """Text from outside that is no markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escaping.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>\n{line(headings, "th")}\n{body}\n</table></div>'
