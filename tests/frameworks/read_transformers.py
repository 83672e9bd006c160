"""What the Hugging Face Trainer makes of a launch, without GPUs: its own TrainingArguments and FSDP plug-in."""

from __future__ import annotations

from typing import Any

import readers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, TrainingArguments, training_args

training_args.is_torch_bf16_gpu_available = lambda: True  # there is no GPU here


def read(launch: dict[str, Any]) -> dict[str, Any]:
    argv = launch["argv"]
    words = list(argv[argv.index("train.py") + 1 :])
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(words[0])
    hf = AutoConfig.from_pretrained(".")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    parameters = sum(p.numel() for p in model.parameters())
    world, m = launch["world"], arguments.gradient_accumulation_steps
    compute = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32"
    if arguments.fsdp:
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        if compute != "fp32":
            plugin.set_mixed_precision(compute)
        plugin.set_auto_wrap_policy(model)
        assert plugin.fsdp_version == 2
        names = {type(module).__name__ for module in model.modules()}
        assert set(plugin.transformer_cls_names_to_wrap) <= names, plugin.transformer_cls_names_to_wrap
        zero, full = 3 if plugin.reshard_after_forward else 2, plugin.activation_checkpointing
        policy = plugin.mixed_precision_policy
        reduce = readers.dtype_name(policy.reduce_dtype) if policy else "fp32"
    else:
        zero, full, reduce = 0, arguments.gradient_checkpointing, "fp32"
    return {
        "parameters": parameters, "layers": [hf.num_hidden_layers], "seq_len": int(words[words.index("--seq-len") + 1]),
        "global_batch": arguments.per_device_train_batch_size * m * world,
        "micro_batch": arguments.per_device_train_batch_size, "micro_batches": m, "dp": world,
        "tp": 1, "pp": 1, "cp": 1,
        "zero": zero, "shards": world if zero else 1, "compute": compute, "reduce": reduce, "grads": "fp32",
        "recompute": "full" if full else "none",
        "optimizer": arguments.optim.value.removesuffix("_torch"),
    }  # fmt: skip


if __name__ == "__main__":
    readers.main(read)
