"""Rows: a cache-sized piece of a plan table with the float columns that all formulas share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.cost.layouts import Layouts
from autotune.cost.shapes import Shapes
from autotune.cost.table import BoolColumn, CodeColumn, FloatColumn, IndexColumn, PlanTable
from autotune.specs import Workload

CHUNK_ROWS = 8192
"""Rows of one piece: a float column of it is 64 KiB, so that a dozen of them stay in a core's cache."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Rows:
    """`layout` indexes the table's distinct layouts, `shape` its distinct shapes.

    `tokens` are those of one micro-batch on one context-parallel rank; `spread` divides what sequence parallelism
    divides (tp with it, else 1); `micro_batches` is m.
    """

    layout: IndexColumn
    shape: IndexColumn
    tp: FloatColumn
    spread: FloatColumn
    tokens: FloatColumn
    micro_batches: FloatColumn
    zero_stage: CodeColumn
    recompute: CodeColumn
    schedule: CodeColumn
    sequence_parallel: BoolColumn


def pieces(table: PlanTable, layouts: Layouts, shapes: Shapes, workload: Workload) -> Iterator[tuple[slice, Rows]]:
    """(where, rows) over the table, piece by piece."""
    for start in range(0, len(table), CHUNK_ROWS):
        where = slice(start, start + CHUNK_ROWS)
        layout = layouts.index[where]
        shape = shapes.index[where]
        micro_batch = table.micro_batch[where].astype(np.float64)
        yield (
            where,
            Rows(
                layout=layout,
                shape=shape,
                tp=shapes.tp[shape],
                spread=shapes.spread[shape],
                tokens=shapes.tokens[shape],
                micro_batches=(workload.global_batch / layouts.dp)[layout] / micro_batch,
                zero_stage=table.zero_stage[where],
                recompute=table.recompute[where],
                schedule=table.schedule[where],
                sequence_parallel=table.sequence_parallel[where],
            ),
        )
