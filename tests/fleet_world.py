"""A scripted world: nodes that answer at once with made-up measurements, and a queue that may lose what it carries.

What is real is the store and all that decides; what the nodes measure is a formula, so that a tuning's way is known.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.fleet.finishing import Ending
from autotune.fleet.service import FleetService, submission_of
from autotune.ports.fleet import FleetStore
from autotune.settings import FleetTimes
from autotune.specs import (
    ClusterSpec,
    CollectiveReading,
    CollectiveRequest,
    Device,
    DeviceKind,
    DType,
    Failure,
    FailureKind,
    Fingerprint,
    Job,
    JobState,
    LayerReading,
    LayerRequest,
    Link,
    MemberReport,
    MemberState,
    ModelSpec,
    Node,
    NodeState,
    Norm,
    Plan,
    ProbeOutcome,
    Recompute,
    Space,
    StepReading,
    StepRequest,
    Workload,
)
from autotune.specs.regression import CHECK_JOB

MODEL = ModelSpec(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, gated=False, vocab=512, tied=False,
    norm=Norm.RMSNORM, source="ours",
)  # fmt: skip
WORKLOAD = Workload(seq_len=32, global_batch=8, dtype=DType.FP32)
SPACE = Space(micro_batch=(1, 2), zero_stage=(0,), recompute=(Recompute.NONE,), sequence_parallel=(False,), vpp=(1,))
DEVICE = Device(name="cpu", kind=DeviceKind.CPU, memory_bytes=2**30)


def pool_cluster(nodes: int = 2, gpus_per_node: int = 2) -> ClusterSpec:
    """The cluster of the pool `box`."""
    link = Link(name="loopback")
    return ClusterSpec(
        name="box",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        device=DEVICE,
        intra=link,
        inter=Link(name="wire", bytes_per_s=1e9),
    )


def node_of(store: FleetStore, name: str, *, slots: int = 2, torch: str = "2.13.0", session: str = "s1") -> Node:
    """A node as its worker would register it."""
    fingerprint = Fingerprint(
        hostname=name, device_name="cpu", device_count=slots, device_memory_bytes=2**30, torch=torch
    )
    key, now = store.put_fingerprint(fingerprint), store.now()
    return Node(
        name=name, pool="box", address="127.0.0.1", device=DEVICE, slots=slots, fingerprint_key=key,
        environment_key=fingerprint.environment_key, session=session, registered_at=now, heartbeat_at=now,
    )  # fmt: skip


class Mail:
    """A queue in memory. `loses` says of each message (kind, id) whether it goes astray."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, tuple[str | int, ...]]] = deque()
        self.loses: Callable[[str], bool] = lambda kind: False

    def _put(self, kind: str, *ids: str | int) -> bool:
        if not self.loses(kind):
            self.waiting.append((kind, ids))
        return True

    def advance(self, *tuning_ids: str) -> bool:
        if tuning_ids:
            return self._put("advance", *tuning_ids)
        if ("begin", ()) not in self.waiting and not self.loses("begin"):
            self.waiting.appendleft(("begin", ()))  # never behind tunings, and one is as good as many
        return True

    def backlog(self) -> int:
        return sum(kind == "advance" for kind, _ in self.waiting)

    def run(self, node: str, job_id: str, token: int) -> bool:
        return self._put("run", node, job_id, token)

    def canary(self, node: str, session: str) -> bool:
        return self._put("canary", node, session)

    def close(self) -> None:
        self.waiting.clear()


Fault = Callable[[Job, str], FailureKind | None]


@dataclass
class World:
    """Nodes that play their part, and a fleet's service over a real store.

    `fault` says of a job and a node whether, and how, the node fails at it; `speed` is of a node in health probes.
    """

    store: FleetStore
    cluster: ClusterSpec
    mail: Mail = field(default_factory=Mail)
    fault: Fault = lambda job, node: None
    speed: dict[str, float] = field(default_factory=dict)
    times: FleetTimes = FleetTimes()
    runs: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.service = FleetService(self.store, self.mail, self.merge, self.times)

    def join(self, *names: str, slots: int = 2, torch: str = "2.13.0") -> None:
        """Registers nodes, and the pool's cluster if it is not known."""
        if self.cluster.name not in {cluster.name for cluster in self.store.clusters()}:
            self.store.put_cluster(self.cluster)
        for name in names:
            self.store.register_node(node_of(self.store, name, slots=slots, torch=torch))

    def submit(self, nodes: int = 2, *, principal: str = "ann", **options: object) -> str:
        """Asks for a tuning of `nodes` nodes; returns its id."""
        cluster = self.cluster.model_copy(update={"nodes": nodes})
        options.setdefault("space", SPACE)
        submission = submission_of(MODEL, cluster, WORKLOAD, principal=principal, **options)  # type: ignore[arg-type]
        return self.service.submit(submission)[0].id

    def deliver(self, most: int = 10_000) -> int:
        """Delivers what waits, and what follows from it; returns how many messages."""
        count = 0
        while self.mail.waiting and count < most:
            kind, ids = self.mail.waiting.popleft()
            count += 1
            self.act(kind, *ids)
        return count

    def act(self, kind: str, *ids: str | int) -> None:
        match kind:
            case "advance":
                self.advance_by(str(ids[0]))
            case "begin":
                self.service.admit()
            case "run":
                self.play(str(ids[0]), str(ids[1]), int(ids[2]))
            case "canary":
                self.store.renew_node(str(ids[0]), str(ids[1]))

    def advance_by(self, each: str) -> None:
        """What a tuner does with an id; a check's, of which a fleet without checks has none, waits for the sweep."""
        if not each.startswith(CHECK_JOB):
            self.service.advance(each)

    def play(self, node: str, job_id: str, token: int) -> None:
        """A node's share of a job."""
        held = len(set(self.store.leased_nodes().values()))
        self.most_at_once = max(self.most_at_once, held)
        session = self.store.node(node).session
        job = self.store.start_member(job_id, token, node, session, lease_s=self.times.lease_s)
        if job is None:
            return
        failure = self.fault(job, node)
        message = f"node {node}: rank 0 failed"
        report = MemberReport(failure=failure, message=message) if failure else MemberReport(kept_warm=True)
        reported = self.store.report_member(job_id, token, node, session, report)
        if reported is not None and reported.state is JobState.REPORTED:
            self.service.finish(reported)

    def settle(self, sweeps: int = 200) -> None:
        """Delivers and sweeps until nothing moves any more."""
        for _ in range(sweeps):
            before = self.deliver()
            self.service.sweep()
            if not before and not any(kind != "canary" for kind, _ in self.mail.waiting):
                return

    # -- what is measured ---------------------------------------------------------------------------------

    def merge(self, job: Job) -> Ending:
        """What the members' reports amount to: the first failure, or made-up readings."""
        for member in job.members:
            if member.state is MemberState.LOST:
                return self._failed(job, FailureKind.LOST, f"node {member.node} was lost", member.node)
            if member.report is not None and member.report.failure is not None:
                return self._failed(job, member.report.failure, member.report.message, member.node)
        self.runs[job.id] += 1
        speed = min(self.speed.get(member.node, 1.0) for member in job.members)
        outcome = ProbeOutcome(readings=(), wall_s=1.0, gpu_s=float(job.cluster.devices), setup_s=0.1)
        whole = outcome.model_copy(update={"readings": self._readings(job, speed)})
        return Ending(outcome=whole, calc_s=self._calc_s(job))

    def _calc_s(self, job: Job) -> dict[int, float]:
        """Each rank computes for 20 ms at full speed, in whatever probe."""
        size = job.cluster.gpus_per_node
        ranks = range(job.cluster.devices)
        nodes = {member.index: member.node for member in job.members}
        return {rank: 0.02 / self.speed.get(nodes[rank // size], 1.0) for rank in ranks}

    def _failed(self, job: Job, kind: FailureKind, message: str, node: str) -> Ending:
        outcome = ProbeOutcome(
            failure=Failure(kind=kind, message=message), wall_s=1.0, gpu_s=float(job.cluster.devices), setup_s=0.1
        )
        return Ending(outcome=outcome, blamed=node)

    def _readings(self, job: Job, speed: float) -> tuple[object, ...]:
        match job.request:
            case CollectiveRequest():
                return collective_readings(job.request, speed)
            case LayerRequest():
                return (layer_reading(job.request, speed),)
            case _:
                done = self._before(job, job.request.plan)
                return (step_reading(job.request, job.cluster, truth(job.request.plan, done)),)

    def _before(self, job: Job, plan: Plan) -> int:
        """The complete trials of that plan in its tuning: repeats differ a little, and always in the same way."""
        assert job.tuning_id is not None
        return sum(trial.plan == plan and trial.reading is not None for trial in self.store.trials(job.tuning_id))

    def nodes_ready(self) -> set[str]:
        return {node.name for node in self.store.nodes() if node.state is NodeState.READY}


def truth(plan: Plan, repeat: int) -> float:
    """Tokens a second and GPU of a plan."""
    cost = 1.0 + 0.3 * (plan.tp - 1) + 0.2 * (plan.pp - 1) - 0.1 * (plan.micro_batch - 1)
    noise = (zlib.crc32(f"{plan.key}/{repeat}".encode()) % 1000) / 1e5
    return 1000.0 / cost * (1.0 + noise)


def collective_readings(request: CollectiveRequest, speed: float) -> tuple[CollectiveReading, ...]:
    found = []
    for size in request.sizes_bytes:
        time_s = (1e-5 + size / 1e9) / speed
        found.append(
            CollectiveReading(
                op=request.op,
                group_size=request.group_size,
                stride=request.stride,
                size_bytes=size,
                iterations=7,
                time_s=time_s,
                time_p10_s=time_s,
                time_p90_s=time_s,
                algbw_bytes_per_s=size / time_s,
                busbw_bytes_per_s=size / time_s,
            )
        )
    return tuple(found)


def layer_reading(request: LayerRequest, speed: float) -> LayerReading:
    time_s = (1e-4 + 1e-3 * request.micro_batch / request.tp) / speed
    return LayerReading(
        part=request.part, tp=request.tp, micro_batch=request.micro_batch, recompute=request.recompute,
        sequence_parallel=request.sequence_parallel, iterations=7, forward_s=time_s, backward_s=2 * time_s,
        forward_p10_s=time_s, forward_p90_s=time_s, backward_p10_s=2 * time_s, backward_p90_s=2 * time_s,
        forward_calc_s=time_s, backward_calc_s=2 * time_s, saved_bytes=2**16, peak_bytes=2**18,
        parameter_bytes=2**16, memory_source="made up",
    )  # fmt: skip


def step_reading(request: StepRequest, cluster: ClusterSpec, tokens: float) -> StepReading:
    step_s = request.workload.tokens_per_step / (tokens * cluster.devices)
    return StepReading(
        tokens_per_s_per_gpu=tokens, interval_tokens_per_s_per_gpu=(0.999 * tokens, 1.001 * tokens),
        step_time_s=step_s, step_times_s=(step_s,) * 3, warmup_times_s=(), steady=True, traced_step_s=None,
        t_calc_s=None, t_comm_s=None, t_comm_exposed_s=None, mu=None, mfu=None, peak_allocated_bytes=2**20,
        peak_reserved_bytes=2**20, memory_source="made up", losses=(), pruned=False, setup_s=0.1, ranks=(),
    )  # fmt: skip
