"""The programs that each node's operator allows to be run there: none before this was asked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Adds the column."""
    op.add_column("nodes", sa.Column("commands_json", sa.Text(), nullable=False, server_default="[]"))
