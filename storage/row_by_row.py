"""RowByRow: psycopg's cursor without its pipeline mode. Imported only where PostgreSQL is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psycopg import Cursor


class RowByRow(Cursor[Any]):
    """Executes a statement for many rows by one round trip each.

    psycopg would send them in a pipeline. To the server, a session in the middle of one is at work: it is not ended for
    being idle in its transaction (storage.postgres.OPTIONS). A process that was frozen just then would keep its
    locks, and with them the whole fleet, for as long as it is frozen.
    """

    _changed: int | None = None

    def executemany(self, query: Any, params_seq: Iterable[Any], *, returning: bool = False) -> None:
        """Returned rows are not kept: raises NotImplementedError for `returning`."""
        if returning:
            raise NotImplementedError("executemany with returning")
        changed = 0
        for params in params_seq:
            self.execute(query, params)
            changed += max(super().rowcount, 0)
        self._changed = changed

    def execute(self, *arguments: Any, **named: Any) -> RowByRow:
        """As psycopg's."""
        self._changed = None
        super().execute(*arguments, **named)
        return self

    @property
    def rowcount(self) -> int:
        """Rows that the last execute, or all of the last executemany, changed."""
        return super().rowcount if self._changed is None else self._changed
