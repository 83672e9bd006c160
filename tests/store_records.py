"""Records to fill a store with: every optional part present, awkward floats, all kinds of readings."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from autotune.specs import (
    Basis,
    Budget,
    BytesByPart,
    ClusterSpec,
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    ComputeFit,
    Device,
    DeviceKind,
    DType,
    Estimate,
    Failure,
    FailureKind,
    Fingerprint,
    LayerPart,
    LayerReading,
    LayerRequest,
    Link,
    LinkFit,
    ModelSpec,
    Norm,
    Plan,
    ProbeOutcome,
    Profile,
    RankReading,
    Recompute,
    SamplerName,
    SecondsByPart,
    Space,
    StepReading,
    Trial,
    TrialState,
    Tuning,
    Workload,
)

MODEL = ModelSpec(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=172, gated=True, vocab=512, tied=False,
    norm=Norm.RMSNORM, source="ours",
)  # fmt: skip
DEVICE = Device(name="card", kind=DeviceKind.CUDA, memory_bytes=80 * 2**30, peak_flops_per_s={DType.BF16: 3e14})
CLUSTER = ClusterSpec(
    name="pair", nodes=2, gpus_per_node=4, device=DEVICE, intra=Link(name="nvlink", bytes_per_s=3e11),
    inter=Link(name="ib"),
)  # fmt: skip
WORKLOAD = Workload(seq_len=128, global_batch=16)
FINGERPRINT = Fingerprint(
    hostname="node-1", device_name="card", device_count=8, device_memory_bytes=80 * 2**30, driver="580.1",
    torch="2.11.0", libraries={"nccl": "2.28"}, clocks={"sm": 1980.0}, environment={"NCCL_ALGO": "Ring"},
)  # fmt: skip
MOMENT = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)
ELSEWHERE = timezone(timedelta(hours=5, minutes=45))
ESTIMATE = Estimate(
    seconds=SecondsByPart(
        compute=0.1, tp=0.2, ep=0.0, cp=0.0, pp_p2p=1e-7, bubble=1 / 3, dp_exposed=0.05, optimizer=2**-40
    ),
    bytes=BytesByPart(parameters=1e9, gradients=2e9, optimizer=4e9, activations=5e9, logits=1.5, buffers=0.0),
    step_time_s=0.7,
    tokens_per_s_per_gpu=1234.5678901234567,
    mfu=None,
    peak_memory_bytes=1.25e10,
    worst_stage=1,
    fits=True,
    basis=Basis.PROFILE,
)
FAILURE = Failure(
    kind=FailureKind.OOM, message="rank 3: out of memory", rank=3, stage=1, log_path="/logs/3", log_tail="a\nü"
)
COLLECTIVE_REQUEST = CollectiveRequest(op=CollectiveOp.ALL_REDUCE, group_size=4, stride=2, sizes_bytes=(1024, 2**33))
LAYER_REQUEST = LayerRequest(model=MODEL, workload=WORKLOAD, part=LayerPart.LAYER, tp=2)


def step_reading(tokens_per_s_per_gpu: float = 1 / 3, *, pruned: bool = False, traced: bool = True) -> StepReading:
    """A step reading with two ranks; without trace its communication is unknown."""
    t_calc_s, t_comm_s, exposed_s = (0.1, 2 / 3, 5e-324) if traced else (None, None, None)
    ranks = tuple(
        RankReading(
            rank=rank,
            stage=rank // 2,
            hostname=f"node-{rank}",
            t_calc_s=t_calc_s,
            t_comm_s=t_comm_s,
            t_comm_exposed_s=exposed_s,
            comm_s_by_op={"tp": 0.1 + rank, "dp": 1e-9} if traced else {},
            peak_allocated_bytes=70 * 2**30 + rank,
            peak_reserved_bytes=75 * 2**30,
        )
        for rank in range(2)
    )
    return StepReading(
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        interval_tokens_per_s_per_gpu=(tokens_per_s_per_gpu * 0.9, tokens_per_s_per_gpu * 1.1),
        step_time_s=0.1 + 0.2,
        step_times_s=(0.3, 0.30000000000000004, 0.29),
        warmup_times_s=(1.0, 0.5),
        steady=not pruned,
        traced_step_s=0.31 if traced else None,
        t_calc_s=t_calc_s,
        t_comm_s=t_comm_s,
        t_comm_exposed_s=exposed_s,
        mu=None if t_comm_s is None or t_calc_s is None else t_comm_s / t_calc_s,
        mfu=0.41 if traced else None,
        peak_allocated_bytes=70 * 2**30 + 1,
        peak_reserved_bytes=75 * 2**30,
        memory_source="torch.cuda",
        losses=(11.5, 11.25, 3.0000000001),
        pruned=pruned,
        setup_s=4.5,
        ranks=ranks,
    )


def collective_reading(size_bytes: int, time_s: float = 1e-5) -> CollectiveReading:
    """One size of the sweep of COLLECTIVE_REQUEST."""
    return CollectiveReading(
        op=CollectiveOp.ALL_REDUCE, group_size=4, stride=2, size_bytes=size_bytes, iterations=7, time_s=time_s,
        time_p10_s=time_s * 0.9, time_p90_s=time_s * 1.1, algbw_bytes_per_s=size_bytes / time_s,
        busbw_bytes_per_s=1.5 * size_bytes / time_s,
    )  # fmt: skip


LAYER_READING = LayerReading(
    part=LayerPart.LAYER, tp=2, micro_batch=1, recompute=Recompute.SELECTIVE, sequence_parallel=True, iterations=7,
    forward_s=0.1, backward_s=0.2, forward_p10_s=0.09, forward_p90_s=0.11, backward_p10_s=0.19, backward_p90_s=0.21,
    forward_calc_s=0.08, backward_calc_s=0.17, saved_bytes=2**31, peak_bytes=2**32, parameter_bytes=2**20,
    memory_source="tensors",
)  # fmt: skip
COLLECTIVE_OUTCOME = ProbeOutcome(
    readings=(collective_reading(1024), collective_reading(2**33, 0.5)), wall_s=2.0, gpu_s=16.0, setup_s=0.5
)
LAYER_OUTCOME = ProbeOutcome(readings=(LAYER_READING,), wall_s=1.0, gpu_s=8.0, setup_s=0.5, log_path="/logs/layer")


def profile(fingerprint_key: str, step_scale: float = 1.0625) -> Profile:
    """A profile of CLUSTER."""
    link = LinkFit(
        op=CollectiveOp.ALL_REDUCE, group_size=4, stride=2, crosses_nodes=True, latency_s=1e-5, bytes_per_s=1 / 3e-11,
        relative_error=0.02, readings=9,
    )  # fmt: skip
    compute = ComputeFit(flops_per_s=2.5e14, launch_s=4e-6, bytes_per_s=None, relative_error=0.03, readings=12)
    return Profile(
        cluster_key=CLUSTER.key, fingerprint_key=fingerprint_key, links=(link,), compute=compute, step_scale=step_scale
    )


def tuning(tuning_id: str = "tuning-1", **changes: object) -> Tuning:
    """A new tuning of MODEL on CLUSTER."""
    new = Tuning(
        id=tuning_id, model=MODEL, cluster=CLUSTER, workload=WORKLOAD, space=Space(tp=(1, 2)),
        budget=Budget(gpu_s=600.0, max_trials=12), seed=7, sampler=SamplerName.TPE, owner="me",
        created_at=MOMENT, updated_at=MOMENT,
    )  # fmt: skip
    return new.model_copy(update=changes)


def trial(number: int, tuning_id: str = "tuning-1", plan: Plan | None = None) -> Trial:
    """A running trial, started `number` seconds after MOMENT."""
    return Trial(
        id=f"{tuning_id}-{number}", tuning_id=tuning_id, number=number, plan=plan or Plan(tp=2, pp=2, dp=2),
        state=TrialState.RUNNING, estimate=ESTIMATE if number % 2 == 0 else None, owner="me",
        started_at=(MOMENT + timedelta(seconds=number)).astimezone(ELSEWHERE),
    )  # fmt: skip
