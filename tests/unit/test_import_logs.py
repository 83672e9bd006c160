"""Training logs as runs: what each framework's log says, and what cannot be."""

from __future__ import annotations

import import_logs
import pytest

from autotune.catalog import load_model
from autotune.catalog.gpus import cluster_from_shorthand
from autotune.errors import InputError
from autotune.imports import Format, Imported, Stated, read_log
from autotune.imports.assembly import median_interval, settled
from autotune.imports.logs import LoggedStep
from autotune.specs import Attention, CrossEntropy, DType, FailureKind, Module, Plan, Recompute, Schedule

SIXTEEN, EIGHT = cluster_from_shorthand("h100-80gb-sxm:2x8"), cluster_from_shorthand("h100-80gb-sxm:1x8")
LLAMA = load_model("llama3.1-8b")
DEEPSPEED_SAYS = {"tp": 1, "pp": 1, "recompute": "full"}


def megatron(text: str, **stated: object) -> Imported:
    return read_log(Format.MEGATRON, "m.log", text, Stated(cluster=SIXTEEN, **stated))


def deepspeed(text: str, **stated: object) -> Imported:
    given = {"model": LLAMA, "workload": {"seq_len": 4096}, "plan": DEEPSPEED_SAYS, **stated}
    return read_log(Format.DEEPSPEED, "d.log", text, Stated(cluster=SIXTEEN, **given))


def test_a_megatron_log_states_everything() -> None:
    (run,) = megatron(import_logs.megatron()).runs
    assert run.plan == Plan(
        tp=4, pp=2, dp=2, zero_stage=1, recompute=Recompute.SELECTIVE, sequence_parallel=True, micro_batch=1
    )
    assert (run.workload.seq_len, run.workload.global_batch, run.workload.dtype) == (8192, 128, DType.BF16)
    assert (run.model.layers, run.model.kv_heads, run.model.gated, run.model.tied) == (32, 8, True, False)
    # Iterations 6 to 11 remain: 5010, 5000, 4990, 5005, 9800, 4995 ms, whose median is 5002.5.
    assert run.steps == 6
    assert run.tokens_per_s_per_gpu == pytest.approx(8192 * 128 / 16 / 5.0025)
    assert run.interval_tokens_per_s_per_gpu == pytest.approx((8192 * 8 / 9.8, 8192 * 8 / 4.99))
    assert (run.peak_reserved_bytes, run.peak_allocated_bytes) == (61_440 * 2**20, 51_200 * 2**20)
    assert run.where.startswith("m.log, line ")


def test_the_named_model_is_kept_and_must_be_the_logs() -> None:
    (run,) = megatron(import_logs.megatron(), model=LLAMA).runs
    assert run.model == LLAMA
    with pytest.raises(InputError, match=r"layers.*32.*the log trains a model with layers=32.*llama3.1-70b has layers"):
        megatron(import_logs.megatron(), model=load_model("llama3.1-70b"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_distributed_optimizer": False}, {"zero_stage": 0}),
        ({"virtual_pipeline_model_parallel_size": 4}, {"vpp": 4, "schedule": Schedule.INTERLEAVED}),
        ({"recompute_granularity": "full"}, {"recompute": Recompute.FULL}),
        ({"recompute_granularity": None}, {"recompute": Recompute.NONE}),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, {"zero_stage": 3}),
    ],
)
def test_megatrons_arguments_become_our_plan(changes: dict[str, object], expected: dict[str, object]) -> None:
    (run,) = megatron(import_logs.megatron(**changes)).runs
    assert {name: getattr(run.plan, name) for name in expected} == expected


def test_a_torchtitan_log_gives_the_speed_of_a_gpu() -> None:
    text = import_logs.torchtitan()
    (run,) = read_log(Format.TORCHTITAN, "t.log", text, Stated(cluster=EIGHT, model=LLAMA)).runs
    assert run.plan == Plan(dp=8, micro_batch=2, zero_stage=3)
    assert (run.workload.global_batch, run.workload.dtype) == (16, DType.BF16)
    assert (run.steps, run.tokens_per_s_per_gpu) == (6, pytest.approx(7400.0))
    assert run.peak_reserved_bytes == round(46.5 * 2**30)


def test_torchtitans_mesh_and_options_make_a_pipeline() -> None:
    text = import_logs.torchtitan(mesh="Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [2, 2, 2]")
    with pytest.raises(InputError, match="--plan micro_batch"):
        read_log(Format.TORCHTITAN, "t.log", text, Stated(cluster=EIGHT, model=LLAMA))
    stated = Stated(cluster=EIGHT, model=LLAMA, plan={"micro_batch": 1})
    (run,) = read_log(Format.TORCHTITAN, "t.log", text, stated).runs
    # Under a pipeline torchtitan keeps gathered parameters after forward: gradients and optimizer are sharded.
    assert run.plan == Plan(pp=2, tp=2, dp=2, micro_batch=1, zero_stage=2, sequence_parallel=True)


def test_torchtitans_printed_config_counts() -> None:
    config = (
        'Running with configs: {"parallelism": {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1},\n'
        ' "activation_checkpoint": {"mode": "full"}, "training": {"mixed_precision_param": "bfloat16"}}\n'
    )
    (run,) = read_log(
        Format.TORCHTITAN, "t.log", config + import_logs.torchtitan(), Stated(cluster=EIGHT, model=LLAMA)
    ).runs  # fmt: skip
    assert (run.plan.recompute, run.workload.dtype) == (Recompute.FULL, DType.BF16)


def test_a_torchtitan_log_of_another_model_or_gpu() -> None:
    other = load_model("llama3.1-70b")
    with pytest.raises(InputError, match=r"parameters.*8030261248.*llama3 8B.*llama3.1-70b"):
        read_log(Format.TORCHTITAN, "t.log", import_logs.torchtitan(), Stated(cluster=EIGHT, model=other))
    a100 = cluster_from_shorthand("a100-80gb-sxm:1x8")
    with pytest.raises(InputError, match=r"H100 80GB HBM3.*a100-80gb-sxm:1x8 has a100-80gb-sxm, this is h100"):
        read_log(Format.TORCHTITAN, "t.log", import_logs.torchtitan(), Stated(cluster=a100, model=LLAMA))


def test_a_deepspeed_log_needs_the_rest_from_options() -> None:
    (run,) = deepspeed(import_logs.deepspeed()).runs
    assert run.plan == Plan(dp=16, micro_batch=2, zero_stage=3, recompute=Recompute.FULL)
    assert run.tokens_per_s_per_gpu == pytest.approx(40.0 * 4096 / 16)
    assert run.peak_allocated_bytes == round(31.5 * 2**30)
    for missing, option in (
        ({"model": None}, "--model"),
        ({"workload": {}}, "--seq-len"),
        ({"plan": {"tp": 1, "recompute": "none"}}, r"--plan pp="),
    ):
        with pytest.raises(InputError, match=option):
            deepspeed(import_logs.deepspeed(), **missing)


def test_deepspeeds_pipeline_prints_seconds() -> None:
    text = import_logs.deepspeed((), world_size=4, gradient_accumulation_steps=8, zero_optimization_stage=1)
    steps = "".join(f"steps: {n} loss: 9.1 lm_loss: 9.0 iter time (s): 2.500 samples/sec: 25.6\n" for n in range(1, 12))
    (run,) = deepspeed(text + steps, plan={"tp": 1, "pp": 4, "recompute": "none"}).runs
    assert (run.plan.pp, run.plan.dp) == (4, 4)
    assert run.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / 16 / 2.5)


def test_a_nanotron_log_states_everything() -> None:
    (run,) = read_log(Format.NANOTRON, "n.log", import_logs.nanotron(), Stated(cluster=EIGHT)).runs
    assert run.plan == Plan(tp=2, pp=2, dp=2, micro_batch=4, zero_stage=1, sequence_parallel=True)
    assert (run.workload.seq_len, run.workload.global_batch) == (4096, 64)
    assert (run.model.layers, run.model.hidden, run.model.tied, run.model.vocab) == (16, 2048, True, 131072)
    assert run.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / 8 / 1.24)
    assert run.peak_reserved_bytes == 24576 * 2**20


def test_out_of_memory_is_a_result() -> None:
    tail = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total of 79.1 GiB\n"
    (run,) = megatron(import_logs.megatron((), tail=tail)).runs
    assert run.failure is not None
    assert (run.failure.kind, run.tokens_per_s_per_gpu) == (FailureKind.OOM, None)
    assert run.failure.message.startswith("torch.OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize(
    "tail",
    [
        "RuntimeError: CUDA error: out of memory\n",
        "node1:47604:53083 [0] include/alloc.h:103 NCCL WARN Cuda failure 2 'out of memory'\n",
        "node1:47604:53083 [0] NCCL WARN Cuda failure 'out of memory'\n",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.\n",
        "RuntimeError: HIP error: out of memory\n",
        "RuntimeError: NPU out of memory. Tried to allocate 1.00 GiB\n",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.\n",
    ],
)
def test_memory_that_ran_out_in_other_words_is_the_same_result(tail: str) -> None:
    (run,) = megatron(import_logs.megatron(tail=tail)).runs
    assert run.failure is not None
    assert (run.failure.kind, run.failure.message) == (FailureKind.OOM, tail.strip())


@pytest.mark.parametrize(
    "label",
    [
        " 0: ", "12: ", "[default0]:", "[rank3]: ", "[1,0]<stdout>:", "[prterun-node-0-12345@1,0]<stdout>: ",
        "(head, rank=0, pid=21170) ", "(RayTrainWorker pid=912, ip=10.0.0.7) ", "2024-05-08T12:00:00.123456789Z ",
        "[pod/train-0/pytorch] ", "trainer-1  | ", "worker-0: ", "10.0.0.7: ", "stdout: ", "worker-0:  3: ",
    ],
)  # fmt: skip
def test_labels_of_launchers_are_taken_off(label: str) -> None:
    text = import_logs.megatron()
    labelled = "".join(label + line + "\n" for line in text.splitlines())
    assert megatron(labelled).runs == megatron(text).runs


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5}, "recompute_num"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4}, "recompute_num"),
        ({"recompute_modules": "['embedding']"}, "recompute_modules"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload"),
        ({"decoder_first_pipeline_num_layers": 10}, "decoder_first_pipeline_num_layers"),
        ({"account_for_loss_in_pipeline_split": True}, "account_for_loss"),
        ({"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances"),
        ({"enable_zero_bubble": True}, "zero-bubble"),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "torch.int3"}, "exp_avg_dtype"),
        ({"context_parallel_size": 2, "data_parallel_size": 1, "cp_comm_type": "['a2a']"}, "Ulysses"),
    ],
)
def test_arguments_that_make_another_plan_are_refused_by_name(changes: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        megatron(import_logs.megatron(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 16},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_all_layers_of_a_stage_are_full_recomputation(changes: dict[str, object]) -> None:
    assert megatron(import_logs.megatron(**changes)).runs[0].plan.recompute is Recompute.FULL


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_modules": "['core_attn']"}, {"optimizer_cpu_offload": False, "cpu_offloading": False},
        {"num_distributed_optimizer_instances": 1, "cp_comm_type": "['p2p']"},
        {"decoder_first_pipeline_num_layers": None, "account_for_loss_in_pipeline_split": False},
        {"use_precision_aware_optimizer": False, "exp_avg_dtype": "torch.bfloat16"},
    ],
)  # fmt: skip
def test_arguments_that_are_off_change_nothing(changes: dict[str, object]) -> None:
    plain = megatron(import_logs.megatron())
    found = megatron(import_logs.megatron(**changes))
    assert (found.runs[0].plan, found.runs[0].workload, found.notes) == (plain.runs[0].plan, plain.runs[0].workload, [])


def test_ends_that_count_as_layers_are_an_interleaved_plan_of_ours() -> None:
    changes = {"num_layers": 30, "virtual_pipeline_model_parallel_size": 4, "account_for_loss_in_pipeline_split": True}
    both = megatron(import_logs.megatron(**changes, account_for_embedding_in_pipeline_split=True)).runs[0]
    assert (both.plan.vpp, both.plan.pp, both.plan.schedule) == (4, 2, Schedule.INTERLEAVED)
    with pytest.raises(InputError, match="account_for_loss"):
        megatron(import_logs.megatron(**changes))  # 31 on 8 chunks


def test_what_precision_and_modules_megatron_says_are_the_runs() -> None:
    (run,) = megatron(
        import_logs.megatron(
            recompute_modules="['moe_act', 'layernorm']", use_precision_aware_optimizer=True,
            exp_avg_dtype="torch.bfloat16", exp_avg_sq_dtype="torch.uint8", main_params_dtype="torch.float16",
            cross_entropy_loss_fusion=True,
        )
    ).runs  # fmt: skip
    assert run.plan.recompute_modules == (Module.LAYERNORM, Module.MOE_ACT)
    work = run.workload
    assert (work.master_dtype, work.exp_avg_dtype, work.exp_avg_sq_dtype) == (DType.FP16, DType.BF16, DType.FP8)
    assert work.cross_entropy is CrossEntropy.FUSED


def test_torchtitans_op_recomputation_is_said_by_its_config() -> None:
    config = (
        'Running with configs: {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}\n'
        "Applied selective activation checkpointing to the model\n"
    )
    lines = [line for line in TODAY if "FullAC" not in line]
    assert titan([*config.splitlines(), *lines]).runs[0].plan.recompute is Recompute.OP


def test_arguments_that_change_the_speed_only_are_told() -> None:
    (note,) = megatron(import_logs.megatron(delay_wgrad_compute=True)).notes
    assert "delay_wgrad_compute (weight gradients computed later), which a plan does not say" in note


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tp_comm_overlap": True}, {"tp_overlap": True, "ep_overlap": None, "attention": None}),
        ({"overlap_moe_expert_parallel_comm": True}, {"tp_overlap": None, "ep_overlap": True}),
        ({"attention_backend": "AttnBackend.unfused"}, {"attention": Attention.UNFUSED}),
        ({"attention_backend": "AttnBackend.auto"}, {"attention": None}),
        ({"transformer_impl": "local", "use_flash_attn": False}, {"attention": Attention.UNFUSED}),
        ({"transformer_impl": "transformer_engine", "use_flash_attn": False}, {"attention": None}),
    ],
)
def test_megatrons_kernels_are_the_workloads(changes: dict[str, object], expected: dict[str, object]) -> None:
    (run,) = megatron(import_logs.megatron(**changes)).runs
    assert {name: getattr(run.workload, name) for name in expected} == expected


TODAY = [
    "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=8",
    "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory",
    "Model deepseek_v3 16B size: 15,706,484,224 total parameters",
    "Applied FullAC activation checkpointing to the model",
    "Trainer is initialized with 16384 tokens per DP rank, 131072 tokens per train step, gradient accumulation steps 1,"
    " sequence length 4096, total steps 1000 (warmup 200)",
    "step:  1  loss: 12.0  memory: 73.32GiB(92.70%)  tps: 217",
    *[f"step: {step}  loss: 11.1  memory: 73.32GiB(92.70%)  tps: 11,600" for step in (10, 20, 30, 40)],
]


def titan(lines: list[str], shorthand: str = "h100-80gb-sxm:1x8", name: str = "deepseek-v2-lite") -> Imported:
    text = "".join(f"[rank0]:[titan] 2026-08-01 10:00:00,000 - root - INFO - {line}\n" for line in lines)
    stated = Stated(cluster=cluster_from_shorthand(shorthand), model=load_model(name))
    return read_log(Format.TORCHTITAN, "t.log", text, stated)


def test_torchtitan_as_it_prints_today_states_everything() -> None:
    (run,) = titan(TODAY).runs
    assert run.plan == Plan(dp=8, ep=8, micro_batch=4, zero_stage=3, recompute=Recompute.FULL)
    assert (run.workload.seq_len, run.workload.global_batch, run.tokens_per_s_per_gpu) == (4096, 32, 11_600.0)


def test_torchtitans_shards_within_a_part_of_dp_are_refused() -> None:
    lines = [line.replace("dp_replicate=1, dp_shard=8", "dp_replicate=2, dp_shard=4") for line in TODAY]
    with pytest.raises(InputError, match=r"HSDP.*dp_replicate 2 x dp_shard 4"):
        titan(lines)


@pytest.mark.parametrize(
    ("gpu", "shorthand", "message"),
    [
        ("CUDA capacity: Tesla T4 with 14.56GiB memory", "h100-80gb-sxm:1x8", r"Tesla T4.*the catalog does not know"),
        ("CUDA capacity: NVIDIA H800 with 79.10GiB memory", "h100-80gb-sxm:1x8", "this is h800-80gb-sxm"),
        ("GPU capacity: NVIDIA H100 80GB HBM3 (0) with 94.00GiB memory", "h100-80gb-sxm:1x8", r"94.0 GiB.*79.6 GiB"),
    ],
)
def test_a_log_of_other_gpus_is_refused(gpu: str, shorthand: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        titan([gpu if "capacity" in line else line for line in TODAY], shorthand)


def test_a_gpu_that_nobody_knows_is_the_clusters_if_it_has_its_name() -> None:
    t4 = EIGHT.model_copy(update={"device": EIGHT.device.model_copy(update={"name": "Tesla T4"})})
    text = import_logs.torchtitan().replace("NVIDIA H100 80GB HBM3", "Tesla T4")
    assert read_log(Format.TORCHTITAN, "t.log", text, Stated(cluster=t4, model=LLAMA)).runs


def test_deepspeed_0_7_is_read_and_the_running_mean_of_before_is_refused() -> None:
    text = import_logs.deepspeed()
    older = text.replace("epoch=0/micro_step", "").replace("/global_step=", "/")
    older = "".join(line.replace("stop] =", "stop] 0/") + "\n" for line in older.splitlines())
    assert "global_step" not in older
    assert deepspeed(older).runs[0].tokens_per_s_per_gpu == deepspeed(text).runs[0].tokens_per_s_per_gpu
    line = "[2022-03-11 02:06:30,985] [INFO] [timer.py:189:stop] 0/100, SamplesPerSec=83.5, MemAllocated=0.26GB\n"
    with pytest.raises(InputError, match=r"line 1, SamplesPerSec.*'83.5'.*DeepSpeed before 0.7"):
        deepspeed(line + text)


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("stage=3 offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device='cpu', nvme_path=None)", "offload"),
        ("{'stage': 3, 'zero_hpz_partition_size': 8}", "zero_hpz_partition_size"),
        ("stage=3 mics_shard_size=8", "mics_shard_size"),
    ],
)
def test_deepspeeds_states_elsewhere_than_a_plan_says_are_refused(entry: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        deepspeed(import_logs.deepspeed(zero_config=entry))
    plain = "stage=3 offload_optimizer=None zero_hpz_partition_size=1 mics_shard_size=-1 cpu_offload=None"
    assert deepspeed(import_logs.deepspeed(zero_config=plain)).runs


def test_a_log_cut_in_a_line_gives_its_complete_steps_and_says_so() -> None:
    whole = import_logs.megatron()
    found = megatron(whole[:-180])
    assert found.runs[0].steps == 5
    assert found.notes == [f"m.log: line {whole.count(chr(10))} is cut off and left out"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (import_logs.megatron(import_logs.TIMES_MS[:7]), r"7 timed steps.*nothing of this log is imported"),
        (import_logs.megatron()[:900], r"m.log.*the log does not tell its model"),
        ("nothing of Megatron\n", r"m.log.*the log does not tell its model"),
        ("", r"m.log.*at least one complete line"),
        ("a\0b\n", r"m.log.*a text file"),
        (import_logs.megatron((-5.0, *import_logs.TIMES_MS)), r"m.log, line \d+, elapsed time.*'-5.0'.*above 0"),
        (import_logs.megatron().replace("5010.0", "nan"), r"elapsed time per iteration \(ms\).*'nan'.*above 0"),
        (import_logs.megatron(world_size=0), r"line \d+, world_size.*'0'.*above 0"),
        (import_logs.megatron(world_size=32), r"devices.*32.*h100-80gb-sxm:2x8 has 16 devices"),
        (import_logs.megatron(data_parallel_size=4), r"tp\*pp\*cp\*dp = 4\*2\*1\*4 = 32.*16 devices"),
        (import_logs.megatron(global_batch_size=127), r"127 must be a multiple of dp \* micro_batch"),
        (import_logs.megatron(num_experts=8), r"mixture of experts.*--model"),
        (import_logs.megatron([5.0] * 11), r"line \d+, tokens/s/GPU.*TFLOP/s of 32x4096 on a h100.*peak is 989"),
        (import_logs.megatron().replace("61440.0", "99999.0"), r"peak memory.*97.7 GiB.*has 79.6 GiB"),
        (import_logs.megatron().replace("size:   128", "size:   256", 1), r"global_batch.*line .* has 256"),
        (import_logs.megatron(optimizer="muon"), r"optimizer.*'muon'.*adam or sgd"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_line_and_value(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        megatron(text)


def test_options_must_agree_with_the_log() -> None:
    with pytest.raises(InputError, match=r"tp.*4.*--plan tp= says 8"):
        megatron(import_logs.megatron(), plan={"tp": 8})
    with pytest.raises(InputError, match=r"seq_len.*8192.*--seq-len says 4096"):
        megatron(import_logs.megatron(), workload={"seq_len": 4096})


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (Format.TORCHTITAN, import_logs.torchtitan().replace("7,410", "-7")),
        (Format.DEEPSPEED, import_logs.deepspeed().replace("CurrSamplesPerSec=40.0", "CurrSamplesPerSec=0.0", 1)),
        (Format.NANOTRON, import_logs.nanotron().replace("1.24K", "-1.24K", 1)),
        (Format.NANOTRON, import_logs.nanotron().replace("1.24K", "1.24X", 1)),
        (Format.DEEPSPEED, import_logs.deepspeed(zero_optimization_stage=7)),
    ],
)
def test_every_reader_refuses_figures_that_cannot_be(format: Format, text: str) -> None:
    with pytest.raises(InputError, match=r"x.log, line \d+, "):
        read_log(format, "x.log", text, Stated(cluster=EIGHT, model=LLAMA))


def steps(*numbers: int) -> list[LoggedStep]:
    return [LoggedStep(line=i, number=number, time_s=1.0) for i, number in enumerate(numbers, start=1)]


def test_warm_up_is_dropped_after_every_start() -> None:
    assert [step.number for step in settled(steps(*range(1, 9)))] == [6, 7, 8]
    assert [step.number for step in settled(steps(100, 200, 300))] == [200, 300]
    restarted = settled(steps(1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10, 11))
    assert [step.number for step in restarted] == [6, 7, 10, 11]


def test_the_interval_of_a_median_is_of_order_statistics() -> None:
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    assert median_interval([4.0, 1.0, 2.0, 3.0]) == (2.5, 1.0, 4.0)
    # Of ten values the second smallest and largest: P(Binomial(10, 1/2) < 2) = 1.07 %, < 3 would be 5.5 %.
    assert median_interval([float(n) for n in range(1, 11)]) == (5.5, 2.0, 9.0)


@pytest.mark.parametrize(
    ("format", "text", "what"),
    [
        (Format.MEGATRON, import_logs.megatron().replace("iteration        3/", f"iteration {'9' * 5000}/"), "step"),
        (Format.TORCHTITAN, import_logs.torchtitan(mesh="Building 1-D device mesh with ['dp'], [8x]"), "device mesh"),
        (Format.TORCHTITAN, import_logs.torchtitan(mesh="Building 1-D device mesh with [8], [8]"), "device mesh"),
        (Format.TORCHTITAN, import_logs.torchtitan(("612", *["1e-320"] * 6)), "tps"),
        (Format.NCCL_TESTS, import_logs.nccl_tests().replace(" 5600.0 ", " 1e-320 "), "time"),
        (Format.NCCL_TESTS, import_logs.nccl_tests().replace("algbw   busbw #wrong", "algbw"), "columns"),
        (Format.NCCL_TESTS, import_logs.nccl_tests().replace(" iters: 20 ", f" iters: {'0' * 5000} "), "iters"),
    ],
)
def test_damaged_lines_are_named(format: Format, text: str, what: str) -> None:
    cluster = EIGHT if format is Format.TORCHTITAN else SIXTEEN
    with pytest.raises(InputError, match=rf"line \d+, {what}"):
        read_log(format, "x.log", text, Stated(cluster=cluster, model=None if format is Format.MEGATRON else LLAMA))


def test_a_config_that_is_too_deep_is_passed_over() -> None:
    text = "Running with args: {" + "[" * 100_000 + "\n" + import_logs.torchtitan()
    (run,) = read_log(Format.TORCHTITAN, "x.log", text, Stated(cluster=EIGHT, model=LLAMA)).runs
    assert run.plan.dp == 8
