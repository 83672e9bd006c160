"""PlanTable: many plans as columns, so that one formula serves one plan and a table of a million."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from autotune.specs import Plan, Recompute, Schedule

IntColumn = npt.NDArray[np.int32]
CodeColumn = npt.NDArray[np.int8]
BoolColumn = npt.NDArray[np.bool_]
FloatColumn = npt.NDArray[np.float64]
IndexColumn = npt.NDArray[np.intp]

RECOMPUTES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""The meaning of the `recompute` codes, by position."""

SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""The meaning of the `schedule` codes, by position."""

NO_RECOMPUTE, SELECTIVE, FULL = 0, 1, 2
GPIPE, ONE_F_ONE_B, INTERLEAVED = 0, 1, 2
LARGEST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans as equal-length columns; row i is `plan(i)`.

    Integer columns are int32; `recompute` and `schedule` are int8 codes into RECOMPUTES and SCHEDULES.
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


COLUMNS = tuple(field.name for field in fields(PlanTable))
"""The names of the columns, which are the names of Plan's fields."""

DEGREES = COLUMNS[:7]
"""The integer columns."""
