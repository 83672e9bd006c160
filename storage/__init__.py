"""The memory: everything measured, in SQLite or PostgreSQL, one code path."""

from storage.store import SqlStore, open_store

__all__ = ["SqlStore", "open_store"]
