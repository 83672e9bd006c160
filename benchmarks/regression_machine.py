"""A machine made of formulas, to try the nightly regression on: what it measures follows from what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    CollectiveRequest,
    Failure,
    FailureKind,
    LayerReading,
    LayerRequest,
    ProbeOutcome,
    ProbeRequest,
    RankReading,
    StepReading,
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What is wrong: by how much each part is slower (1 is well)."""

    inside: float = 1.0
    across: float = 1.0
    kernels: float = 1.0
    plan: float = 1.0
    ranks: dict[int, float] = field(default_factory=dict)
    peak_bytes: int = 2**28
    failure: FailureKind | None = None


@dataclass(frozen=True, kw_only=True)
class Noises:
    """Standard deviations of ln: from repeat to repeat, window to window and visit to visit."""

    within: float = 0.01
    between: float = 0.004
    visits: float = 0.002
    heavy: bool = False


@dataclass(kw_only=True)
class Machine:
    """Answers probes of a cluster. `calc_s`, `comm_s` and `hidden` describe a step: the share of it under computing."""

    cluster: ClusterSpec
    trouble: Trouble = Trouble()
    noises: Noises = Noises()
    calc_s: float = 0.06
    inside_s: float = 0.02
    across_s: float = 0.04
    hidden: float = 0.5
    seed: int = 0
    probes: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.hosts = [f"node-{rank // self.cluster.gpus_per_node}" for rank in range(self.cluster.devices)]
        self.visit()

    def visit(self, **trouble: object) -> None:
        """Another night, with other trouble."""
        self.trouble = replace(Trouble(), **trouble)  # type: ignore[arg-type]
        self._night = {
            name: self.random.normal() * self.noises.visits for name in ("step", "inside", "across", "layer")
        }
        self.window()

    def window(self) -> None:
        """Another stretch of time."""
        self._window = {name: self.random.normal() * self.noises.between for name in self._night}

    def answer(self, request: ProbeRequest) -> ProbeOutcome:
        """What a probe measures."""
        self.probes += 1
        if self.probes % 14 == 0:
            self.window()
        readings: tuple[object, ...]
        match request:
            case CollectiveRequest():
                readings = (self._collective(request),)
            case LayerRequest():
                readings = (self._layer(request),)
            case _ if self.trouble.failure is not None:
                failure = Failure(kind=self.trouble.failure, message="rank 1: no memory")
                return ProbeOutcome(failure=failure, wall_s=1.0, gpu_s=self.cluster.devices, setup_s=0.1)
            case _:
                readings = (self._step(request.workload.tokens_per_step),)
        outcome = ProbeOutcome(wall_s=1.0, gpu_s=float(self.cluster.devices), setup_s=0.1)
        return outcome.model_copy(update={"readings": readings})

    def _noisy(self, name: str, value: float) -> float:
        """With a repeat's own noise; where it is heavy it has Student's tails with three degrees of freedom."""
        own = self.random.standard_t(3) / math.sqrt(3.0) if self.noises.heavy else self.random.normal()
        return value * math.exp(self._night[name] + self._window[name] + self.noises.within * own)

    def _collective(self, request: CollectiveRequest) -> CollectiveReading:
        across = request.stride >= self.cluster.gpus_per_node
        size = request.sizes_bytes[0]
        slower = max(self.trouble.across if across else self.trouble.inside, *[1.0, *self.trouble.ranks.values()])
        time_s = self._noisy("across" if across else "inside", slower * size / (1e9 if across else 1e10))
        return CollectiveReading(
            op=request.op, group_size=request.group_size, stride=request.stride, size_bytes=size, iterations=7,
            time_s=time_s, time_p10_s=time_s, time_p90_s=time_s, algbw_bytes_per_s=size / time_s,
            busbw_bytes_per_s=size / time_s,
        )  # fmt: skip

    def _layer(self, request: LayerRequest) -> LayerReading:
        time_s = self._noisy("layer", 1e-3 * self.trouble.kernels * max([1.0, *self.trouble.ranks.values()]))
        return LayerReading(
            part=request.part, tp=request.tp, micro_batch=request.micro_batch, recompute=request.recompute,
            sequence_parallel=request.sequence_parallel, iterations=7, forward_s=time_s, backward_s=2 * time_s,
            forward_p10_s=time_s, forward_p90_s=time_s, backward_p10_s=time_s, backward_p90_s=time_s,
            forward_calc_s=time_s, backward_calc_s=2 * time_s, saved_bytes=1, peak_bytes=1, parameter_bytes=1,
            memory_source="made up",
        )  # fmt: skip

    def _step(self, tokens: int) -> StepReading:
        trouble, devices = self.trouble, self.cluster.devices
        calc = [self.calc_s * trouble.kernels * trouble.plan * trouble.ranks.get(rank, 1.0) for rank in range(devices)]
        usual_s = self.inside_s + self.across_s
        comm_s = self.inside_s * trouble.inside + self.across_s * trouble.across
        exposed_s = max(comm_s - self.hidden * usual_s, 0.0)
        step_s = self._noisy("step", max(calc) + exposed_s)
        scale = step_s / (max(calc) + exposed_s)
        ranks = tuple(
            RankReading(
                rank=rank, stage=0, hostname=self.hosts[rank], t_calc_s=self._noisy("step", calc[rank]),
                t_comm_s=comm_s * scale, t_comm_exposed_s=exposed_s * scale, comm_s_by_op={},
                peak_allocated_bytes=trouble.peak_bytes, peak_reserved_bytes=trouble.peak_bytes,
            )
            for rank in range(devices)
        )  # fmt: skip
        speed = tokens / (step_s * devices)
        return StepReading(
            tokens_per_s_per_gpu=speed, interval_tokens_per_s_per_gpu=(speed, speed), step_time_s=step_s,
            step_times_s=(step_s,) * 3, warmup_times_s=(), steady=True, traced_step_s=step_s,
            t_calc_s=sum(calc) / devices * scale, t_comm_s=comm_s * scale, t_comm_exposed_s=exposed_s * scale,
            mu=None, mfu=None, peak_allocated_bytes=trouble.peak_bytes, peak_reserved_bytes=trouble.peak_bytes,
            memory_source="made up", losses=(), pruned=False, setup_s=0.1, ranks=ranks,
        )  # fmt: skip
