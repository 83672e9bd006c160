"""What is printed: one JSON object on standard output with --json, else rich tables; errors as one line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, InputError, NothingFitsError, masked
from autotune.files import whole_file
from autotune.shown import shown

PIPE_WIDTH = 160

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from autotune.specs import Spec

    Row = Mapping[str, Any]
    Column = tuple[str, str | Callable[[Any], str]]


def print_json(data: object) -> None:
    """Prints one JSON document. Numbers that are not finite are a bug and raise ValueError."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def tell(data: object, people: str | Callable[[], None], *, as_json: bool) -> None:
    """An answer: as JSON, or as the sentence for people, or as what prints it for them."""
    if as_json:
        print_json(data)
    elif isinstance(people, str):
        console().print(people, soft_wrap=True)
    else:
        people()


def tell_list(name: str, rows: Sequence[Row], *columns: Column, empty: str, as_json: bool, title: str = "") -> None:
    """A list: as JSON, an object with the list under its name, or as a table; `empty` says what would fill it."""
    if as_json:
        print_json({name: rows})
    else:
        console().print(listing(title, rows, *columns) if rows else empty)


def print_spec(spec: Spec, *, as_json: bool) -> None:
    """A record as the YAML of our files, or as JSON."""
    if as_json:
        print_json(spec.to_data())
    else:
        sys.stdout.write(spec.to_yaml())


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all (a device or pipe as it comes). Raises InputError if that cannot be done."""
    text = text if text.endswith("\n") else text + "\n"
    target = Path(os.path.realpath(path))  # a link is followed, not replaced
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            target.write_text(text, encoding="utf-8")
            return
        with whole_file(target) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), error.strerror or type(error).__name__, "a file that can be written") from None


def console() -> Console:
    """Standard output for people: as wide as the terminal, or wide enough for our tables in a file or pipe.

    Without markup: names and messages come from users, and brackets in them are theirs.
    """
    return _console(stderr=False)


def error_console() -> Console:
    """Standard error for people: progress and errors, so that standard output holds only the answer."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class ShownConsole(Console):
        """Neutralises what a terminal obeys in names and messages; rich's own controls and styles are kept apart."""

        def render_str(self, text: str, **how: Any) -> Text:
            """As text of which the width is known, so that a table holds all of it."""
            return super().render_str(shown(text), **how)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """What did not come as a string."""
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else shown(text), style, control)

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else PIPE_WIDTH
    return ShownConsole(stderr=stderr, markup=False, highlight=False, width=width)


def table(title: str, *columns: str) -> Table:
    """A plain table; a column whose name starts with `<` is left-aligned (text), others right (numbers)."""
    from rich import box
    from rich.table import Table

    result = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column.startswith("<")
        result.add_column(column.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    return result


def listing(title: str, rows: Iterable[Row], *columns: Column) -> Table:
    """A table of rows given as plain data.

    Args:
        title: above it, if not empty.
        rows: an item a row.
        columns: the heading (`table`) and where its value stands in a row: a name, a path such as `estimate.mfu`, or
            what makes the text.
    """
    result = table(title, *(heading for heading, _ in columns))
    for row in rows:
        result.add_row(*(_at(row, place) if isinstance(place, str) else place(row) for _, place in columns))
    return result


def print_cells(rows: Iterable[Mapping[str, str]], empty: str, *, numbers: Collection[str]) -> None:
    """A table of rows that name their own columns, of which those in `numbers` are numbers; `empty` without a row."""
    found = list(rows)
    result = table("", *(name if name in numbers else f"<{name}" for name in (found[0] if found else ())))
    for row in found:
        result.add_row(*row.values())
    console().print(result if found else empty)


def facts(title: str, column: str, rows: Mapping[str, str]) -> Table:
    """A table of names and what is said of each."""
    result = table(title, "<what", f"<{column}")
    for row in rows.items():
        result.add_row(*row)
    return result


def _at(row: Row, path: str) -> str:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else value.get(name)
    return value_text(path.rpartition(".")[2], value)


def value_text(name: str, value: Any) -> str:
    """A value of an answer for people: the unit stands in its name."""
    if value is None or value == "":
        return "-"
    if isinstance(value, (str, bool)):
        yes_or_no = ("yes" if value else "no") if isinstance(value, bool) else value
        return moment_text(yes_or_no) if name.endswith("_at") else yes_or_no
    if isinstance(value, list):
        return " - ".join(count_text(item) for item in value)
    if name == "plan":
        return plan_text(value)
    for ending, text in _TEXTS.items():
        if name.endswith(ending):
            return text(value)
    return str(value) if isinstance(value, int) else count_text(value)


def error_data(error: AutotuneError) -> dict[str, Any]:
    """The object that --json prints for an error: `message` always, the rest where the error has it."""
    data: dict[str, Any] = {"what": None, "value": None, "allowed": None, "message": masked(str(error))}
    if isinstance(error, InputError):
        plain = error.value is None or isinstance(error.value, (str, int, float, bool))
        value = error.value if plain else repr(error.value)
        value = masked(value) if isinstance(value, str) else value
        data |= {"what": error.what, "value": value, "allowed": error.allowed}
    if isinstance(error, NothingFitsError):
        data["misses"] = error.misses
    return {"error": data}


def print_error(message: str) -> None:
    """One line on standard error, without passwords."""
    sys.stderr.write(shown("error: " + " ".join(masked(message).split()), one_line=True) + "\n")


def print_misses(misses: Sequence[Row]) -> None:
    """Plans that nearly fit and what would make each fit, on standard error."""
    columns = (("<plan", lambda miss: miss["plan"]), ("needs", "needs_bytes"), ("has", "has_bytes"))
    error_console().print(listing("Nearest misses (estimates)", misses, *columns, ("<would fit if", "would_fit_if")))


def plan_text(plan: dict[str, Any]) -> str:
    """The short name of a plan given as plain data."""
    from autotune.specs import Plan

    return Plan.from_data(plan).key


def bytes_text(count: float | None) -> str:
    """Bytes for people: 512 B, 1.5 GiB, 151 GiB."""
    if count is None:
        return "-"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        value = count / 1024**power
        if value >= 1:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def rate_text(bytes_per_s: float | None) -> str:
    """Decimal bytes a second, as vendors count bandwidth: 1.5 GB/s."""
    if bytes_per_s is None:
        return "-"
    for size, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def seconds_text(seconds: float | None) -> str:
    """Seconds for people: 1.23 s, 4.56 ms, 7.8 us."""
    if seconds is None:
        return "-"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def count_text(value: float | None) -> str:
    """A number with thousands separators and at least three digits that count."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def runs_text(count: int) -> str:
    """How often a plan was measured: 1 run, 3 runs."""
    return "1 run" if count == 1 else f"{count} runs"


def percent_text(share: float | None) -> str:
    """A share as per cent."""
    return "-" if share is None else f"{share:.1%}"


_TEXTS: dict[str, Callable[[Any], str]] = {
    "gpu_s": lambda value: f"{value:.0f}",
    "gpu_s_spent": lambda value: f"{value:.0f}",
    "bytes_per_s": rate_text,
    "bytes": bytes_text,
    "per_s": count_text,
    "_s": seconds_text,
    "mfu": percent_text,
    "p_fits": percent_text,
}


def speed_text(figures: Mapping[str, Any], unit: str = "") -> str:
    """A measured speed with its interval and how often it was measured; `unit` where nothing else says what it is."""
    low, high = (count_text(value) for value in figures["interval"])
    runs = runs_text(figures["repeats"])
    return f"{count_text(figures['tokens_per_s_per_gpu'])} {unit}(95 % interval {low} to {high}, {runs})"


def workload_text(workload: Mapping[str, Any]) -> str:
    """A workload given as plain data."""
    framework = workload.get("framework", "torch")
    said = "" if framework == "torch" else f", {framework}"
    return f"sequence {workload['seq_len']}, {workload['global_batch']} sequences a step, {workload['dtype']}{said}"


def print_findings(found: Sequence[Mapping[str, Any]]) -> None:
    """Findings of a plan (explain.findings as plain data), a line each."""
    for each in found:
        where = f" ({each['where']})" if each["where"] else ""
        line = f"{each['severity']} {each['rule']}{where}: {each['text']}. Remedy: {each['remedy']}"
        console().print(line, soft_wrap=True, markup=False)


def moment_text(moment: str, *, seconds: bool = False) -> str:
    """A moment of an answer for people, to the minute or the second."""
    return moment[: 19 if seconds else 16].replace("T", " ")


def print_launch(launch: Mapping[str, Any]) -> None:
    """The command of launch arguments (frameworks.LaunchArguments as plain data), its file, and what is left to do.

    A server of an older release names no version, variables or placeholders.
    """
    import shlex

    # The launcher's variables must reach the shell unquoted by single quotes.
    command = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in launch["argv"])
    setting = "".join(f"{name}={shlex.quote(value)} " for name, value in launch.get("environment", {}).items())
    lines = [f"Launch with {launch['target']} {launch.get('version', '')}".rstrip() + ":", setting + command]
    if launch["config"]:
        lines += [f"with {launch['config_name']}:", launch["config"]]
    lines += [f"yours: {each['name']}: {each['about']}" for each in launch.get("placeholders", ())]
    lines += [f"note: {note}" for note in launch["notes"]]
    sys.stdout.write(shown("\n".join(lines)) + "\n")
