"""Megatron-LM's words, both ways: what an export says an import reads, and launches of others are understood."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import IllegalPlanError, InputError
from autotune.frameworks import Given, ImportedPlan, import_plan, launch_arguments
from autotune.search.space import legal_plans
from autotune.specs import FrameworkName, Plan, Recompute, Schedule, Workload

CLUSTER = cluster_from_shorthand("h100-80gb-sxm:2x8")
SHAPE = {
    "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14336, "num-attention-heads": 32,
    "group-query-attention": None, "num-query-groups": 8, "seq-length": 8192, "max-position-embeddings": 8192,
    "swiglu": None, "normalization": "RMSNorm", "position-embedding-type": "rope", "disable-bias-linear": None,
    "untie-embeddings-and-output-weights": None, "vocab-size": 128256, "rotary-base": 500000,
}  # fmt: skip
RUN = {"micro-batch-size": 1, "global-batch-size": 128, "bf16": None, "overlap-grad-reduce": None}
GPT = {"seq-length": 2048, "max-position-embeddings": 2048, "vocab-size": 51200, "position-embedding-type":
       "learned_absolute", "overlap-grad-reduce": None}  # fmt: skip


def line(program: str, nodes: int, **options: object) -> str:
    words = [f"--{name.replace('_', '-')}" + ("" if value is None else f" {value}") for name, value in options.items()]
    return f"torchrun --nnodes={nodes} --nproc_per_node 8 {program} " + " ".join(words)


def imported(text: str, **given: object) -> ImportedPlan:
    return import_plan("megatron", "run.sh", text, Given(**given))  # type: ignore[arg-type]


def llama(**options: object) -> ImportedPlan:
    return imported(line("pretrain_gpt.py", 2, **SHAPE, **{**RUN, **options}))


@pytest.mark.parametrize(("name", "seed"), [("llama3.1-405b", 1), ("gpt3-175b", 2), ("deepseek-v3", 3)])
def test_an_exported_plan_is_imported_as_the_same_plan(name: str, seed: int) -> None:
    shape, cluster = model(name), cluster_from_shorthand("h100-80gb-sxm:8x8")
    seq_len = 2048 if shape.max_positions else 4096
    workload = Workload(seq_len=seq_len, global_batch=128, framework=FrameworkName.MEGATRON)
    table = legal_plans(shape, cluster, workload)
    checked = 0
    for row in random.Random(seed).sample(range(len(table)), 200):
        plan = table.plan(row)
        try:
            launch = launch_arguments("megatron", shape, cluster, workload, plan)
        except IllegalPlanError:
            continue
        found = imported(launch.files()["launch.sh"])
        if plan.etp and plan.etp == plan.model_copy(update={"etp": 0}).expert_tp:
            plan = plan.model_copy(update={"etp": 0})  # two ways to say one plan
        assert (found.plan, found.model.key, found.devices) == (plan, shape.key, 64), plan.key
        assert found.exact, found.remainder
        assert found.model.constants == shape.constants
        checked += 1
        if checked == 15:
            break
    assert checked == 15


def test_gpt3_175b_and_1t_of_sc21() -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, tp 8, pp 12 (interleaved: chunks of 2 layers), and tp 8, pp 64."""
    small = imported(line("pretrain_gpt.py", 192, **GPT, **{
        "num-layers": 96, "hidden-size": 12288, "num-attention-heads": 96, "micro-batch-size": 1,
        "global-batch-size": 1536, "fp16": None, "tensor-model-parallel-size": 8, "pipeline-model-parallel-size": 12,
        "num-layers-per-virtual-pipeline-stage": 2, "activations-checkpoint-method": "uniform",
    }))  # fmt: skip
    assert small.plan == Plan(
        tp=8, pp=12, dp=16, vpp=4, schedule=Schedule.INTERLEAVED, recompute=Recompute.FULL
    )  # fmt: skip
    assert small.model.name == "gpt3-175b"
    large = imported(line("pretrain_gpt.py", 384, **GPT, **{
        "num-layers": 128, "hidden-size": 25600, "num-attention-heads": 160, "micro-batch-size": 1,
        "global-batch-size": 3072, "fp16": None, "tensor-model-parallel-size": 8, "pipeline-model-parallel-size": 64,
        "activations-checkpoint-method": "uniform",
    }))  # fmt: skip
    assert large.plan == Plan(tp=8, pp=64, dp=6, recompute=Recompute.FULL)
    assert (large.devices, large.workload.global_batch, large.exact) == (3072, 3072, True)


BLOOM = r"""#!/bin/bash
#SBATCH --nodes=48
#SBATCH --gres=gpu:8
TP_SIZE=4; PP_SIZE=12
NLAYERS=${NLAYERS:-70}
GPT_ARGS=" \
    --pp-partition-method 'type:transformer|embedding' --num-layers $NLAYERS --hidden-size 14336 \
    --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 2 --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 --bf16 \
    --position-embedding-type alibi --checkpoint-activations --pad-vocab-size-to 250880 \
    "
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes 48"
export CMD=" \
    `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE \
    --pipeline-model-parallel-size $PP_SIZE \
    $GPT_ARGS --deepspeed --zero-stage 1 \
    "
srun bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee log
"""


def test_bloom_176b() -> None:
    """BigScience 2022, arXiv:2211.05100, section 3.2.4: tp 4, pp 12, 8 replicas of 48 A100; 72 parts over 12 stages."""
    found = imported(BLOOM)
    assert found.plan == Plan(tp=4, pp=12, dp=8, micro_batch=2, zero_stage=1, recompute=Recompute.FULL)
    assert found.workload.framework is FrameworkName.MEGATRON_DEEPSPEED
    assert found.exact, found.remainder
    assert found.assumed == ("the full global batch; the run begins with 192 and adds 16 over 9_765_625 samples",)


def test_llama3_405b() -> None:
    """Grattafiori et al. 2024, arXiv:2407.21783, table 4, first row: tp 8, pp 16, dp 64 on 8,192 GPUs, batch 2,048."""
    found = imported(line("pretrain_gpt.py", 1024, **{
        **SHAPE, **RUN, "num-layers": 126, "hidden-size": 16384, "ffn-hidden-size": 53248, "num-attention-heads": 128,
        "use-rope-scaling": None, "tensor-model-parallel-size": 8, "sequence-parallel": None,
        "pipeline-model-parallel-size": 16, "num-layers-per-virtual-pipeline-stage": 1, "global-batch-size": 2048,
        "account-for-embedding-in-pipeline-split": None, "account-for-loss-in-pipeline-split": None,
        "use-distributed-optimizer": None, "overlap-param-gather": None,
    }))  # fmt: skip
    assert found.plan == Plan(tp=8, pp=16, dp=64, vpp=8, schedule=Schedule.INTERLEAVED, zero_stage=1,
                              sequence_parallel=True)  # fmt: skip
    assert (found.model.name, found.exact) == ("llama3.1-405b", True)


def test_deepseek_v3() -> None:
    """DeepSeek-AI 2024, arXiv:2412.19437, section 3.2: pp 16, ep 64 over 8 nodes, ZeRO-1, no tp, on 2,048 GPUs."""
    found = imported(line("pretrain_gpt.py", 256, **{
        "num-layers": 61, "hidden-size": 7168, "ffn-hidden-size": 18432, "num-attention-heads": 128, "swiglu": None,
        "seq-length": 4096, "max-position-embeddings": 4096, "position-embedding-type": "rope", "vocab-size": 129280,
        "normalization": "RMSNorm", "disable-bias-linear": None, "untie-embeddings-and-output-weights": None,
        "multi-latent-attention": None, "q-lora-rank": 1536, "kv-lora-rank": 512, "qk-layernorm": None,
        "num-experts": 256, "moe-router-topk": 8, "moe-ffn-hidden-size": 2048, "moe-layer-freq": "'([0]*3+[1]*58)'",
        "moe-shared-expert-intermediate-size": 2048, "moe-router-num-groups": 8, "moe-router-group-topk": 4,
        "moe-router-score-function": "sigmoid", "pipeline-model-parallel-size": 16, "expert-model-parallel-size": 64,
        "pipeline-model-parallel-layout": "'Et*3|(t*4|)*14t*2mL'", "mtp-num-layers": 1,
        "micro-batch-size": 1, "global-batch-size": 15360, "bf16": None, "use-distributed-optimizer": None,
        "overlap-grad-reduce": None, "overlap-param-gather": None,
    }))  # fmt: skip
    assert found.plan == Plan(pp=16, dp=128, ep=64, zero_stage=1)
    assert found.model.name == "deepseek-v3"
    said = {each.name: each.what for each in found.remainder}
    assert said == {
        "mtp_num_layers": "there are layers for multi-token prediction",
        "pipeline_model_parallel_layout": "stages hold 3, 14x4, 2 layers",
    }  # fmt: skip


def test_qwen3_235b() -> None:
    """NVIDIA's run on 256 H100: tp 2, pp 8 with 4 chunks that count both ends, ep 32, experts whole."""
    found = imported(line("pretrain_gpt.py", 32, **{
        **SHAPE, **RUN, "num-layers": 94, "ffn-hidden-size": 12288, "num-attention-heads": 64, "num-query-groups": 4,
        "kv-channels": 128, "qk-layernorm": None, "vocab-size": 151936, "make-vocab-size-divisible-by": 1,
        "num-experts": 128, "moe-router-topk": 8, "moe-ffn-hidden-size": 1536, "global-batch-size": 2048,
        "tensor-model-parallel-size": 2, "sequence-parallel": None, "pipeline-model-parallel-size": 8,
        "num-virtual-stages-per-pipeline-rank": 4, "account-for-embedding-in-pipeline-split": None,
        "account-for-loss-in-pipeline-split": None, "expert-model-parallel-size": 32, "expert-tensor-parallel-size": 1,
        "use-distributed-optimizer": None, "overlap-param-gather": None,
    }))  # fmt: skip
    assert found.plan == Plan(tp=2, pp=8, dp=16, vpp=4, ep=32, schedule=Schedule.INTERLEAVED, zero_stage=1,
                              sequence_parallel=True)  # fmt: skip
    assert (found.plan.expert_tp, found.model.name, found.exact) == (1, "qwen3-235b-a22b", True)


@pytest.mark.parametrize(
    ("options", "named", "what"),
    [
        ({"frobnicate": 3}, "frobnicate", ""),
        ({"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 3},
         "recompute_num_layers", "recomputation is of 3 of the 32 layers of a stage"),
        ({"pipeline-model-parallel-size": 4, "decoder-first-pipeline-num-layers": 5},
         "decoder_first_pipeline_num_layers", "stages hold 5, 3x9 layers"),
        ({"optimizer-cpu-offload": None}, "optimizer_cpu_offload", "optimizer states are in host memory"),
        ({"use-distributed-optimizer": None}, "overlap_param_gather",
         "this communication waits for computation; estimates let it run beside"),
    ],
)  # fmt: skip
def test_what_a_plan_does_not_say_is_named(options: dict[str, object], named: str, what: str) -> None:
    found = llama(**options)
    assert [(each.name, each.what) for each in found.remainder] == [(named, what)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "a script or command that starts the training"),
        ("", "a script or command that starts the training"),
        ("pretrain_gpt.py --num-layers many", "run.sh, line 1: num_layers: 'many' cannot be used; a whole number"),
        ("pretrain_gpt.py --num-layers $L", "the file does not set this variable: give --set NAME=VALUE"),
        ("pretrain_gpt.py --num-layers 2", "give --model"),
        ("if then ((", "a script or command in the words of bash is needed"),
        ("a() { a; }\na", "functions that call each other without end"),
        ("A=xxxxxxxx\n" + "A=$A$A\n" * 30, "its words come to more than"),
        ("--num-layers 4 --moe-layer-freq '[1]*9' --num-experts 4 --hidden-size 8 --num-attention-heads 2", "pattern"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_error(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        imported(text)
    assert message in str(error.value)


def test_devices_are_asked_for_where_nothing_states_them() -> None:
    text = line("pretrain_gpt.py", 2, **SHAPE, **RUN).replace("--nnodes=2", "--nnodes=$SLURM_NNODES")
    with pytest.raises(InputError, match="give --devices"):
        imported(text)
    assert imported(text, devices=64).plan.dp == 64
    assert imported(text, variables={"SLURM_NNODES": "4"}).plan.dp == 32


def test_positions_that_a_file_states_are_kept_where_its_vocabulary_is_assumed() -> None:
    said = {**GPT, "seq-length": 4096, "max-position-embeddings": 4096} | {
        "num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "micro-batch-size": 1,
        "global-batch-size": 64, "bf16": None,
    }  # fmt: skip
    del said["vocab-size"]
    found = imported(line("pretrain_gpt.py", 4, **said))
    assert (found.model.name, found.model.max_positions, found.workload.seq_len) == ("gpt3-6.7b", 4096, 4096)
    assert found.assumed[0] == f"the model is gpt3-6.7b with its vocabulary of {model('gpt3-6.7b').vocab}"


def test_arrays_defaults_tests_and_functions_of_a_script_are_worked_out() -> None:
    options = {name: value for name, value in SHAPE.items() if name != "num-layers"}
    text = f"""
NODES=2
MODEL=( --num-layers ${{LAYERS:-32}} # of the 8B
  {" ".join(line("", 1, **options, **RUN).split()[4:])} )
if [ "$BIG" = yes ]; then TP=8; elif [[ $NODES -ge 2 && -z $SMALL ]]; then TP=4; else TP=1; fi
case $TP in 4|8) MODEL+=(--sequence-parallel);; esac
launch() {{ torchrun --nproc-per-node $((4 * 2)) --nnodes $NODES pretrain_gpt.py "${{MODEL[@]}}" "$@"; }}
launch --tensor-model-parallel-size $TP
"""
    found = imported(text)
    assert found.plan == Plan(tp=4, dp=4, sequence_parallel=True)
    assert imported(text, variables={"BIG": "yes"}).plan == Plan(tp=8, dp=2, sequence_parallel=True)


def test_yaml_arguments_are_read_by_name_or_as_flags(tmp_path: Path) -> None:
    flags = {f"--{name}": True if value is None else value for name, value in {**SHAPE, **RUN}.items()}
    text = "MODEL_ARGS:\n" + "".join(f"  {name}: {value}\n" for name, value in flags.items())
    found = import_plan(
        "megatron", "model_config.yaml", text + "  --tensor-model-parallel-size: 2\n", Given(devices=16)
    )
    assert (found.plan, found.model.name) == (Plan(tp=2, dp=8), "llama3-8b")


def test_an_export_says_what_an_estimate_takes_for_granted() -> None:
    workload = Workload(seq_len=4096, global_batch=64, framework=FrameworkName.MEGATRON)
    plan = Plan(tp=2, dp=8, ep=4, zero_stage=1, sequence_parallel=True)
    launch = launch_arguments("megatron@0.16", model("deepseek-v2-lite"), CLUSTER, workload, plan)
    said = " ".join(launch.argv)
    for words in (
        "--overlap-grad-reduce", "--overlap-param-gather", "--moe-grouped-gemm", "--rotary-base 10000",
        "--norm-epsilon 1e-06", "--padded-vocab-size 102400", "--expert-tensor-parallel-size 2",
    ):  # fmt: skip
        assert words in said
    assert launch.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in launch.files()["launch.sh"]
    assert launch.version == "0.16"


def test_constants_that_nobody_knows_are_named_placeholders() -> None:
    workload = Workload(seq_len=4096, global_batch=64, framework=FrameworkName.MEGATRON)
    launch = launch_arguments("megatron", model("qwen2.5-72b"), CLUSTER, workload, Plan(tp=8, dp=2))
    assert [each.name for each in launch.placeholders] == ["DATA", "TRAINING", "CONSTANTS"]
    assert launch.placeholders[-1].words == ("--norm-epsilon", "1e-05")
