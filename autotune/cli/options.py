"""The options that several commands share, each declared once. Values stay text: the specs validate them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_SPACE = "Restrict the space (comma-separated values; default: every legal value)"
_WORKLOAD = "Workload"

MAX_ID = 2**63 - 1
"""A database's numbers are no greater."""


def option(name: str, metavar: str | None = None, help: str = "", *, panel: str | None = None, **more: Any) -> Any:
    """An option: its name, what stands for its value (None: what typer says), what it does, the panel of the help."""
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=panel, **more)


AsJson = Annotated[bool, option("--json", help="Print one JSON object instead of tables.")]
Database = Annotated[
    str | None,
    option(
        "--db",
        "URL",
        "Database, as sqlite:///FILE or postgresql://USER@HOST/NAME. "
        "Default: $AUTOTUNE_DB, else autotune.db in the user's data folder.",
    ),
]
Broker = Annotated[str | None, option("--broker", "URL", "Redis. Default: $AUTOTUNE_BROKER, else this machine's.")]
Model = Annotated[
    str | None,
    option(
        "--model",
        "MODEL",
        "A preset's or stored name, a file of ours, or a Hugging Face config.json. Default: the smallest preset.",
    ),
]
Cluster = Annotated[
    str | None,
    option(
        "--cluster",
        "CLUSTER",
        "A file, a stored name, or GPU:NODESxGPUS_PER_NODE (a100-80gb-sxm:128x8). Default: this machine.",
    ),
]
SeqLen = Annotated[
    int | None,
    option(
        "--seq-len",
        "TOKENS",
        "Sequence length. Default: 128 for a tiny preset or on CPUs, else 4096, at most the model's longest.",
        panel=_WORKLOAD,
    ),
]
GlobalBatch = Annotated[
    int | None,
    option(
        "--global-batch",
        "SEQUENCES",
        "Sequences a step. Default: 16 for a tiny preset or on CPUs, else 16 a device up to 1024; at least one "
        "a device, and a multiple of the devices.",
        panel=_WORKLOAD,
    ),
]
DTypeName = Annotated[
    str | None,
    option(
        "--dtype",
        "DTYPE",
        "fp32, bf16, fp16 or fp8. Default: fp32 on CPUs, else bf16, or fp16 where there is no bf16.",
        panel=_WORKLOAD,
    ),
]
Precision = Annotated[
    str | None,
    option(
        "--precision",
        "KEY=VALUE,...",
        "Number formats that are not the framework's own: grad_dtype, param_dtype, reduce_dtype, master_dtype, "
        "exp_avg_dtype, exp_avg_sq_dtype, saved_dtype (fp32, bf16, fp16, fp8), fp8_recipe (delayed, tensorwise, "
        "blockwise, mxfp8).",
        panel=_WORKLOAD,
    ),
]
FrameworkName = Annotated[
    str | None,
    option(
        "--framework",
        "FRAMEWORK",
        "What trains: torch, megatron, nemo, megatron-bridge, megatron-2021, megatron-deepspeed, nanotron, fsdp, jax, "
        "deepspeed or scaling. The estimate has its habits, and only plans that it runs are listed. Default: torch, "
        "any plan.",
        panel=_WORKLOAD,
    ),
]
Target = Annotated[
    str | None,
    option(
        "--for",
        "NAME[@VERSION]",
        "Only plans that this framework runs, with its habits behind the estimate: megatron, nemo, torchtitan, "
        "deepspeed, nanotron. Default version: the newest known.",
        panel=_WORKLOAD,
    ),
]
Kernels = Annotated[
    str | None,
    option(
        "--kernels",
        "KEY=VALUE,...",
        "attention=unfused|flash|flash2|flash3|cudnn, norms=fused|eager, cross_entropy=eager|fused|gathered, "
        "tp_overlap=true|false, ep_overlap=true|false. Default: as the framework has them.",
        panel=_WORKLOAD,
    ),
]
Tp = Annotated[str | None, option("--tp", "1,2,...", "Tensor parallel.", panel=_SPACE)]
Pp = Annotated[str | None, option("--pp", "1,2,...", "Pipeline parallel.", panel=_SPACE)]
MicroBatch = Annotated[str | None, option("--micro-batch", "1,2,...", "Sequences a micro-batch.", panel=_SPACE)]
ZeroStage = Annotated[str | None, option("--zero-stage", "0,1,2,3", "ZeRO stage.", panel=_SPACE)]
RecomputeModes = Annotated[
    str | None, option("--recompute", "none,selective,full,op", "Recomputation. Default: all but op.", panel=_SPACE)
]
RecomputeModules = Annotated[
    str | None,
    option(
        "--recompute-modules",
        "layernorm+moe_act,...",
        "What selective recomputes, sets of Megatron's modules. Default: core_attn.",
        panel=_SPACE,
    ),
]
SequenceParallel = Annotated[
    str | None, option("--sequence-parallel", "true,false", "Sequence parallelism.", panel=_SPACE)
]
Schedules = Annotated[str | None, option("--schedule", "gpipe,1f1b,interleaved", "Pipeline schedule.", panel=_SPACE)]
Seed = Annotated[int, option("--seed", min=0, max=2**53 - 1, help="Seed of weights and data.")]
"""What every reader of JSON has exactly, a server's too."""

CommandName = Annotated[
    str | None,
    option(
        "--command",
        "NAME|FILE",
        "A program of your own that runs the trials: its file, or the name of one in $AUTOTUNE_COMMANDS. "
        "With --server the name of one that the nodes have. Default: our step probe.",
    ),
]
History = Annotated[
    str | None,
    option(
        "--history",
        "SOURCE",
        "Learn from what was imported under this name, too (autotune import). Its runs are never results.",
    ),
]
TuningId = Annotated[str, typer.Argument(metavar="TUNING", help="A tuning's id, or its first characters (4 or more).")]
_PLAN = option("--plan", "PLAN", "tp=8,pp=4,micro_batch=1,... A missing dp is what is left.")
PlanText = Annotated[str | None, _PLAN]
RequiredPlanText = Annotated[str, _PLAN]
