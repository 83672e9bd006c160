"""Alembic's entry: migrates over the connection it is given, within that connection's transaction."""

from __future__ import annotations

from alembic import context

from storage.database.columns import Base
from storage.database.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,  # true of SQLite too, as storage.database.engine begins transactions
)
context.run_migrations()
