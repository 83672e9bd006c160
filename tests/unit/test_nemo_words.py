"""Megatron-Bridge's words, both ways: overrides of a recipe, and configs that Bridge wrote."""

from __future__ import annotations

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import IllegalPlanError, InputError
from autotune.frameworks import Given, import_plan, launch_arguments
from autotune.specs import DType, FrameworkName, Module, Plan, Recompute, Schedule, Workload

CLUSTER = cluster_from_shorthand("h100-80gb-sxm:8x8")
WORKLOAD = Workload(seq_len=4096, global_batch=512, framework=FrameworkName.NEMO)
PLANS = (
    ("llama3-8b", Plan(tp=2, cp=2, dp=16, zero_stage=1, sequence_parallel=True, recompute=Recompute.FULL)),
    ("llama3-8b", Plan(dp=64, zero_stage=3)),
    ("llama3.1-405b", Plan(tp=8, pp=8, dp=1, vpp=16, schedule=Schedule.INTERLEAVED, sequence_parallel=True)),
    ("qwen3-235b-a22b", Plan(tp=2, pp=8, dp=4, vpp=4, ep=4, etp=1, zero_stage=1, schedule=Schedule.INTERLEAVED,
                             sequence_parallel=True)),
    ("deepseek-v3", Plan(pp=1, dp=64, ep=64, zero_stage=1, recompute=Recompute.SELECTIVE,
                         recompute_modules=(Module.MLA_UP_PROJ, Module.MLP))),
)  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_an_export_is_imported_as_the_same_plan(name: str, plan: Plan) -> None:
    launch = launch_arguments("nemo", model(name), CLUSTER, WORKLOAD, plan)
    given = Given(model=model(name), devices=64)
    script = import_plan("nemo", "launch.sh", launch.files()["launch.sh"], given)
    config = import_plan("nemo", launch.config_name, launch.config, given)
    assert script.plan == config.plan == plan
    assert (script.remainder, config.remainder) == ((), ())
    assert script.workload.global_batch == 512


def test_a_format_that_its_precision_overwrites_is_refused() -> None:
    changed = WORKLOAD.model_copy(update={"grad_dtype": DType.BF16})
    with pytest.raises(IllegalPlanError, match="grad_dtype"):
        launch_arguments("nemo", model("llama3-8b"), CLUSTER, changed, Plan(dp=64))


WRITTEN = """
model:
  _target_: megatron.bridge.models.GPTModelProvider
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 128
  gated_linear_unit: true
  add_bias_linear: false
  normalization: RMSNorm
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  vocab_size: 128256
  rotary_base: 500000
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: true
  cuda_graph_impl: local
  init_method_std: 0.02
train: {global_batch_size: 128, micro_batch_size: 1}
dataset: {seq_length: 8192}
mixed_precision: {bf16: true, grad_reduce_in_fp32: false, fp8: hybrid, fp8_recipe: tensorwise}
ddp: {use_distributed_optimizer: true}
"""


def test_a_written_config_says_model_workload_and_plan() -> None:
    found = import_plan("nemo", "run_config.yaml", WRITTEN, Given(devices=16))
    assert found.model.name == "llama3-8b"
    assert found.plan == Plan(tp=4, pp=2, dp=2, zero_stage=1, sequence_parallel=True)
    assert (found.workload.dtype, found.workload.grad_dtype, found.workload.seq_len) == (DType.FP8, DType.BF16, 8192)
    assert [(each.name, each.what) for each in found.remainder] == [
        ("model.cuda_graph_impl", "layers or steps are CUDA graphs")
    ]


def test_a_command_with_a_recipe_says_what_it_overrides() -> None:
    text = (
        "torchrun --nproc_per_node=8 run_recipe.py --recipe llama3_8b_pretrain_8gpu_h100_bf16_config --dataset mock "
        "-tp 2 -gb 64 train.micro_batch_size=2 dataset.seq_length=4096 model.sequence_parallel=true model.strange=1"
    )
    with pytest.raises(InputError, match="the shape is the recipe's: give --model"):
        import_plan("nemo", "-", text)
    found = import_plan("nemo", "-", text, Given(model=model("llama3-8b")))
    assert found.plan == Plan(tp=2, dp=4, micro_batch=2, sequence_parallel=True)
    assert [each.name for each in found.remainder] == ["model.strange"]
    assert "llama3_8b_pretrain_8gpu_h100_bf16_config" in found.assumed[-1]
