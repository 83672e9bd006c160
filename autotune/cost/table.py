"""PlanTable: many plans as columns, so that one formula serves one plan and a table of a million."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autotune.specs import Module, Plan, Recompute, Schedule, Workload

IntColumn = npt.NDArray[np.int32]
CodeColumn = npt.NDArray[np.int8]
BoolColumn = npt.NDArray[np.bool_]
IndexColumn = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
"""Of any shape; a column has one for each row."""

FloatColumn = Floats
RECOMPUTES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL, Recompute.OP)
"""The meaning of the `recompute` codes, by position."""

SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""The meaning of the `schedule` codes, by position."""

MODULES = tuple(Module)
"""The meaning of the bits of `recompute_modules`, lowest first."""

NO_RECOMPUTE, SELECTIVE, FULL, OP = 0, 1, 2, 3
GPIPE, ONE_F_ONE_B, INTERLEAVED = 0, 1, 2
LARGEST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans as equal-length columns; row i is `plan(i)`.

    Integer columns are int32; `recompute` and `schedule` are int8 codes into RECOMPUTES and SCHEDULES,
    `recompute_modules` int8 sets of MODULES.
    """

    tp: IntColumn
    pp: IntColumn
    dp: IntColumn
    cp: IntColumn
    ep: IntColumn
    vpp: IntColumn
    micro_batch: IntColumn
    zero_stage: CodeColumn
    recompute: CodeColumn
    sequence_parallel: BoolColumn
    schedule: CodeColumn
    recompute_modules: CodeColumn
    etp: IntColumn

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in COLUMNS}
        if len(lengths) > 1:
            raise ValueError(f"columns differ in length: {sorted(lengths)}")

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> PlanTable:
        """The table of these plans, in order. A degree too large for any cluster is cut to 2**31 - 1."""

        def integers(name: str) -> IntColumn:
            return np.array([min(getattr(plan, name), LARGEST) for plan in plans], dtype=np.int32)

        return cls(
            **{name: integers(name) for name in DEGREES},
            zero_stage=np.array([plan.zero_stage for plan in plans], dtype=np.int8),
            recompute=np.array([RECOMPUTES.index(plan.recompute) for plan in plans], dtype=np.int8),
            sequence_parallel=np.array([plan.sequence_parallel for plan in plans], dtype=np.bool_),
            schedule=np.array([SCHEDULES.index(plan.schedule) for plan in plans], dtype=np.int8),
            recompute_modules=np.array([module_bits(plan.recompute_modules) for plan in plans], dtype=np.int8),
            etp=integers("etp"),
        )

    @classmethod
    def concat(cls, tables: Sequence[PlanTable]) -> PlanTable:
        """The rows of these tables, one after the other."""
        if not tables:
            return cls.of([])
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS})

    def __len__(self) -> int:
        return len(self.tp)

    def plan(self, i: int) -> Plan:
        """Row i as a Plan."""
        return Plan(
            tp=int(self.tp[i]),
            pp=int(self.pp[i]),
            dp=int(self.dp[i]),
            cp=int(self.cp[i]),
            ep=int(self.ep[i]),
            vpp=int(self.vpp[i]),
            micro_batch=int(self.micro_batch[i]),
            zero_stage=int(self.zero_stage[i]),
            recompute=RECOMPUTES[int(self.recompute[i])],
            sequence_parallel=bool(self.sequence_parallel[i]),
            schedule=SCHEDULES[int(self.schedule[i])],
            recompute_modules=modules_of(int(self.recompute_modules[i])),
            etp=int(self.etp[i]),
        )

    def find(self, plan: Plan) -> int | None:
        """The first row that is this plan; None if there is none."""
        wanted = PlanTable.of([plan])
        rows = np.flatnonzero(self.dp == wanted.dp[0])
        for name in COLUMNS:
            rows = rows[getattr(self, name)[rows] == getattr(wanted, name)[0]]
        return int(rows[0]) if len(rows) else None

    def take(self, indices: IndexColumn | BoolColumn | slice) -> PlanTable:
        """The rows at these indices (or where a mask is true, or of a slice), in that order."""
        return PlanTable(**{name: getattr(self, name)[indices] for name in COLUMNS})


def module_bits(modules: Sequence[Module]) -> int:
    """These modules as bits."""
    return sum(1 << MODULES.index(module) for module in modules)


def modules_of(bits: int) -> tuple[Module, ...]:
    """The modules that the bits say."""
    return tuple(module for i, module in enumerate(MODULES) if bits >> i & 1)


COLUMNS = tuple(field.name for field in fields(PlanTable))
"""The names of the columns, which are the names of Plan's fields."""

DEGREES = COLUMNS[:7]
"""The integer columns."""

# The distinct rank layouts of a table: a million plans share some thousand of them.

LUT_LIMIT = 1 << 22
"""Largest look-up table that replaces sorting."""

FIELDS = ("tp", "pp", "dp", "cp", "ep", "vpp", "etp")
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layouts:
    """Distinct (tp, pp, dp, cp, ep, vpp, etp) as float columns; row i of the table has layout `index[i]`."""

    tp: FloatColumn
    pp: FloatColumn
    dp: FloatColumn
    cp: FloatColumn
    ep: FloatColumn
    vpp: FloatColumn
    etp: FloatColumn
    index: IndexColumn

    @classmethod
    def of(cls, table: PlanTable) -> Layouts:
        """The layouts of this table."""
        code = np.zeros(len(table), dtype=np.int64)
        for name in FIELDS:
            values, inverse = distinct(getattr(table, name))
            if len(values) > 1:
                code = code * len(values) + inverse
            if code.size and int(code.max()) >= LUT_LIMIT:
                _, code = distinct(code)
        index, first = _first_rows(code)
        columns = {name: getattr(table, name)[first].astype(np.float64) for name in FIELDS}
        return cls(**columns, index=index)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def shards(self) -> FloatColumn:
        """Ranks that hold the same parameters and share ZeRO's state: z = dp * cp."""
        return self.dp * self.cp

    @cached_property
    def expert_tp(self) -> FloatColumn:
        """Ranks that an expert is divided over: etp, and where it is not said, tp or (folded) 1."""
        unsaid = np.where(self.shards % self.ep == 0, self.tp, 1.0)
        ranks: FloatColumn = np.where(self.etp > 0, self.etp, unsaid)
        return ranks

    @cached_property
    def expert_shards(self) -> FloatColumn:
        """Ranks that hold the same part of the same experts."""
        return self.tp * self.shards / (self.expert_tp * self.ep)


def distinct(column: npt.NDArray[np.integer]) -> tuple[Integers, IndexColumn]:
    """(sorted distinct values, inverse), as numpy.unique; without sorting where the values are small."""
    least, most = (int(column.min()), int(column.max())) if column.size else (0, LUT_LIMIT)
    if column.size and least == most:
        return np.array([least], dtype=np.int64), np.zeros(len(column), dtype=np.intp)
    if most >= LUT_LIMIT or least < 0:
        values, inverse = np.unique(column, return_inverse=True)
        return values.astype(np.int64), inverse
    seen = np.zeros(most + 1, dtype=np.bool_)
    seen[column] = True
    lut = np.cumsum(seen, dtype=np.intp) - 1
    return np.flatnonzero(seen), lut[column]


def _first_rows(code: Integers) -> tuple[IndexColumn, IndexColumn]:
    """(which distinct code each one is, one row of each)."""
    values, index = distinct(code)
    first = np.zeros(len(values), dtype=np.intp)
    first[index] = np.arange(len(code))
    return index, first


# Shapes: the distinct work of one micro-batch on one rank. A million plans share some thousand of them.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Shapes:
    """Distinct (tp, cp, ep, etp, micro-batch, sequence parallelism, recompute and its modules); row i of the table has
    shape `index[i]`.

    `tokens` are those of one micro-batch on one context-parallel rank; `spread` divides what sequence parallelism
    divides (tp with it, else 1).
    """

    tp: FloatColumn
    cp: FloatColumn
    ep: FloatColumn
    expert_tp: FloatColumn
    spread: FloatColumn
    tokens: FloatColumn
    sequence_parallel: BoolColumn
    recompute: CodeColumn
    recompute_modules: CodeColumn
    index: IndexColumn

    def __len__(self) -> int:
        return len(self.tp)

    @classmethod
    def of(cls, table: PlanTable, layouts: Layouts, workload: Workload) -> Shapes:
        """The shapes of this table."""
        of_layout = (layouts.tp, layouts.cp, layouts.ep, layouts.expert_tp)
        by_layout = _code([column.astype(np.int64) for column in of_layout])
        sizes, micro_batch = distinct(table.micro_batch)
        code = by_layout[layouts.index] * len(sizes) + micro_batch
        choices, choice = distinct((table.recompute_modules.astype(np.int64) << 2) + table.recompute)
        code = (code * 2 + table.sequence_parallel) * len(choices) + choice
        index, first = _first_rows(code)
        layout = layouts.index[first]
        tp, cp = layouts.tp[layout], layouts.cp[layout]
        sequence_parallel = table.sequence_parallel[first]
        return cls(
            tp=tp,
            cp=cp,
            ep=layouts.ep[layout],
            expert_tp=layouts.expert_tp[layout],
            spread=np.where(sequence_parallel, tp, 1.0),
            tokens=table.micro_batch[first] * (workload.seq_len / cp),
            sequence_parallel=sequence_parallel,
            recompute=table.recompute[first],
            recompute_modules=table.recompute_modules[first],
            index=index,
        )


def _code(columns: list[IndexColumn]) -> IndexColumn:
    """One number for each distinct row of the columns."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = distinct(column)
        code = code * max(len(values), 1) + inverse
    return distinct(code)[1]


# Rows: a cache-sized piece of a plan table with the float columns that all formulas share.

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
