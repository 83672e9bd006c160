"""`autotune best` and `autotune known`: what was measured to be best, and for what; of this machine or of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.asking import QUESTION, Here, ask, asked_server
from autotune.cli.options import option
from autotune.cli.tunings import print_frameworks
from autotune.errors import InputError, MissingMeasurementError, NothingFitsError

app = typer.Typer(help="Best-known plans: list them, with their history, and compare two.", no_args_is_help=True)

EntryNumber = Annotated[
    int, typer.Argument(min=1, max=options.MAX_ID, metavar="ENTRY", help="An entry's number (autotune known list).")
]


def best(
    model: options.Model = None,
    cluster: options.Cluster = None,
    seq_len: options.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    dtype: options.DTypeName = None,
    precision: options.Precision = None,
    framework: options.FrameworkName = None,
    kernels: options.Kernels = None,
    tuning: Annotated[
        str | None,
        option(
            "--tuning",
            "TUNING",
            "A tuning's id. Default, without a model or cluster: the newest that measured something.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        option("--for", "NAME[@VERSION]", "The best plan that megatron, deepspeed, ... runs, and its launch."),
    ] = None,
    folder: Annotated[
        Path | None, option("--output", "DIR", "With --for: write the launch script and its config into a directory.")
    ] = None,
    settle: Annotated[
        bool, option("--settle", help="Where nothing is known exactly: run the probes and trials that settle it.")
    ] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> int:
    """The best-known plan for a model on a cluster, or of a tuning: its evidence, the runner-up, how to launch it.

    Where nothing was measured for exactly that question: the nearest that was, how far it is, what it implies as an
    estimate, and which probes would settle it at what cost.
    """
    asked = model, cluster, seq_len, global_batch, dtype, framework, kernels, precision, None
    question: dict[str, Any] = dict(zip(QUESTION, asked, strict=True))
    is_asked = any(value is not None for value in question.values())
    if is_asked and tuning is not None:
        raise InputError("--tuning", tuning, "give a tuning or a question (--model, --cluster, ...), not both")
    if settle and not is_asked:
        raise InputError("--settle", True, "only a question (--model, --cluster, ...) can be settled")
    if folder is not None and target is None:
        raise InputError("--output", str(folder), "it goes with --for: whose files are wanted")
    with ask(db) as answers:
        asking = {name: value for name, value in question.items() if name != "target"}
        data = answers.best(**asking, tuning=tuning, **{"for": target})
        newest = None if is_asked or tuning is not None else next(iter(answers.tunings(limit=1)), None)
    if newest is not None and newest["tuning"] != data["tuning"] and not _has_ended(newest):
        output.error_console().print(
            f"Tuning {newest['tuning']} is under way ({newest['state']}) and has no complete trial yet: this is of an "
            "earlier one",
            soft_wrap=True,
        )
    if settle and data["known"] is None:
        return _settle(question | {"target": target}, data, db=db, as_json=as_json)
    if as_json:
        output.print_json(data)
    elif is_asked:
        _print_known(data)
    else:
        _print_best(data)
    written = _written(data["launch"], folder)
    if data["launch"] is not None and not as_json:
        if written:
            output.console().print("Written: " + ", ".join(written), soft_wrap=True)
        else:
            output.print_launch(data["launch"])
    return _status(data) if is_asked else 0


def _written(launch: dict[str, Any] | None, folder: Path | None) -> list[str]:
    """Writes the files of a launch, if that is asked for. Raises InputError where they cannot be written."""
    from autotune.files import whole_file

    if launch is None or folder is None:
        return []
    paths = [folder / name for name in launch["files"]]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, launch["files"].values(), strict=True):
            with whole_file(path, mode=0o777 if path.suffix == ".sh" else 0o666) as part:
                part.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError("--output", str(folder), f"a directory that can be written is needed ({reason})") from None
    return [str(path) for path in paths]


def _status(data: dict[str, Any]) -> int:
    if data["known"] or data["carried"] or data["tuning"]:
        return 0
    return MissingMeasurementError.exit_code if data["misses"] is None else NothingFitsError.exit_code


def _has_ended(row: dict[str, Any]) -> bool:
    from autotune.specs import TuningState

    return TuningState(row["state"]).ended


def _settle(question: dict[str, Any], data: dict[str, Any], *, db: str | None, as_json: bool) -> int:
    """A tuning that stops when little is expected to be gained: on a server's nodes, or on this machine."""
    from autotune.cli.tune import run_tuning, tune_there
    from autotune.knowledge.settling import SETTLE_GAIN, TRIALS
    from autotune.specs import Budget
    from autotune.tuning.request import submit, tuning_of
    from autotune.wiring import open_store, require_local

    there = asked_server(db) is not None
    inputs = None if there else Here(db).inputs(question)
    if inputs is not None:
        require_local(inputs.cluster)
    if data["settle"] is not None:
        probes, gpu_s = len(data["settle"]["probes"]), data["settle"]["gpu_s"]
        output.error_console().print(
            f"Settling it: about {gpu_s:.0f} GPU-seconds for {probes} probes and {TRIALS} trials (estimate)",
            soft_wrap=True,
        )
    budget = Budget(max_trials=2 * TRIALS, min_gain=SETTLE_GAIN)
    if inputs is None:
        return tune_there(question, {"budget": budget}, as_json=as_json)
    store = open_store(db)
    tuning = submit(store, tuning_of(inputs.model, inputs.cluster, inputs.workload, budget=budget))
    return run_tuning(store, tuning, as_json=as_json, db=db)


def _print_best(data: dict[str, Any]) -> None:
    """The best plan of a tuning with its evidence."""
    title = f"Best plan of tuning {data['tuning']}: {data['model']} on {data['cluster']}"
    found, second, where, seconds = data["best"], data["runner_up"], data["fingerprint"], output.seconds_text
    rows = {
        "plan": output.plan_text(found["plan"]),
        "tokens/s/GPU": output.speed_text(found),
        "step": seconds(found["step_time_s"]),
        "T_calc": seconds(found["t_calc_s"]),
        "T_comm": f"{seconds(found['t_comm_s'])}, {seconds(found['t_comm_exposed_s'])} exposed",
        "mu = T_comm / T_calc": output.count_text(found["mu"]),
        "peak memory of a rank": f"{output.bytes_text(found['peak_memory_bytes'])} ({found['memory_source']})",
        "repeats": str(found["repeats"]),
        "measured at": f"{output.moment_text(data['measured_at'], seconds=True)} UTC",
    }
    if where:
        rows["on"] = (
            f"{where['hostname']}, {where['device_count']} x {where['device_name']}, torch {where['torch']} "
            f"(fingerprint {data['fingerprint_key']})"
        )
    rows["runner-up"] = f"{output.plan_text(second['plan'])}: {output.speed_text(second)}" if second else "none"
    console = output.console()
    console.print(output.facts(title, "measured", rows))
    if not _has_ended(data):
        line = f"Tuning {data['tuning']} is still under way ({data['state']}): this is its best plan so far"
        console.print(line, soft_wrap=True)
    for line in [*filter(None, [found["preferred_because"]]), *found["why"]]:
        console.print(line, soft_wrap=True)
    output.print_findings(data.get("findings", []))
    print_frameworks(data)


def _print_known(data: dict[str, Any]) -> None:
    """The best-known plan for a question, or what is nearest to it and what that implies."""
    console, known = output.console(), data["known"]
    title = (
        f"{data['model']} on {data['cluster']} ({data['devices']} devices), {output.workload_text(data['workload'])}"
    )
    if known is None:
        console.print(f"Nothing is known of exactly {title}", soft_wrap=True)
        _print_near(data)
        return
    console.print(output.facts(f"Best known plan: {title}", "measured", _known_rows(known)))
    if data["stale"]:
        console.print("Stale: the environment has changed since it was measured:")
    for change in data["stale"]:
        line = f"  {change['name']}: {change['then'] or 'none'} then, {change['now'] or 'none'} now"
        console.print(line, soft_wrap=True)
    for other in data["others"]:
        console.print(
            f"Also known: {output.plan_text(other['plan'])}, {output.count_text(other['tokens_per_s_per_gpu'])} "
            f"tokens/s/GPU, {other['source']}, {other['measured_at'][:10]}",
            soft_wrap=True,
        )


def _known_rows(entry: dict[str, Any]) -> dict[str, str]:
    margin, second = entry["memory_margin"], entry["runner_up"]
    runner_up = "none was measured"
    if second is not None:
        close = "; too close to call" if second["too_close"] else ""
        speed = output.count_text(second["tokens_per_s_per_gpu"])
        runner_up = f"{output.plan_text(second['plan'])}: {speed} tokens/s/GPU{close}"
    return {
        "plan": output.plan_text(entry["plan"]),
        "tokens/s/GPU": output.speed_text(entry),
        "free memory of the worst rank": f"{margin:.0%}" if margin is not None else "not known",
        "runner-up": runner_up,
        "measured at": f"{output.moment_text(entry['measured_at'], seconds=True)} UTC",
        "source": entry["source"] + (f", tuning {entry['tuning_id']}" if entry["tuning_id"] else ""),
        "fingerprint": entry["fingerprint_key"] or "not known",
        **({"why this one": entry["reason"]} if entry["reason"] else {}),
        "entry": str(entry["id"]),
    }


def _print_near(data: dict[str, Any]) -> None:
    console, measured, carried, settle = output.console(), data["tuning"], data["carried"], data["settle"]
    if measured is not None:
        found = measured["best"]
        console.print(
            f"Tuning {measured['tuning']} ({measured['state']}) has measured it: {output.plan_text(found['plan'])}, "
            f"{output.speed_text(found, 'tokens/s/GPU ')}",
            soft_wrap=True,
        )
    if data["nearest"]:
        differs, distance = (lambda item: "; ".join(item["differs"])), (lambda item: f"{item['distance']:.2f}")
        columns = ("entry", "id"), ("<differs in", differs), ("tokens/s/GPU", "tokens_per_s_per_gpu")
        console.print(output.listing("Nearest known", data["nearest"], *columns, ("distance", distance)))
    else:
        console.print("Nothing near it is known either.")
    if carried is None:
        console.print(f"No estimate: {data['carried_why_not']}", soft_wrap=True)
        if data["misses"]:
            output.print_misses(data["misses"])
        return
    low, high = carried["interval"]
    console.print(
        f"Estimate (not measured): {output.plan_text(carried['plan'])}, "
        f"{output.count_text(carried['tokens_per_s_per_gpu'])} tokens/s/GPU "
        f"(90 % interval {output.count_text(low)} to {output.count_text(high)}), P(fits) {carried['p_fits']:.0%}",
        soft_wrap=True,
    )
    if settle is not None:
        console.print(
            f"To settle it: {len(settle['probes'])} probes and {settle['trials']} trials, about "
            f"{settle['gpu_s']:.0f} GPU-seconds (estimate): add --settle",
            soft_wrap=True,
        )


@app.command("list")
def known_list(
    model: Annotated[str | None, option("--model", "NAME", "Of this model only.")] = None,
    cluster: Annotated[str | None, option("--cluster", "NAME", "On this cluster only.")] = None,
    device: Annotated[str | None, option("--device", "GPU", "On this device only.")] = None,
    source: Annotated[str | None, option("--source", "SOURCE", "`measured`, or the name of an import.")] = None,
    history: Annotated[bool, option("--history", help="Entries that were superseded, too.")] = False,
    before: Annotated[
        int | None, option("--before", "ENTRY", min=1, max=options.MAX_ID, help="Entries older than this.")
    ] = None,
    limit: Annotated[int, option("--limit", min=1, max=1_000_000, help="Entries at most, newest first.")] = 50,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Best-known entries, newest first."""
    names = {"model": model, "cluster": cluster, "device": device, "source": source}
    with ask(db) as answers:
        entries = list(answers.known(limit=limit, before=before, history=history, **names))
    ended: tuple[output.Column, ...] = (("<superseded (UTC)", "superseded_at"),) if history else ()
    output.tell_list(
        "entries", entries, ("entry", "id"), ("<model", "model"), ("<cluster", "cluster"), ("seq", "workload.seq_len"),
        ("batch", "workload.global_batch"), ("<plan", "plan"), ("tokens/s/GPU", "tokens_per_s_per_gpu"),
        ("runs", "repeats"), ("<source", "source"), ("<measured (UTC)", "measured_at"), *ended,
        empty="Nothing is known yet: autotune tune", as_json=as_json,
    )  # fmt: skip


@app.command("compare")
def known_compare(
    one: EntryNumber, other: EntryNumber, db: options.Database = None, as_json: options.AsJson = False
) -> None:
    """Two entries of this machine's database side by side: what differs, and whether their intervals overlap."""
    from autotune.cli.database import open_to_read
    from autotune.knowledge.answer import entry_data
    from autotune.knowledge.nearness import compared

    if one == other:
        raise InputError("ENTRY", other, "name two different entries")
    if (server := asked_server(db)) is not None:
        raise InputError("--server", server, "`autotune known compare` works on this machine only")
    with open_to_read(db) as store:
        first, second = store.best_entry(one), store.best_entry(other)
        data: dict[str, Any] = compared(store, first, second)
    answer = {"one": entry_data(first), "other": entry_data(second), **data}
    columns = ("<what", "name"), (f"<entry {one}", "one"), (f"<entry {other}", "other")
    output.tell(answer, lambda: output.console().print(output.listing("", data["differs"], *columns)), as_json=as_json)
    if not as_json:
        output.console().print(data["verdict"], soft_wrap=True)
