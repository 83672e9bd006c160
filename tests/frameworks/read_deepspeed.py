"""What DeepSpeed makes of a launch, without GPUs: its config, the optimizer that its engine would choose, its split."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.runtime.config as configs
import readers
import torch
from deepspeed.comm import comm
from deepspeed.module_inject.auto_ep_config import validate_autoep_config
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import partition_balanced
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM


def read(launch: dict[str, Any]) -> dict[str, Any]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=launch["world"])
    comm.cdb = None
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    try:
        return _meaning(launch)
    finally:
        torch.distributed.destroy_process_group()


def _meaning(launch: dict[str, Any]) -> dict[str, Any]:
    argv = launch["argv"]
    words = list(argv[argv.index("train.py") + 1 :])
    seq_len = int(words[words.index("--seq-len") + 1])
    path = words[words.index("--deepspeed_config") + 1]
    raw = json.loads(Path(path).read_text())
    pp, tp = raw.get("pipeline", {}).get("stages", 1), raw.get("tensor_parallel", {}).get("autotp_size", 1)
    replicas = launch["world"] // pp
    mpu = SimpleNamespace(
        get_data_parallel_world_size=lambda: replicas
    )  # AutoTP counts its ranks in, as the engine does
    config = configs.DeepSpeedConfig(path, mpu)
    dp = replicas // tp
    experts = config.expert_parallel_config
    validate_autoep_config(experts, launch["world"], pp, max(tp, 1), 1, zero_stage=config.zero_optimization_stage)
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine._config, engine.pipeline_parallelism, engine.global_rank = config, pp > 1, 0
    basic = getattr(torch.optim, {"adamw": "AdamW"}.get(config.optimizer_name, config.optimizer_name))
    chosen = engine._do_optimizer_sanity_check(basic([torch.nn.Parameter(torch.zeros(1))], lr=1e-3))
    compute, grads = engine.get_data_types()
    stage = config.zero_optimization_stage
    if pp > 1 and stage > 1:
        raise ValueError("ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism")
    if pp > 1 and tp > 1:
        raise ValueError("mpu must be None with pipeline parallelism")
    # BF16_Optimizer divides the states by itself.
    shards = dp if stage or (str(chosen) == "bf16" and pp > 1) else 1
    zero = 0 if dp == 1 else stage or int(shards > 1)
    hf = AutoConfig.from_pretrained(".")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    layers = hf.num_hidden_layers
    parts = partition_balanced(weights=[0, *[1] * layers, 0, 0], num_parts=pp)
    sizes = [sum(1 <= at <= layers for at in range(start, end)) for start, end in pairwise(parts)]
    recompute = config.pipeline["activation_checkpoint_interval"] if pp > 1 else "activation_checkpointing" in raw
    m = config.gradient_accumulation_steps
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "layers": sorted(sizes, reverse=True),
        "seq_len": seq_len, "global_batch": m * config.train_micro_batch_size_per_gpu * dp,
        "micro_batch": config.train_micro_batch_size_per_gpu, "micro_batches": m, "schedule": "1f1b",
        "tp": max(tp, 1), "pp": pp, "dp": dp, "cp": 1, "ep": experts.autoep_size if experts.enabled else 1,
        "zero": zero, "shards": shards if dp > 1 else 1, "compute": readers.dtype_name(compute),
        "grads": readers.dtype_name(grads), "recompute": "full" if recompute else "none",
        "optimizer": config.optimizer_name.lower(), "sequence_parallel": False,
        **({"reduce": readers.dtype_name(config.communication_data_type)} if config.communication_data_type else {}),
    }  # fmt: skip


if __name__ == "__main__":
    readers.main(read)
