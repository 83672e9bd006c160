"""What an alert says: to people as text, to programs as JSON."""

from __future__ import annotations

from typing import Any

from autotune.specs.regression import Alert, AlertEvent

MOST_SUBJECT = 120


def payload(alert: Alert) -> dict[str, Any]:
    """The JSON object of a webhook. Fields are only ever added."""
    incident = alert.incident
    return {
        "version": 1,
        "key": alert.key,
        "event": f"incident.{alert.event}",
        "at": alert.at.isoformat(),
        "incident": {
            "id": incident.id,
            "cause": incident.kind.value,
            "subject": incident.subject,
            "message": incident.message,
            "opened_at": incident.opened_at.isoformat(),
            "recovered_at": incident.recovered_at.isoformat() if incident.recovered_at else None,
            "entries": list(incident.entries),
            "check": incident.check_id,
        },
    }


def headline(alert: Alert) -> str:
    """One line."""
    incident = alert.incident
    what = incident.subject or incident.kind.value.replace("_", " ")
    verb = "recovered" if alert.event is AlertEvent.RECOVERED else "slower"
    line = " ".join(f"autotune: {verb}: {what} (incident {incident.id})".split())
    return line if len(line) <= MOST_SUBJECT else line[: MOST_SUBJECT - 3] + "..."


def text(alert: Alert) -> str:
    """The body of an e-mail."""
    incident = alert.incident
    lines = [
        headline(alert),
        "",
        f"What was found: {incident.message}",
        f"Cause:          {incident.kind.value.replace('_', ' ')}",
        f"Opened at:      {incident.opened_at:%Y-%m-%d %H:%M:%S} UTC",
    ]
    if incident.recovered_at is not None:
        lines.append(f"Recovered at:   {incident.recovered_at:%Y-%m-%d %H:%M:%S} UTC")
    entries = ", ".join(str(entry) for entry in incident.entries)
    lines += [f"Entries:        {entries}", f"Check:          {incident.check_id}", ""]
    return "\n".join(lines) + "More: autotune regress history, autotune regress report\n"
