"""The workload of a model on a cluster where the user does not say all of it."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.specs import ClusterSpec, DeviceKind, DType, ModelSpec, Workload

TINY_SEQ_LEN, TINY_GLOBAL_BATCH = 128, 16
SEQ_LEN, SEQUENCES_PER_DEVICE, MAX_GLOBAL_BATCH = 4096, 16, 1024


def workload(model: ModelSpec, cluster: ClusterSpec, given: Mapping[str, object]) -> Workload:
    """The workload of the values in `given`; what is absent or None gets its default.

    Tiny presets, and any model on CPUs, get sequences of 128 tokens and 16 of them a step, so that a step takes
    well under a second there. Others get 4096 tokens (at most the model's longest) and 16 sequences a device, at
    most 1,024 or what of that the devices divide, so that plain data parallelism is legal on any number of devices.
    There is at least one sequence a device. Raises InputError for a value that cannot be used.
    """
    peaks, cpu = cluster.device.peak_flops_per_s, cluster.device.kind is DeviceKind.CPU
    half = DType.FP16 if DType.FP16 in peaks and DType.BF16 not in peaks else DType.BF16
    small = model.name.startswith("tiny") or cpu
    longest = model.max_positions or SEQ_LEN
    batch = TINY_GLOBAL_BATCH if small else min(SEQUENCES_PER_DEVICE * cluster.devices, MAX_GLOBAL_BATCH)
    defaults: dict[str, object] = {
        "seq_len": min(TINY_SEQ_LEN if small else SEQ_LEN, longest),
        "global_batch": max(batch // cluster.devices, 1) * cluster.devices,
        "dtype": (DType.FP32 if cpu else half).value,
    }
    return Workload.from_data(defaults | {key: value for key, value in given.items() if value is not None}, "workload")
