"""Shapes: the distinct work of one micro-batch on one rank. A million plans share some thousand of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.layouts import Layouts, distinct
from autotune.cost.table import BoolColumn, CodeColumn, FloatColumn, IndexColumn, PlanTable
from autotune.specs import Workload


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Shapes:
    """Distinct (tp, cp, ep, micro-batch, sequence parallelism, recompute); row i of the table has shape `index[i]`.

    `tokens` are those of one micro-batch on one context-parallel rank; `spread` divides what sequence parallelism
    divides (tp with it, else 1).
    """

    tp: FloatColumn
    cp: FloatColumn
    ep: FloatColumn
    spread: FloatColumn
    tokens: FloatColumn
    sequence_parallel: BoolColumn
    recompute: CodeColumn
    index: IndexColumn

    def __len__(self) -> int:
        return len(self.tp)

    @classmethod
    def of(cls, table: PlanTable, layouts: Layouts, workload: Workload) -> Shapes:
        """The shapes of this table."""
        by_layout = _code([layouts.tp.astype(np.int64), layouts.cp.astype(np.int64), layouts.ep.astype(np.int64)])
        sizes, micro_batch = distinct(table.micro_batch)
        code = by_layout[layouts.index] * len(sizes) + micro_batch
        code = code * 6 + table.sequence_parallel * 3 + table.recompute
        values, index = distinct(code)
        first = np.zeros(len(values), dtype=np.intp)
        first[index] = np.arange(len(code))
        layout = layouts.index[first]
        tp, cp = layouts.tp[layout], layouts.cp[layout]
        sequence_parallel = table.sequence_parallel[first]
        return cls(
            tp=tp,
            cp=cp,
            ep=layouts.ep[layout],
            spread=np.where(sequence_parallel, tp, 1.0),
            tokens=table.micro_batch[first] * (workload.seq_len / cp),
            sequence_parallel=sequence_parallel,
            recompute=table.recompute[first],
            index=index,
        )


def _code(columns: list[IndexColumn]) -> IndexColumn:
    """One number for each distinct row of the columns."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = distinct(column)
        code = code * max(len(values), 1) + inverse
    return distinct(code)[1]
