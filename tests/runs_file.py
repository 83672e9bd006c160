"""Small runs files with known contents."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from autotune.backtest.groups import Group, group_runs
from autotune.backtest.runs import read_runs
from autotune.catalog.published import published_cluster

# A GPT of 125 million parameters on one node of 8: 7,000 tokens a second and GPU are 5 TFLOP/s.
ROW = {
    "source": "ours", "group": "g", "model_name": "gpt", "params_b": "0.125", "layers": "12.0", "hidden": "768",
    "heads": "12", "kv_heads": "", "ffn": "3072", "vocab": "50304", "seq_len": "1024", "gpu": "A100-SXM4-80GB",
    "gpu_mem_gb": "80.0", "gpus_per_node": "8", "num_gpus": "8", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "dp": "8",
    "vpp": "1", "sp": "False", "zero_stage": "0", "micro_batch": "1", "global_batch": "64", "recompute": "none",
    "dtype": "bf16", "schedule": "", "tokens_per_s_per_gpu": "7000", "mfu": "", "iter_time_s": "", "peak_mem_gb": "",
    "mem_alloc_gb": "", "status": "ok", "net_allreduce_GBps": "", "intra_allreduce_GBps": "",
}  # fmt: skip

CsvRow = dict[str, str]


def row(**values: object) -> CsvRow:
    """A good row with these values."""
    return {**ROW, **{name: str(value) for name, value in values.items()}}


def failed(status: str, **values: object) -> CsvRow:
    """A row without results."""
    return row(status=status, tokens_per_s_per_gpu="", **values)


def write(path: Path, rows: Iterable[CsvRow], without: str = "") -> Path:
    """A runs file of these rows, less one column."""
    columns = [name for name in ROW if name != without]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def group_of(folder: Path, *rows: CsvRow) -> Group:
    """The one group of these rows."""
    runs, _ = read_runs(write(folder / "runs.csv", rows), published_cluster)
    (group,), _ = group_runs(runs)
    return group


def four(**values: object) -> list[CsvRow]:
    """Four plans by micro-batch: 1 -> 7000, 2 -> 9700, 4 -> 10000 (the best), 8 -> out of memory."""
    return [
        row(micro_batch=1, tokens_per_s_per_gpu=7000, **values),
        row(micro_batch=2, tokens_per_s_per_gpu=9700, **values),
        row(micro_batch=4, tokens_per_s_per_gpu=10000, **values),
        failed("oom", micro_batch=8, **values),
    ]
