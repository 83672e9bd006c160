"""`autotune import-plan`: a launch of a training framework as a model, a workload and a plan of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output
from autotune.cli.options import option
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.frameworks import ImportedPlan

_UNSTATED = "What the file does not state itself"


def import_plan(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A launch script, command line or config; - is standard input.")
    ],
    framework: Annotated[
        str, option("--framework", "NAME[@VERSION]", "Whose words they are. Default version: the newest covered.")
    ],
    model: Annotated[
        str | None, option("--model", "MODEL", "What is trained, where the file has no shape.", panel=_UNSTATED)
    ] = None,
    devices: Annotated[
        int | None, option("--devices", "N", "Devices of the whole run.", min=1, panel=_UNSTATED)
    ] = None,
    seq_len: Annotated[int | None, option("--seq-len", min=1, panel=_UNSTATED)] = None,
    global_batch: Annotated[int | None, option("--global-batch", min=1, panel=_UNSTATED)] = None,
    dtype: Annotated[str | None, option("--dtype", metavar="DTYPE", panel=_UNSTATED)] = None,
    variables: Annotated[
        list[str] | None,
        option("--set", "NAME=VALUE", "A variable that a script expects from its environment.", panel=_UNSTATED),
    ] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Read a launch of a training framework: its model, workload and plan, and by name what these do not say.

    Nothing of the file is run.
    """
    from autotune.cli.inputs import read_model
    from autotune.frameworks import Given
    from autotune.frameworks import import_plan as imported

    facts = {"seq_len": seq_len, "global_batch": global_batch, "dtype": dtype}
    given = Given(
        model=None if model is None else read_model(model, db),
        devices=devices,
        facts={name: value for name, value in facts.items() if value is not None},
        variables=dict(map(read_variable, variables or [])),
    )
    found = imported(framework, file, read_file(file), given, beside(file))
    output.tell(found.to_data(), lambda: _print(found), as_json=as_json)


def read_variable(text: str) -> tuple[str, str]:
    """A NAME=VALUE of --set. Raises InputError."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InputError("--set", text, "NAME=VALUE")
    return name, value


def read_file(file: str) -> str:
    """The text of a file, or of standard input. Raises InputError for what is no text or too long."""
    from autotune.specs.documents import LONGEST_BYTES, read_text

    if file != "-":
        return read_text(file)
    content = sys.stdin.buffer.read(LONGEST_BYTES + 1)
    if len(content) > LONGEST_BYTES:
        raise InputError("standard input", "a long text", f"at most {LONGEST_BYTES} bytes are needed")
    try:
        return content.decode("utf-8-sig")
    except ValueError:
        raise InputError("standard input", "bytes", "text in UTF-8 is needed") from None


def beside(file: str) -> Callable[[str], str]:
    """Reads what the launch names: from its own folder, or from here where it came from standard input."""
    from autotune.specs.documents import read_text

    folder = Path.cwd() if file == "-" else Path(file).parent
    return lambda name: read_text(str(folder / name))


def _print(found: ImportedPlan) -> None:
    from autotune.cost.parameters import total_parameters
    from autotune.frameworks import plan_text

    nodes = "" if found.gpus_per_node is None else f", {found.gpus_per_node} a node"
    rows = {
        "model": f"{found.model.name}, {output.count_text(total_parameters(found.model))} parameters",
        "devices": f"{found.devices}{nodes}",
        "workload": output.workload_text(found.workload.to_data()),
        "plan": plan_text(found.plan),
    }
    console = output.console()
    console.print(output.facts(f"{found.file}: {found.framework} {found.version}", "read", rows))
    for line in found.assumed:
        console.print(f"assumed: {line}", soft_wrap=True)
    for each in found.remainder:
        where = f" ({each.where})" if each.where else ""
        what = each.what or "not known here"
        console.print(f"not in the plan: {each.name} {each.value}{where}: {what}", soft_wrap=True)
    if found.exact:
        console.print("The plan says all of it.")
