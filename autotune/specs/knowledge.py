"""Best-known plans: what the database answers to "what is the best plan for this model on this cluster?"."""

from __future__ import annotations

from datetime import datetime

from autotune.specs.base import Name, Spec
from autotune.specs.cluster import ClusterSpec
from autotune.specs.model import ModelSpec
from autotune.specs.plan import Plan
from autotune.specs.workload import Workload

MEASURED = "measured"
"""The source of our own measurements; any other one is the name of an import."""


class RunnerUp(Spec):
    """The plan that came closest."""

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    repeats: int
    too_close: bool


class BestEntry(Spec):
    """The best plan that was measured for one model, cluster and workload in one environment.

    `id` is 0 until it is stored. `parameters` is the model's number of parameters. `interval` holds the mean
    throughput with 95 %. `peak_bytes` is the worst rank's of all repeats, None where unknown. `source` is `measured`
    for our own trials, else the import's name. `superseded_at` is set when a later entry took its place, `reason` says
    why this plan and not the fastest one.
    """

    id: int = 0
    model: ModelSpec
    parameters: float
    cluster: ClusterSpec
    workload: Workload
    plan: Plan
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    repeats: int
    peak_bytes: int | None
    memory_source: str = ""
    runner_up: RunnerUp | None = None
    reason: str = ""
    source: Name = MEASURED
    tuning_id: str | None = None
    fingerprint_key: str = ""
    environment_key: str = ""
    measured_at: datetime
    superseded_at: datetime | None = None

    @property
    def memory_margin(self) -> float | None:
        """The share of a device's memory that the worst rank left free."""
        return None if self.peak_bytes is None else 1.0 - self.peak_bytes / self.cluster.device.memory_bytes

    @property
    def too_close(self) -> bool:
        """Whether the runner-up may be as fast."""
        return self.runner_up is not None and self.runner_up.too_close


class NearEntry(Spec):
    """What is needed to judge how near a current entry is to a question; `id` fetches the whole."""

    id: int
    model_name: str
    model_key: str
    parameters: float
    cluster_key: str
    device_name: str
    gpus_per_node: int
    devices: int
    workload_key: str
    seq_len: int
    global_batch: int
    dtype: str
    environment_key: str
    source: str
    tokens_per_s_per_gpu: float
    measured_at: datetime
