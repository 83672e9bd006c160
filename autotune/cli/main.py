"""The command `autotune`: its commands, and the process edge where every error becomes one line.

Exit status: 0, or the error's `exit_code` (autotune.errors): 2 for input that cannot be used, 3 when no plan fits,
4 for a missing measurement, 5 for the database, 6 for the measuring side, 7 for the server, 1 for a tuning that
failed; 130 after Ctrl-C. With --json standard output holds exactly one object, the answer or {"error": {"what",
"value", "allowed", "message"}}; the line for people goes to standard error either way.

Importing this module loads typer and nothing heavy: commands import what they need when they run.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import (
    asking,
    backtest,
    best,
    catalog,
    check,
    database,
    findings,
    fleet,
    imports,
    nodes,
    output,
    plan,
    plans,
    probe,
    regress,
    trace,
    tune,
    tunings,
)
from autotune.errors import AutotuneError, InputError, NothingFitsError, masked
from autotune.shown import LogFormatter

app = typer.Typer(
    name="autotune",
    help="Finds, by measuring, the hybrid-parallel plan that trains a model fastest on a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TUNE, _PLAN, _RECORDS, _CATALOG = "Measure", "Estimate", "What was measured", "Inputs and storage"
_FLEET = "Fleet"

app.command("tune", rich_help_panel=_TUNE)(tune.tune)
probe.app.command("check")(check.check)
app.add_typer(probe.app, name="probe", rich_help_panel=_TUNE)
app.command("trace", rich_help_panel=_TUNE)(trace.trace)
app.command("plan", rich_help_panel=_PLAN)(plan.plan)
app.command("estimate", rich_help_panel=_PLAN)(plan.estimate)
app.command("check", rich_help_panel=_PLAN)(findings.check)
app.command("backtest", rich_help_panel=_RECORDS)(backtest.backtest)
app.command("best", rich_help_panel=_RECORDS)(best.best)
app.add_typer(best.app, name="known", rich_help_panel=_RECORDS)
app.add_typer(regress.app, name="regress", rich_help_panel=_RECORDS)
app.command("show", rich_help_panel=_RECORDS)(tunings.show)
app.command("history", rich_help_panel=_RECORDS)(tunings.history)
app.command("export", rich_help_panel=_RECORDS)(imports.export)
app.command("import", rich_help_panel=_RECORDS)(imports.import_files)
app.command("import-plan", rich_help_panel=_CATALOG)(plans.import_plan)
app.command("imports", rich_help_panel=_RECORDS)(imports.imports)
app.add_typer(catalog.clusters, name="cluster", rich_help_panel=_CATALOG)
app.add_typer(catalog.models, name="models", rich_help_panel=_CATALOG)
app.command("gpus", rich_help_panel=_CATALOG)(catalog.gpus)
app.command("schema", rich_help_panel=_CATALOG)(catalog.schema)
app.add_typer(database.app, name="db", rich_help_panel=_CATALOG)
app.command("serve", rich_help_panel=_FLEET)(fleet.serve)
app.command("worker", rich_help_panel=_FLEET)(fleet.worker)
app.command("beat", rich_help_panel=_FLEET)(fleet.beat)
app.add_typer(nodes.keys, name="keys", rich_help_panel=_FLEET)
app.command("cancel", rich_help_panel=_FLEET)(tunings.cancel)
app.add_typer(nodes.nodes, name="nodes", rich_help_panel=_FLEET)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"autotune {version('autotune')}\n")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Ask this server (http://HOST:PORT) instead of this machine: tune, show, history, best, plan, cancel, "
            "known list, nodes, cluster list, models list. Default: $AUTOTUNE_SERVER; the key is $AUTOTUNE_API_KEY.",
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Finds, by measuring, the hybrid-parallel plan that trains a model fastest on a cluster."""
    asking.use_server(server, context.invoked_subcommand or "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits. `arguments` are the process's own if None."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _prepare_streams()
    if logging.lastResort is not None:  # what prints warnings where no log was set up
        logging.lastResort.setFormatter(LogFormatter())
    sys.exit(_run(arguments))


def _prepare_streams() -> None:
    """Makes both outputs take any text: a closed one (`>&-`) swallows it, a narrow encoding gets escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open to the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


# What typer raises for a wrong command line. The class has moved between its releases, its place above BadParameter
# has not.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    try:
        result = app(list(arguments), prog_name="autotune", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except AutotuneError as error:
        return _report(error, as_json=as_json)
    except _UsageError as error:
        return _report_usage(error, arguments, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        output.print_error("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`autotune history | head`): not an error of ours.
        _give_up_output()
        return 1
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
            raise
        _give_up_output()
        output.print_error(f"the output cannot be written: {error.strerror}")
        return 1


def _give_up_output() -> None:
    """Python would complain once more when it flushes standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: AutotuneError, *, as_json: bool) -> int:
    if as_json:
        output.print_json(output.error_data(error))
    output.print_error(str(error))
    if isinstance(error, NothingFitsError) and not as_json:
        output.print_misses(error.misses)
    return error.exit_code


def _report_usage(error: Exception, arguments: Sequence[str], *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "autotune"
    message = masked(str(getattr(error, "format_message", error.__str__)()))
    if not message:  # a group without a command: typer has printed its help
        return InputError.exit_code
    if as_json:
        option = next(iter(getattr(getattr(error, "param", None), "opts", ())), None)
        value = None if option is None else _given(option, arguments)
        allowed = None if value is None else str(getattr(error, "message", "")) or None
        found = {"what": option or command, "value": value, "allowed": allowed, "message": message}
        output.print_json({"error": {name: text and masked(text) for name, text in found.items()}})
    output.print_error(f"{command}: {message} (see {command} --help)")
    return InputError.exit_code


def _given(option: str, arguments: Sequence[str]) -> str | None:
    """What a command line gives an option last; None where it does not."""
    found = None
    for name, following in zip(arguments, [*arguments[1:], None], strict=True):
        if name == option:
            found = following
        elif name.startswith(f"{option}="):
            found = name.removeprefix(f"{option}=")
    return found
