"""Tunings know what chose their trials. Until now it was always our own search."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds tunings.sampler, `plan` for every tuning that there is."""
    op.add_column("tunings", sa.Column("sampler", sa.String(length=64), nullable=False, server_default="plan"))
