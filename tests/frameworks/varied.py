"""Plans that differ in everything that a framework has a word for: of dense and mixed models, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.catalog import cluster_from_shorthand, model
from autotune.errors import IllegalPlanError
from autotune.frameworks import LaunchArguments, launch_arguments
from autotune.search.space import illegal_reason
from autotune.specs import ClusterSpec, FrameworkName, ModelSpec, Plan, Workload

MODELS = (
    "llama3-8b", "llama3.1-70b", "gpt3-175b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b",
    "qwen3-235b-a22b", "deepseek-v3", "deepseek-v2-lite",
)  # fmt: skip
CLUSTERS = ("h100-80gb-sxm:1x8", "h100-80gb-sxm:2x8", "h100-80gb-sxm:8x8", "h100-80gb-sxm:32x8")
MODULES = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan with everything that it is a plan for."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan

    def exported(self, target: str) -> LaunchArguments:
        """Its launch."""
        return launch_arguments(target, self.model, self.cluster, self.workload, self.plan)


def varied(target: str, framework: FrameworkName, count: int, seed: int = 1) -> Iterator[Run]:
    """So many runs, a legal plan each that the target has words for, no two alike."""
    random_ = random.Random(seed)
    seen: set[tuple[str, str, str]] = set()
    while len(seen) < count:
        run = _drawn(random_, framework)
        if run is None or (key := (run.model.name, run.cluster.name, run.plan.key)) in seen:
            continue
        try:
            run.exported(target)
        except IllegalPlanError:
            continue
        seen.add(key)
        yield run


def _drawn(random_: random.Random, framework: FrameworkName) -> Run | None:
    shape, cluster = model(random_.choice(MODELS)), cluster_from_shorthand(random_.choice(CLUSTERS))
    powers = [1, 2, 4, 8]
    tp, pp, cp = random_.choice(powers), random_.choice([1, 2, 3, 4, 8, 16]), random_.choice([1, 1, 2])
    if cluster.devices % (tp * pp * cp):
        return None
    dp, micro = cluster.devices // (tp * pp * cp), random_.choice([1, 2])
    kind = random_.choice(["none", "selective", "full", "modules"])
    plan: dict[str, object] = {
        "tp": tp, "pp": pp, "cp": cp, "dp": dp, "micro_batch": micro, "zero_stage": random_.choice([0, 1, 1, 2, 3]),
        "recompute": "selective" if kind == "modules" else kind,
        "recompute_modules": random_.sample(_modules(shape), 2) if kind == "modules" else [],
        "sequence_parallel": tp > 1 and random_.random() < 0.7,
    }  # fmt: skip
    if shape.experts:
        plan |= {"ep": random_.choice(powers), "etp": random_.choice([0, 0, 1])}
    if pp > 1 and random_.random() < 0.5:
        plan |= {"vpp": random_.choice([2, 3, 4]), "schedule": "interleaved"}
    precise = random_.random() < 0.2
    workload: dict[str, object] = {
        "seq_len": random_.choice([2048, 4096, 8192]) if shape.position != "learned" else 2048,
        "global_batch": dp * micro * random_.choice([1, 4, 8]) * (pp if random_.random() < 0.7 else 1),
        "dtype": random_.choice(["bf16", "bf16", "fp8"]), "grad_dtype": random_.choice(["fp32", "fp32", "bf16"]),
        "framework": framework.value, "cross_entropy": random_.choice([None, "fused"]),
        "attention": random_.choice([None, "flash2", "cudnn"]),
        **({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"} if precise else {}),
    }  # fmt: skip
    found = Run(model=shape, cluster=cluster, workload=Workload.from_data(workload), plan=Plan.from_data(plan))
    reason = illegal_reason(found.model, found.cluster, found.workload, found.plan)
    return None if reason else found


def _modules(shape: ModelSpec) -> list[str]:
    mixed = {"moe_act", "moe", "shared_experts"} if shape.experts else set()
    latent = {"mla_up_proj"} if shape.latent_attention else set()
    return [each for each in MODULES if each in mixed | latent | {"core_attn", "layernorm", "mlp"}]
