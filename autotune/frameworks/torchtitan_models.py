"""A model's shape as the Python modules that torchtitan imports: one for 0.2's `custom_import`, one for 0.3's registry.

What a module holds besides numbers is our own; the names are torchtitan's (models/llama3, models/qwen3,
models/deepseek_v3 of the release).
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.specs import ModelSpec, Norm, Position

FLAVORS = {
    "llama3_8b": "llama3-8b", "llama3_70b": "llama3-70b", "llama3_405b": "llama3.1-405b", "llama3_1b": "llama3.2-1b",
    "llama3_3b": "llama3.2-3b", "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b",
    "qwen3_8b": "qwen3-8b", "qwen3_14b": "qwen3-14b", "qwen3_32b": "qwen3-32b", "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b", "deepseek_v3_16b": "deepseek-v2-lite", "deepseek_v3_671b": "deepseek-v3",
}  # fmt: skip
"""Our names of torchtitan's models, by family and flavor."""


def unsayable_model(model: ModelSpec, version: str) -> str:
    """Why this torchtitan has no model of this shape; empty if it has one."""
    plain = model.norm is Norm.RMSNORM and model.position is Position.ROPE and model.gated
    if not plain or model.linear_bias or model.qkv_bias:
        return "its models have RMSNorm, rotary positions, gated MLPs and no biases"
    if model.latent_attention is not None and not (version == "0.2" and model.experts and not model.tied):
        return "the export to 0.2 covers latent attention with experts, that to 0.3 does not"
    if model.latent_attention is None and model.experts and (model.shared_experts or model.dense_layers):
        return "its Qwen3 has neither shared experts nor dense layers before the mixtures"
    if version == "0.3" and not model.qk_norm and (model.experts or model.head_dim * model.heads != model.hidden):
        return "its Llama has neither experts nor heads of another width than hidden / heads"
    return ""


def family(model: ModelSpec) -> str:
    """Which of torchtitan's models 0.2 is given."""
    if model.latent_attention is not None:
        return "deepseek_v3"
    own = model.head_dim * model.heads != model.hidden
    return "qwen3" if model.experts or model.qk_norm or model.tied or own else "llama3"


def model_module(model: ModelSpec) -> str:
    """The module that 0.2 imports: a model `autotune`, its flavor the model's own name, and random tokens for data."""
    shape: dict[str, object] = {
        "dim": model.hidden, "n_layers": model.layers, "n_heads": model.heads, "vocab_size": model.vocab,
    }  # fmt: skip
    experts: dict[str, object] = {
        "num_experts": model.experts, "num_shared_experts": model.shared_experts, "top_k": model.top_k,
    }  # fmt: skip
    kind, latent = family(model), model.latent_attention
    if latent is not None:
        name = "DeepSeekV3ModelArgs"
        shape |= {
            "inter_dim": model.ffn, "moe_inter_dim": model.expert_ffn, "n_dense_layers": model.dense_layers,
            "q_lora_rank": latent.q_lora_rank, "kv_lora_rank": latent.kv_lora_rank,
            "qk_nope_head_dim": latent.qk_nope_head_dim, "qk_rope_head_dim": latent.qk_rope_head_dim,
            "v_head_dim": latent.v_head_dim,
        }  # fmt: skip
    elif kind == "qwen3":
        name = "Qwen3ModelArgs"
        shape |= {
            "n_kv_heads": model.kv_heads, "head_dim": model.head_dim, "hidden_dim": model.ffn,
            "qk_norm": model.qk_norm, "enable_weight_tying": model.tied,
        }  # fmt: skip
        if model.experts:
            shape |= {"moe_enabled": True, "moe_inter_dim": model.expert_ffn}
            experts |= {"score_func": "softmax", "route_norm": True, "score_before_experts": False}
    else:
        name = "TransformerModelArgs"
        # Its MLP is ffn_dim_multiplier times 8/3 of dim, rounded up to a multiple.
        multiplier = model.ffn / int(8 * model.hidden / 3)
        shape |= {"n_kv_heads": model.kv_heads, "multiple_of": model.ffn, "ffn_dim_multiplier": multiplier}
    lines = [f"    {key}={value!r}," for key, value in shape.items()]
    imported = f"from torchtitan.models.{kind} import {name}, get_train_spec"
    if model.experts:
        imported += "\nfrom torchtitan.models.moe import MoEArgs"
        lines.append(f"    moe_args=MoEArgs({', '.join(f'{key}={value!r}' for key, value in experts.items())}),")
    return _MODULE.format(flavor=model.name, imported=imported, args=name, lines="\n".join(lines))


_MODULE = '''"""The model of autotune.toml for torchtitan 0.2. Written by autotune.

Data are random tokens. For yours, leave out build_tokenizer_fn and build_dataloader_fn below, and set
[training] dataset and [model] hf_assets_path in autotune.toml.
"""

from dataclasses import asdict, replace

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
{imported}
from torchtitan.protocols.train_spec import register_train_spec

SHAPE = {args}(
{lines}
)


class RandomTokens(IterableDataset):
    def __init__(self, seq_len, seed):
        self.seq_len, self.seed = seq_len, seed

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            tokens = torch.randint(SHAPE.vocab_size, (self.seq_len + 1,), generator=draw)
            yield {{"input": tokens[:-1]}}, tokens[1:]


def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
    training = job_config.training
    return ParallelAwareDataloader(
        RandomTokens(training.seq_len, dp_rank),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=training.local_batch_size,
        **asdict(training.dataloader),
    )


register_train_spec(
    "autotune",
    replace(
        get_train_spec(),
        model_args={{{flavor!r}: SHAPE}},
        build_tokenizer_fn=None,
        build_dataloader_fn=build_dataloader,
    ),
)
'''


def registry_module(model: ModelSpec, sections: Mapping[str, Mapping[str, object]]) -> str:
    """The module that 0.3 takes as --module: its function `plan` gives the whole configuration."""
    recompute = sections["activation_checkpoint"]
    kind = {"none": "None", "full": "FullAC.Config()"}.get(str(recompute["mode"]), "SelectiveAC.Config()")
    if model.experts:
        layers = f"""_build_qwen3_moe_layers(
            n_layers={model.layers}, dim={model.hidden}, n_heads={model.heads}, n_kv_heads={model.kv_heads},
            head_dim={model.head_dim}, moe_hidden_dim={model.expert_ffn}, num_experts={model.experts},
            top_k={model.top_k}, attn_backend="flex", moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim={model.head_dim}, max_seq_len=131072, theta=1000000.0),
        )"""
    elif model.qk_norm:
        layers = f"""_build_qwen3_layers(
            n_layers={model.layers}, dim={model.hidden}, n_heads={model.heads}, n_kv_heads={model.kv_heads},
            head_dim={model.head_dim}, hidden_dim={model.ffn}, attn_backend="flex",
            rope=CosSinRoPE.Config(dim={model.head_dim}, max_seq_len=131072, theta=1000000.0),
        )"""
    else:
        layers = f"""_build_llama3_layers(
            n_layers={model.layers}, dim={model.hidden}, n_heads={model.heads}, n_kv_heads={model.kv_heads},
            hidden_dim={model.ffn}, attn_backend="flex",
            rope=ComplexRoPE.Config(dim={model.head_dim}, max_seq_len=131072, theta=500000, scaling="llama"),
        )"""
    kind_of, builder = ("qwen3", "Qwen3") if model.qk_norm else ("llama3", "Llama3")
    return _REGISTRY.format(
        flavor=model.name, family=kind_of, builder=builder, layers=layers, maker=layers.partition("(")[0],
        rope="CosSinRoPE" if model.qk_norm else "ComplexRoPE",
        parallelize="parallelize_qwen3" if model.qk_norm else "parallelize_llama",
        dim=model.hidden, vocab=model.vocab, tied=model.tied, recompute=kind,
        training=_arguments(sections["training"]), parallelism=_arguments(sections["parallelism"]),
    )  # fmt: skip


def _arguments(values: Mapping[str, object]) -> str:
    return "\n".join(f"            {key}={value!r}," for key, value in values.items())


_REGISTRY = '''"""For torchtitan 0.3: --module autotune_config --config plan. Written by autotune."""

from functools import partial

from torch import nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import {rope}, Embedding, Linear, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.{family} import {builder}Model, {maker}, {parallelize}
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

DATASET = "c4"
TOKENIZER = "./assets/tokenizer"

DIM, VOCAB, TIED = {dim}, {vocab}, {tied}
NORMAL = partial(nn.init.normal_, std=0.02)


def model() -> {builder}Model.Config:
    return {builder}Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        enable_weight_tying=TIED,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=DIM, param_init={{"weight": skip_param_init if TIED else NORMAL}}
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init={{"weight": nn.init.ones_}}),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init={{"weight": NORMAL}}),
        layers={layers},
    )


def plan() -> Trainer.Config:
    return Trainer.Config(
        model_spec=ModelSpec(
            name="autotune",
            flavor={flavor!r},
            model=model(),
            parallelize_fn={parallelize},
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        hf_assets_path=TOKENIZER,
        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASET),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        activation_checkpoint={recompute},
    )
'''
