"""What was measured elsewhere: imported files, the runs and readings in them. Kept by source, apart from our own."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Self

from pydantic import Field, model_validator

from autotune.specs.base import MOST_PER_S, Name, Spec, mismatch
from autotune.specs.cluster import ClusterSpec
from autotune.specs.measurement import CollectiveReading, Failure
from autotune.specs.model import ByteCount, CountOrZero, ModelSpec
from autotune.specs.plan import Plan
from autotune.specs.workload import Workload

OWN_SOURCES = frozenset({"autotune", "measured"})
"""Names that stand for our own measurements (in runs files, and in answers); no import may take one."""

Positive = Annotated[float, Field(gt=0, le=MOST_PER_S)]


class ImportBatch(Spec):
    """One imported file: its content is known by its digest, and belongs to one source."""

    source: Name
    file_name: Name
    format: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: int
    imported_at: datetime


class ImportedRun(Spec):
    """One training run of others: how fast a plan was, or why it failed.

    `where` is the file and line. `framework` names whose habits an estimate of it assumes (cost.framework). `group` is
    the file's own name of what may be compared with it, where it has one. `interval_tokens_per_s_per_gpu` is that of
    the median step (95 %), None where single steps are not known; `steps` are the timed lines behind it. A peak of None
    is not known.
    """

    where: str
    framework: str
    group: str = ""
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan
    tokens_per_s_per_gpu: Positive | None = None
    interval_tokens_per_s_per_gpu: tuple[Positive, Positive] | None = None
    steps: CountOrZero = 0
    peak_reserved_bytes: ByteCount | None = None
    peak_allocated_bytes: ByteCount | None = None
    failure: Failure | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens_per_s_per_gpu is None) == (self.failure is None):
            raise mismatch("failure", None, "a run has either a speed or a failure")
        if self.tokens_per_s_per_gpu is None and self.interval_tokens_per_s_per_gpu is not None:
            raise mismatch("interval_tokens_per_s_per_gpu", None, "only a speed has an interval")
        return self


class ImportedReading(Spec):
    """One size of a collective sweep that was measured elsewhere, on which cluster, and its file and line."""

    where: str
    cluster: ClusterSpec
    reading: CollectiveReading
