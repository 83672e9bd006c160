"""Turns: how often in a row the next step of a tuning failed in the same way.

Older releases took numbers without bounds: what is stored beyond those of today is brought within them, or nobody could
read it.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

MOST = {"gpu_s": 1e12, "max_trials": 100_000, "min_gain": 100.0}
LARGEST = 2**31 - 1
DEGREES = ("tp", "pp", "cp", "ep", "vpp", "micro_batch")
TUNINGS = sa.table("tunings", sa.column("id"), sa.column("budget_json"), sa.column("space_json"))


def upgrade() -> None:
    """Adds the columns, and brings numbers within bounds."""
    op.add_column("tunings", sa.Column("fault", sa.Text(), nullable=False, server_default=""))
    op.add_column("tunings", sa.Column("faults", sa.BigInteger(), nullable=False, server_default="0"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(TUNINGS)).all():
        budget, space = _within(row.budget_json), _possible(row.space_json)
        if (budget, space) != (row.budget_json, row.space_json):
            changed = sa.update(TUNINGS).where(TUNINGS.c.id == row.id)
            connection.execute(changed.values(budget_json=budget, space_json=space))


def _within(text: str) -> str:
    data: dict[str, Any] = json.loads(text)
    over = {name: most for name, most in MOST.items() if data.get(name) is not None and data[name] > most}
    return _json(data | over) if over else text


def _possible(text: str) -> str:
    """Without degrees that no plan can have."""
    data: dict[str, Any] = json.loads(text)
    kept = {name: [each for each in data[name] if 1 <= each <= LARGEST] for name in DEGREES if data.get(name)}
    changed = {name: values for name, values in kept.items() if values != data[name]}
    return _json(data | changed) if changed else text


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))
