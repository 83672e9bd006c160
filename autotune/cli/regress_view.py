"""Checks and incidents as tables, and as plain data for --json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.cli import output

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.specs import BestEntry
    from autotune.specs.regression import Check, CheckResult, Incident


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


def checks_table(checks: Sequence[Check], known: Mapping[int, BestEntry]) -> Table:
    """A line a check."""
    table = output.table(
        "", "entry", "<model", "<cluster", "<plan", "<checked (UTC)", "<verdict", "throughput", "<interval", "memory",
        "<cause", "GPU-s",
    )  # fmt: skip
    for check in checks:
        entry = known[check.entry_id]
        table.add_row(
            str(check.entry_id), entry.model.name, entry.cluster.name, entry.plan.key,
            f"{check.started_at:%Y-%m-%d %H:%M}", *_figures(check.result), f"{check.gpu_s:.0f}",
        )  # fmt: skip
    return table


def _figures(result: CheckResult | None) -> tuple[str, str, str, str, str]:
    if result is None:
        return "-", "-", "-", "-", "-"
    compared = result.baseline_windows > 0
    low, high = result.interval
    memory = memory_change(result)
    return (
        result.verdict.value.replace("_", " "),
        f"{result.effect:+.1%}" if compared else "-",
        f"{low:+.1%} to {high:+.1%}" if compared else "-",
        f"{memory:+.1%}" if memory is not None else "-",
        cause_text(result),
    )


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


def incidents_table(incidents: Sequence[Incident]) -> Table:
    """A line an incident."""
    table = output.table("", "incident", "<opened (UTC)", "<recovered (UTC)", "<cause", "<what", "<entries")
    for incident in incidents:
        table.add_row(
            str(incident.id), f"{incident.opened_at:%Y-%m-%d %H:%M}",
            f"{incident.recovered_at:%Y-%m-%d %H:%M}" if incident.recovered_at else "open",
            incident.kind.value.replace("_", " "), incident.message, ", ".join(map(str, incident.entries)),
        )  # fmt: skip
    return table
