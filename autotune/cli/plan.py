"""`autotune plan` and `autotune estimate`: what the cost model says, without any hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.errors import IllegalPlanError

if TYPE_CHECKING:
    from autotune.cli.inputs import Inputs
    from autotune.search.space import Runtime
    from autotune.specs import Estimate, Plan

PlanText = typer.Option("--plan", metavar="PLAN", help="tp=8,pp=4,micro_batch=1,... A missing dp is what is left.")


def plan() -> None: 
    """Rank."""


def estimate(
    plan: Annotated[str, PlanText],
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate one plan: seconds and bytes by named part."""
