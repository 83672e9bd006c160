"""DeepSpeed: its JSON config (deepspeed.ai/docs/config-json), and a script that trains a model of transformers with it.

What DeepSpeed leaves to the script (stages of a pipeline, recomputation) stands in the JSON as well, under the keys that
it has for them; our script reads them from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autotune.export.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.export.hf_models import hf_config, model_type
from autotune.specs import DeviceKind, DType, Optimizer, Plan, Recompute, Schedule

NAME = "deepspeed"
VERSIONS = ("0.19",)
CONFIG = "autotune.json"
HALVES = {DType.BF16, DType.FP16}
_SGD = {"type": "SGD", "params": {"lr": 3e-4, "momentum": 0.9}}
_ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}


def check(run: ExportRequest, version: str = VERSIONS[-1]) -> None:
    """Raises IllegalPlanError for a plan, model or workload that DeepSpeed cannot run as it is meant."""
    refuse(NAME, run, ((True, reason) for reason in reasons(run)))
    refuse_choices(NAME, run, grad_dtype=("fp32", run.workload.dtype.value), reduce_dtype=("fp32", "bf16", "fp16"))


def reasons(run: ExportRequest) -> Iterator[str]:
    """Why DeepSpeed cannot run the plan."""
    plan, workload = run.plan, run.workload
    half = workload.dtype in HALVES
    if plan.zero_stage > 1 and plan.pp > 1:
        yield "its pipeline engine refuses ZeRO-2 and ZeRO-3"
    if plan.zero_stage > 2 and plan.tp > 1:
        yield "its tensor parallelism (AutoTP) goes with ZeRO 0, 1 or 2"
    if plan.tp > 1 and plan.pp > 1:
        yield "AutoTP and its pipeline engine are not combined"
    if plan.pp > 1 and plan.schedule is not Schedule.ONE_F_ONE_B:
        yield "its pipeline engine has 1f1b only"
    if plan.vpp > 1:
        yield "its pipeline engine holds one chunk a rank"
    if plan.sequence_parallel and plan.tp > 1:
        yield "AutoTP has no sequence parallelism"
    if plan.cp > 1:
        yield "context parallelism is no part of its config"
    if plan.recompute in {Recompute.SELECTIVE, Recompute.OP}:
        yield "it recomputes whole layers only"
    if workload.dtype is DType.FP8:
        yield "fp8 is no part of its config"
    if half and plan.zero_stage == 0 and plan.dp > 1:
        if workload.grad_dtype is DType.FP32:
            yield f"without ZeRO it adds gradients up in {workload.dtype.value} only: use zero_stage 1 or more"
        if plan.pp > 1 and workload.dtype is DType.BF16:
            yield "its pipeline shards optimizer states in bf16: use zero_stage 1"
    if run.model.experts and plan.ep == 1 and plan.tp > 1:
        yield "AutoTP divides no experts: use ep above 1"
    if run.model.experts and plan.ep > 1 and plan.pp > 1:
        yield "its expert parallelism (AutoEP) and its pipeline engine are not combined"
    if run.model.experts and plan.ep > 1 and plan.expert_tp > 1:
        yield "AutoEP keeps each expert on one rank: use etp 1"


def export(run: ExportRequest, version: str = VERSIONS[-1]) -> LaunchArguments:
    """The command of one node and its files. Raises IllegalPlanError as `check`."""
    check(run, version)
    files = {CONFIG: json.dumps(_config(run), indent=2) + "\n"}
    family = model_type(run.model)
    if family is not None and not (run.plan.pp > 1 and family == "gpt2"):
        files |= {"config.json": json.dumps(hf_config(run.model, run.workload.seq_len), indent=2) + "\n"}
        files |= {"train.py": _SCRIPT}
        note = "train.py trains the model of config.json on random tokens: put your data in their place."
    else:
        note = "train.py is your script: it builds the model, its stages and experts, and calls deepspeed.initialize."
    nodes, gpus = str(run.cluster.nodes), str(run.cluster.gpus_per_node)
    launch = ("deepspeed", "--num_nodes", nodes, "--num_gpus", gpus)
    if run.cluster.device.kind is DeviceKind.CPU:
        launch = run.torchrun()
    words = ("train.py", "--deepspeed", "--deepspeed_config", CONFIG, "--seq-len", str(run.workload.seq_len))
    return LaunchArguments(
        target=NAME,
        argv=(*launch, *words),
        config_name=CONFIG,
        config=files[CONFIG],
        files=tuple(files.items()),
        notes=(note,),
    )


def _config(run: ExportRequest) -> dict[str, Any]:
    plan, workload = run.plan, run.workload
    half = workload.dtype in HALVES
    # One replica has nothing to shard: stage 1 is then ZeRO-0 with an fp32 accumulator, which stage 0 lacks.
    stage = 1 if half and plan.dp == 1 else plan.zero_stage
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "zero_optimization": {"stage": stage},
        "data_types": {"grad_accum_dtype": gradients(run).value},
        "optimizer": _ADAMW if workload.optimizer is Optimizer.ADAMW else _SGD,
    }
    if plan.tp == 1:  # it would count the ranks of tp as replicas
        config["train_batch_size"] = workload.global_batch
    if workload.optimizer is not Optimizer.ADAMW:
        config["zero_allow_untested_optimizer"] = True
    if workload.reduce_dtype is not None:
        config["communication_data_type"] = workload.reduce_dtype.value
    if half:
        config[workload.dtype.value] = {"enabled": True}
    return config | _parallelism(plan, run.model.layers)


def gradients(run: ExportRequest) -> DType:
    """The format in which gradients are added up: fp32 unless the workload says otherwise or ZeRO-0 has no other."""
    workload, plan = run.workload, run.plan
    if workload.grad_dtype is None and plan.zero_stage == 0 and plan.dp > 1:
        return workload.dtype
    return workload.gradients


def _parallelism(plan: Plan, layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    full = plan.recompute is Recompute.FULL
    if plan.tp > 1:
        found["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.ep > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep, "expert_tensor_parallel_size": 1}
    if plan.pp > 1:
        found["pipeline"] = {"stages": plan.pp, "activation_checkpoint_interval": int(full)}
    elif full:
        found["activation_checkpointing"] = {"number_checkpoints": layers}
    return found


_SCRIPT = '''"""Trains the model of config.json with DeepSpeed on random tokens. Written by autotune.

Put your data in the place of `batches`, and your checkpoint in that of random weights (from_config).
"""

import argparse
import json
import os
import time

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from transformers import AutoConfig, AutoModelForCausalLM


def pipeline(config, stages, interval):
    """The model as layers of a pipeline, whose stages have equally many."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config).model
    layer, norm, rotary = type(whole.layers[0]), type(whole.norm), type(whole.rotary_emb)

    class Layer(torch.nn.Module):
        def __init__(self, index):
            super().__init__()
            self.layer, self.rotary = layer(config, index), rotary(config)

        def forward(self, hidden):
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            found = self.layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=self.rotary(hidden, positions)
            )
            return found[0] if isinstance(found, tuple) else found

    sizes = config.vocab_size, config.hidden_size
    if config.tie_word_embeddings:
        first = TiedLayerSpec("embedding", torch.nn.Embedding, *sizes)
        last = TiedLayerSpec(
            "embedding", torch.nn.Embedding, *sizes, forward_fn=lambda e, x: torch.nn.functional.linear(x, e.weight)
        )
    else:
        first = LayerSpec(torch.nn.Embedding, *sizes)
        last = LayerSpec(torch.nn.Linear, config.hidden_size, config.vocab_size, bias=False)
    layers = [LayerSpec(Layer, index) for index in range(config.num_hidden_layers)]

    def loss(logits, tokens):
        return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    return PipelineModule(
        [first, *layers, LayerSpec(norm, config.hidden_size, config.rms_norm_eps), last],
        num_stages=stages,
        loss_fn=loss,
        partition_method="type:Layer",
        activation_checkpoint_interval=interval,
    )


def batches(vocab, micro_batch, seq_len, device, seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(vocab, (micro_batch, seq_len), generator=draw).to(device)
        yield tokens, tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, default=100)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    with open(arguments.deepspeed_config) as file:
        settings = json.load(file)
    deepspeed.init_distributed()
    config = AutoConfig.from_pretrained(".")
    stages = settings.get("pipeline", {}).get("stages", 1)
    tp = settings.get("tensor_parallel", {}).get("autotp_size", 1)
    torch.manual_seed(0)
    if stages > 1:
        model = pipeline(config, stages, settings["pipeline"]["activation_checkpoint_interval"])
    else:
        sharded = settings["zero_optimization"]["stage"] == 3
        with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config, enabled=sharded):
            model = AutoModelForCausalLM.from_config(config)
        if "activation_checkpointing" in settings:
            model.gradient_checkpointing_enable()
        model.train()
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    rank = torch.distributed.get_rank()
    replica = engine.grid.get_data_parallel_rank() if stages > 1 else rank // tp
    micro_batch, rounds = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    data = batches(config.vocab_size, micro_batch, arguments.seq_len, engine.device, replica)
    ranks = torch.distributed.get_world_size()
    tokens = micro_batch * rounds * arguments.seq_len * (ranks // (tp * stages))
    for step in range(1, arguments.steps + 1):
        start = time.perf_counter()
        if stages > 1:
            loss = engine.train_batch(data)
        else:
            for _ in range(rounds):
                inputs, labels = next(data)
                loss = engine(input_ids=inputs, labels=labels, use_cache=False).loss
                engine.backward(loss)
                engine.step()
        loss, seconds = loss.item(), time.perf_counter() - start
        if rank == 0:
            print(f"step {step} loss {loss:.4f} step_time_s {seconds:.4f} tokens_per_s {tokens / seconds:.0f}", flush=True)


if __name__ == "__main__":
    main()
'''
