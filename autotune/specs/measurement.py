"""What crosses between the brain and the probes: requests, readings, failures and the fingerprint."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from autotune.specs.base import LONGEST_S, MOST_PER_S, Seed, Spec
from autotune.specs.model import MOST, ByteCount, Count, CountOrZero, ModelSpec
from autotune.specs.plan import Plan, Recompute
from autotune.specs.workload import Workload

Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
PerSecond = Annotated[float, Field(ge=0, le=MOST_PER_S)]


class Fingerprint(Spec):
    """The environment a measurement was taken in. Every field is read, or empty when it cannot be."""

    hostname: str
    device_name: str
    device_count: int
    device_memory_bytes: int
    driver: str = ""
    runtime: str = ""  # CUDA or ROCm version of the torch build; "cpu" without
    collective_library: str = ""  # "nccl 2.27.3", "gloo"
    torch: str = ""
    python: str = ""
    libraries: dict[str, str] = {}
    os: str = ""
    cpu: str = ""
    cpu_cores: int = 0
    clocks: dict[str, float] = {}  # MHz, by clock name, where readable
    environment: dict[str, str] = {}  # variables that change speed: OMP_NUM_THREADS, NCCL_*, ...

    @property
    def key(self) -> str:
        """Identifies the environment. Momentary clocks are recorded but do not make it another one."""
        return self.digest(without=frozenset({"clocks"}))

    @property
    def environment_key(self) -> str:
        """Identifies the environment whatever the machine: equal nodes of a fleet agree in it."""
        return self.digest(without=frozenset({"clocks", "hostname"}))


class CollectiveOp(StrEnum):
    """The operations that plans use."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


class CollectiveRequest(Spec):
    """A sweep of one operation over groups of `group_size` ranks, `stride` apart, all groups at once.

    Ranks 0, stride, 2*stride, ... form the first group, as a mesh axis does; every rank of the world is in
    one group, so groups compete for shared links as they do in a plan. Sizes are nccl-tests' `size`: the
    full buffer (for all_gather and reduce_scatter the gathered one). For send_recv, group_size is 2.
    """

    kind: Literal["collective"] = "collective"
    op: CollectiveOp
    group_size: Annotated[int, Field(ge=2, le=MOST)]
    stride: Count = 1
    sizes_bytes: Annotated[tuple[ByteCount, ...], Field(min_length=1)]
    warmup: CountOrZero = 2
    iterations: Count = 7


class CollectiveReading(Spec):
    """One size of a sweep. `time_s` is the median over iterations of the slowest rank's time.

    algbw = size / time; busbw = algbw * 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and
    all_to_all, 1 for send_recv (nccl-tests, doc/PERFORMANCE.md).
    """

    op: CollectiveOp
    group_size: Count
    stride: Count
    size_bytes: ByteCount
    iterations: CountOrZero
    time_s: Seconds
    time_p10_s: Seconds
    time_p90_s: Seconds
    algbw_bytes_per_s: PerSecond
    busbw_bytes_per_s: PerSecond


class LayerPart(StrEnum):
    """What a layer probe times: one transformer layer, the embedding, or head and loss."""

    LAYER = "layer"
    EMBEDDING = "embedding"
    HEAD = "head"


class LayerRequest(Spec):
    """Time one part of the model at the shapes that tp and micro_batch give, on all ranks at once.

    Ranks form world/tp groups. Communication inside the part is timed apart from its computation.
    """

    kind: Literal["layer"] = "layer"
    model: ModelSpec
    workload: Workload
    part: LayerPart
    tp: Count = 1
    micro_batch: Count = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    warmup: CountOrZero = 2
    iterations: Count = 7


class LayerReading(Spec):
    """Medians over iterations, of the slowest rank. `calc` is the time less exposed communication.

    `saved_bytes` is what stays allocated between forward and backward, `peak_bytes` the highest point of both
    above what was there before, `parameter_bytes` the rank's parameters.
    """

    part: LayerPart
    tp: int
    micro_batch: int
    recompute: Recompute
    sequence_parallel: bool
    iterations: int
    forward_s: Seconds
    backward_s: Seconds
    forward_p10_s: Seconds
    forward_p90_s: Seconds
    backward_p10_s: Seconds
    backward_p90_s: Seconds
    forward_calc_s: Seconds
    backward_calc_s: Seconds
    saved_bytes: int
    peak_bytes: int
    parameter_bytes: int
    memory_source: str


class StepRequest(Spec):
    """Real training steps under a plan.

    After `warmup_steps`, steps are timed until the 95 % interval of the mean step time is narrower than
    ±`target_relative_interval`, at least `min_steps` and at most `max_steps` of them. With `give_up_step_s` the
    trial stops as pruned once two timed steps are both slower than that. `trace` adds one profiled step, from which
    T_calc and T_comm come. `cold` starts fresh ranks for it.
    """

    kind: Literal["step"] = "step"
    model: ModelSpec
    workload: Workload
    plan: Plan
    warmup_steps: CountOrZero = 2
    min_steps: Count = 3
    max_steps: Count = 10
    target_relative_interval: Annotated[float, Field(gt=0, le=100)] = 0.03
    give_up_step_s: Seconds | None = None
    trace: bool = True
    seed: Seed = 0
    learning_rate: Annotated[float, Field(ge=0, le=1e6)] = 1e-3
    cold: bool = False


class RankReading(Spec):
    """What one rank saw. Seconds are of the traced step; `None` where no trace was asked for."""

    rank: int
    stage: int
    hostname: str
    t_calc_s: Seconds | None
    t_comm_s: Seconds | None
    t_comm_exposed_s: Seconds | None
    comm_s_by_op: dict[str, float]
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class StepReading(Spec):
    """What a step probe measured.

    `interval_tokens_per_s_per_gpu` is the 95 % interval of the mean. t_* are means over ranks of the traced step
    (`traced_step_s` long); mu = T_comm / T_calc. Peaks are of the worst rank; `memory_source` says how they
    were taken. `pruned` says that the steps stopped early because they could not win.
    """

    tokens_per_s_per_gpu: float
    interval_tokens_per_s_per_gpu: tuple[float, float]
    step_time_s: Seconds
    step_times_s: tuple[float, ...]
    warmup_times_s: tuple[float, ...]
    steady: bool
    traced_step_s: Seconds | None
    t_calc_s: Seconds | None
    t_comm_s: Seconds | None
    t_comm_exposed_s: Seconds | None
    mu: float | None
    mfu: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    memory_source: str
    losses: tuple[float, ...]
    pruned: bool
    setup_s: Seconds
    ranks: tuple[RankReading, ...]


class FailureKind(StrEnum):
    """Why a probe has no reading. Only OOM teaches the search about memory."""

    OOM = "oom"
    HANG = "hang"
    COMMUNICATION = "communication"
    CRASH = "crash"
    ILLEGAL = "illegal"
    LOST = "lost"  # the process that ran the probe is gone
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"  # ranks could not be started at all
    SLOW = "slow"  # a node computed so much slower than the others that the figures are the node's


class Failure(Spec):
    """A probe's failure: the first cause, where it happened, and the log."""

    kind: FailureKind
    message: str
    rank: int | None = None
    stage: int | None = None
    log_path: str | None = None
    log_tail: str = ""


ProbeRequest = Annotated[CollectiveRequest | LayerRequest | StepRequest, Field(discriminator="kind")]


class ProbeOutcome(Spec):
    """The end of a probe: readings or a failure, never both; and what it cost.

    `gpu_s` is wall time from start to end times the devices held, set-up included. `setup_s` is the part before
    the first measured operation.
    """

    readings: tuple[CollectiveReading, ...] | tuple[LayerReading, ...] | tuple[StepReading, ...] = ()
    failure: Failure | None = None
    wall_s: Seconds
    gpu_s: Seconds
    setup_s: Seconds
    log_path: str | None = None


class ProbeProgress(Spec):
    """A line of progress from a running probe."""

    phase: str  # "start", "build", "warm-up", "step", "trace", "sweep"
    done: int = 0
    total: int = 0
    seconds: float | None = None  # the last step's time
