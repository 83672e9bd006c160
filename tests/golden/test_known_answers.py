"""Runs that everybody knows, uncalibrated: catalog figures and the framework's habits, nothing told but what is public.

Each estimate is within a fifth of the published speed. Some of the frameworks' constants were chosen on rows of the
same publishers (docs/calibration.md); none was fitted to the rows below of DeepSeek, Meta, Mixtral or Automodel.
"""

from __future__ import annotations

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.cost.work import model_flops_per_token
from autotune.search.space import illegal_reason
from autotune.specs import Plan, Workload

H100_FLOPS = 989.4e12


def of_flops(name: str, seq_len: int, flops_per_s: float) -> float:
    """tokens/s/GPU behind a published rate of model FLOPs."""
    return flops_per_s / model_flops_per_token(model(name), seq_len)


KNOWN: dict[str, tuple[str, str, int, int, dict[str, object], str, float]] = {
    # DeepSeek-V3 (arXiv:2412.19437), sections 2.4 and 3: 180 thousand H800 hours a trillion tokens; pp 16, ep 64,
    # ZeRO-1, fp8 with dispatch in fp8 to 4 nodes at most, the exchange beside the other micro-batch (DualPipe).
    "deepseek-v3 on 2,048 H800": (
        "deepseek-v3", "h800-80gb-sxm:256x8", 4096, 15_360,
        {"dtype": "fp8", "framework": "megatron-bridge", "ep_overlap": True},
        "tp=1,pp=16,ep=64,micro_batch=1,zero_stage=1", 1e12 / (180e3 * 3600),
    ),
    # NeMo Automodel, performance summary (2025): bf16, 8,192 sequences in 37.9 s, full recomputation.
    "deepseek-v3 on 1,024 H100": (
        "deepseek-v3", "h100-80gb-sxm:128x8", 4096, 8192, {"framework": "fsdp"},
        "tp=1,pp=4,ep=64,vpp=8,micro_batch=1,zero_stage=3,recompute=full", 8192 * 4096 / 1024 / 37.882,
    ),
    # Grattafiori et al. 2024 (arXiv:2407.21783), table 4: 400 and 430 TFLOP/s a GPU in bf16.
    "llama 3 405B on 16,384 H100": (
        "llama3.1-405b", "h100-80gb-sxm:2048x8", 8192, 2048, {"framework": "megatron", "tp_overlap": False},
        "tp=8,pp=16,dp=128,vpp=8,micro_batch=1,zero_stage=1,sequence_parallel=true",
        of_flops("llama3.1-405b", 8192, 400e12),
    ),
    "llama 3 405B on 8,192 H100": (
        "llama3.1-405b", "h100-80gb-sxm:1024x8", 8192, 2048, {"framework": "megatron", "tp_overlap": False},
        "tp=8,pp=16,dp=64,vpp=8,micro_batch=1,zero_stage=1,sequence_parallel=true",
        of_flops("llama3.1-405b", 8192, 430e12),
    ),
    # Liu et al. 2025 (MoE parallel folding, arXiv:2504.14960): 49.3 % of the peak on 128 H100, bf16.
    "mixtral 8x22B on 128 H100": (
        "mixtral-8x22b", "h100-80gb-sxm:16x8", 4096, 256, {"framework": "megatron"},
        "tp=2,pp=8,ep=8,etp=1,vpp=7,micro_batch=1,zero_stage=1,sequence_parallel=true",
        of_flops("mixtral-8x22b", 4096, 0.493 * H100_FLOPS),
    ),
    # Megatron-Bridge, performance summary 26.02 to 26.04: 1,611 to 1,712 tokens/s/GPU; 5,448 to 5,680; 3,955 to 4,256.
    "qwen3 235B on 256 H100": (
        "qwen3-235b-a22b", "h100-80gb-sxm:32x8", 4096, 8192, {"dtype": "fp8", "framework": "megatron-bridge"},
        "tp=2,pp=8,ep=32,vpp=4,micro_batch=1,zero_stage=1,sequence_parallel=true", 1650.0,
    ),
    "qwen3 235B on 256 GB200": (
        "qwen3-235b-a22b", "gb200:64x4", 4096, 8192, {"dtype": "fp8", "framework": "megatron-bridge"},
        "tp=1,pp=8,ep=32,vpp=3,micro_batch=1,zero_stage=1", 5530.0,
    ),
    "deepseek-v3 on 256 GB200": (
        "deepseek-v3", "gb200:64x4", 4096, 4096, {"dtype": "fp8", "framework": "megatron-bridge"},
        "tp=1,pp=4,ep=64,vpp=4,micro_batch=1,zero_stage=1", 4021.0,
    ),
    # NeMo 24.07 to 24.09, performance summary: 782 to 832 tokens/s/GPU, the recipe of MLPerf's GPT-3.
    "gpt3 175B in fp8 on 512 H100": (
        "gpt3-175b", "h100-80gb-sxm:64x8", 2048, 2048, {"dtype": "fp8", "framework": "nemo", "tp_overlap": True},
        "tp=4,pp=8,vpp=6,micro_batch=2,zero_stage=1,sequence_parallel=true", 813.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_run_is_within_a_fifth(name: str) -> None:
    what, where, seq_len, batch, how, text, published = KNOWN[name]
    spec, cluster = model(what), cluster_from_shorthand(where)
    work = Workload.from_data(how | {"seq_len": seq_len, "global_batch": batch}, name)
    plan = Plan.parse(text, cluster.devices)
    assert illegal_reason(spec, cluster, work, plan) is None
    found = estimate(spec, cluster, work, plan)
    assert found.tokens_per_s_per_gpu == pytest.approx(published, rel=0.2)
