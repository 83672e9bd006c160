"""How true the memory estimate is on published runs that nothing was fitted on.

python -m benchmarks.outside_memory OUTSIDE.csv MODELS.md [--rows]

A row is one run: its model (a preset, or one that MODELS.md defines), cluster, plan and framework, and whether it
worked or ran out of memory. Each is estimated as somebody would ask for it who knows that framework, and nothing else
of the run. Printed by source: how many working runs are said not to fit (P(fits) under a half), how many that ran out
of memory are said not to, how far peaks are off, and how often a run fits where P(fits) is so and so much.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.errors import AutotuneError
from autotune.specs import ClusterSpec, Estimate, ModelSpec, Plan, Workload

FRAMEWORK = {
    "a800_zero_gist": "deepspeed",
    "aleph_layouts": "scaling",
    "dgxc_bench": "nemo",
    "moe_modelzoo": "megatron-bridge",
    "ms_swift": "deepspeed",
    "tprimat": "nemo",
}
"""Sources whose framework is known more closely than the file says."""

UNKNOWN = ("LoRA", "offload", "Mamba", "linear-attention", "FSDP-no-reshard")
"""Features that change the memory and that a plan cannot say."""

BINS = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One row: whether it worked, and what the estimate says of it. `peak_bytes` is 0 where nobody published one."""

    source: str
    row: int
    worked: bool
    peak_bytes: float
    allocated: bool
    estimate: Estimate


def judged(path: Path, defined: Path, *, told: bool = True) -> Iterator[Judged | str]:
    """The rows, or why one cannot be estimated."""
    models, clusters = definitions(defined)
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            unknown = [name for name in UNKNOWN if name in row["features"]]
            if unknown or not row["model_ref"] or row["status"] not in {"ok", "oom"}:
                yield f"{row['source']}: {unknown[0] if unknown else 'no model, or neither ok nor oom'}"
                continue
            try:
                found = asked(row, models, clusters, told=told)
            except AutotuneError as error:
                yield f"{row['source']}: {error}"
                continue
            peak = row["peak_mem_gb"] or row["mem_alloc_gb"] or 0.0
            yield Judged(
                source=row["source"], row=number, worked=row["status"] == "ok", peak_bytes=float(peak) * 2**30,
                allocated=not row["peak_mem_gb"], estimate=found,
            )  # fmt: skip


def definitions(path: Path) -> tuple[dict[str, ModelSpec], dict[str, ClusterSpec]]:
    """The models and clusters that a document has as lines of JSON."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('{"name"')]
    data = [json.loads(line) for line in lines]
    return (
        {item["name"]: ModelSpec.from_data(item) for item in data if "layers" in item},
        {item["name"]: ClusterSpec.from_data(item) for item in data if "nodes" in item},
    )


def asked(
    row: dict[str, str], models: dict[str, ModelSpec], clusters: dict[str, ClusterSpec], *, told: bool
) -> Estimate:
    """The estimate of a row's plan; `told` what its framework does beside what its name says."""
    name, machine = row["model_ref"].removeprefix("model:"), row["cluster_ref"].removeprefix("cluster:")
    cluster = clusters[machine] if machine in clusters else cluster_from_shorthand(machine)
    workload: dict[str, object] = {
        "seq_len": int(float(row["seq_len"])), "global_batch": int(float(row["global_batch"])),
        "dtype": row["dtype_arg"] or "bf16",
        "framework": FRAMEWORK.get(row["source"], row["framework"]) if told else row["framework"],
    }  # fmt: skip
    if "RMS kernel" in row["note"]:
        workload["norms"] = "fused"
    if "no-flash-attention" in row["features"]:
        workload["attention"] = "unfused"
    return estimate(
        models[name] if name in models else model(name),
        cluster,
        Workload.from_data(workload),
        Plan.parse(row["plan"], cluster.devices),
    )


def p_fits(found: Estimate) -> float:
    """P(fits); an estimate without one is sure."""
    return float(found.fits) if found.p_fits is None else found.p_fits


def print_sources(rows: Sequence[Judged]) -> None:
    """By source and together."""
    print(f"{'source':20}{'worked':>8}{'not to fit':>12}{'oom':>6}{'recall':>8}{'peaks':>7}{'off by':>8}{'median':>8}")
    for source in [*sorted({row.source for row in rows}), ""]:
        some = [row for row in rows if source in ("", row.source)]
        worked = np.array([p_fits(row.estimate) for row in some if row.worked])
        failed = np.array([p_fits(row.estimate) for row in some if not row.worked])
        ratios = np.array([ratio(row) for row in some if row.peak_bytes])
        print(
            f"{source or 'all':20}{len(worked):8}{percent(worked < 0.5):>12}{len(failed):6}{percent(failed < 0.5):>8}"
            f"{len(ratios):7}{percent(np.abs(ratios - 1.0)):>8}{np.median(ratios) if len(ratios) else np.nan:8.2f}"
        )


def ratio(row: Judged) -> float:
    """The estimate over the published peak: of what is allocated, or of what the device shows."""
    found = row.estimate.allocated_bytes if row.allocated else row.estimate.peak_memory_bytes
    return (found or 0.0) / row.peak_bytes


def percent(values: np.ndarray) -> str:
    """A mean as per cent; a dash where there is none."""
    return f"{values.mean():.1%}" if len(values) else "-"


def print_reliability(rows: Sequence[Judged]) -> None:
    """How often a run fits where P(fits) is so and so much."""
    said = np.array([p_fits(row.estimate) for row in rows])
    worked = np.array([row.worked for row in rows])
    print(f"\n{'P(fits)':>14}{'runs':>7}{'said':>8}{'fitted':>8}")
    for low, high in pairwise(BINS):
        inside = (said >= low) & (said < high)
        if inside.any():
            figures = f"{inside.sum():8}{percent(said[inside]):>8}{percent(worked[inside]):>8}"
            print(f"{low:6.2f} - {min(high, 1.0):.2f}{figures}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--bare", action="store_true", help="tell no more of a framework than the file does")
    parser.add_argument("--rows", action="store_true", help="print each row, too")
    options = parser.parse_args(arguments)
    found = list(judged(options.runs, options.models, told=not options.bare))
    rows = [item for item in found if isinstance(item, Judged)]
    print_sources(rows)
    print_reliability(rows)
    left = [item for item in found if isinstance(item, str)]
    print(f"\n{len(left)} rows are left out:")
    for reason in sorted(set(left)):
        print(f"  {left.count(reason):4} {reason}")
    for row in rows if options.rows else ():
        parts = {name: round(size / 2**30, 1) for name, size in row.estimate.bytes.to_data().items()}
        peak = f"{row.peak_bytes / 2**30:.1f}" if row.peak_bytes else "-"
        print(row.row, row.source, "ok" if row.worked else "oom", f"P {p_fits(row.estimate):.2f}", peak, parts)


if __name__ == "__main__":
    main()
