"""DeepSpeed: its JSON config (deepspeed.ai/docs/config-json), and a script that trains a model of transformers.

What DeepSpeed leaves to the script (stages of a pipeline, recomputation) stands in the JSON as well, under the keys
that it has for them; our script reads them from there.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.errors import InputError
from autotune.frameworks.arguments import ExportRequest, LaunchArguments, refuse, refuse_choices
from autotune.frameworks.commands import Command
from autotune.frameworks.documents import dumped, flat, json_object, nest
from autotune.frameworks.hf_models import hf_config, model_type, with_hf_model
from autotune.frameworks.reading import Given, ImportedPlan, Launch, assembled
from autotune.frameworks.table import Entry, Facts, Settings, Table
from autotune.specs import DeviceKind, DType, Optimizer, Recompute, Schedule

NAME = "deepspeed"
VERSIONS = ("0.19",)
CONFIG = "autotune.json"
_HALVES = frozenset({DType.BF16, DType.FP16})
_SGD = {"type": "SGD", "params": {"lr": 3e-4, "momentum": 0.9}}
_ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}}


def check(run: ExportRequest) -> None:
    """Raises IllegalPlanError for a plan, model or workload that DeepSpeed cannot run as it is meant."""
    refuse(NAME, run, limits(run))
    refuse_choices(NAME, run, grad_dtype=("fp32", run.workload.dtype.value), reduce_dtype=("fp32", "bf16", "fp16"))


def limits(run: ExportRequest) -> tuple[tuple[bool, str], ...]:
    """Whether each limit of DeepSpeed is passed, and what it is."""
    plan, workload, model = run.plan, run.workload, run.model
    plain_half = workload.dtype in _HALVES and plan.zero_stage == 0 and plan.dp > 1
    return (
        (plan.zero_stage > 1 and plan.pp > 1, "its pipeline engine refuses ZeRO-2 and ZeRO-3"),
        (plan.zero_stage > 2 and plan.tp > 1, "its tensor parallelism (AutoTP) goes with ZeRO 0, 1 or 2"),
        (plan.tp > 1 and plan.pp > 1, "AutoTP and its pipeline engine are not combined"),
        (plan.pp > 1 and plan.schedule is not Schedule.ONE_F_ONE_B, "its pipeline engine has 1f1b only"),
        (plan.vpp > 1, "its pipeline engine holds one chunk a rank"),
        (plan.sequence_parallel and plan.tp > 1, "AutoTP has no sequence parallelism"),
        (plan.cp > 1, "context parallelism is no part of its config"),
        (plan.recompute in {Recompute.SELECTIVE, Recompute.OP}, "it recomputes whole layers only"),
        (workload.dtype is DType.FP8, "fp8 is no part of its config"),
        (
            plain_half and workload.grad_dtype is DType.FP32,
            f"without ZeRO it adds gradients up in {workload.dtype.value} only: use zero_stage 1 or more",
        ),
        (
            plain_half and plan.pp > 1 and workload.dtype is DType.BF16,
            "its pipeline shards optimizer states in bf16: use zero_stage 1",
        ),
        (model.experts > 0 and plan.ep == 1 and plan.tp > 1, "AutoTP divides no experts: use ep above 1"),
        (plan.ep > 1 and plan.pp > 1, "its expert parallelism (AutoEP) and its pipeline engine are not combined"),
        (plan.ep > 1 and plan.expert_tp > 1, "AutoEP keeps each expert on one rank: use etp 1"),
    )


def _say_batch(facts: Facts) -> Mapping[str, object]:
    return {
        # With tensor parallelism it would count those ranks as replicas.
        "train_batch_size": facts["global_batch"] if facts["tp"] == 1 else None,
        "train_micro_batch_size_per_gpu": facts["micro_batch"],
        "gradient_accumulation_steps": facts["micro_batches"],
    }


def _read_batch(settings: Settings, facts: Facts) -> Mapping[str, object]:
    """Of the three any two give the third, with the replicas; `auto` is what the Trainer puts there."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, rounds = (None if settings.value(name) == "auto" else settings.count(name) for name in names)
    others, devices = facts["tp"] * facts["pp"], facts["devices"]
    dp = None if devices is None or devices % others else devices // others
    if whole is not None and facts["tp"] == 1:  # without tensor parallelism it knows its replicas
        if dp is None and micro is not None and rounds is not None:
            if whole % (micro * rounds):
                raise settings.bad(names[0], f"a multiple of micro batch times steps, {micro * rounds}")
            dp = whole // (micro * rounds)
        if micro is None and dp is not None:
            micro = whole // (dp * (rounds or 1))
        if rounds is None and micro and dp is not None:
            rounds = whole // (micro * dp)
    if micro is None or (rounds is None and whole is None and dp is None):
        auto = [name for name in names if settings.value(name) in {None, "auto"}]
        raise InputError(settings.file, None, f"it does not state {', '.join(auto)}: give --devices, or numbers there")
    found: dict[str, object] = {"micro_batch": micro, "micro_batches": rounds or 1, "dp": dp}
    if whole is not None and facts["tp"] == 1 and dp is not None:
        if whole != micro * (rounds or 1) * dp:
            allowed = (
                f"micro batch {micro} times {rounds or 1} steps times {dp} replicas are {micro * (rounds or 1) * dp}"
            )
            raise settings.bad(names[0], allowed)
        found["global_batch"] = whole
    return found


def _say_formats(facts: Facts) -> Mapping[str, object]:
    half = facts["dtype"] in _HALVES
    # One replica has nothing to shard: stage 1 is then ZeRO-0 with an fp32 accumulator, which stage 0 lacks.
    stage = 1 if half and facts["dp"] == 1 else facts["zero_stage"]
    return {
        "zero_optimization.stage": stage,
        "data_types.grad_accum_dtype": facts["gradients"],
        "communication_data_type": facts["reduce_dtype"],
        f"{facts['dtype']}.enabled": True if half else None,
    }


def _read_formats(settings: Settings, facts: Facts) -> Mapping[str, object]:
    stage = settings.count("zero_optimization.stage", 0, least=0) or 0
    if stage > 3:
        raise settings.bad("zero_optimization.stage", "0, 1, 2 or 3")
    on = [name for name in ("bf16", "fp16", "bfloat16") if _on(settings, f"{name}.enabled")]
    if len(on) > 1:
        raise settings.bad(f"{on[1]}.enabled", f"{on[0]} is enabled too: one of them")
    dtype = {"bfloat16": "bf16"}.get(on[0], on[0]) if on else "fp32"
    known = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bfp16": "bf16"}
    grads = settings.word("data_types.grad_accum_dtype", None, known=tuple(known))
    reduced = settings.word("communication_data_type", None, known=tuple(known))
    found = {"dtype": dtype, "zero_stage": 0 if facts["dp"] == 1 else stage, "reduce_dtype": reduced and known[reduced]}
    # Without a word it adds up in the model's format.
    accumulated = known[grads] if grads else dtype
    return found | {"grad_dtype": None if accumulated == "fp32" else accumulated}


def _on(settings: Settings, name: str) -> bool:
    return settings.value(name) not in {None, "auto"} and settings.switch(name)


def _say_parallelism(facts: Facts) -> Mapping[str, object]:
    full = facts["recompute"] == Recompute.FULL.value
    experts, staged = facts["ep"] > 1, facts["pp"] > 1
    return {
        "tensor_parallel.autotp_size": facts["tp"] if facts["tp"] > 1 else None,
        "expert_parallel.enabled": True if experts else None,
        "expert_parallel.autoep_size": facts["ep"] if experts else None,
        "expert_parallel.expert_tensor_parallel_size": 1 if experts else None,
        "pipeline.stages": facts["pp"] if staged else None,
        "pipeline.activation_checkpoint_interval": int(full) if staged else None,
        "activation_checkpointing.number_checkpoints": facts["layers"] if full and not staged else None,
    }


def _read_parallelism(settings: Settings, facts: Facts) -> Mapping[str, object]:
    tp = max(settings.count("tensor_parallel.autotp_size", 0, least=0) or 0, 1)
    ep = settings.count("expert_parallel.autoep_size", 1) if settings.switch("expert_parallel.enabled") else 1
    settings.count("expert_parallel.expert_tensor_parallel_size", 1)
    stages = settings.value("pipeline.stages", 1)
    pp = 1 if stages == "auto" else settings.count("pipeline.stages", 1)
    interval = settings.count("pipeline.activation_checkpoint_interval", 0, least=0)
    checkpoints = settings.count("activation_checkpointing.number_checkpoints", 0, least=0)
    return {"tp": tp, "ep": ep, "pp": pp, "recompute": Recompute.FULL if interval or checkpoints else Recompute.NONE}


def _say_optimizer(facts: Facts) -> Mapping[str, object]:
    adamw = facts["optimizer"] == Optimizer.ADAMW.value
    return {
        "optimizer": _ADAMW if adamw else _SGD,
        "zero_allow_untested_optimizer": None if adamw else True,
    }


def _read_optimizer(settings: Settings, facts: Facts) -> Mapping[str, object]:
    known = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
    name = str(settings.value("optimizer.type", "adamw")).lower()
    if name not in known:
        raise settings.bad("optimizer.type", "Adam, AdamW or SGD")
    return {"optimizer": known[name]}


TABLE = Table(
    entries=(
        Entry(say=_say_parallelism, read=_read_parallelism),
        Entry(say=_say_batch, read=_read_batch),
        Entry(say=_say_formats, read=_read_formats),
        Entry(say=_say_optimizer, read=_read_optimizer),
    ),
    no_word={
        "zero_optimization.offload_*": "parameters or states are in host memory or on disk",
        "zero_optimization.zero_hpz_partition_size": "states are sharded over part of the replicas",
        "zero_optimization.mics_shard_size": "states are sharded over part of the replicas",
        "zero_optimization.zero_quantized_*": "what is communicated has fewer bits",
        "sequence_parallel_size": "sequences are divided (Ulysses)",
        "activation_checkpointing.cpu_checkpointing": "activations are in host memory",
        "activation_checkpointing.partition_activations": "activations are divided over tp ranks",
        "compression_training.*": "weights are compressed",
        "sparse_attention.*": "attention is sparse",
        "curriculum_learning.*": "sequences grow during the run",
        "elasticity.*": "the number of devices changes",
        "amp.*": "apex decides on number formats",
        "torch_autocast.*": "torch decides on number formats",
        "compile.deepcompile": "the model is compiled",
    },
    elsewhere=(
        r"zero_optimization(\.(overlap_comm|contiguous_gradients|reduce_scatter|.*bucket.*|allgather_partitions))?",
        r"zero_optimization\.(stage3_.*|sub_group_size|round_robin_gradients|ignore_unused_parameters)",
        r"(optimizer|scheduler|fp16|bf16|flops_profiler|tensorboard|wandb|csv_monitor|comet|checkpoint|aio)\..*",
        r"(comms_logger|monitor_config|activation_checkpointing|tensor_parallel|autotuning|data_types)\..*",
        r"steps_per_print|gradient_clipping|wall_clock_breakdown|prescale_gradients|gradient_predivide_factor",
        r"zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|dump_state|seed|memory_breakdown|log_level",
        r"sparse_gradients|disable_allgather|dataloader_drop_last|pipeline\..*",
    ),
)


def gradients(run: ExportRequest) -> DType:
    """The format in which gradients are added up: fp32 unless the workload says otherwise or ZeRO-0 has no other."""
    workload, plan = run.workload, run.plan
    if workload.grad_dtype is None and plan.zero_stage == 0 and plan.dp > 1:
        return workload.dtype
    return workload.gradients


def export(run: ExportRequest) -> LaunchArguments:
    """The command of one node and its files. Raises IllegalPlanError as `check`."""
    check(run)
    facts = {**run.facts, "micro_batches": run.micro_batches, "gradients": gradients(run).value}
    family = model_type(run.model)
    beside = {}
    if family is not None and not (run.plan.pp > 1 and family == "gpt2"):
        beside = {"config.json": dumped(hf_config(run.model, run.workload.seq_len)), "train.py": _SCRIPT}
        note = "train.py trains the model of config.json on random tokens: put your data in their place."
    else:
        note = "train.py is your script: it builds the model, its stages and experts, and calls deepspeed.initialize."
    nodes, gpus = str(run.cluster.nodes), str(run.cluster.gpus_per_node)
    start: tuple[str, ...] = ("deepspeed", "--num_nodes", nodes, "--num_gpus", gpus)
    if run.cluster.device.kind is DeviceKind.CPU:
        start = run.torchrun()
    words = ("train.py", "--deepspeed", "--deepspeed_config", CONFIG, "--seq-len", str(run.workload.seq_len))
    return LaunchArguments(
        target=NAME,
        version=run.version,
        argv=(*start, *words),
        config_name=CONFIG,
        config=dumped(nest(TABLE.say(facts, run.version))),
        beside=beside,
        notes=(note,),
    )


def read(launch: Launch, given: Given) -> ImportedPlan:
    """The model, workload and plan of a JSON config, or of a command that names one."""
    command = Command.of(launch, "train.py", given.variables)
    if not command.argv:
        command = Command.of_config(launch, "deepspeed_config", given.variables)
    text, file = launch.text, launch.file
    if command.argv:
        path = command.options.get("deepspeed_config") or command.options.get("deepspeed")
        if path is None or path.value is True:
            raise InputError(launch.file, None, "a DeepSpeed command names --deepspeed_config")
        file = str(path.value)
        text = launch.other(file)
    settings = Settings(file, flat(file, json_object(file, text)))
    facts, remainder = TABLE.read(settings, {"devices": given.devices or command.devices})
    stated = {"seq_len": command.count(launch, "seq-len", "seq_length", "max_seq_length")} if command.argv else {}
    given = with_hf_model(launch, given, command)
    facts = {name: value for name, value in facts.items() if name != "devices" and value is not None}
    return assembled(
        launch, given, facts | {name: value for name, value in stated.items() if value is not None}, framework=NAME,
        devices=command.devices, gpus_per_node=command.gpus_per_node, remainder=remainder,
    )  # fmt: skip


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
        checkpointable_layers=["Layer"],  # the embedding's input, whole numbers, has no gradient
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
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
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
            speed = tokens / seconds
            print(f"step {step} loss {loss:.4f} step_time_s {seconds:.4f} tokens_per_s {speed:.0f}", flush=True)


if __name__ == "__main__":
    main()
'''
