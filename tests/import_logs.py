"""Logs as the frameworks print them, made for tests: what a reader must understand, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

TIMES_MS = (21_000.0, 5_900.0, 5_100.0, 5_050.0, 5_020.0, 5_010.0, 5_000.0, 4_990.0, 5_005.0, 9_800.0, 4_995.0)
"""A start, warm-up, steady steps around 5 s, and one that waited for a checkpoint."""

LLAMA_8B = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
            "num_query_groups": 8}  # fmt: skip


def megatron(times_ms: Sequence[float] = TIMES_MS, *, tail: str = "", **changes: object) -> str:
    """A Megatron-LM log of Llama 3.1 8B on 16 GPUs with tp=4, pp=2, dp=2; `changes` are arguments."""
    arguments: dict[str, object] = {
        "accumulate_allreduce_grads_in_fp32": True, "add_bias_linear": False, "add_qkv_bias": False, "bf16": True,
        "context_parallel_size": 1, "data_parallel_size": 2, "expert_model_parallel_size": 1, "fp16": False,
        "fp8": None, "global_batch_size": 128, "group_query_attention": True, "kv_channels": 128,
        "max_position_embeddings": 8192, "micro_batch_size": 1, "normalization": "RMSNorm", "num_experts": None,
        "optimizer": "adam", "padded_vocab_size": 128256, "pipeline_model_parallel_size": 2,
        "position_embedding_type": "rope", "qk_layernorm": False, "recompute_granularity": "selective",
        "seq_length": 8192, "sequence_parallel": True, "swiglu": True, "tensor_model_parallel_size": 4,
        "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True,
        "use_megatron_fsdp": False, "virtual_pipeline_model_parallel_size": None, "world_size": 16,
        **LLAMA_8B, **changes,
    }  # fmt: skip
    lines = [
        "using world size: 16, data-parallel size: 2, context-parallel size: 1, hierarchical context-parallel sizes: "
        "None, tensor-model-parallel size: 4, pipeline-model-parallel size: 2",
        "------------------------ arguments ------------------------",
        *(f"  {name} {'.' * max(48 - len(name), 3)} {value}" for name, value in sorted(arguments.items())),
        "-------------------- end of arguments ---------------------",
        "> building torch dataset index ...",
        *_megatron_steps(times_ms, arguments["global_batch_size"]),
    ]
    return "\n".join(lines) + "\n" + tail


def _megatron_steps(times_ms: Iterable[float], batch: object) -> Iterable[str]:
    for number, time_ms in enumerate(times_ms, start=1):
        yield (
            f" [2026-03-01 10:{number:02d}:00] iteration {number:8d}/     100 | consumed samples: {number * 128:12d} | "
            f"elapsed time per iteration (ms): {time_ms:.1f} | throughput per GPU (TFLOP/s/GPU): 612.3 | "
            f"learning rate: 1.000000E-04 | global batch size: {batch!s:>5} | lm loss: 1.002E+01 | loss scale: 1.0 | "
            "grad norm: 2.345 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        if number == 1:
            for rank, reserved in ((0, 61_440.0), (8, 51_200.0)):
                yield (
                    f"[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 30720.5 | "
                    f"max allocated: {reserved - 10_240:.1f} | reserved: {reserved} | max reserved: {reserved}"
                )


def torchtitan(tps: Sequence[str] = ("612", *["7,400"] * 4, "7,410", "7,390"), *, mesh: str = "") -> str:
    """A torchtitan log of Llama 3 8B on 8 GPUs under FSDP, in colours, ten steps a line."""
    mesh = mesh or "Building 1-D device mesh with ['dp_shard'], [8]"
    texts = [
        "Starting job: Llama 3 8B training",
        mesh,
        "Model llama3 8B size: 8,030,261,248 total parameters",
        "GPU capacity: NVIDIA H100 80GB HBM3 (0) with 79.10GiB memory",
        "Applied FSDP to the model",
        "Training starts at step 1, with local batch size 2, global batch size 16, sequence length 8192, "
        "total steps 1000 (warmup 200)",
    ]
    for index, speed in enumerate(tps):
        texts.append(
            f"\x1b[31mstep: {max(index * 10, 1):2d}  \x1b[32mloss: 12.2713  \x1b[38;2;180;60;0mgrad_norm:  1.2000  "
            f"\x1b[38;2;54;234;195mmemory: {40 + index}.50GiB(51.20%)  \x1b[34mtps: {speed}  \x1b[36mtflops: 380.52  "
            "\x1b[35mmfu: 38.47%\x1b[39m"
        )
    return "".join(f"[rank0]:[titan] 2026-03-01 10:00:00,000 - root - INFO - {text}\n" for text in texts)


def deepspeed(samples_per_s: Sequence[float] = (9.0, *[40.0] * 9), **changes: object) -> str:
    """A DeepSpeed log of ZeRO-3 on 16 GPUs; `changes` are entries of its config."""
    config: Mapping[str, object] = {
        "bfloat16_enabled": True, "fp16_enabled": False, "gradient_accumulation_steps": 2, "optimizer_name": "adamw",
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "world_size": 16, "zero_optimization_stage": 3,
        **changes,
    }  # fmt: skip
    stamp = "[2026-03-01 10:00:00,123] [INFO]"
    lines = [f"{stamp} [config.py:1000:print]   {name} {'.' * (29 - len(name))} {value}" for name, value in
             config.items()]  # fmt: skip
    for number, speed in enumerate(samples_per_s, start=1):
        lines.append(
            f"{stamp} [logging.py:96:log_dist] [Rank 0] step={number}, skipped=0, lr=[1e-4], mom=[(0.9, 0.95)]"
        )
        lines.append(
            f"{stamp} [timer.py:264:stop] epoch=0/micro_step={2 * number}/global_step={number}, "
            f"RunningAvgSamplesPerSec=38.2, CurrSamplesPerSec={speed}, MemAllocated=12.2GB, MaxMemAllocated=31.5GB"
        )
    return "\n".join(lines) + "\n"


def nanotron(times: Sequence[str] = ("9.91K", *["1.24K"] * 9), *, tp_mode: str = "REDUCE_SCATTER: 2") -> str:
    """A nanotron log of a small Llama on 8 GPUs with tp=2, pp=2, dp=2, labelled by torchrun."""
    stamp = "[default0]:03/01/2026 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-1]: "
    lines = [
        f"{stamp}Config:",
        "[default0]:Config(general=GeneralArgs(project='bench', run='a_run', seed=42),",
        "[default0]:       parallelism=ParallelismArgs(dp=2,",
        "[default0]:                                   pp=2,",
        "[default0]:                                   tp=2,",
        "[default0]:                                   pp_engine=<nanotron.parallel.pipeline_parallel.engine."
        "OneForwardOneBackwardPipelineEngine object at 0x7f10>,",
        f"[default0]:                                   tp_mode=<TensorParallelLinearMode.{tp_mode}>,",
        "[default0]:                                   recompute_layer=False, expert_parallel_size=1),",
        "[default0]:       tokens=TokensArgs(sequence_length=4096, train_steps=20, micro_batch_size=4,",
        "[default0]:                         batch_accumulation_per_replica=8),",
        "[default0]:       optimizer=OptimizerArgs(zero_stage=1, accumulate_grad_in_fp32=True, weight_decay=0.01),",
        f"{stamp}Model Config:",
        "[default0]:LlamaConfig(hidden_size=2048, intermediate_size=8192, num_attention_heads=32,",
        "[default0]:            num_hidden_layers=16, num_key_value_heads=8, tie_word_embeddings=True,",
        "[default0]:            vocab_size=131072)",
        "[default0]:model_dtype: dtype=torch.bfloat16",
    ]
    for number, time in enumerate(times, start=1):
        lines.append(
            f"{stamp}iteration: {number} / 20 | consumed_tokens: 262K | elapsed_time_per_iteration_ms: {time}"
            " | tokens_per_sec: 211K | tokens_per_sec_per_gpu: 26.4K | global_batch_size: 64 | lm_loss: 11.1 | "
            "lr: 0.0003 | model_tflops_per_gpu: 252 | hardware_tflops_per_gpu: 252 | grad_norm: 1.2"
        )
        lines.append(f"{stamp} Memory usage: 9000.12MiB. Peak allocated {20480 + number}.00MiB. "
                     "Peak reserved: 24576.00MiB")  # fmt: skip
    return "\n".join(lines) + "\n"


def nccl_tests(test: str = "all_reduce", *, hosts: int = 2, local: int = 8, end: bool = True) -> str:
    """An nccl-tests log of three sizes whose times give a bus bandwidth near 360 GB/s at the largest."""
    ranks = hosts * local
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "sendrecv": 1.0}.get(test, (ranks - 1) / ranks)
    lines = [
        f"# Collective test starting: {test}_perf",
        "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1073741824 step: 32(factor) warmup iters: 5 iters: 20 agg "
        "iters: 1 validation: 1 graph: 0",
        "#",
        "# Using devices",
        *(
            f"#  Rank {rank:2d} Group  0 Pid {4000 + rank} on node-{rank // local} device {rank % local:2d} [0x07] "
            "NVIDIA H100 80GB HBM3"
            for rank in range(ranks)
        ),
        "#",
        "#                                                              out-of-place                       in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw "
        "#wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size, time_us in ((1048576, 60.0), (33554432, 300.0), (1073741824, 5600.0)):
        algbw = size / time_us / 1e3
        figures = f"{time_us:8.1f} {algbw:7.2f} {algbw * share:7.2f}      0"
        lines.append(f"{size:12d} {size // 4:13d}     float     sum      -1 {figures} {figures}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 210.512", "#"] if end else []
    return "\n".join(lines) + "\n"


RUNS_HEADER = (
    "source,group,model_name,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gpu,gpus_per_node,num_gpus,"
    "tp,pp,dp,cp,micro_batch,zero_stage,global_batch,recompute,tokens_per_s_per_gpu,peak_mem_gb,status,"
    "net_allreduce_GBps,note\n"
)


def runs_row(plan: str = "2,1,4,1,2,1", speed: str = "9000", status: str = "ok") -> str:
    """A row of a runs file of Llama 3.1 8B on a node of H100; the plan is tp, pp, dp, cp, micro-batch, ZeRO stage."""
    shape = "32,4096,32,8,14336,128256,8192"
    return f"megatron_ci,g,Llama 3.1 8B,8.03,{shape},h100-80gb-sxm,8,8,{plan},64,none,{speed},60,{status},380,a note\n"
