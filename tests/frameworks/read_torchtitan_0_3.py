"""What torchtitan 0.3 makes of a launch, without GPUs: its own parser, mesh, split and parallelisation on meta tensors.

Run by torchtitan's own interpreter (`reading.py`): one launch a line in, what it means a line out.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import readers
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.tools import utils

# Its CPU would have to be a GPU: only what it asks of a device module.
utils.device_type = "cpu"
torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.distributed.pipeline_parallel as pipelines  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import parallel_dims as dims_module  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

dims_module.device_type = "cpu"
_split, _stages = pipelines._pipeline_module_split, []


def _remember(model: Any, mesh: Any, schedule: str, device: Any, names: list[list[str]], **more: Any) -> Any:
    _stages[:] = [sum(name.startswith("layers.") for name in stage) for stage in names]
    return _split(model, mesh, schedule, device, names, **more)


pipelines._pipeline_module_split = _remember


def read(launch: dict[str, Any]) -> dict[str, Any]:
    argv, world = launch["argv"], launch["world"]
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    sys.modules.pop("autotune_config", None)
    importlib.invalidate_caches()
    words = list(argv[argv.index("torchtitan.train") + 1 :])
    # Its default backend needs a nightly torch; how ranks are meshed and what is sharded are the same.
    config = ConfigManager().parse_args([*words, "--parallelism.spmd_backend", "partial_dtensor"])
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return _meaning(config, world)
    finally:
        torch.distributed.destroy_process_group()


def _meaning(config: Any, world: int) -> dict[str, Any]:
    dims = ParallelDims.from_config(config.parallelism, world)
    dims.build_mesh()
    enabled = config.parallelism.enable_sequence_parallel
    divisor = (dims.tp if enabled else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    if config.training.seq_len % divisor:
        raise ValueError(f"Training sequence length {config.training.seq_len} must be divisible by {divisor}")
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    parameters = sum(p.numel() for p in model.parameters())
    batch, replicas = config.training.local_batch_size, dims.dp_replicate * dims.dp_shard
    whole = config.training.global_batch_size
    if whole % (batch * replicas):
        raise ValueError(f"global batch {whole} is no multiple of local batch {batch} times {replicas}")
    schedule, count, accumulated = "1f1b", 1, whole // (batch * replicas)
    shared = {
        "parallel_dims": dims, "training": config.training, "parallelism": config.parallelism,
        "compile_config": config.compile, "ac_config": config.activation_checkpoint, "dump_folder": config.dump_folder,
    }  # fmt: skip
    if dims.pp > 1:
        made, parts, _, _ = spec.pipelining_fn(
            model, **shared, device=torch.device("meta"), model_config=spec.model, parallelize_fn=spec.parallelize_fn,
            loss_fn=lambda *a: None,
        )  # fmt: skip
        schedule, count = type(made).__name__, made._n_microbatches
    else:
        _stages[:] = [len(spec.model.layers)]
        parts = [spec.parallelize_fn(model, **shared)]
    part = parts[0]
    layer = next(iter(part.layers.values()))
    state = layer._get_fsdp_state()
    group = state._fsdp_param_groups[0]
    recompute = type(config.activation_checkpoint).__qualname__.partition(".")[0]
    shards = dims.dp_shard * dims.cp
    return {
        "parameters": parameters, "layers": list(_stages), "seq_len": config.training.seq_len,
        "global_batch": whole, "micro_batch": batch // count, "micro_batches": count * accumulated,
        "rounds": accumulated, "schedule": readers.SCHEDULES.get(schedule, schedule),
        "tp": dims.tp, "pp": dims.pp, "cp": dims.cp, "dp": replicas, "ep": dims.ep,
        "etp": 1 if dims.ep > 1 else dims.tp, "sequence_parallel": enabled and dims.tp > 1,
        "zero": (3 if group.post_forward_mesh_info is not None else 2) if shards > 1 else 0, "shards": shards,
        "compute": readers.dtype_name(state._mp_policy.param_dtype),
        "reduce": readers.dtype_name(state._mp_policy.reduce_dtype),
        "recompute": {"NoneType": "none", "FullAC": "full", "SelectiveAC": "selective op"}[recompute],
        "optimizer": config.optimizer.param_groups[0].optimizer_name.lower(),
    }  # fmt: skip


if __name__ == "__main__":
    readers.main(read)
