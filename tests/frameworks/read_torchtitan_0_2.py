"""What torchtitan 0.2 makes of a launch, without GPUs: its own parser, mesh, split and parallelisation on meta tensors.

Run by torchtitan's own interpreter (`reading.py`): one launch a line in, what it means a line out.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import readers
import torch
from torch.distributed.fsdp import FSDPModule
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
from torchtitan.protocols import train_spec as specs  # noqa: E402

dims_module.device_type = "cpu"
_split, _stages = pipelines.pipeline_module_split, []


def _remember(model: Any, mesh: Any, schedule: str, device: Any, names: list[list[str]]) -> Any:
    _stages[:] = [sum(name.startswith("layers.") for name in stage) for stage in names]
    return _split(model, mesh, schedule, device, names)


pipelines.pipeline_module_split = _remember


def read(launch: dict[str, Any]) -> dict[str, Any]:
    argv, world = launch["argv"], launch["world"]
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    sys.modules.pop("autotune_model", None)
    specs._extra_train_specs.clear()
    config = ConfigManager().parse_args(list(argv[argv.index("torchtitan.train") + 1 :]))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return _meaning(config, world)
    finally:
        torch.distributed.destroy_process_group()


def _meaning(config: Any, world: int) -> dict[str, Any]:
    chosen = config.parallelism
    dims = ParallelDims(
        dp_shard=chosen.data_parallel_shard_degree, dp_replicate=chosen.data_parallel_replicate_degree,
        cp=chosen.context_parallel_degree, tp=chosen.tensor_parallel_degree, pp=chosen.pipeline_parallel_degree,
        ep=chosen.expert_parallel_degree, etp=chosen.expert_tensor_parallel_degree, world_size=world,
    )  # fmt: skip
    dims.build_mesh()
    if config.experimental.custom_import:
        readers.import_fresh(config.experimental.custom_import)
    spec = specs.get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    parameters = sum(p.numel() for p in model.parameters())
    batch = config.training.local_batch_size
    replicas = dims.dp_replicate * dims.dp_shard
    whole = config.training.global_batch_size
    if whole % (batch * replicas):
        raise ValueError(f"global batch {whole} is no multiple of local batch {batch} times {replicas}")
    schedule, count, accumulated = "1f1b", 1, whole // (batch * replicas)
    if dims.pp > 1:
        made, parts, _, _ = spec.pipelining_fn(
            model, dims, config, torch.device("meta"), arguments, spec.parallelize_fn, lambda *a: None
        )
        schedule, count = type(made).__name__, made._n_microbatches
    else:
        _stages[:] = [arguments.n_layers]
        parts = [spec.parallelize_fn(model, dims, config)]
    part = parts[0]
    layer = next(iter(part.layers.values()))
    sharded = isinstance(layer, FSDPModule)
    autocast = dist_utils.maybe_enable_amp(dims, config.training.mixed_precision_param, "cpu")
    if sharded:
        state = layer._get_fsdp_state()
        policy = state._mp_policy
        compute, reduce = policy.param_dtype, policy.reduce_dtype
        group = state._fsdp_param_groups[0]
        reshards = group.post_forward_mesh_info is not None
    else:
        compute = autocast.fast_dtype if isinstance(autocast, torch.autocast) else torch.float32
        reduce, reshards = torch.float32, False
    tensor_parallel = any(
        "tp" in (getattr(p, "device_mesh", None) or _NO_MESH).mesh_dim_names for p in part.parameters()
    )
    return {
        "parameters": parameters, "layers": list(_stages), "seq_len": config.training.seq_len,
        "global_batch": whole, "micro_batch": batch // count, "micro_batches": count * accumulated,
        "rounds": accumulated, "schedule": readers.SCHEDULES.get(schedule, schedule),
        "tp": dims.tp, "pp": dims.pp, "cp": dims.cp, "dp": replicas, "ep": dims.ep,
        "etp": dims.etp if dims.ep > 1 else dims.tp, "sequence_parallel": tensor_parallel,
        "zero": (3 if reshards else 2) if sharded else 0, "shards": dims.dp_shard * dims.cp if sharded else 1,
        "compute": readers.dtype_name(compute), "reduce": readers.dtype_name(reduce),
        "recompute": _recompute(config, layer), "optimizer": config.optimizer.name.lower(),
    }  # fmt: skip


class _NO_MESH:
    mesh_dim_names = ()


def _recompute(config: Any, layer: Any) -> str:
    wrapped = "CheckpointWrapper" in type(layer).__name__ or hasattr(layer, "_checkpoint_wrapped_module")
    if not wrapped:
        return "none"
    option = config.activation_checkpoint
    return "full" if option.mode == "full" else f"{option.mode} {option.selective_ac_option}"


if __name__ == "__main__":
    readers.main(read)
