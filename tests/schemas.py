"""Databases of other releases: one that was made before the baseline, and a next release that has a revision more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import storage
from storage.database.engine import build_engine, locate
from storage.database.schema import HEAD

DATA = Path(__file__).parent / "contract" / "data"

# Recorded from the migrations that the baseline replaced, as PostgreSQL was told; in other words for SQLite.
TO_SQLITE = {
    "BIGSERIAL": "INTEGER",
    "DOUBLE PRECISION": "DOUBLE",
    "TIMESTAMP WITH TIME ZONE": "DATETIME",
    "ix_layer_measurements_cluster_key_fingerprint_key_model_e56b":
        "ix_layer_measurements_cluster_key_fingerprint_key_model_key_workload_key",
    r"(\w+_id) BIGINT": r"\1 INTEGER",
}  # fmt: skip

BASELINE = "0007"
FOLLOWING = f"{int(HEAD) + 1:04}"
NEXT = f"""
import sqlalchemy as sa
from alembic import op

revision = "{FOLLOWING}"
down_revision = "{HEAD}"

def upgrade():
    op.create_table("notes", sa.Column("id", sa.BigInteger(), primary_key=True))
    op.add_column("tunings", sa.Column("note", sa.Text(), nullable=False, server_default="none"))
"""


def make_database(url: str) -> None:
    """Fills an empty database as the code before the baseline left one, which is of the baseline's schema.

    Every table has rows; there is a study of Optuna's.
    """
    engine = build_engine(locate(url), read_only=False)
    tables = (DATA / "schema_0007_tables.sql").read_text()
    if engine.dialect.name == "sqlite":
        for pattern, word in TO_SQLITE.items():
            tables = re.sub(pattern, word, tables)
    with engine.begin() as connection:
        for statement in (tables + (DATA / "schema_0007_rows.sql").read_text()).split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    engine.dispose()


class NextRelease:
    """A copy of the storage package with one migration more, in processes of its own.

    Args:
        folder: an empty one, for the copy.
        fails: its migration does all that it does, and then fails.
    """

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        self._folder = folder
        package = folder / "storage"
        shutil.copytree(Path(storage.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        migration = package / "migrations" / "versions" / f"v{FOLLOWING}_notes.py"
        migration.write_text(f"{NEXT}    1 / 0\n" if fails else NEXT)

    def run(self, code: str, *arguments: object) -> str:
        """What the code prints, with `migrate`, `backup` and the others at hand and its arguments in `argv`."""
        imports = """
from pathlib import Path
from sys import argv
from autotune.errors import StoreError
from storage import open_store
from storage.care.backup import backup, restore
from storage.care.maintenance import check, migrate
"""
        command = [sys.executable, "-c", imports + code, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(self._folder)}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
