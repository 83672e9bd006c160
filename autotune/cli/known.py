"""`autotune known` and the question form of `autotune best`: what was ever measured to be best, and for what."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.errors import InputError, MissingMeasurementError

if TYPE_CHECKING:
    from autotune.cli.inputs import Inputs
    from autotune.knowledge.answer import Answer
    from autotune.specs import BestEntry

app = typer.Typer(help="Best-known plans: list them, with their history, and compare two.", no_args_is_help=True)


def answer_question(inputs: Inputs, *, target: str | None, settle: bool, db: str | None, as_json: bool) -> int:
    """Answers and, where asked to and nothing is known, settles by measuring."""
    from autotune.cli.database import is_there, open_to_read, open_to_write
    from autotune.knowledge.answer import best_known
    from autotune.search.space import Runtime, require_bounded

    require_bounded(inputs.model, inputs.cluster, inputs.workload, Runtime.TORCH)
    with open_to_read(db) if is_there(db) else open_to_write(db) as store:
        answer = best_known(store, inputs.model, inputs.cluster, inputs.workload)
    if settle and answer.known is None:
        return _settle(inputs, answer, db=db, as_json=as_json)
    plan = answer.known.plan if answer.known else answer.carried.plan if answer.carried else None
    launch = None
    if target is not None and plan is not None:
        from autotune.export import launch_arguments

        launch = launch_arguments(target, inputs.model, inputs.cluster, inputs.workload, plan)
    data = answer.to_data() | {"launch": asdict(launch) if launch else None}
    if as_json:
        output.print_json(data)
    else:
        _print_answer(answer)
        if launch is not None:
            output.print_launch(launch)
    return 0 if answer.known or answer.carried else MissingMeasurementError.exit_code


def _settle(inputs: Inputs, answer: Answer, *, db: str | None, as_json: bool) -> int:
    """Runs a tuning that stops when little is expected to be gained."""
    from autotune.cli.tune import run_tuning
    from autotune.knowledge.settling import SETTLE_GAIN, TRIALS
    from autotune.specs import Budget
    from autotune.wiring import open_service, open_store, require_local

    require_local(inputs.cluster)
    if answer.settle is not None:
        expected = f"{answer.settle.gpu_s:.0f} GPU-seconds for {len(answer.settle.probes)} probes and {TRIALS} trials"
        output.error_console().print(f"Settling it: about {expected} (estimate)", soft_wrap=True)
    service = open_service(open_store(db))
    budget = Budget(max_trials=2 * TRIALS, min_gain=SETTLE_GAIN)
    tuning = service.submit(inputs.model, inputs.cluster, inputs.workload, budget=budget)
    return run_tuning(service, tuning, as_json=as_json, db=db)


def _print_answer(answer: Answer) -> None:
    console, workload = output.console(), answer.workload
    title = (
        f"{answer.model.name} on {answer.cluster.name} ({answer.cluster.devices} devices), "
        f"sequence {workload.seq_len}, {workload.global_batch} sequences a step, {workload.dtype.value}"
    )
    if answer.known is not None:
        table = output.table(f"Best known plan: {title}", "<what", "<measured")
        for name, value in _known_rows(answer.known):
            table.add_row(name, value)
        console.print(table)
        if answer.stale:
            console.print("Stale: the environment has changed since it was measured:")
            for change in answer.stale:
                console.print(f"  {change.text}", soft_wrap=True)
        for other in answer.others:
            console.print(
                f"Also known: {other.plan.key}, {output.count_text(other.tokens_per_s_per_gpu)} tokens/s/GPU, "
                f"{other.source}, {other.measured_at:%Y-%m-%d}",
                soft_wrap=True,
            )
        return
    console.print(f"Nothing was measured for exactly this: {title}", soft_wrap=True)
    _print_near(answer)


def _known_rows(entry: BestEntry) -> list[tuple[str, str]]:
    low, high = entry.interval
    speed = output.count_text(entry.tokens_per_s_per_gpu)
    margin = entry.memory_margin
    second = entry.runner_up
    runner_up = "none was measured"
    if second is not None:
        close = "; too close to call" if second.too_close else ""
        runner_up = f"{second.plan.key}: {output.count_text(second.tokens_per_s_per_gpu)} tokens/s/GPU{close}"
    return [
        ("plan", entry.plan.key),
        (
            "tokens/s/GPU",
            f"{speed} (95 % interval {output.count_text(low)} to {output.count_text(high)}, "
            f"{output.runs_text(entry.repeats)})",
        ),
        ("free memory of the worst rank", f"{margin:.0%}" if margin is not None else "not known"),
        ("runner-up", runner_up),
        ("measured at", f"{entry.measured_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("source", f"{entry.source}" + (f", tuning {entry.tuning_id}" if entry.tuning_id else "")),
        ("fingerprint", entry.fingerprint_key or "not known"),
        *([("why this one", entry.reason)] if entry.reason else []),
        ("entry", str(entry.id)),
    ]


def _print_near(answer: Answer) -> None:
    console = output.console()
    if answer.near:
        table = output.table("Nearest known", "entry", "<differs in", "tokens/s/GPU", "distance")
        for item in answer.near:
            speed = output.count_text(item.entry.tokens_per_s_per_gpu)
            table.add_row(str(item.entry.id), "; ".join(item.differs), speed, f"{item.distance:.2f}")
        console.print(table)
    else:
        console.print("Nothing near it is known either.")
    carried, settle = answer.carried, answer.settle
    if carried is None:
        console.print(f"No estimate: {answer.carried_why_not}", soft_wrap=True)
        return
    low, high = carried.interval
    console.print(
        f"Estimate (not measured): {carried.plan.key}, {output.count_text(carried.tokens_per_s_per_gpu)} tokens/s/GPU "
        f"(90 % interval {output.count_text(low)} to {output.count_text(high)}), P(fits) {carried.p_fits:.0%}",
        soft_wrap=True,
    )
    if settle is not None:
        console.print(
            f"To settle it: {len(settle.probes)} probes and {settle.trials} trials, about {settle.gpu_s:.0f} "
            "GPU-seconds (estimate): add --settle",
            soft_wrap=True,
        )


@app.command("list")
def known_list(
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Of this model only.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="NAME", help="On this cluster only.")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="GPU", help="On this device only.")] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="SOURCE", help="`measured`, or the name of an import.")
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="Entries that were superseded, too.")] = False,
    before: Annotated[
        int | None,
        typer.Option("--before", min=1, max=options.MAX_ID, metavar="ENTRY", help="Entries older than this."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="Entries at most, newest first.")] = 50,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Best-known entries, newest first."""
    from autotune.cli.database import open_to_read
    from autotune.knowledge.answer import entry_data

    with open_to_read(db) as store:
        entries = store.best_page(
            model=model, cluster=cluster, device=device, source=source, history=history, before=before, limit=limit
        )
    if as_json:
        output.print_json({"entries": [entry_data(entry) for entry in entries]})
        return
    table = output.table(
        "", "entry", "<model", "<cluster", "seq", "batch", "<plan", "tokens/s/GPU", "runs", "<source",
        "<measured (UTC)",
        *(["<superseded (UTC)"] if history else []),
    )  # fmt: skip
    for entry in entries:
        ended = f"{entry.superseded_at:%Y-%m-%d %H:%M}" if entry.superseded_at else ""
        table.add_row(
            str(entry.id), entry.model.name, entry.cluster.name, str(entry.workload.seq_len),
            str(entry.workload.global_batch), entry.plan.key, output.count_text(entry.tokens_per_s_per_gpu),
            str(entry.repeats), entry.source, f"{entry.measured_at:%Y-%m-%d %H:%M}", *([ended] if history else []),
        )  # fmt: skip
    output.console().print(table if entries else "Nothing is known yet: autotune tune")


@app.command("compare")
def known_compare(
    one: Annotated[
        int,
        typer.Argument(min=1, max=options.MAX_ID, metavar="ENTRY", help="An entry's number (autotune known list)."),
    ],
    other: Annotated[int, typer.Argument(min=1, max=options.MAX_ID, metavar="ENTRY", help="Another one.")],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Two entries side by side: what differs, and whether their intervals overlap."""
    from autotune.cli.database import open_to_read
    from autotune.knowledge.answer import entry_data
    from autotune.knowledge.nearness import compared

    if one == other:
        raise InputError("ENTRY", other, "name two different entries")
    with open_to_read(db) as store:
        first, second = store.best_entry(one), store.best_entry(other)
        data: dict[str, Any] = compared(store, first, second)
    if as_json:
        output.print_json({"one": entry_data(first), "other": entry_data(second), **data})
        return
    table = output.table("", "<what", f"<entry {one}", f"<entry {other}")
    for row in data["differs"]:
        table.add_row(row["name"], row["one"], row["other"])
    output.console().print(table)
    output.console().print(data["verdict"], soft_wrap=True)
