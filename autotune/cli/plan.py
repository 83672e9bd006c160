"""`autotune plan` and `autotune estimate`: what the cost model says, without any hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output, remote, remote_fleet
from autotune.errors import IllegalPlanError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.table import Table

    from autotune.cli.inputs import Inputs
    from autotune.search.offline import Ranking
    from autotune.search.space import Runtime
    from autotune.specs import BytesByPart, Estimate, Plan, Profile, SecondsByPart


def plan(
    plan: options.PlanText = None,
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    micro_batch: options.MicroBatch = None,
    zero_stage: options.ZeroStage = None,
    recompute: options.RecomputeModes = None,
    sequence_parallel: options.SequenceParallel = None,
    schedule: options.Schedules = None,
    top: Annotated[int, typer.Option("--top", min=1, max=10_000, metavar="N", help="Plans to list.")] = 10,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say what limits the plan, what others lose against it, and what would help."),
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Instead: the best plan on fewer and more GPUs, and how many still pay."),
    ] = False,
    history: options.History = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Rank all legal plans by estimate, without any hardware. With --plan: that one, or why it is not legal.

    Speeds come from the cluster's profile if the database has one, else from the catalog.
    """
    dimensions = {
        "tp": tp, "pp": pp, "micro_batch": micro_batch, "zero_stage": zero_stage, "recompute": recompute,
        "sequence_parallel": sequence_parallel, "schedule": schedule,
    }  # fmt: skip
    if remote.asked_server():
        if plan is not None or explain or scaling or history is not None or db is not None:
            allowed = "--plan, --explain, --scaling, --history and --db work on this machine only: leave it out"
            raise InputError("--server", remote.asked_server(), allowed)
        asked = {
            "seq_len": seq_len, "global_batch": global_batch, "dtype": dtype, "top": top, **dimensions,
        }  # fmt: skip
        remote_fleet.print_plans(model, cluster, asked, as_json=as_json)
        return
    from autotune.cli.database import stored_profile
    from autotune.cli.expected import expected_ranking, print_expected
    from autotune.cli.explain_view import explanation_of, print_explained, print_scaling, scaling_of
    from autotune.cli.inputs import read_inputs, read_space
    from autotune.search.offline import rank
    from autotune.search.space import require_bounded
    from autotune.tuning.report import ranking_data

    _require_one_question(plan, dimensions, history, explain=explain, scaling=scaling)
    inputs = read_inputs(model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, db=db)
    if plan is None or explain or scaling:
        require_bounded(inputs.model, inputs.cluster, inputs.workload)
    profile = stored_profile(inputs.cluster, db)
    space = read_space(**dimensions)
    if history is not None:
        chosen = None if plan is None else read_plan(inputs, plan)
        print_expected(
            inputs, expected_ranking(inputs, space, chosen, profile, history, db, top), history, as_json=as_json
        )
        return
    if scaling:
        curve = scaling_of(inputs, space, profile)
        if as_json:
            output.print_json({**_request_data(inputs), "scaling": curve.to_data()})
        else:
            print_scaling(inputs, curve)
        return
    if plan is not None:
        ranking = _ranking_of_one(inputs, read_plan(inputs, plan), profile)
    else:
        ranking = rank(inputs.model, inputs.cluster, inputs.workload, space, profile=profile, limit=top)
    explanation = explanation_of(inputs, space, profile, ranking.plans[0].plan) if explain else {}
    if as_json:
        output.print_json(ranking_data(inputs.model, inputs.cluster, inputs.workload, ranking) | explanation)
        return
    _print_ranking(inputs, ranking)
    if explain:
        print_explained(ranking.plans[0].plan, explanation)


def _require_one_question(
    plan: str | None, dimensions: Mapping[str, object], history: str | None, *, explain: bool, scaling: bool
) -> None:
    """Raises InputError for options of which one would be ignored."""
    if history is not None and (scaling or explain):
        raise InputError("--history", history, "it goes with neither --scaling nor --explain")
    if scaling and explain:
        raise InputError("--explain", explain, "it does not go with --scaling: ask one after the other")
    if plan is not None and scaling:
        raise InputError("--plan", plan, "--scaling finds the best plan for each number of GPUs: leave one of them out")
    given = [f"--{name.replace('_', '-')}" for name, value in dimensions.items() if value is not None]
    if plan is not None and given and not explain:  # what it is explained by is of that space
        raise InputError("--plan", plan, f"it is one plan, so leave out {', '.join(given)}, or write them into it")


def read_plan(inputs: Inputs, text: str, runtime: Runtime | None = None) -> Plan:
    """The plan that the text of --plan gives. Raises IllegalPlanError with the reason if it cannot be run."""
    from autotune.search import space
    from autotune.specs import Plan

    plan = Plan.parse(text, inputs.cluster.devices)
    runtime = runtime or space.Runtime.ANY
    reason = space.illegal_reason(inputs.model, inputs.cluster, inputs.workload, plan, runtime)
    if reason is not None:
        raise IllegalPlanError("--plan", plan.key, reason)
    return plan


def _ranking_of_one(inputs: Inputs, plan: Plan, profile: Profile | None) -> Ranking:
    """One plan as a ranking, whether it fits or not."""
    import time

    from autotune.cost.estimate import estimate as estimate_plan
    from autotune.search.offline import RankedPlan, Ranking

    started = time.perf_counter()
    found = estimate_plan(inputs.model, inputs.cluster, inputs.workload, plan, profile)
    seconds = time.perf_counter() - started
    ranked = RankedPlan(plan=plan, estimate=found)
    return Ranking(legal=1, fitting=int(found.fits), seconds=seconds, estimates_per_s=1 / seconds, plans=(ranked,))


def _request_data(inputs: Inputs) -> dict[str, Any]:
    from autotune.tuning.report import request_data

    return request_data(inputs.model, inputs.cluster, inputs.workload)


def _print_ranking(inputs: Inputs, ranking: Ranking) -> None:
    table = output.table("", "<plan", "tokens/s/GPU", "step", "MFU", "peak memory", "<fits", "<largest losses")
    for each in ranking.plans:
        found = each.estimate
        table.add_row(
            each.plan.key,
            output.count_text(found.tokens_per_s_per_gpu),
            output.seconds_text(found.step_time_s),
            output.percent_text(found.mfu),
            output.bytes_text(found.peak_memory_bytes),
            "yes" if found.fits else "no",
            _losses(found),
        )
    console = output.console()
    console.print(_heading(inputs, ranking.plans[0].estimate), soft_wrap=True)
    console.print(table)
    console.print(
        f"{ranking.legal:,} legal plans, {ranking.fitting:,} estimated to fit; {ranking.seconds:.2f} s, "
        f"{ranking.estimates_per_s:,.0f} estimates/s"
    )


def _heading(inputs: Inputs, found: Estimate) -> str:
    workload = inputs.workload
    return (
        f"Estimates from the {found.basis.value} for {inputs.model.name} on {inputs.cluster.name} "
        f"({inputs.cluster.devices} devices): sequence {workload.seq_len}, {workload.global_batch} sequences a step, "
        f"{workload.dtype.value}"
    )


def _losses(found: Estimate) -> str:
    """The two largest parts of the step that are not compute."""
    parts = {name: seconds for name, seconds in found.seconds.to_data().items() if name != "compute" and seconds > 0}
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    return ", ".join(f"{name} {parts[name] / found.step_time_s:.1%}" for name in largest)


def estimate(
    plan: options.RequiredPlanText,
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate one plan: seconds of a step and bytes of the worst stage, by named part."""
    from autotune.cli.database import stored_profile
    from autotune.cli.inputs import read_inputs
    from autotune.cost.estimate import estimate as estimate_plan
    from autotune.explain.losses import largest_parts

    inputs = read_inputs(model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, dtype=dtype, db=db)
    chosen = read_plan(inputs, plan)
    profile = stored_profile(inputs.cluster, db)
    found = estimate_plan(inputs.model, inputs.cluster, inputs.workload, chosen, profile)
    if as_json:
        shares = {"largest_parts": dict(largest_parts(found))}
        output.print_json({**_request_data(inputs), "plan": chosen.to_data(), "estimate": found.to_data(), **shares})
    else:
        _print_estimate(inputs, chosen, found)


def _print_estimate(inputs: Inputs, plan: Plan, found: Estimate) -> None:
    from autotune.explain.losses import largest_parts

    console = output.console()
    console.print(_heading(inputs, found), f"plan {plan.key}", sep="\n", soft_wrap=True)
    console.print(_parts("seconds of a step", found.seconds, found.step_time_s, output.seconds_text))
    title = f"bytes of the worst stage ({found.worst_stage})"
    console.print(_parts(title, found.bytes, found.peak_memory_bytes, output.bytes_text))
    first, *rest = largest_parts(found)
    then = f"; then {rest[0][0]}, {rest[0][1]:.1%}" if rest else ""
    console.print(f"The step is mostly {first[0]}, {first[1]:.1%}{then} (estimates)")
    fits = "fits" if found.fits else "does not fit"
    memory = output.bytes_text(inputs.cluster.device.memory_bytes)
    console.print(
        f"{output.count_text(found.tokens_per_s_per_gpu)} tokens/s/GPU, MFU {output.percent_text(found.mfu)}; "
        f"{fits} in {memory} (estimates)"
    )


def _parts(title: str, parts: SecondsByPart | BytesByPart, total: float, text: Callable[[float], str]) -> Table:
    table = output.table("", f"<{title}", "estimate", "share")
    for name, value in parts.to_data().items():
        table.add_row(name, text(value), output.percent_text(value / total))
    table.add_section()
    table.add_row("total", text(total), "")
    return table
