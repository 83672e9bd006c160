"""`autotune show`, `history` and `cancel`: tunings, of this machine or of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from autotune.cli import options, output
from autotune.cli.asking import ask
from autotune.cli.options import option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_WHAT_IFS = 3
MIN_GAIN = 0.01


def show(tuning: options.TuningId, db: options.Database = None, as_json: options.AsJson = False) -> None:
    """One tuning: its request, where it stands, and every trial, measured beside estimated."""
    with ask(db) as answers:
        data = answers.tuning(tuning)
    output.tell(data, lambda: print_tuning(data), as_json=as_json)


def history(
    limit: Annotated[int, option("--limit", min=1, max=1_000_000, help="Tunings at most, newest first.")] = 20,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """The newest tunings and the best plan of each."""
    with ask(db) as answers:
        rows = list(answers.tunings(limit=limit))
    output.tell_list(
        "tunings", rows, ("<tuning", "tuning"), ("<created (UTC)", "created_at"), ("<model", "model"),
        ("<cluster", "cluster"), ("<state", _state), ("trials", "trials"), ("GPU-s", "gpu_s_spent"),
        ("<best plan", "plan"), ("tokens/s/GPU", "tokens_per_s_per_gpu"),
        empty="Nothing was tuned yet: autotune tune", as_json=as_json,
    )  # fmt: skip


def _state(row: output.Row) -> str:
    return f"{row['state']}, number {row['place']}" if row["place"] else str(row["state"])


def cancel(
    tuning: options.TuningId,
    force: Annotated[bool, option("--force", help="Whoever else wants it; needs the role admin.")] = False,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Take back a request for a tuning. A server's nodes are free within seconds, unless somebody else wants it too."""
    with ask(db) as answers:
        data = answers.cancel(tuning, force=force)
    still = "" if data["state"] == "cancelled" else ": somebody else wants it still (--force of an admin ends it)"
    output.tell(data, f"Tuning {data['tuning']} is {data['state']}{still}", as_json=as_json)


def print_tuning(data: dict[str, Any], *, rows: int | None = None, again: str = "") -> None:
    """A tuning: its trials, where it stands, its best plan and why that is the best.

    Args:
        data: as an API tells it.
        rows: trials to print, the fastest; None prints all.
        again: the command that measures the best plan once more.
    """
    console, asked = output.console(), data["request"]
    if data["trials"]:
        console.print(trial_table(data["trials"], rows))
    if rows is not None and len(data["trials"]) > rows:
        console.print(f"(+{len(data['trials']) - rows} more: autotune show {data['tuning']})")
    workload, cluster = asked["workload"], asked["cluster"]
    where = data["stop_reason"] or asked["message"] or _where(data["place"])
    devices = cluster["nodes"] * cluster["gpus_per_node"]
    console.print(
        f"Tuning {data['tuning']} of {asked['model']['name']} on {cluster['name']} is {data['state']}: "
        f"{where}. {data['gpu_s_spent']:.0f} GPU-seconds spent.\n"
        f"  {devices} devices, {output.workload_text(workload)}; sampler {data['sampler']}; "
        f"asked for {output.moment_text(asked['created_at'])} UTC",
        soft_wrap=True,
    )
    best = data["best"]
    if best is None:
        return
    seconds = output.seconds_text
    console.print(f"\nBest plan: {output.plan_text(best['plan'])}", style="bold")
    console.print(
        f"  {output.speed_text(best, 'tokens/s/GPU ')}, step {seconds(best['step_time_s'])}: "
        f"T_calc {seconds(best['t_calc_s'])}, T_comm {seconds(best['t_comm_s'])} "
        f"({seconds(best['t_comm_exposed_s'])} exposed), mu {output.count_text(best['mu'])}, "
        f"peak memory {output.bytes_text(best['peak_memory_bytes'])} ({best['memory_source']})",
        soft_wrap=True,
    )
    print_best_reasons(console, data)
    output.print_findings(data.get("findings", []))
    console.print()
    if again:
        console.print(f"Measure it again:  {again}", soft_wrap=True)
    if not workload["command"]:
        print_frameworks(data)


def print_frameworks(data: dict[str, Any]) -> None:
    """Which frameworks run the best plan; else why not, and the best of the others that they run. With the command."""
    found, console = data.get("frameworks", []), output.console()
    if not found:
        return
    measured = "tuning" in data
    ask = f"autotune best --tuning {data['tuning']} --for" if measured else "--for"
    runs = [each["target"] for each in found if each["reason"] is None]
    if runs and measured:
        console.print(f"Runs in {', '.join(runs)}: {ask} {runs[0].partition('@')[0]}", soft_wrap=True)
    elif len(found) > 1:
        console.print(f"The first runs in {', '.join(runs) or 'none of these'}; --for NAME ranks what one of them runs")
    if measured and not any(each["plan"] for each in found):
        console.print("No framework here runs a plan that was measured: add --for NAME to autotune tune")
    for each in found:
        if each["reason"] is None:
            continue
        name, instead = each["target"].partition("@")[0], ""
        if each["plan"] is not None:
            speed = output.count_text(each["tokens_per_s_per_gpu"])
            instead = f"; the fastest measured that it runs: {output.plan_text(each['plan'])}, {speed} tokens/s/GPU"
            instead += f" ({ask} {name})" if not runs else ""
        console.print(f"Not in {each['target']}: {each['reason']}{instead}", soft_wrap=True)


def _where(place: int | None) -> str:
    from autotune.tuning.report import queue_text

    return queue_text(place) if place else "under way"


def trial_table(trials: list[dict[str, Any]], rows: int | None = None) -> Table:
    """Trials, measured beside estimated: the fastest first, then what was stopped early, what failed last."""
    return output.listing(
        "Trials (measured | estimated)", sorted(trials, key=_order)[:rows], ("#", "number"), ("<plan", "plan"),
        ("<state", lambda row: row["failure"]["kind"] if row["failure"] else row["state"]),
        ("tokens/s/GPU", "tokens_per_s_per_gpu"), ("est.", "estimate.tokens_per_s_per_gpu"),
        ("step", "step_time_s"), ("est.", "estimate.step_time_s"), ("T_calc", "t_calc_s"), ("T_comm", "t_comm_s"),
        ("exposed", "t_comm_exposed_s"), ("mu", "mu"), ("peak mem", "peak_allocated_bytes"),
        ("est.", "estimate.peak_memory_bytes"),
    )  # fmt: skip


def _order(row: output.Row) -> tuple[int, float]:
    return {"complete": 0, "pruned": 1}.get(row["state"], 2), -(row["tokens_per_s_per_gpu"] or 0.0)


def print_best_reasons(console: Console, data: dict[str, Any]) -> None:
    """Of a tuning's answer: how sure the choice is, and its explanation."""
    best = data["best"]
    for plan in best["too_close_to_call"]:
        console.print(f"  too close to call against {output.plan_text(plan)}: the repeats cannot tell them apart")
    if best["preferred_because"]:
        console.print(f"  {best['preferred_because']}", soft_wrap=True)
    print_explanation(console, data["explanation"])


def print_explanation(console: Console, data: dict[str, Any]) -> None:
    """Limits, losses and the changes that would help most, a line each."""
    helpful = [item["text"] for item in data["what_ifs"] if item["gain"] >= MIN_GAIN][:MAX_WHAT_IFS]
    for title, lines in (
        ("What limits it:", [item["text"] for item in data["limits"]]),
        ("Against other plans:", [item["text"] for item in data["losses"]]),
        ("What would help the best plan most, one change at a time:", helpful),
    ):
        for line in [title, *(f"  {line}" for line in lines)] if lines else []:
            console.print(line, soft_wrap=True)
