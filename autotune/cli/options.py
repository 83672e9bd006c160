"""The options that several commands share, each declared once. Values stay text: the specs validate them."""

from __future__ import annotations

from typing import Annotated

import typer

_SPACE = "Restrict the space (comma-separated values; default: every legal value)"
_WORKLOAD = "Workload"

MAX_ID = 2**63 - 1
"""A database's numbers are no greater."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="Database, as sqlite:///FILE or postgresql://USER@HOST/NAME. "
        "Default: $AUTOTUNE_DB, else autotune.db in the user's data folder.",
    ),
]
Broker = Annotated[
    str | None,
    typer.Option("--broker", metavar="URL", help="Redis. Default: $AUTOTUNE_BROKER, else this machine's."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A preset's or stored name, a file of ours, or a Hugging Face config.json. Default: the smallest preset.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="A file, a stored name, or GPU:NODESxGPUS_PER_NODE (a100-80gb-sxm:128x8). Default: this machine.",
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        metavar="TOKENS",
        help="Sequence length. Default: 128 for a tiny preset or on CPUs, else 4096, at most the model's longest.",
        rich_help_panel=_WORKLOAD,
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        metavar="SEQUENCES",
        help="Sequences a step. Default: 16 for a tiny preset or on CPUs, else 16 a device up to 1024; at least one "
        "a device, and a multiple of the devices.",
        rich_help_panel=_WORKLOAD,
    ),
]
DTypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="fp32, bf16, fp16 or fp8. Default: fp32 on CPUs, else bf16, or fp16 where there is no bf16.",
        rich_help_panel=_WORKLOAD,
    ),
]
Tp = Annotated[str | None, typer.Option("--tp", metavar="1,2,...", help="Tensor parallel.", rich_help_panel=_SPACE)]
Pp = Annotated[str | None, typer.Option("--pp", metavar="1,2,...", help="Pipeline parallel.", rich_help_panel=_SPACE)]
MicroBatch = Annotated[
    str | None,
    typer.Option("--micro-batch", metavar="1,2,...", help="Sequences a micro-batch.", rich_help_panel=_SPACE),
]
ZeroStage = Annotated[
    str | None, typer.Option("--zero-stage", metavar="0,1,2,3", help="ZeRO stage.", rich_help_panel=_SPACE)
]
RecomputeModes = Annotated[
    str | None,
    typer.Option("--recompute", metavar="none,selective,full", help="Recomputation.", rich_help_panel=_SPACE),
]
SequenceParallel = Annotated[
    str | None,
    typer.Option("--sequence-parallel", metavar="true,false", help="Sequence parallelism.", rich_help_panel=_SPACE),
]
Schedules = Annotated[
    str | None,
    typer.Option("--schedule", metavar="gpipe,1f1b,interleaved", help="Pipeline schedule.", rich_help_panel=_SPACE),
]
History = Annotated[
    str | None,
    typer.Option(
        "--history",
        metavar="SOURCE",
        help="Learn from what was imported under this name, too (autotune import). Its runs are never results.",
    ),
]
TuningId = Annotated[str, typer.Argument(metavar="TUNING", help="A tuning's id, or its first characters (4 or more).")]
_PLAN = typer.Option("--plan", metavar="PLAN", help="tp=8,pp=4,micro_batch=1,... A missing dp is what is left.")
PlanText = Annotated[str | None, _PLAN]
RequiredPlanText = Annotated[str, _PLAN]
