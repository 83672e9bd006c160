"""Who stored a model or a cluster: nobody else may put another one under its name. Empty: whoever operates this."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Adds the columns; what was stored before belongs to whoever operates this."""
    for table in ("models", "clusters"):
        op.add_column(table, sa.Column("owner", sa.Text(), nullable=False, server_default=""))
