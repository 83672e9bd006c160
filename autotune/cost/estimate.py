"""estimate: seconds and bytes of plans by named part; the same formulas for one plan and for a table of a million."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from autotune.cost.capacity import (
    GIVEN_BACK,
    context_bytes,
    device_bytes,
    device_overhead_bytes,
    memory_sd,
    p_fits,
    usable_bytes,
)
from autotune.cost.framework import Framework, framework_for
from autotune.cost.memory import BYTE_PARTS, MemoryModel
from autotune.cost.network import Network
from autotune.cost.pieces import PieceModel, runs_ahead
from autotune.cost.pipeline import stage_slots
from autotune.cost.speeds import attention_of, peak_flops_per_s, speeds_of
from autotune.cost.table import BoolColumn, CodeColumn, FloatColumn, IntColumn, Layouts, PlanTable, Shapes, pieces
from autotune.cost.time import TERMS, TIME_PARTS, Terms, TimeModel
from autotune.cost.work import model_flops_per_token
from autotune.errors import IllegalPlanError
from autotune.specs import (
    Attention,
    Basis,
    BytesByPart,
    ClusterSpec,
    Device,
    DeviceKind,
    DType,
    Estimate,
    ModelSpec,
    Plan,
    Profile,
    SecondsByPart,
    Workload,
)

NINETY_PERCENT = 1.645
"""Standard deviations on either side of a normal mean that hold 90 %."""


@dataclass(frozen=True, eq=False)
class SecondsColumns:
    """Seconds of a step by part, a column each; the parts are those of `SecondsByPart`."""

    compute: FloatColumn
    tp: FloatColumn
    ep: FloatColumn
    cp: FloatColumn
    pp_p2p: FloatColumn
    bubble: FloatColumn
    dp_exposed: FloatColumn
    optimizer: FloatColumn
    launch: FloatColumn


@dataclass(frozen=True, eq=False)
class BytesColumns:
    """Peak bytes on the worst stage by part, a column each; the parts are those of `BytesByPart`."""

    parameters: FloatColumn
    gradients: FloatColumn
    optimizer: FloatColumn
    activations: FloatColumn
    logits: FloatColumn
    buffers: FloatColumn
    gathered: FloatColumn
    fragmentation: FloatColumn


@dataclass(frozen=True, eq=False)
class EstimateTable:
    """Estimates of a table of plans, row by row. Sums of parts are exact by construction.

    `network_unread`: there is a link between nodes, and its speed is the catalog's word only.
    """

    seconds: SecondsColumns
    bytes: BytesColumns
    terms: Terms
    worst_stage: IntColumn
    zero_stage: CodeColumn
    basis: Basis
    framework: Framework
    network_unread: bool
    queued: bool
    tokens_per_step: int
    devices: int
    device_memory_bytes: int
    overhead_bytes: float
    memory_sd: float
    model_flops_per_step: float
    peak_flops_per_s: float | None

    def __len__(self) -> int:
        return len(self.worst_stage)

    @cached_property
    def step_time_s(self) -> FloatColumn:
        """Seconds of an optimizer step: the sum of its parts."""
        return _total(self.seconds)

    @cached_property
    def tokens_per_s_per_gpu(self) -> FloatColumn:
        """The objective: tokens of a step / (step time * devices)."""
        return (self.tokens_per_step / self.devices) / self.step_time_s

    @cached_property
    def peak_memory_bytes(self) -> FloatColumn:
        """Bytes of the worst stage: the sum of its parts."""
        return _total(self.bytes)

    @cached_property
    def reserved_bytes(self) -> FloatColumn:
        """What the allocator reserves of the peak: all but what a rank loses beside its tensors."""
        return self.peak_memory_bytes - self.overhead_bytes

    @cached_property
    def needed_bytes(self) -> FloatColumn:
        """The peak without what an allocator gives back before allocations fail."""
        return self.peak_memory_bytes - self.bytes.fragmentation - GIVEN_BACK * self.bytes.gathered

    @property
    def usable_bytes(self) -> float:
        """What a plan can need and fit as often as not."""
        return usable_bytes(self.device_memory_bytes, self.overhead_bytes)

    @property
    def capacity_bytes(self) -> float:
        """The same of what it allocates."""
        return self.usable_bytes - self.overhead_bytes

    @cached_property
    def fits(self) -> BoolColumn:
        """Whether a plan is likelier to fit than not."""
        return self.needed_bytes <= self.usable_bytes

    @cached_property
    def p_fits(self) -> FloatColumn:
        """The probability that a plan fits, before anything of it was measured."""
        return p_fits(self.needed_bytes - self.overhead_bytes, self.capacity_bytes, self.memory_sd)

    @cached_property
    def expected(self) -> FloatColumn:
        """What plans are ranked by before any is run: tokens/s/GPU times P(fits)."""
        return self.tokens_per_s_per_gpu * self.p_fits

    @cached_property
    def best_row(self) -> int | None:
        """The best of the rows that are likelier to fit than not; None where there is none."""
        return int(np.argmax(np.where(self.fits, self.expected, -1.0))) if self.fits.any() else None

    def memory_interval(self, i: int) -> tuple[float, float]:
        """What holds row i's peak with 90 % probability, before anything of it was measured."""
        reserved, spread = float(self.reserved_bytes[i]), float(np.exp(NINETY_PERCENT * self.memory_sd))
        return self.overhead_bytes + reserved / spread, self.overhead_bytes + reserved * spread

    def row(self, i: int) -> Estimate:
        """Row i as an Estimate."""
        seconds = SecondsByPart(**{name: float(getattr(self.seconds, name)[i]) for name in TIME_PARTS})
        parts = BytesByPart(**{name: float(getattr(self.bytes, name)[i]) for name in BYTE_PARTS})
        step_time_s = float(self.step_time_s[i])
        flops_per_s = self.model_flops_per_step / (step_time_s * self.devices)
        return Estimate(
            seconds=seconds,
            bytes=parts,
            step_time_s=step_time_s,
            tokens_per_s_per_gpu=float(self.tokens_per_s_per_gpu[i]),
            mfu=flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s else None,
            peak_memory_bytes=float(self.peak_memory_bytes[i]),
            worst_stage=int(self.worst_stage[i]),
            fits=bool(self.fits[i]),
            basis=self.basis,
            framework=self.framework.name,
            needed_bytes=float(self.needed_bytes[i]),
            usable_bytes=self.usable_bytes,
            p_fits=float(self.p_fits[i]),
            peak_memory_interval_bytes=self.memory_interval(i),
            reserved_bytes=float(self.reserved_bytes[i]),
            allocated_bytes=float(self.reserved_bytes[i] - self.bytes.fragmentation[i]),
        )


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Peak bytes of a table of plans, without any speed."""

    bytes: BytesColumns
    worst_stage: IntColumn
    overhead_bytes: float

    @cached_property
    def peak_memory_bytes(self) -> FloatColumn:
        """Bytes of the worst stage: the sum of its parts."""
        return _total(self.bytes)

    @cached_property
    def device_bytes(self) -> FloatColumn:
        """Memory that a device must have for a plan to fit as often as not."""
        needed = self.peak_memory_bytes - self.bytes.fragmentation - GIVEN_BACK * self.bytes.gathered
        return device_bytes(needed, self.overhead_bytes)


def estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    plan: Plan,
    profile: Profile | None = None,
    framework: Framework | None = None,
) -> Estimate:
    """The estimate of one plan: a table of one. See `estimate_table`."""
    return estimate_table(model, cluster, workload, PlanTable.of([plan]), profile, framework).row(0)


def estimate_table(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    table: PlanTable,
    profile: Profile | None = None,
    framework: Framework | None = None,
) -> EstimateTable:
    """Estimates of all plans of the table.

    Speeds come from the profile where it has them, else from the catalog times assumed efficiencies; `basis`
    says which. Without a framework it is the workload's. Plans must be legal (autotune.search.space).

    Raises:
        MissingMeasurementError: a speed that is needed is neither measured nor in the catalog.
        IllegalPlanError: a plan that does not fill the cluster, or has more pipeline chunks than layers.
    """
    framework = framework_for(workload, framework)
    layouts = _layouts(model, cluster, table)
    slots = stage_slots(model, layouts, by_cost=framework.splits_by_cost, ends=framework.counts_ends)
    speeds = speeds_of(cluster, model, workload, profile, framework)
    shapes = Shapes.of(table, layouts, workload)
    network = Network(cluster, profile, framework)
    work = PieceModel(model, workload, shapes, network, speeds, framework).all()
    gpu = cluster.device.kind is not DeviceKind.CPU
    memory = MemoryModel(
        model,
        workload,
        layouts,
        slots,
        shapes,
        framework,
        kept_gathers=runs_ahead(work[0]),
        fragments=gpu,
        flash=speeds.fused,
    )
    time = TimeModel(model, workload, layouts, slots, shapes, memory.parameters, network, speeds, framework, work)
    seconds = {name: np.empty(len(table)) for name in TIME_PARTS}
    terms = {name: np.empty(len(table)) for name in TERMS}
    peak = {name: np.empty(len(table)) for name in BYTE_PARTS}
    stage = np.empty(len(table), dtype=np.int32)
    scale = profile.step_scale if profile else 1.0
    for where, rows in pieces(table, layouts, shapes, workload):
        spent, behind = time.step(rows)
        _store(seconds, where, spent, scale)
        _store(terms, where, {name: getattr(behind, name) for name in TERMS}, scale)
        parts, stage[where] = memory.peak(rows)
        _store(peak, where, parts, profile.memory_scale if profile else 1.0)
    if profile is not None:
        seconds["compute"] += profile.step_overhead_s
        terms["optimizer"] += profile.step_overhead_s
    peak["buffers"] += device_overhead_bytes(cluster, profile)
    return EstimateTable(
        seconds=SecondsColumns(**seconds),
        bytes=BytesColumns(**peak),
        terms=Terms(**terms),
        worst_stage=stage,
        zero_stage=table.zero_stage,
        basis=speeds.basis,
        framework=framework,
        network_unread=cluster.nodes > 1 and not (profile and any(fit.crosses_nodes for fit in profile.links)),
        queued=speeds.queued,
        tokens_per_step=workload.tokens_per_step,
        devices=cluster.devices,
        device_memory_bytes=cluster.device.memory_bytes,
        overhead_bytes=context_bytes(cluster),
        memory_sd=memory_sd(framework, profile),
        model_flops_per_step=model_flops_per_token(model, workload.seq_len) * workload.tokens_per_step,
        peak_flops_per_s=peak_flops_per_s(cluster, workload),
    )


def memory_table(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    table: PlanTable,
    profile: Profile | None = None,
    framework: Framework | None = None,
) -> MemoryTable:
    """Peak bytes of all plans of the table; needs no speed of anything. Raises IllegalPlanError as above."""
    framework = framework_for(workload, framework)
    layouts = _layouts(model, cluster, table)
    slots = stage_slots(model, layouts, by_cost=framework.splits_by_cost, ends=framework.counts_ends)
    gpu = cluster.device.kind is not DeviceKind.CPU
    shapes = Shapes.of(table, layouts, workload)
    memory = MemoryModel(
        model, workload, layouts, slots, shapes, framework, fragments=gpu, flash=_flash(cluster.device, framework)
    )
    peak = {name: np.empty(len(table)) for name in BYTE_PARTS}
    stage = np.empty(len(table), dtype=np.int32)
    for where, rows in pieces(table, layouts, shapes, workload):
        parts, stage[where] = memory.peak(rows)
        _store(peak, where, parts, profile.memory_scale if profile else 1.0)
    peak["buffers"] += device_overhead_bytes(cluster, profile)
    return MemoryTable(BytesColumns(**peak), stage, context_bytes(cluster))


def _flash(device: Device, framework: Framework) -> bool:
    """Whether attention keeps no scores: the framework's kernel or an older one, of which old GPUs have none."""
    known = {DType.BF16, DType.FP16} & device.peak_flops_per_s.keys()
    kernel = attention_of(device, framework.attention) if known else framework.attention
    return kernel is not Attention.UNFUSED


def _layouts(model: ModelSpec, cluster: ClusterSpec, table: PlanTable) -> Layouts:
    """The table's layouts, refused where the formulas have no meaning."""
    layouts = Layouts.of(table)
    ranks = layouts.tp * layouts.pp * layouts.dp * layouts.cp
    most = model.layers + 2  # the embedding and the head may be chunks of their own
    for i in np.flatnonzero((ranks != cluster.devices) | (layouts.pp * layouts.vpp > most))[:1]:
        raise IllegalPlanError(
            "plan",
            f"tp={layouts.tp[i]:.0f} pp={layouts.pp[i]:.0f} dp={layouts.dp[i]:.0f} cp={layouts.cp[i]:.0f} "
            f"vpp={layouts.vpp[i]:.0f}",
            f"tp*pp*dp*cp must be the cluster's {cluster.devices} devices and pp*vpp at most {most} chunks",
        )
    return layouts


def _store(into: dict[str, FloatColumn], where: slice, parts: dict[str, FloatColumn], scale: float) -> None:
    """Writes a piece's columns, scaled."""
    for name, column in parts.items():
        if scale == 1.0:
            into[name][where] = column
        else:
            np.multiply(column, scale, out=into[name][where])


def _total(columns: SecondsColumns | BytesColumns) -> FloatColumn:
    """The parts added in the order of their fields, as `sum` adds the fields of one Estimate."""
    names = [field.name for field in fields(columns)]
    total: FloatColumn = getattr(columns, names[0]).copy()
    for name in names[1:]:
        total += getattr(columns, name)
    return total
