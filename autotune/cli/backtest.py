"""`autotune backtest`: what our search would have done on runs that were already made."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options, output
from autotune.cli.options import option

if TYPE_CHECKING:
    from autotune.backtest.runs import Clusters
    from autotune.search.residual import Learning
    from autotune.specs import ClusterSpec

_KNOWN = ("framework", "readings")
_WHICH, _HOW = "Which runs", "How to replay"


def backtest(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS.csv", help="Published runs, or `autotune export --table runs`.")
    ],
    source: Annotated[
        list[str] | None, option("--source", help="Only runs of this source (repeatable).", panel=_WHICH)
    ] = None,
    group: Annotated[list[str] | None, option("--group", help="Only this group (repeatable).", panel=_WHICH)] = None,
    min_ok: Annotated[
        int, option("--min-ok", min=1, help="Only groups with so many successful plans.", panel=_WHICH)
    ] = 1,
    skip_bad: Annotated[bool, option("--skip-bad", help="List bad rows and go on without them.", panel=_WHICH)] = False,
    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "CLUSTER",
            "Describes the device of own runs that the catalog does not know: a file or a stored name.",
            panel=_WHICH,
        ),
    ] = None,
    sampler: Annotated[str, option("--sampler", metavar="plan|tpe|gp|random|grid|rule", panel=_HOW)] = "plan",
    calibration: Annotated[
        str,
        option(
            "--calibration",
            "none|told|history",
            "What may be learned: nothing, what the search was told, or other groups' runs too.",
            panel=_HOW,
        ),
    ] = "told",
    train_gpus: Annotated[
        int | None,
        option(
            "--train-gpus",
            "N",
            min=1,
            help="Learn from groups of the same model at or under N GPUs, judge the larger ones.",
            panel=_HOW,
        ),
    ] = None,
    told_trials: Annotated[
        int, option("--told-trials", min=0, help="Judge the estimate after so many trials.", panel=_HOW)
    ] = 3,
    without: Annotated[
        list[str] | None,
        option(
            "--without",
            "calibration|residual|p-fits|framework|readings",
            "Switch off a part of our learning, or leave the search without the framework's name or the collective "
            "readings, to see what it is worth (repeatable).",
            panel=_HOW,
        ),
    ] = None,
    max_trials: Annotated[int | None, option("--max-trials", min=1, help="Trials a group at most.", panel=_HOW)] = None,
    repeat: Annotated[int, option("--repeat", min=1, help="Searches a group, each with its own seed.", panel=_HOW)] = 1,
    seed: Annotated[int, option("--seed", min=0, max=2**31 - 1, help="Seed of the first search.", panel=_HOW)] = 0,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay published or own runs: how soon does the search find the best plan, and how right is the estimate?

    A run's result is revealed only when the search asks for its plan. docs/backtest.md describes the file and defines
    every figure.
    """
    from autotune.backtest.groups import group_runs
    from autotune.backtest.report import BacktestSettings, Calibration, report_data
    from autotune.backtest.report import backtest as replay
    from autotune.backtest.runs import read_runs
    from autotune.search.sampler import SamplerName

    settings = BacktestSettings(
        sampler=SamplerName(_word("--sampler", sampler, [item.value for item in SamplerName])),
        calibration=Calibration(
            "history"
            if train_gpus is not None
            else _word("--calibration", calibration, [item.value for item in Calibration])
        ),
        told_trials=told_trials,
        max_trials=max_trials,
        repeat=repeat,
        seed=seed,
        train_gpus=train_gpus,
        learning=_learning([word for word in without or [] if word not in _KNOWN]),
        told="framework" not in (without or []),
        read="readings" not in (without or []),
    )
    found, skipped = read_runs(
        runs, clusters_of(cluster, db), sources=source or (), groups=group or (), skip_bad=skip_bad
    )
    groups, more = group_runs(found, min_ok=min_ok, skip_bad=skip_bad)
    with output.error_console().status("") as status:
        reports = replay(groups, settings, lambda done, total, name: status.update(f"{done}/{total} {name}"))
    data = report_data(reports, [*skipped, *more], settings)
    if as_json:
        output.print_json(data)
    else:
        _print(data)


def _word(option: str, value: str, allowed: list[str]) -> str:
    from autotune.errors import InputError

    if value not in allowed:
        raise InputError(option, value, "give one of " + ", ".join(allowed))
    return value


def _learning(without: list[str]) -> Learning:
    from autotune.search.residual import Learning

    parts = {field.name.replace("_", "-"): field.name for field in fields(Learning)}
    return Learning(**{parts[_word("--without", word, [*parts, *_KNOWN])]: False for word in without})


def clusters_of(ref: str | None, db: str | None) -> Clusters:
    """The catalog's clusters, and the user's own for the device that it describes."""
    from autotune.catalog.published import published_cluster
    from autotune.cli.inputs import read_cluster

    own = read_cluster(ref, db) if ref is not None else None

    def find(gpu: str, memory_gb: float | None, num_gpus: int, gpus_per_node: int) -> ClusterSpec:
        if own is None or own.device.name != gpu:
            return published_cluster(gpu, memory_gb, num_gpus, gpus_per_node)
        local = min(num_gpus, gpus_per_node)
        return own.model_validate({**dict(own), "nodes": num_gpus // local, "gpus_per_node": local})

    return find


def _print(data: dict[str, Any]) -> None:
    columns = ("plans", "ok", "to 95 %", "to 98 %", "first pick", "<status", "regret 1", "regret 3", "Kendall", "MAPE",
               "coverage", "mem. MAPE", "OOM recall", "false alarm")  # fmt: skip
    settings = data["settings"]
    title = f"Sampler {settings['sampler']}, calibration {settings['calibration']}"
    off = [name.replace("_", "-") for name, on in settings["learning"].items() if not on]
    off += [name for name, key in (("framework", "told"), ("readings", "read")) if not settings[key]]
    if off:
        title += ", without " + " and ".join(off)
    table = output.table(title, "<group", *columns)
    for row in data["groups"]:
        table.add_row(*_cells(row))
    table.add_section()
    table.add_row(*_cells({**data["summary"], "group": f"mean of {len(data['groups'])}"}))
    console = output.console()
    console.print(table)
    modes = output.table("The estimate by what it was calibrated on (means over groups)", "<calibration", *columns[6:])
    for name, row in data["modes"].items():
        modes.add_row(name, *_accuracy(row))
    console.print(modes)
    for item in data["skipped"]:
        console.print(f"skipped: {item['reason']}", markup=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    status = row["first_status"]
    return [
        row["group"],
        f"{row['plans']:.4g}",
        f"{row['ok']:.4g}",
        f"{row['trials_to_95']:.3g}",
        f"{row['trials_to_98']:.3g}",
        output.percent_text(row["first_pick"]),
        status if isinstance(status, str) else f"{status:.0%} ok",
        *_accuracy(row),
    ]


def _accuracy(row: dict[str, Any]) -> list[str]:
    def share(name: str) -> str:
        return output.percent_text(row[name])

    kendall = "-" if row["kendall"] is None else f"{row['kendall']:.2f}"
    return [share("regret_top1"), share("regret_top3"), kendall, share("mape"), share("coverage"), share("mem_mape"),
            share("oom_recall"), share("oom_false_alarm")]  # fmt: skip
