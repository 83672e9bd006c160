"""Framework: what the training framework decides beside the plan. Assumptions, each with where its value comes from.

A user's own cluster gets the prior of the framework that will run the plan; its name is on every estimate. All
constants were chosen on published runs as docs/calibration.md describes, and all of them are priors: trials correct
the ones that matter (search.physics).

What was fitted to the network of one published sweep is that sweep's alone (`framework_of`), and so is the confidence
in constants that were fitted to it. By its name a framework has its habits, the neutral value of the rest, and wide
priors: two clusters with the same framework differ by far more than one sweep shows (docs/calibration.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.specs import Attention, CrossEntropy, DType, Fp8Recipe, Norms, Optimizer, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework's habits.

    Args:
        name: shown with every estimate.
        kernel_s: host seconds of one counted operation (`work.layer_kernels`): Python, autograd and dispatch.
        collective_s: host seconds of one collective beyond that.
        message_s: host seconds of a pipeline's send and receive of one micro-batch, each way.
        traffic: bytes that a layer's small kernels move, over the count of `work.layer_work` (which is for fused ones).
        attention: the kernel of the attention core that it takes where the device has it (`speeds.attention_of`).
        current: its matrix products are those of today's libraries, not of an architecture's first years.
        fused_norms: a norm is one kernel; else its parts pass through memory one by one, in fp32.
        accumulates: gradients of each micro-batch are added to an accumulator of `grad_dtype` by a kernel of its own.
        splits_by_cost: pipeline stages are cut at equal shares of the matrix parameters, the head's included; else by
            layers.
        counts_ends: where layers do not divide evenly, the embedding and the head count as one each (Megatron-LM,
            --account-for-embedding-in-pipeline-split), if they divide evenly then.
        bucket_bytes: stored gradients that one collective of ZeRO-0 reduces; 0 for one collective a layer.
        overlap: share of data-parallel communication that may hide under the last backward, ZeRO-0.
        overlap_sharded: the same with sharded state.
        overlap_messages: share of the messages of an interleaved pipeline that its computation hides.
        tp_exposed: share of tensor-parallel communication that no computation hides.
        ep_exposed: share of the exchange of experts that no computation hides.
        dispatches_once: a token crosses to a rank or node once for all its experts there (DeepEP, HybridEP).
        fp8_dispatch: with dtype fp8 tokens go out to experts in 8 bits; what comes back has 16.
        sharded_penalty: time a byte of gathering and scattering across nodes, over that of an all-reduce's half. This
            and the next four are of one network; neutral unless they were fitted to it.
        crossing_penalty: time a byte of any collective across nodes, over what the catalog's links would take.
        node_step_s: latency of gathering and scattering a node beyond the first; 0 for that of the network.
        rank_step_s: the same a rank.
        slow_step_host: host seconds a rank and collective, over what a step between nodes takes beyond the usual
            (cost.network): the thread that drives a collective may wait for a slow network too.
        gathers_again: backward gathers the inputs of a sharded matrix once more.
        device_gap_s: device seconds between two kernels.
        splits_messages: tp ranks send a tp-th of a pipeline message each, with or without sequence parallelism.
        half_gradients: gradients are kept and reduced in 16 bits where the workload does not say.
        cross_entropy: how the loss is computed.
        loss_gradients: fp32 gradients of the logits that an eager loss has at once.
        masters_sharded: with ZeRO-3 the shards are the fp32 masters, and no shard in the compute dtype is kept.
        fused_mlp: an MLP's activation, its product with the gate and the weight of an expert are one kernel, which
            keeps its inputs and its output.
        joint_qkv: queries, keys and values are parts of one tensor, which stays whole because the values are needed.
        fp8_parameters: with dtype fp8 parameters are kept in it; else in bf16, with a copy in fp8 for the products.
        fp8_saved: with dtype fp8 the inputs of matrix products are kept in it for backward.
        gradient_copy: with several replicas gradients of the compute dtype stay beside those of `grad_dtype`.
        gathered_copy: with several replicas parameters of the compute dtype stay beside fp32 masters, in fp32 too.
        gathers_kept: share of the gathered inputs of sharded matrices that stay in memory although they are not needed,
            while the host is far ahead: they were made on another stream, whose memory the allocator frees late.
        gather_buffers: whole inputs of sharded matrices that have buffers of their own, which are never freed.
        logit_scale: measured over counted bytes of logits and loss, without a pipeline.
        piped_logit_scale: the same on a pipeline's last stage.
        memory_sd: standard deviation of ln(true / estimated) of what a rank reserves.
        checked: the constants were fitted to these very runs: trials then move them little (search.physics).
        fragmentation: reserved beyond allocated activations on a GPU, for each doubling of the micro-batches in flight.
        fragmentation_by_tp: what each doubling of tp adds to it.
        optimizer_passes: memory traffic of an optimizer step over the least (one fused kernel).
    """

    name: str
    kernel_s: float = 72e-6
    collective_s: float = 50e-6
    message_s: float = 0.3e-3
    traffic: float = 1.5
    attention: Attention = Attention.FLASH2
    current: bool = False
    fused_norms: bool = True
    accumulates: bool = False
    splits_by_cost: bool = False
    counts_ends: bool = False
    bucket_bytes: float = 0.0
    overlap: float = 0.5
    overlap_sharded: float = 0.5
    overlap_messages: float = 0.0
    tp_exposed: float = 1.0
    ep_exposed: float = 1.0
    dispatches_once: bool = False
    fp8_dispatch: bool = False
    sharded_penalty: float = 1.0
    crossing_penalty: float = 1.0
    node_step_s: float = 0.0
    rank_step_s: float = 0.0
    slow_step_host: float = 0.0
    optimizer_passes: float = 1.0
    device_gap_s: float = 2e-6
    gathers_again: bool = False
    splits_messages: bool = False
    half_gradients: bool = False
    cross_entropy: CrossEntropy = CrossEntropy.EAGER
    loss_gradients: float = 1.0
    masters_sharded: bool = False
    fused_mlp: bool = False
    joint_qkv: bool = False
    fp8_parameters: bool = False
    fp8_saved: bool = False
    gradient_copy: bool = False
    gather_buffers: float = 0.0
    gathered_copy: bool = False
    gathers_kept: float = 0.0
    logit_scale: float = 1.0
    piped_logit_scale: float = 1.0
    fragmentation: float = 0.0
    fragmentation_by_tp: float = 0.0
    memory_sd: float = 0.15
    checked: bool = False

    def settled(self, workload: Workload) -> Framework:
        """These habits with what the workload says of the kernels."""
        changes: dict[str, object] = {}
        if workload.attention is not None:
            changes["attention"] = workload.attention
        if workload.norms is not None:
            changes["fused_norms"] = workload.norms is Norms.FUSED
        if workload.cross_entropy is not None:
            changes["cross_entropy"] = workload.cross_entropy
        if workload.tp_overlap is not None:
            changes["tp_exposed"] = TP_EXPOSED if workload.tp_overlap else 1.0
        if workload.ep_overlap is not None:
            changes["ep_exposed"] = EP_EXPOSED if workload.ep_overlap else 1.0
        return replace(self, **changes) if changes else self  # type: ignore[arg-type]

    def gradient_bytes(self, workload: Workload) -> int:
        """Bytes of one gradient as it is kept."""
        if workload.grad_dtype is not None:
            return workload.grad_dtype.size_bytes
        return max(workload.dtype.size_bytes, 2) if self.half_gradients else DType.FP32.size_bytes

    def reduced_bytes(self, workload: Workload) -> int:
        """Bytes of one gradient as replicas exchange it: as it is kept, unless the workload says otherwise."""
        return workload.reduce_dtype.size_bytes if workload.reduce_dtype else self.gradient_bytes(workload)

    def parameter_bytes(self, workload: Workload) -> float:
        """Bytes of one parameter as a step computes with it.

        fp8 matrices are there in both orders (Transformer Engine keeps the transpose for the backward pass; MXFP8 has
        a scale for each 32 numbers of either), and beside 16-bit parameters as one copy.
        """
        if workload.dtype is not DType.FP8:
            return float((workload.param_dtype or workload.dtype).size_bytes)
        kept = workload.param_dtype or (DType.FP8 if self.fp8_parameters else DType.BF16)
        if kept is DType.FP8:
            return 2.0 * _scaled(workload)
        return kept.size_bytes + _scaled(workload)

    def optimizer_bytes(self, workload: Workload) -> int:
        """Optimizer state a parameter: AdamW has two moments, SGD one, in fp32, and an fp32 master copy of what is
        kept in fewer bits."""
        own = workload.param_dtype or workload.dtype
        master = workload.master_dtype or DType.FP32
        first, second = (item or DType.FP32 for item in (workload.exp_avg_dtype, workload.exp_avg_sq_dtype))
        moments = first.size_bytes + (second.size_bytes if workload.optimizer is Optimizer.ADAMW else 0)
        return moments + (0 if master is own else master.size_bytes)

    def saved_bytes(self, workload: Workload) -> float:
        """Bytes of a number of a matrix product's input as backward gets it."""
        saved = workload.saved_dtype or (workload.dtype if self.fp8_saved else None)
        if saved is DType.FP8:
            return _scaled(workload)
        return float(max((saved or workload.dtype).size_bytes, 2))


def _scaled(workload: Workload) -> float:
    """Bytes of a number in fp8 with its share of the scales: a byte for 32 numbers in MXFP8, four for 128 by block."""
    block = workload.fp8_recipe in {Fp8Recipe.BLOCKWISE, Fp8Recipe.MXFP8}
    return 1.0 + (1.0 / 32.0 if block else 0.0)


TP_EXPOSED = 0.5
"""Share of tensor-parallel communication that stays where it runs beside the products that it feeds (NeMo's rows)."""

EP_EXPOSED = 0.25
"""Assumption: share of the exchange of experts that stays where the other micro-batch computes beside it."""

TORCH = Framework(name="torch", kernel_s=60e-6, traffic=1.75, gathered_copy=True)
"""Our own step probe, and the default: eager PyTorch with its parallel building blocks. Its small kernels move what
llm-foundry's do, which was fitted."""

MEGATRON = Framework(
    name="megatron", kernel_s=40e-6, traffic=1.75, attention=Attention.CUDNN, current=True, counts_ends=True,
    dispatches_once=True, tp_exposed=0.75, overlap=0.9, overlap_sharded=0.9, overlap_messages=0.8, fused_mlp=True,
    joint_qkv=True, fp8_saved=True,
)  # fmt: skip
"""Megatron-LM of today: fused attention and small kernels, gradients in fp32 and added by the product that makes them,
Transformer Engine's fp8, communication of gradients and of interleaved stages beside computation."""

NEMO = replace(MEGATRON, name="nemo", half_gradients=True, fp8_parameters=True)
"""NeMo 2 of 2024-25: Megatron-LM under NVIDIA's recipes, which keep and reduce gradients in bf16, parameters in fp8."""

MEGATRON_BRIDGE = replace(NEMO, name="megatron-bridge", cross_entropy=CrossEntropy.FUSED, fp8_dispatch=True)
"""Megatron-Bridge, NeMo's successor: Transformer Engine's cross entropy, which writes gradients over the logits."""

MEGATRON_2021 = Framework(
    name="megatron-2021", kernel_s=70e-6, collective_s=35e-6, message_s=0.45e-3, traffic=0.8,
    attention=Attention.UNFUSED, optimizer_passes=0.8, device_gap_s=3e-6, half_gradients=True, splits_messages=True,
    overlap=0.0, overlap_sharded=0.0,
)  # fmt: skip
"""Megatron-LM of 2021-22: scores in memory, fused softmax, no overlap, pipeline messages scattered over tp ranks
(Narayanan et al. 2021, section 4.1)."""

MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed")
"""Megatron-DeepSpeed of 2021-23: the same kernels; DeepSpeed's pipeline, which partitions messages over tp ranks too
(deepspeed/runtime/pipe/engine.py, `is_pipe_partitioned`)."""

NANOTRON = Framework(
    name="nanotron", kernel_s=56e-6, collective_s=75e-6, message_s=0.12e-3, traffic=1.25, accumulates=True,
    splits_by_cost=True, bucket_bytes=25e6, optimizer_passes=1.5, overlap=0.4, overlap_sharded=0.0, gathers_again=True,
    gradient_copy=True, gather_buffers=2.0, gathers_kept=0.86, logit_scale=1.37, piped_logit_scale=0.62,
    fragmentation=0.05, fragmentation_by_tp=0.04, memory_sd=0.10,
)  # fmt: skip
"""nanotron of 2024-25: parameters in bf16, gradients added to fp32 by a hook, buckets of DistributedDataParallel."""

FSDP = Framework(
    name="fsdp", kernel_s=57e-6, traffic=1.75, current=True, dispatches_once=True, overlap=0.9,
    overlap_sharded=0.9, loss_gradients=2.0,
    masters_sharded=True,
)  # fmt: skip
"""Fully sharded data parallelism with prefetch, as torchtitan, fms-fsdp and Automodel run it."""

JAX = replace(FSDP, name="jax", kernel_s=20e-6, traffic=1.5, loss_gradients=1.0)
"""MaxText and PaxML: XLA fuses small kernels, and a step is one program."""

DEEPSPEED = Framework(
    name="deepspeed",
    traffic=2.0,
    fused_norms=False,
    overlap=0.7,
    overlap_sharded=0.7,
    half_gradients=True,
    loss_gradients=2.0,
)
"""ZeRO around a model of Hugging Face: eager kernels, gradients in the format of the parameters (its JSON's
data_types)."""

SCALING = replace(
    TORCH, name="scaling", gathered_copy=False, half_gradients=True, joint_qkv=True, fused_norms=False,
    cross_entropy=CrossEntropy.GATHERED,
)  # fmt: skip
"""Aleph Alpha's scaling of 2023-24: eager PyTorch with tensor, pipeline and ZeRO-1 parallelism of its own. Gradients
stay in bf16 (optimizer/parameter_group.py), one projection makes queries, keys and values (attention.py), norms are
made of operations unless a kernel is chosen (rms_norm.py), and the head gathers its logits (column_parallel_linear.py).
"""

FRAMEWORKS = {
    item.name: item
    for item in (
        TORCH, MEGATRON, NEMO, MEGATRON_BRIDGE, MEGATRON_2021, MEGATRON_DEEPSPEED, NANOTRON, FSDP, JAX, DEEPSPEED,
        SCALING,
    )
}  # fmt: skip

_ULTRASCALE = replace(
    NANOTRON, sharded_penalty=1.8, node_step_s=37e-6, rank_step_s=33e-6, slow_step_host=1.2, checked=True
)
_VTRAIN = replace(MEGATRON_DEEPSPEED, crossing_penalty=2.8, checked=True)

_SOURCES = {
    "hf_ultrascale": _ULTRASCALE,
    "hf_playbook_figs": NANOTRON,
    "vtrain_single": _VTRAIN,
    "vtrain_multi": _VTRAIN,
    "megatron_sc21": replace(MEGATRON_2021, checked=True),
    "korthikanti22": replace(MEGATRON_2021, checked=True),
    "bigscience_a100": MEGATRON_DEEPSPEED,
    "zero_bubble": MEGATRON_2021,
    "libai": MEGATRON_2021,
    "llm_foundry": replace(
        FSDP, attention=Attention.FLASH, current=False, cross_entropy=CrossEntropy.FUSED, checked=True
    ),
    "torchtitan": FSDP,
    "fms_fsdp": FSDP,
    "colossalai": FSDP,
    "lucie_4k": MEGATRON,
    "lucie_2k": MEGATRON,
    "megatron_ci": MEGATRON,
    "megatron_bridge": MEGATRON_BRIDGE,
    "nemo_docs": NEMO,
    "nemo_launcher": NEMO,
    "nemo_longseq": NEMO,
    "simumax_b200": MEGATRON,
}
"""Which framework made the runs of a published source, with what was fitted to that source alone."""


def framework_of(source: str) -> Framework:
    """The framework behind a source of published runs, or the one of that name, which nobody checked; else TORCH."""
    return _SOURCES.get(source) or FRAMEWORKS.get(source, TORCH)


def framework_for(workload: Workload, framework: Framework | None = None) -> Framework:
    """The framework that is given, else that of the workload, with the kernels that the workload says."""
    return (framework or FRAMEWORKS[workload.framework.value]).settled(workload)
