"""How right the estimate is on published runs that nothing was fitted on. A judge: no constant may be tuned by it.

    python -m benchmarks.outside OUTSIDE.csv [--exact EA] [--framework NAME] [--rows] [--json]

The framework is told, and of its kernels what a row states (its `features` and its `note`): nothing else is.

The file has the columns of a runs file (docs/backtest.md) and beside them `model_ref` (a preset, or `model:NAME`),
`cluster_ref` (a shorthand, or `cluster:NAME`), `plan`, `dtype_arg`, `features`, `framework` and `exact` (E: as
published, A: something left out or assumed, X: refused or stood in for when the file was written, X0: no plan can say
it). What follows `model:` or `cluster:` is defined in the Markdown file of the same name, one JSON object a line.

MAPE is the mean of |estimated / measured step time - 1|, `ratio` the median of measured / estimated.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.backtest.csv_rows import CsvRow, read_csv_rows
from autotune.catalog import cluster_from_shorthand, model
from autotune.cost.estimate import estimate
from autotune.cost.framework import FRAMEWORKS, Framework
from autotune.errors import AutotuneError
from autotune.search.space import illegal_reason
from autotune.specs import ClusterSpec, ModelSpec, Plan, Workload

Definitions = tuple[dict[str, ModelSpec], dict[str, ClusterSpec]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One row; `estimated_s` is None where it could not be estimated, and `reason` says why."""

    where: str
    source: str
    kinds: tuple[str, ...]
    year: str
    text: str
    measured_s: float
    estimated_s: float | None
    reason: str

    @property
    def error(self) -> float:
        """estimated / measured - 1."""
        return (self.estimated_s or 0.0) / self.measured_s - 1.0


def definitions(path: Path) -> Definitions:
    """The models and clusters that the lines of a Markdown file define."""
    models: dict[str, ModelSpec] = {}
    clusters: dict[str, ClusterSpec] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith('{"name"'):
            data = json.loads(line)
            if "nodes" in data:
                clusters[data["name"]] = ClusterSpec.from_data(data, data["name"])
            else:
                models[data["name"]] = ModelSpec.from_data(data, data["name"])
    return models, clusters


def year_of(row: CsvRow) -> str:
    """The year of the software: a release such as 25.04 in the note; else unknown."""
    found = re.search(r"\b(2[2-6])\.(0[1-9]|1[0-2])\b", row.text("note", ""))
    return f"20{found[1]}" if found else "unknown"


def kinds_of(row: CsvRow, spec: ModelSpec | None) -> tuple[str, ...]:
    """What kind of run a row is: the device, the number format, dense or experts."""
    experts = (spec is not None and spec.experts > 0) or "MoE" in row.text("features", "")
    return row.text("gpu"), row.text("dtype_arg", "bf16"), "experts" if experts else "dense"


FEATURES: dict[str, dict[str, object]] = {
    "tp-comm-overlap": {"tp_overlap": True},
    "no-flash-attention": {"attention": "unfused"},
}
"""What the words in `features` say of kernels."""

NOTES: tuple[tuple[str, dict[str, object]], ...] = (
    (r"paxml|maxtext|MaxText", {"framework": "jax"}),
    (r"flash_attention2 \+ RMS", {"framework": "scaling", "attention": "flash2", "norms": "fused"}),
    (r"flash_attention2", {"framework": "scaling", "attention": "flash2", "norms": "eager"}),
    (r"flash_attentionv1", {"framework": "scaling", "attention": "flash", "norms": "eager"}),
    (r"HF \+ DeepSpeed", {"framework": "deepspeed"}),
    (r"overlap of all-to-all", {"ep_overlap": True}),
)
"""What a note says of the framework and its kernels; the first that is found counts."""


def software_of(row: CsvRow) -> dict[str, object]:
    """The fields of a workload that say what trained, as far as the row does."""
    said: dict[str, object] = {"framework": row.text("framework", "torch")}
    for word in row.text("features", "").split(";"):
        said |= FEATURES.get(word, {})
    if "XLA" in row.text("features", ""):
        said["framework"] = "jax"
    return said | next((more for text, more in NOTES if re.search(text, row.text("note", ""))), {})


def judge(row: CsvRow, known: Definitions, framework: Framework | None) -> Judged | None:
    """One row, None where it has no speed."""
    speed, step_s = row.positive("tokens_per_s_per_gpu"), row.positive("iter_time_s")
    if row.values["status"] != "ok" or not (speed or step_s):
        return None
    spec, estimated, reason, text = None, None, "", row.text("plan", "")
    try:
        spec = _named(row.text("model_ref"), "model:", known[0], model)
        cluster = _named(row.text("cluster_ref"), "cluster:", known[1], cluster_from_shorthand)
        data = {"seq_len": row.count("seq_len"), "global_batch": row.count("global_batch")}
        workload = Workload.from_data({**data, "dtype": row.text("dtype_arg"), **software_of(row)}, "workload")
        plan = Plan.parse(row.text("plan"), cluster.devices)
        reason = illegal_reason(spec, cluster, workload, plan) or ""
        text = f"{spec.name} {cluster.name} {workload.dtype.value} {plan.key}"
        if not reason:
            estimated = estimate(spec, cluster, workload, plan, framework=framework).step_time_s
        tokens = workload.tokens_per_step / cluster.devices
    except AutotuneError as error:
        reason, tokens = str(error), row.count("seq_len") * row.count("global_batch") / row.count("num_gpus")
    measured = step_s if speed is None else tokens / speed
    assert measured is not None
    return Judged(
        where=row.where.rpartition(" ")[2], source=row.values["source"], kinds=kinds_of(row, spec), year=year_of(row),
        text=text, measured_s=measured, estimated_s=estimated, reason=reason,
    )  # fmt: skip


def _named(ref: str, prefix: str, known: dict[str, Any], other: Any) -> Any:
    name = ref.removeprefix(prefix)
    return known[name] if ref.startswith(prefix) and name in known else other(ref)


def figures(rows: Sequence[Judged]) -> dict[str, Any]:
    """The figures of some rows that could be estimated."""
    if not rows:
        return {"rows": 0, "mape": float("nan"), "ratio": float("nan"), "worst": float("nan")}
    return {
        "rows": len(rows),
        "mape": round(statistics.fmean(abs(row.error) for row in rows), 4),
        "ratio": round(statistics.median(1.0 / (1.0 + row.error) for row in rows), 3),
        "worst": round(max(abs(row.error) for row in rows), 3),
    }


def report(rows: Sequence[Judged]) -> dict[str, Any]:
    """All figures: of all rows, by source, by kind and by year of the software."""
    done = [row for row in rows if row.estimated_s is not None]
    groups: dict[str, dict[str, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    for row in done:
        groups["by source"][row.source].append(row)
        groups["by year"][row.year].append(row)
        groups["by kind"][" ".join(row.kinds)].append(row)
        groups["by kind"][row.kinds[2]].append(row)
    return {
        "all": figures(done),
        **{name: {key: figures(found) for key, found in sorted(by.items())} for name, by in groups.items()},
        "not estimated": [f"row {row.where}: {row.reason}" for row in rows if row.estimated_s is None],
    }


def main() -> None:
    """Judges the rows of a file and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--exact", default="E,A", help="which rows, by their column `exact` (E,A,X,X0)")
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), help="for all rows, whatever the file says")
    parser.add_argument("--rows", action="store_true", help="every row, the worst first")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    wanted, framework = set(args.exact.split(",")), FRAMEWORKS[args.framework] if args.framework else None
    known = definitions(args.path.with_suffix(".md"))
    chosen = [row for row in read_csv_rows(args.path) if row.values.get("exact", "") in wanted]
    rows = [item for item in (judge(row, known, framework) for row in chosen) if item is not None]
    found = report(rows)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, by in {"": {"all": found["all"]}, **{k: v for k, v in found.items() if k.startswith("by")}}.items():
        print(name)
        for key, item in by.items():
            print(
                f" {key:32} {item['rows']:4} rows  MAPE {item['mape']:6.1%}  "
                f"measured / estimated {item['ratio']:.2f}  worst {item['worst']:.0%}"
            )
    print(f"{len(found['not estimated'])} rows not estimated")
    if args.rows:
        for row in sorted(rows, key=lambda item: -abs(item.error)):
            print(f" {row.where:>5} {row.source:18} {row.error:+7.1%} {row.measured_s:9.3f} s  {row.text} {row.reason}")


if __name__ == "__main__":
    main()
