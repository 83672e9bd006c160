"""The distinct rank layouts of a table: a million plans share some thousand of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.cost.table import FloatColumn, IndexColumn, PlanTable

LUT_LIMIT = 1 << 22
"""Largest look-up table that replaces sorting."""

FIELDS = ("tp", "pp", "dp", "cp", "ep", "vpp")
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layouts:
    """Distinct (tp, pp, dp, cp, ep, vpp) as float columns; row i of the table has layout `index[i]`."""

    tp: FloatColumn
    pp: FloatColumn
    dp: FloatColumn
    cp: FloatColumn
    ep: FloatColumn
    vpp: FloatColumn
    index: IndexColumn

    @classmethod
    def of(cls, table: PlanTable) -> Layouts:
        """The layouts of this table."""
        code = np.zeros(len(table), dtype=np.int64)
        for name in FIELDS:
            values, inverse = distinct(getattr(table, name))
            code = code * len(values) + inverse
            if code.size and int(code.max()) >= LUT_LIMIT:
                _, code = distinct(code)
        _, index, first = _first_rows(code)
        columns = {name: getattr(table, name)[first].astype(np.float64) for name in FIELDS}
        return cls(**columns, index=index)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def shards(self) -> FloatColumn:
        """Ranks that hold the same parameters and share ZeRO's state: z = dp * cp."""
        return self.dp * self.cp


def distinct(column: npt.NDArray[np.integer]) -> tuple[Integers, IndexColumn]:
    """(sorted distinct values, inverse), as numpy.unique; without sorting where the values are small."""
    if column.size == 0 or int(column.max()) >= LUT_LIMIT or int(column.min()) < 0:
        values, inverse = np.unique(column, return_inverse=True)
        return values.astype(np.int64), inverse
    seen = np.zeros(int(column.max()) + 1, dtype=np.bool_)
    seen[column] = True
    lut = np.cumsum(seen, dtype=np.intp) - 1
    return np.flatnonzero(seen), lut[column]


def _first_rows(code: Integers) -> tuple[Integers, IndexColumn, IndexColumn]:
    """(distinct codes, inverse, one row of each)."""
    values, index = distinct(code)
    first = np.zeros(len(values), dtype=np.intp)
    first[index] = np.arange(len(code))
    return values, index, first
