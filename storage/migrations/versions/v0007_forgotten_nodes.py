"""Nodes that were forgotten, and indexes by which measurements of one cluster are listed in their order."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Adds nodes.forgotten_at, of no node that there is, and the indexes."""
    op.add_column("nodes", sa.Column("forgotten_at", sa.DateTime(timezone=True), nullable=True))
    for table in ("collective_measurements", "layer_measurements"):
        op.create_index(f"ix_{table}_cluster_key_id", table, ["cluster_key", "id"])
