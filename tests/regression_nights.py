"""Nights of a machine made of formulas, over a real store: what its ranks would measure."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from autotune.fleet.finishing import Ending
from autotune.fleet.local import LocalFleet
from autotune.regression.local import LocalRegression, Night
from autotune.specs import (
    BestEntry,
    ClusterSpec,
    Device,
    DeviceKind,
    DType,
    Fingerprint,
    Job,
    Link,
    MemberReport,
    ModelSpec,
    Norm,
    Plan,
    ProbeOutcome,
    ProbeRequest,
    Workload,
)
from autotune.specs.regression import AlertChannel, Check
from benchmarks.regression_machine import Machine
from storage import SqlStore

MODEL = ModelSpec(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, gated=False, vocab=512, tied=False,
    norm=Norm.RMSNORM, source="ours",
)  # fmt: skip
WORKLOAD = Workload(seq_len=32, global_batch=8, dtype=DType.FP32)
CLUSTER = ClusterSpec(
    name="here", nodes=1, gpus_per_node=2, device=Device(name="card", kind=DeviceKind.CPU, memory_bytes=2**30),
    intra=Link(name="bus"),
)  # fmt: skip
FINGERPRINT = Fingerprint(
    hostname="node-0", device_name="card", device_count=2, device_memory_bytes=2**30, torch="2.11.0"
)


class MachineRanks:
    """The ranks of such a machine; when `dies_after` jobs were run, the next one raises what an interrupt does."""

    world_id = ""

    def __init__(self, machine: Machine, fingerprint: Fingerprint = FINGERPRINT) -> None:
        self.machine, self.environment = machine, fingerprint
        self.dies_after: int | None = None
        self.closed = 0
        self._outcomes: dict[str, ProbeOutcome] = {}

    def fingerprint(self, cluster: ClusterSpec) -> Fingerprint:
        return self.environment

    def run(self, share: object, request: ProbeRequest, **_: object) -> MemberReport:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                raise KeyboardInterrupt
        return MemberReport()

    def merge(self, job: Job) -> Ending:
        """A job measures the same however often it is asked for."""
        if job.id not in self._outcomes:
            self._outcomes[job.id] = self.machine.answer(job.request)
        return Ending(outcome=self._outcomes[job.id])

    def close(self) -> None:
        self.closed += 1


class Nights:
    """One entry of a store, checked night after night; `entry`: one that is in it already."""

    def __init__(
        self,
        store: SqlStore,
        channels: Collection[AlertChannel] = (),
        *,
        entry: BestEntry | None = None,
        **changes: object,
    ) -> None:
        self.store, self.channels = store, channels
        store.put_fingerprint(FINGERPRINT)
        self.entry = entry or store.put_best(entry_of(**changes))
        self.ranks = MachineRanks(Machine(cluster=self.entry.cluster, across_s=0.0, inside_s=0.03))

    def fleet(self, cluster: ClusterSpec) -> LocalFleet:
        return LocalFleet(
            self.store, cluster, lambda: self.ranks, merge=self.ranks.merge, share_of=lambda job, node: None
        )

    def night(self, *, budget_gpu_s: float | None = None, retune: bool = False, **trouble: object) -> Night:
        self.ranks.machine.visit(**trouble)
        regression = LocalRegression(self.store, self.fleet, channels=self.channels)
        return regression.run([self.entry], budget_gpu_s=budget_gpu_s, retune=retune)

    def check(self, **trouble: object) -> Check:
        (check,) = self.night(**trouble).checks
        return check


def entry_of(**changes: object) -> BestEntry:
    """An entry of the machine, as a tuning would have stored it."""
    made = BestEntry(
        model=MODEL, parameters=1e6, cluster=CLUSTER, workload=WORKLOAD, plan=Plan(dp=2), tokens_per_s_per_gpu=1500.0,
        interval=(1490.0, 1510.0), repeats=3, peak_bytes=None, fingerprint_key=FINGERPRINT.key,
        environment_key=FINGERPRINT.environment_key, measured_at=datetime(2026, 5, 4, tzinfo=UTC),
    )  # fmt: skip
    return made.model_copy(update=changes)
