"""The memory estimate against what was published of runs that none of its constants were fitted on."""

from __future__ import annotations

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.specs import Estimate, ModelSpec, Plan, Workload

GIB = 2**30
NEMOTRON = ModelSpec.from_data(
    {
        "name": "nemotron4-15b", "layers": 32, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 24576, "gated": False,
        "tied": False, "norm": "layernorm", "vocab": 256000,
    }
)  # fmt: skip
LLAMA_12 = model("llama3-70b").model_copy(update={"layers": 12})


def found(spec: ModelSpec, cluster: str, plan: str, **workload: object) -> Estimate:
    machine = cluster_from_shorthand(cluster)
    return estimate(spec, machine, Workload.from_data(workload), Plan.parse(plan, machine.devices))


# NVIDIA DGX Cloud benchmarking, READMEs of the recipes (NeMo 25.04): GiB static, and allocated at most.
@pytest.mark.parametrize(
    ("spec", "cluster", "plan", "seq_len", "global_batch", "static", "peak"),
    [
        (model("llama3.1-8b"), "h100-80gb-sxm:1x8", "cp=2,micro_batch=1,zero_stage=1", 8192, 128, 41.2, 66.0),
        (
            NEMOTRON, "h100-80gb-sxm:8x8", "tp=2,micro_batch=2,zero_stage=1,sequence_parallel=true", 4096, 256, 32.1,
            68.0,
        ),
    ],
)  # fmt: skip
def test_nemo_keeps_gradients_in_bf16(
    spec: ModelSpec, cluster: str, plan: str, seq_len: int, global_batch: int, static: float, peak: float
) -> None:
    one = found(spec, cluster, plan, seq_len=seq_len, global_batch=global_batch, framework="nemo")
    states = one.bytes.parameters + one.bytes.gradients + one.bytes.optimizer
    assert states / GIB == pytest.approx(static, rel=0.015)
    assert one.allocated_bytes is not None
    assert one.allocated_bytes / GIB == pytest.approx(peak, rel=0.05)
    assert one.fits
    wide = found(spec, cluster, plan, seq_len=seq_len, global_batch=global_batch, framework="megatron")
    more = wide.bytes.gradients - one.bytes.gradients
    assert more == pytest.approx(one.bytes.gradients)  # fp32, Megatron-LM's default


# SimuMax, benchmark of Megatron-LM on B200, 12 layers of Llama 3 70B: GiB allocated at most.
@pytest.mark.parametrize(
    ("plan", "devices", "seq_len", "global_batch", "peak"),
    [
        ("pp=2,micro_batch=1,zero_stage=1", 8, 4096, 32, 66.5),
        ("tp=2,micro_batch=1,zero_stage=1,sequence_parallel=true", 8, 4096, 32, 60.7),
        ("tp=4,micro_batch=1,zero_stage=1,sequence_parallel=true", 8, 4096, 32, 39.1),
        ("tp=2,cp=4,micro_batch=1,zero_stage=1,sequence_parallel=true", 8, 32768, 8, 68.4),
    ],
)
def test_todays_megatron_keeps_what_was_measured(
    plan: str, devices: int, seq_len: int, global_batch: int, peak: float
) -> None:
    work = {"seq_len": seq_len, "global_batch": global_batch, "framework": "megatron"}
    one = found(LLAMA_12, f"b200-180gb-sxm:1x{devices}", plan, **work)
    assert one.allocated_bytes is not None
    assert one.allocated_bytes / GIB == pytest.approx(peak, rel=0.05)


# Megatron-Bridge, pull request 3107: Llama 3 70B in fp8 on 32 H100, GB allocated.
@pytest.mark.parametrize(("plan", "peak"), [("tp=4,pp=4,zero_stage=1", 58.8), ("tp=4,pp=8", 53.2), ("tp=8,pp=4", 50.2)])
def test_fp8_saves_activations_and_all_three_fit(plan: str, peak: float) -> None:
    whole = f"{plan},vpp=5,micro_batch=1,sequence_parallel=true"
    work = {"seq_len": 4096, "global_batch": 32, "framework": "megatron-bridge"}
    one = found(model("llama3-70b"), "h100-80gb-sxm:4x8", whole, dtype="fp8", **work)
    assert one.fits
    assert one.peak_memory_bytes / GIB == pytest.approx(peak, rel=0.16)
    wide = found(model("llama3-70b"), "h100-80gb-sxm:4x8", whole, dtype="bf16", **work)
    assert one.bytes.activations < 0.9 * wide.bytes.activations


def test_layouts_of_experts_that_ran_fit() -> None:
    """Megatron-Bridge, issue 949 and pull request 3880: Qwen3-30B-A3B on 16 H100; the first one's peak is 61.35 GB."""
    spec, work = model("qwen3-30b-a3b"), {"seq_len": 4096, "global_batch": 512, "framework": "megatron-bridge"}
    shipped = found(spec, "h100-80gb-sxm:2x8", "pp=2,ep=8,vpp=12,micro_batch=1,zero_stage=1", **work)
    assert shipped.peak_memory_bytes / GIB == pytest.approx(61.35, rel=0.1)
    assert shipped.fits
    plan = "pp=2,ep=2,vpp=2,micro_batch=8,zero_stage=1,recompute=full"
    assert found(spec, "h100-80gb-sxm:2x8", plan, **work).fits
    assert not found(spec, "h100-80gb-sxm:2x8", plan, **work, cross_entropy="eager").fits


def test_a_v100_has_no_flash_attention() -> None:
    """Megatron-LM, issue 525: GPT-2 large on a V100 of 32 GB ran out of memory; scores of 36 layers take 14 GiB."""
    work = {"seq_len": 1024, "global_batch": 16, "dtype": "fp16", "framework": "megatron"}
    none = found(model("gpt2-large"), "v100-32gb-sxm:1x1", "micro_batch=4", **work)
    assert not none.fits
    core = found(model("gpt2-large"), "v100-32gb-sxm:1x1", "micro_batch=4,recompute=selective", **work)
    assert (none.bytes.activations - core.bytes.activations) / GIB == pytest.approx(36 * 5 * 20 * 1024**2 * 4 / GIB)
    ampere = found(model("gpt2-large"), "a100-40gb-sxm:1x1", "micro_batch=4", **work)
    assert ampere.bytes.activations < 0.4 * none.bytes.activations
    asked = found(model("gpt2-large"), "a100-40gb-sxm:1x1", "micro_batch=4", **work, attention="unfused")
    assert asked.bytes == none.bytes


def test_torchtitans_selective_mode_lies_between_none_and_full() -> None:
    """torchtitan, issue 1789: DeepSeek 16B on 8 H100, local batch 8 ran out of memory, 4 took 73.3 GiB."""
    spec, work = model("deepseek-v2-lite"), {"seq_len": 4096, "framework": "fsdp"}

    def of(recompute: str, batch: int) -> Estimate:
        plan = f"ep=8,micro_batch={batch},zero_stage=3,recompute={recompute}"
        return found(spec, "h100-80gb-sxm:1x8", plan, global_batch=8 * batch, **work)

    peaks = [of(recompute, 4).peak_memory_bytes / GIB for recompute in ("none", "op", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] == pytest.approx(73.3, rel=0.15)
    assert of("op", 4).fits
    assert not of("op", 8).fits
