"""What users are told of plans of every kind, held still to seven digits.

The figures in estimates.json are what the cost model said when they were written down; nobody worked them out by hand.
They prove nothing, but no line of the model changes what it says without somebody seeing it here and saying so in the
changelog. Then: `.venv/bin/python tests/golden/test_estimates.py` writes them anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate_table
from autotune.cost.framework import FRAMEWORKS, framework_of
from autotune.cost.table import PlanTable
from autotune.specs import (
    ClusterSpec,
    CollectiveOp,
    ComputeFit,
    DType,
    LinkFit,
    Optimizer,
    Plan,
    Profile,
    Recompute,
    Schedule,
    Workload,
)

FIGURES = Path(__file__).with_name("estimates.json")
SELECTIVE, FULL = {"recompute": Recompute.SELECTIVE}, {"recompute": Recompute.FULL}
GPIPE, INTERLEAVED = {"schedule": Schedule.GPIPE}, {"schedule": Schedule.INTERLEAVED}
SEQUENCE = {"sequence_parallel": True}


def link(op: CollectiveOp, size: int, stride: int, rate: float, latency_s: float, *, crosses: bool) -> LinkFit:
    return LinkFit(
        op=op, group_size=size, stride=stride, crosses_nodes=crosses, latency_s=latency_s, bytes_per_s=rate,
        relative_error=0.0, readings=5,
    )  # fmt: skip


MEASURED = Profile(
    cluster_key="c", fingerprint_key="f", step_scale=1.1, step_overhead_s=0.01, memory_scale=1.2,
    memory_overhead_bytes=1e8,
    compute=ComputeFit(flops_per_s=2e14, launch_s=5e-6, bytes_per_s=1e12, relative_error=0.0, readings=9),
    links=(
        link(CollectiveOp.ALL_REDUCE, 8, 1, 2e11, 4e-6, crosses=False),
        link(CollectiveOp.ALL_GATHER, 4, 1, 1.8e11, 5e-6, crosses=False),
        link(CollectiveOp.ALL_REDUCE, 2, 8, 1.5e10, 3e-4, crosses=True),
        link(CollectiveOp.SEND_RECV, 2, 8, 1e10, 2e-5, crosses=True),
    ),
)  # fmt: skip
ON_CPUS = Profile(
    cluster_key="c", fingerprint_key="f",
    compute=ComputeFit(flops_per_s=2e10, launch_s=2e-5, bytes_per_s=5e9, relative_error=0.0, readings=9),
    links=(link(CollectiveOp.ALL_REDUCE, 4, 1, 2e9, 4e-5, crosses=False),),
)  # fmt: skip
TWO_CORES = ClusterSpec.from_data(
    {
        "name": "two cores", "nodes": 1, "gpus_per_node": 4, "node_cores": 2,
        "intra": {"name": "loopback", "bytes_per_s": 1e9},
        "device": {"name": "cpu", "kind": "cpu", "memory_bytes": 4 * 2**30},
    }
)  # fmt: skip
ODD = ClusterSpec.from_data(
    {
        "name": "odd", "nodes": 4, "gpus_per_node": 6, "nics_per_node": 2,
        "device": {
            "name": "card", "kind": "cuda", "memory_bytes": 24 * 2**30, "memory_bytes_per_s": 9e11,
            "peak_flops_per_s": {"bf16": 1.2e14, "fp32": 3e13, "fp8": 2.4e14},
        },
        "intra": {"name": "PCIe", "bytes_per_s": 2.5e10, "latency_s": 3e-6},
        "inter": {"name": "Ethernet", "bytes_per_s": 1.2e10, "latency_s": 3e-5},
    }
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Plans of one model on one cluster, as one framework runs them."""

    model: str
    cluster: str | ClusterSpec
    workload: Workload
    plans: tuple[Plan, ...]
    framework: str = "torch"
    profile: Profile | None = None
    changes: dict[str, object] = field(default_factory=dict)

    def figures(self) -> list[dict[str, float]]:
        """Seconds and bytes by part, and the terms behind the seconds, of each plan."""
        cluster = cluster_from_shorthand(self.cluster) if isinstance(self.cluster, str) else self.cluster
        spec = model(self.model).model_copy(update=self.changes)
        table = PlanTable.of(self.plans)
        found = estimate_table(spec, cluster, self.workload, table, self.profile, framework_of(self.framework))
        rows = []
        for i in range(len(table)):
            row = found.row(i)
            named: dict[str, float] = {f"{name} s": value for name, value in row.seconds.to_data().items()}
            named |= {f"{name} bytes": value for name, value in row.bytes.to_data().items()}
            named |= {f"term {item.name} s": float(getattr(found.terms, item.name)[i]) for item in fields(found.terms)}
            named |= {"worst stage": row.worst_stage, "mfu": row.mfu or 0.0, "reserved": row.reserved_bytes or 0.0}
            rows.append(named | {"allocated": row.allocated_bytes or 0.0, "fits": row.fits})
        return rows


WORK = Workload(seq_len=2048, global_batch=64)
LONG = Workload(seq_len=8192, global_batch=32, grad_dtype=DType.BF16)
DENSE = (
    Plan(dp=16),
    Plan(tp=2, dp=8, micro_batch=2, zero_stage=1),
    Plan(tp=4, dp=4, micro_batch=4, zero_stage=2, **SELECTIVE, **SEQUENCE),
    Plan(dp=16, micro_batch=4, zero_stage=3, **FULL),
    Plan(tp=2, pp=4, dp=2, micro_batch=2, **GPIPE),
    Plan(tp=2, pp=2, dp=4, zero_stage=1, **SEQUENCE),
    Plan(pp=4, dp=4, vpp=2, **INTERLEAVED, **SELECTIVE),
    Plan(tp=8, pp=2, micro_batch=8, **SEQUENCE, **FULL),
    Plan(pp=16, micro_batch=2),
    Plan(tp=2, dp=4, cp=2, **SEQUENCE, **FULL),
    Plan(dp=8, cp=2, zero_stage=1, **SELECTIVE),
)
EXPERTS = (
    Plan(dp=16, ep=1, zero_stage=1),
    Plan(dp=16, ep=8, zero_stage=1, **FULL),
    Plan(tp=2, pp=2, dp=4, ep=4, micro_batch=2, **SEQUENCE),
    Plan(tp=2, pp=4, dp=2, ep=2, vpp=2, zero_stage=2, **SELECTIVE, **SEQUENCE, **INTERLEAVED),
    Plan(dp=8, cp=2, ep=8, zero_stage=3, **FULL),
)
MANY = (
    *EXPERTS,
    Plan(dp=16, ep=16, zero_stage=1),
    Plan(tp=2, dp=8, ep=8, micro_batch=2, **SEQUENCE),
    Plan(pp=2, dp=8, ep=4, zero_stage=3),
)
SMALL = Workload(seq_len=128, global_batch=16, dtype=DType.FP32)
CASES = {
    **{
        f"llama2-7b as {name} runs it": Case("llama2-7b", "a100-80gb-sxm:2x8", WORK, DENSE, name)
        for name in (*FRAMEWORKS, "hf_ultrascale", "vtrain_multi")
    },
    "llama2-7b measured": Case("llama2-7b", "a100-80gb-sxm:2x8", WORK, DENSE, profile=MEASURED),
    "llama3-8b long": Case("llama3-8b", "h100-80gb-sxm:2x8", LONG, DENSE, "megatron"),
    "gpt2-xl": Case("gpt2-xl", "a100-80gb-sxm:2x8", Workload(seq_len=1024, global_batch=128), DENSE, "megatron-2021"),
    "gpt2-xl in fp32 with SGD": Case(
        "gpt2-xl", "a100-80gb-sxm:2x8",
        Workload(seq_len=1024, global_batch=128, dtype=DType.FP32, optimizer=Optimizer.SGD), DENSE, "hf_ultrascale",
    ),
    "qwen3-8b": Case("qwen3-8b", "h100-80gb-sxm:2x8", WORK, DENSE, "hf_ultrascale"),
    "mixtral-8x7b": Case("mixtral-8x7b", "h100-80gb-sxm:2x8", WORK, EXPERTS, "megatron"),
    "mixtral-8x7b cut by cost": Case("mixtral-8x7b", "h100-80gb-sxm:2x8", WORK, EXPERTS, "hf_ultrascale"),
    "deepseek-v2-lite": Case("deepseek-v2-lite", "b200-180gb-sxm:2x8", WORK, MANY),
    "deepseek-v2-lite routed to few": Case(
        "deepseek-v2-lite", "h100-80gb-sxm:2x8", WORK, MANY, changes={"expert_nodes": 1, "expert_capacity": 1.05}
    ),
    "deepseek-v2-lite with one mixture of experts": Case(
        "deepseek-v2-lite", "h200-141gb-sxm:2x8", LONG, MANY, "fsdp", changes={"dense_layers": 26}
    ),
    "tiny on cores that are shared": Case(
        "tiny", TWO_CORES, SMALL,
        (Plan(dp=4), Plan(tp=2, pp=2, micro_batch=4, **GPIPE), Plan(pp=4, micro_batch=2), Plan(dp=4, zero_stage=3)),
        profile=ON_CPUS,
    ),
    "llama2-7b in fp8 on six cards a node": Case(
        "llama2-7b", ODD, Workload(seq_len=1024, global_batch=48, dtype=DType.FP8),
        (
            Plan(tp=4, pp=6, **SEQUENCE), Plan(tp=2, pp=3, dp=4, zero_stage=1), Plan(pp=6, dp=4, **GPIPE, **FULL),
            Plan(tp=3, pp=8, micro_batch=2), Plan(dp=24, micro_batch=2, zero_stage=3), Plan(tp=2, dp=4, cp=3),
        ),
        "megatron",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_what_they_were(name: str) -> None:
    written = json.loads(FIGURES.read_text())
    found = CASES[name].figures()
    assert len(found) == len(written["cases"][name])
    for plan, new, old in zip(CASES[name].plans, found, written["cases"][name], strict=True):
        assert new == pytest.approx(dict(zip(written["columns"], old, strict=True)), rel=1e-7), plan.key


def write() -> None:
    """Writes the figures anew, a plan a line."""
    found = {name: case.figures() for name, case in CASES.items()}
    lines = {
        name: ",\n".join(json.dumps([float(f"{value:.9g}") for value in row.values()]) for row in rows)
        for name, rows in found.items()
    }
    columns = json.dumps(list(found["gpt2-xl"][0]))
    cases = ",\n".join(f"{json.dumps(name)}: [\n{text}\n]" for name, text in lines.items())
    FIGURES.write_text(f'{{"columns": {columns},\n"cases": {{\n{cases}\n}}}}\n')


if __name__ == "__main__":
    write()
