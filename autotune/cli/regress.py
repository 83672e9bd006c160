"""`autotune regress`: whether best-known plans still hold, and if not, why."""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.options import option
from autotune.errors import InputError
from autotune.regression.report import (
    check_cells,
    check_data,
    explanations,
    incident_cells,
    read_report,
    to_html,
    to_markdown,
)
from autotune.shown import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune.regression.fleet import OnMeasured
    from autotune.regression.protocol import Wanted
    from autotune.regression.selection import Selection
    from autotune.specs import BestEntry, Tuning
    from autotune.specs.regression import Check, CheckMeasurement
    from storage import SqlStore

app = typer.Typer(help="Nightly regression: do best-known plans still hold, and if not, why?", no_args_is_help=True)

MAX_HISTORY = 1_000_000
NUMBERS = frozenset({"entry", "incident", "throughput", "memory", "GPU-s"})


@app.command()
def run(
    entry: Annotated[
        list[int] | None,
        option(
            "--entry", "N", min=1, max=options.MAX_ID, help="Check this entry (autotune known list); may be repeated."
        ),
    ] = None,
    budget_gpu_s: Annotated[
        float | None, option("--budget-gpu-s", "SECONDS", "GPU-seconds for checks and tunings after them.")
    ] = None,
    retune: Annotated[bool, option("--retune/--no-retune", help="Tune again where another plan may win now.")] = True,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """Check best-known plans on this machine: those named, or the most important that the budget allows.

    Exit status 1 if a plan is worse than it was, else 0. Incidents are told as AUTOTUNE_WEBHOOK_URL and
    AUTOTUNE_SMTP_URL say.
    """
    from autotune.regression.alerts import deliver_patiently, senders_of
    from autotune.regression.local import LocalRegression
    from autotune.settings import read_settings
    from autotune.wiring import open_local, open_store, require_local

    _require_budget(budget_gpu_s)
    senders = senders_of(read_settings())
    with closing(open_store(db)) as store:
        entries, selection = _entries(store, entry, budget_gpu_s)
        for each in entries:
            require_local(each.cluster)
        regression = LocalRegression(
            store,
            lambda cluster: open_local(store, cluster),
            channels=tuple(senders),
            on_measured=_progress(live=not as_json),
        )
        night = regression.run(entries, budget_gpu_s=budget_gpu_s, retune=retune)
        unsent = deliver_patiently(store, senders) if senders else 0
        known = {check.entry_id: store.best_entry(check.entry_id) for check in night.checks}
    if as_json:
        output.print_json(_run_data(night.checks, night.tunings, selection, known, unsent))
    else:
        _print_run(night.checks, night.tunings, selection, known, unsent)
    return _status(night.checks)


@app.command()
def start(
    budget_gpu_s: Annotated[
        float | None, option("--budget-gpu-s", "SECONDS", "GPU-seconds for checks and tunings after them.")
    ] = None,
    pool: Annotated[list[str] | None, option("--pool", "NAME", "Of this pool only; may be repeated.")] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Begin this night's checks on a fleet; its workers take them to their end. For cron and the like."""

    from autotune.errors import UnknownNameError
    from autotune.regression.fleet import start_regression
    from autotune.wiring import open_store

    _require_budget(budget_gpu_s)
    with closing(open_store(db)) as store:
        pools = {node.pool for node in store.nodes()}
        for name in pool or ():
            if name not in pools:
                raise UnknownNameError("--pool", name, pools)
        selection = start_regression(store, budget_gpu_s=budget_gpu_s, pools=pool)
    if as_json:
        output.print_json(_selection_data(selection))
        return
    table = output.table("", "entry", "<model", "<pool", "GPU-s expected", "<why")
    for item in selection.chosen:
        each = item.candidate
        table.add_row(str(each.entry_id), each.model_name, each.cluster_name, f"{item.gpu_s:.0f}", item.reason)
    output.console().print(table if selection.chosen else "Nothing to check: no pool is ready, or nothing is known")
    _print_left_out(selection)


@app.command()
def status(db: options.Database = None, as_json: options.AsJson = False) -> int:
    """The last verdict of every current plan, and what is under way. Exit status 1 if one is worse."""
    from autotune.cli.database import open_to_read
    from autotune.specs.regression import CheckState

    with open_to_read(db) as store:
        last, known = [], {}
        unchecked = []
        for candidate in store.check_candidates():
            found = store.checks(series=candidate.series, state=CheckState.DONE, limit=1)
            if not found:
                unchecked.append(candidate.entry_id)
                continue
            last.append(found[0])
            known[found[0].entry_id] = store.best_entry(found[0].entry_id)
        running = store.checks(state=CheckState.RUNNING, limit=1000)
        known |= {check.entry_id: store.best_entry(check.entry_id) for check in running}
    if as_json:
        rows = [check_data(check, known[check.entry_id]) for check in last]
        under_way = [check_data(check, known[check.entry_id]) for check in running]
        output.print_json({"checks": rows, "running": under_way, "never_checked": unchecked})
    else:
        console = output.console()
        _print_checks(last, known, "No plan was checked yet: autotune regress run")
        for check in running:
            console.print(f"Under way: entry {check.entry_id} since {check.started_at:%Y-%m-%d %H:%M} UTC")
        if unchecked:
            console.print(f"Never checked: entries {', '.join(map(str, unchecked))}", soft_wrap=True)
    return _status(last)


@app.command()
def history(
    entry: Annotated[
        int | None, option("--entry", "N", min=1, max=options.MAX_ID, help="Of this entry's plan only.")
    ] = None,
    limit: Annotated[int, option("--limit", min=1, max=MAX_HISTORY, help="Checks at most, newest first.")] = 50,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Checks that were made, newest first."""
    from autotune.cli.database import open_to_read
    from autotune.specs.regression import CheckState, series_of

    with open_to_read(db) as store:
        series = None if entry is None else series_of(store.best_entry(entry))
        checks = store.checks(series=series, state=CheckState.DONE, limit=limit)
        known = {check.entry_id: store.best_entry(check.entry_id) for check in checks}
    data = {"checks": [check_data(check, known[check.entry_id]) for check in checks]}
    output.tell(data, lambda: _print_checks(checks, known, "No check was made yet"), as_json=as_json)


@app.command()
def incidents(
    open_only: Annotated[bool, option("--open", help="Only those that have not recovered.")] = False,
    limit: Annotated[int, option("--limit", min=1, max=MAX_HISTORY, help="Incidents at most.")] = 50,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """What made plans slower, newest first, and when it recovered; and whom that could not be told, and why."""
    from autotune.cli.database import open_to_read
    from autotune.regression.alerts import NEVER, unsent_line

    with open_to_read(db) as store:
        found = store.incidents_page(open_only=open_only, limit=limit)
        unsent = [alert for alert in store.due_alerts(NEVER) if alert.attempts]
    data = {
        "incidents": [incident.to_data() for incident in found],
        "unsent_alerts": [alert.to_data() for alert in unsent],
    }

    def tell() -> None:
        output.print_cells(map(incident_cells, found), "No incident", numbers=NUMBERS)
        for alert in unsent:
            output.console().print(unsent_line(alert), soft_wrap=True)

    output.tell(data, tell, as_json=as_json)


@app.command()
def report(
    html: Annotated[Path | None, option("--html", "FILE", "Write one HTML file.")] = None,
    markdown: Annotated[
        Path | None, option("--markdown", "FILE", "Write Markdown, plots as .svg files beside it.")
    ] = None,
    db: options.Database = None,
) -> None:
    """Verdicts, the history of every plan as a plot, and incidents. Without a file: Markdown without plots, printed."""
    from autotune.cli.database import open_to_read

    with open_to_read(db) as store:
        found = read_report(store)
    if html is not None:
        output.write_text(html, to_html(found))
    if markdown is not None or html is None:
        text, plots = to_markdown(found, beside=markdown)
        for file, drawn in plots.items():
            output.write_text(file, drawn)
        output.write_text(markdown, text) if markdown is not None else typer.echo(shown(text))


def _print_checks(checks: Sequence[Check], known: Mapping[int, BestEntry], empty: str) -> None:
    output.print_cells((check_cells(check, known[check.entry_id]) for check in checks), empty, numbers=NUMBERS)


def _require_budget(budget_gpu_s: float | None) -> None:
    from autotune.specs.base import MOST_GPU_S

    if budget_gpu_s is not None and not 0 < budget_gpu_s <= MOST_GPU_S:
        raise InputError("--budget-gpu-s", budget_gpu_s, f"more than 0 and at most {MOST_GPU_S:g} GPU-seconds")


def _selection_data(selection: Selection | None) -> dict[str, Any]:
    groups = {name: getattr(selection, name, ()) for name in ("chosen", "left_out", "too_costly")}
    return {name: [item.candidate.entry_id for item in items] for name, items in groups.items()}


def _print_left_out(selection: Selection) -> None:
    console = output.console()
    for item in selection.left_out:
        number = item.candidate.entry_id
        console.print(f"Left out for the budget: entry {number} ({item.gpu_s:.0f} GPU-s, {item.reason})")
    for item in selection.too_costly:
        console.print(f"Never fits in the budget: entry {item.candidate.entry_id} ({item.gpu_s:.0f} GPU-s)")


def _entries(
    store: SqlStore, asked: Sequence[int] | None, budget_gpu_s: float | None
) -> tuple[Sequence[BestEntry], Selection | None]:
    """The entries that were named, or those that are chosen among what was measured on this machine."""
    from autotune.regression.selection import select

    if asked:
        found = [store.best_entry(number) for number in dict.fromkeys(asked)]
        for entry in found:
            if entry.source != "measured":
                raise InputError("--entry", entry.id, f"it was imported from {entry.source}: nothing was measured here")
        return found, None
    host = socket.gethostname()
    mine = [
        candidate
        for candidate in store.check_candidates()
        if candidate.fingerprint_key and store.fingerprint(candidate.fingerprint_key).hostname == host
    ]
    selection = select(mine, budget_gpu_s=budget_gpu_s, environments={}, now=datetime.now(UTC))
    return [store.best_entry(item.candidate.entry_id) for item in selection.chosen], selection


def _progress(*, live: bool) -> OnMeasured:
    """Says on standard error what is measured."""
    console = output.error_console()

    def tell(check: Check, wanted: Wanted, measurement: CheckMeasurement) -> None:
        found = "failed" if measurement.speed is None else output.count_text(measurement.speed)
        role = measurement.role.value.replace("_", " ")
        console.print(f"entry {check.entry_id}: window {wanted.window + 1}, {role}: {found}", soft_wrap=True)

    return tell if live else lambda check, wanted, measurement: None


def _status(checks: Sequence[Check]) -> int:
    from autotune.specs.regression import VerdictKind

    return int(any(check.result is not None and check.result.verdict is VerdictKind.WORSE for check in checks))


def _run_data(
    checks: Sequence[Check],
    tunings: Sequence[Tuning],
    selection: Selection | None,
    known: dict[int, BestEntry],
    unsent: int,
) -> dict[str, Any]:
    return {
        "checks": [check_data(check, known[check.entry_id]) for check in checks],
        **_selection_data(selection),
        "tunings": [tuning.id for tuning in tunings],
        "unsent_alerts": unsent,
    }


def _print_run(
    checks: Sequence[Check],
    tunings: Sequence[Tuning],
    selection: Selection | None,
    known: dict[int, BestEntry],
    unsent: int,
) -> None:
    console = output.console()
    _print_checks(checks, known, "Nothing to check on this machine: autotune tune")
    for line in explanations(checks):
        console.print(line, soft_wrap=True)
    for tuning in tunings:
        console.print(f"Tuned again: {tuning.id} ({tuning.state}, {tuning.gpu_s_spent:.0f} GPU-seconds)")
    if selection is not None:
        _print_left_out(selection)
    if unsent:
        output.error_console().print(f"{unsent} alerts could not be sent; the next run tries again", soft_wrap=True)
