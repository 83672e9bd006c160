"""Plans as points: what makes two plans similar, for the Gaussian process that learns what the estimate misses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.cost.table import PlanTable

Floats = NDArray[np.float64]

# Degrees enter as log2: a doubling is one unit, whatever the degree. A switch is worth this many units.
ZERO_UNITS = 1.0
RECOMPUTE_UNITS = 1.5
SEQUENCE_PARALLEL_UNITS = 1.0
SCHEDULE_UNITS = 1.0


def features(table: PlanTable) -> Floats:
    """One row of 16 numbers a plan, in units of doublings.

    Args:
        table: n plans.

    Returns:
        float64 [n, 16].
    """
    degrees = (table.tp, table.pp, table.dp, table.cp, table.ep, table.vpp, table.micro_batch)
    columns = [np.log2(column.astype(np.float64)) for column in degrees]
    columns += [(table.zero_stage == stage) * (ZERO_UNITS / np.sqrt(2)) for stage in range(4)]
    columns += [(table.recompute == code) * (RECOMPUTE_UNITS / np.sqrt(2)) for code in (1, 2)]
    columns.append(table.sequence_parallel * SEQUENCE_PARALLEL_UNITS)
    columns += [(table.schedule == code) * (SCHEDULE_UNITS / np.sqrt(2)) for code in (0, 2)]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
