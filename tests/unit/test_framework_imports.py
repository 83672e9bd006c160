"""Launches of other people as our plans: what is read, what is named as left over, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command
from framework_plans import EVERYTHING, varied

from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import IllegalPlanError, InputError
from autotune.frameworks import Given, ImportedPlan, import_plan, launch_arguments
from autotune.frameworks.table import Why
from autotune.search.space import legal_plans
from autotune.specs import Plan, Workload

TARGETS = ("torchtitan@0.2", "torchtitan@0.3", "deepspeed", "nanotron", "transformers")
MODELS = ("llama3-8b", "qwen3-8b", "qwen3-30b-a3b")
WORKLOAD = Workload(seq_len=4096, global_batch=32)
CLUSTER = cluster_from_shorthand("h100-80gb-sxm:1x8")


def folder(files: dict[str, str]) -> Callable[[str], str]:
    def other(name: str) -> str:
        if name not in files:
            raise InputError(name, None, "no such file")
        return files[name]

    return other


def read(target: str, text: str, name: str = "-", files: dict[str, str] | None = None, **given: object) -> ImportedPlan:
    return import_plan(target, name, text, Given(**given), folder(files or {}))  # type: ignore[arg-type]


def round_trips(target: str, preset: str, plans: list[Plan]) -> int:
    spec, exported = model(preset), 0
    for plan in plans:
        try:
            launch = launch_arguments(target, spec, CLUSTER, WORKLOAD, plan)
        except IllegalPlanError:
            continue
        files = launch.files()
        found = read(target, files["launch.sh"], "launch.sh", files)
        assert found.plan == plan
        assert found.model.key == spec.key
        assert found.workload.of_any_software().model_copy(update={"grad_dtype": None}) == WORKLOAD
        assert found.exact, found.remainder
        assert found.devices == 8
        exported += 1
    return exported


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_exported_is_read_back_as_the_same_plan(target: str) -> None:
    space = EVERYTHING.model_copy(update={"tp": (1,), "pp": (1,), "cp": (1,)} if target == "transformers" else {})
    exported = 0
    for preset in MODELS:
        table = legal_plans(model(preset), CLUSTER, WORKLOAD, space)
        exported += round_trips(target, preset, list(varied(table, 250, seed=1)))
    assert exported >= 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("preset", MODELS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_legal_plan_is_read_back(target: str, preset: str) -> None:
    table = legal_plans(model(preset), CLUSTER, WORKLOAD, EVERYTHING)
    exported = round_trips(target, preset, [table.plan(row) for row in range(len(table))])
    assert exported > 15 or (target == "nanotron" and not exported and preset != "llama3-8b")


TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""


def test_torchtitans_own_toml() -> None:
    found = read("torchtitan@0.2", TITAN, "llama3_8b.toml", devices=16)
    assert found.plan == Plan.parse("tp=2,dp=8,micro_batch=1,zero_stage=3,recompute=op,sequence_parallel=true")
    assert (found.model.name, found.workload.global_batch, found.workload.seq_len) == ("llama3-8b", 8, 8192)
    left = {each.name: each.why for each in found.remainder}
    assert left == dict.fromkeys(
        ("model.converters", "parallelism.enable_async_tensor_parallel", "compile.enable"), Why.NO_WORD
    )
    with pytest.raises(InputError, match="give --devices"):
        read("torchtitan@0.2", TITAN)


def test_a_torchtitan_command_overrides_its_file() -> None:
    text = "NGPU=16\ntorchrun --nnodes=2 --nproc_per_node=8 -m torchtitan.train --job.config_file=a/b.toml \\\n"
    text += "  --parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule 1F1B \\\n"
    text += "  --training.local_batch_size 8 --training.global-batch-size 32"
    found = read("torchtitan", text, "run.sh", {"a/b.toml": TITAN})
    assert (found.plan.pp, found.plan.dp, found.plan.micro_batch, found.plan.zero_stage) == (4, 2, 1, 2)
    assert (found.workload.global_batch, found.devices, found.gpus_per_node) == (32, 16, 8)
    assert any("a layer off the first and the last" in line for line in found.assumed)
    assert any("fills it anew after every 8" in line for line in found.assumed)


PYTHON = """
from . import model_registry
raise SystemExit("read, never run")
def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        activation_checkpoint=SelectiveAC.Config(),
    )

def wide() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=8, data_parallel_shard_degree=2)
    config.training.local_batch_size = 2
    config.activation_checkpoint = FullAC.Config()
    return config
"""


def test_a_python_config_is_read_without_being_run() -> None:
    found = read("torchtitan", PYTHON, "config_registry.py", variables={"CONFIG": "wide"})
    assert found.plan == Plan.parse("tp=8,dp=2,micro_batch=2,zero_stage=3,recompute=full,sequence_parallel=true")
    assert (found.model.name, found.workload.seq_len, found.workload.global_batch) == ("llama3-8b", 8192, 4)
    with pytest.raises(InputError, match="several configurations"):
        read("torchtitan", PYTHON, "config_registry.py")
    named = "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b --training.seq_len 4096"
    assert read("torchtitan", named).plan.recompute.value == "op"


def test_deepspeeds_batch_in_its_spellings() -> None:
    def batch(devices: int | None, **said: object) -> tuple[int, int, int]:
        text = json.dumps({**said, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
        found = read("deepspeed", text, model=model("llama3-8b"), devices=devices, facts={"seq_len": 4096})
        return found.plan.dp, found.plan.micro_batch, found.workload.global_batch

    whole, micro, rounds = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    assert batch(None, **{whole: 64, micro: 2, rounds: 4}) == (8, 2, 64)
    assert batch(8, **{whole: 64, micro: 2}) == (8, 2, 64)
    assert batch(8, **{whole: 64, rounds: 4}) == (8, 2, 64)
    assert batch(8, **{micro: 2, rounds: 4}) == (8, 2, 64)
    assert batch(8, **{micro: 2}) == (8, 2, 16)
    assert batch(8, **{whole: "auto", micro: 2, rounds: "auto"}) == (8, 2, 16)
    assert batch(16, **{micro: 2, rounds: 4, "tensor_parallel": {"autotp_size": 2}}) == (8, 2, 64)
    with pytest.raises(InputError, match="64 cannot be used; micro batch 2 times 3 steps times 8 replicas are 48"):
        batch(8, **{whole: 64, micro: 2, rounds: 3})
    with pytest.raises(InputError, match="does not state train_batch_size, train_micro_batch_size_per_gpu"):
        batch(8, **{whole: "auto", micro: "auto"})


def test_what_deepspeed_does_and_no_plan_says() -> None:
    text = json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "fp16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
            "gradient_clipping": 1.0, "made_up": 7,
        }
    )  # fmt: skip
    found = read("deepspeed", text, model=model("llama3-8b"), devices=4, facts={"seq_len": 2048})
    assert [(each.name, each.why) for each in found.remainder] == [
        ("zero_optimization.offload_optimizer.device", Why.NO_WORD), ("made_up", Why.UNKNOWN)
    ]  # fmt: skip


def test_the_trainers_options_on_a_command_line() -> None:
    text = (
        "torchrun --nnodes 2 --nproc_per_node 8 run_clm.py --model_name_or_path x --bf16 --block_size 2048 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --fsdp 'full_shard auto_wrap' "
        "--gradient_checkpointing true --do_train --output_dir out --torch_compile"
    )
    found = read("transformers", text, model=model("llama3-8b"))
    assert found.plan == Plan.parse("dp=16,micro_batch=4,zero_stage=3,recompute=full")
    assert (found.workload.global_batch, found.workload.dtype.value, found.workload.seq_len) == (128, "bf16", 2048)
    assert [(each.name, each.why) for each in found.remainder] == [
        ("torch_compile", Why.NO_WORD), ("model_name_or_path", Why.UNKNOWN)
    ]  # fmt: skip


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_offload_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def test_accelerates_own_config() -> None:
    found = read("transformers", ACCELERATE, "fsdp.yaml", model=model("llama3-8b"), facts={"seq_len": 2048})
    assert (found.plan.dp, found.plan.zero_stage, found.workload.dtype.value) == (8, 2, "bf16")
    assert [each.name for each in found.remainder] == ["fsdp_config.fsdp_offload_params"]


NANOTRON = """
general: {project: debug, run: tiny}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  make_vocab_size_divisible_by: 128
  model_config: {hidden_size: 16, intermediate_size: 64, is_llama_config: true, num_attention_heads: 4,
    num_hidden_layers: 2, num_key_value_heads: 4, tie_word_embeddings: true, vocab_size: 250}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true, optimizer_factory: {name: adamW}}
parallelism: {dp: 2, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true}
tokens: {sequence_length: 32, train_steps: 15, micro_batch_size: 2, batch_accumulation_per_replica: 4}
"""


def test_nanotrons_own_yaml() -> None:
    found = read("nanotron", NANOTRON, "config.yaml")
    assert found.plan == Plan.parse("tp=2,pp=2,dp=2,micro_batch=2,zero_stage=1,sequence_parallel=true")
    assert (found.model.vocab, found.model.layers, found.workload.global_batch) == (256, 2, 16)
    assert found.exact


BAD = [
    ("torchtitan@0.2", "x.toml", "[training\n", "it is not TOML"),
    ("torchtitan@0.2", "x.toml", TITAN.replace("= -1", "= 0"), "-1 or a positive number"),
    ("torchtitan@0.2", "x.toml", TITAN.replace("= 2", "= 3"), "must divide the devices"),
    ("torchtitan@0.2", "x.toml", TITAN.replace('"op"', '"2"'), "option 2 is no part of a plan"),
    (
        "torchtitan@0.2",
        "x.toml",
        TITAN.replace("replicate_degree = 1", "replicate_degree = 2"),
        "over all of dp, or not",
    ),
    ("torchtitan@0.2", "x.toml", TITAN.replace("seq_len = 8192", 'seq_len = "long"'), "a whole number, at least 1"),
    ("torchtitan", "x.py", "def plan(:", "it is not Python: line 1"),
    ("torchtitan", "x.py", "def plan():\n    config = plan()\n    return config\n", "calls itself"),
    ("torchtitan", "-", "torchrun -m torchtitan.train", "names --job.config_file, or --module and --config"),
    ("torchtitan", "-", "torchrun -m torchtitan.train --job.config_file gone.toml", "gone.toml"),
    ("torchtitan", "-", "torchrun -m torchtitan.train --x 'open", "in the words of bash"),
    ("torchtitan", "-", "torchrun --nproc_per_node 0 -m torchtitan.train --x 1", "a positive whole number"),
    ("deepspeed", "x.json", "{", "it is not JSON"),
    ("deepspeed", "x.json", "[1]", "an object of named settings"),
    ("deepspeed", "x.json", '{"a": 1, "a": 2}', "this key stands twice"),
    ("deepspeed", "x.json", '{"train_batch_size": 16, "zero_optimization": {"stage": 4}}', "0, 1, 2 or 3"),
    (
        "deepspeed",
        "x.json",
        '{"train_batch_size": 16, "optimizer": {"type": "Lion"}}',
        "Adam, AdamW or SGD",
    ),
    ("nanotron", "x.yaml", "a: [", "it is not YAML"),
    ("nanotron", "x.yaml", "general: {}", "has a section parallelism"),
    ("nanotron", "x.yaml", NANOTRON.replace("1f1b", "zb"), "afab, 1f1b"),
    ("transformers", "x.json", '{"fsdp": "hybrid_shard"}', "over all of dp, or not at all"),
    ("transformers", "x.json", '{"bf16": true, "fp16": true}', "one of them"),
    ("transformers", "x.json", '{"optim": "galore_adamw"}', "are not known"),
    ("transformers", "x.json", '{"auto_find_batch_size": true}', "is not in the file"),
]


@pytest.mark.parametrize(("target", "name", "text", "message"), BAD)
def test_a_file_that_cannot_be_used_is_one_error(target: str, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(target, text, name, model=model("llama3-8b") if target != "nanotron" else None, devices=16)
    assert "\n" not in str(error.value)


def test_a_deep_or_long_config_is_refused() -> None:
    for text, message in (("{" + '"a":{' * 2000 + "}" * 2001, "JSON|deep"), ("x" * 300_000, "at most 200000")):
        with pytest.raises(InputError, match=message):
            read("deepspeed", text, "x.json", devices=8)
    with pytest.raises(InputError, match=r"not Python|deep"):
        read("torchtitan", "def plan():\n    return F(" + "a(" * 5000 + ")" * 5000 + ")", "x.py", devices=8)


def test_the_command_reads_what_best_wrote(autotune: Command, tmp_path: Path) -> None:
    plan = Plan.parse("dp=8,micro_batch=2,zero_stage=1")
    launch = launch_arguments("deepspeed", model("llama3-8b"), CLUSTER, WORKLOAD, plan)
    for name, text in launch.files().items():
        (tmp_path / name).write_text(text)
    done = autotune("import-plan", str(tmp_path / "launch.sh"), "--framework", "deepspeed", "--json")
    found = done.data
    assert (found["plan"], found["model"]["name"], found["exact"]) == (plan.to_data(), "llama3-8b", True)
