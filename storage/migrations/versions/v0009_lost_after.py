"""How long each node may be silent before it is lost, as its worker's settings say: 60 s before these were asked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Adds the column."""
    op.add_column("nodes", sa.Column("lost_after_s", sa.Double(), nullable=False, server_default="60"))
