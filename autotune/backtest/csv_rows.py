"""A row of a runs file: its cells with their line and column, so that every complaint names both."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from autotune.errors import InputError
from autotune.shown import of_cell
from autotune.specs.model import MOST

REQUIRED = (
    "source", "group", "layers", "hidden", "heads", "ffn", "seq_len", "gpu", "gpus_per_node", "num_gpus",
    "tp", "pp", "dp", "micro_batch", "global_batch", "status",
)  # fmt: skip
"""Columns that a file must have. Their cells must not be empty either."""

EITHER = ("tokens_per_s_per_gpu", "iter_time_s")
"""A file must have one of these; each successful run must have a value in one."""


MAX_LINE = 1 << 20
MAX_ROWS = 50_000
"""Of a file that is held in memory, at some KiB a row. More than anybody has run."""


@dataclass(frozen=True, slots=True)
class CsvRow:
    """The cells of one row.

    Args:
        where: the file and line, for complaints.
        values: text by column; an empty or missing cell is unknown.
    """

    where: str
    values: Mapping[str, str]

    def bad(self, column: str, allowed: str) -> InputError:
        """The error for a cell."""
        return InputError(f"{self.where}, column {column}", self.values.get(column, ""), allowed)

    def text(self, column: str, default: str | None = None) -> str:
        """The text of a cell. Raises InputError where it is empty and there is no default."""
        value = self.values.get(column, "")
        if value:
            return value
        if default is None:
            raise self.bad(column, "must not be empty")
        return default

    def figure(self, column: str) -> float | None:
        """A number of at least zero; None where the cell is empty."""
        text = self.values.get(column, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise self.bad(column, "must be a number") from None
        if not math.isfinite(value) or value < 0:
            raise self.bad(column, "must be a finite number of at least 0")
        return value

    def positive(self, column: str) -> float | None:
        """A number above zero; None where the cell is empty."""
        value = self.figure(column)
        if value == 0:
            raise self.bad(column, "must be above 0 (leave it empty if unknown)")
        return value

    def count(self, column: str, default: int | None = None, *, most: int = MOST) -> int:
        """A whole number from 1 to `most` ("8" and "8.0" alike)."""
        value = self.figure(column)
        if value is None:
            if default is None:
                raise self.bad(column, "must not be empty")
            return default
        if value != int(value) or value < 1:
            raise self.bad(column, "must be a whole number of at least 1")
        if value > most:
            raise self.bad(column, f"must be at most {most}")
        return int(value)

    def truth(self, column: str) -> bool:
        """True or False; an empty cell is False."""
        text = self.values.get(column, "").lower()
        if text not in {"", "true", "false", "1", "0"}:
            raise self.bad(column, "must be True or False")
        return text in {"true", "1"}


def read_csv_rows(path: Path, *, most: float = MAX_ROWS) -> Iterator[CsvRow]:
    """The rows of a CSV file, one at a time.

    Raises:
        InputError: a file that cannot be read, without rows, with more than `most`, or without a column that is needed.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _rows(path, csv.DictReader(short_lines(path, file), strict=True), most)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), type(error).__name__, "a readable CSV file is needed") from None
    except csv.Error as error:
        raise InputError(str(path), "text", f"a CSV file is needed ({error})") from None


def short_lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a CSV file with their ends. Raises InputError for one longer than any row."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise InputError(str(path), "a longer line", f"at most {MAX_LINE >> 20} MiB a line")
        yield line


def _rows(path: Path, reader: csv.DictReader[str], most: float) -> Iterator[CsvRow]:
    columns = reader.fieldnames or ()
    missing = [name for name in REQUIRED if name not in columns]
    if not set(EITHER) & set(columns):
        missing.append(" or ".join(EITHER))
    if missing:
        raise InputError(f"{path}, row 1", ",".join(columns), "columns are missing: " + ", ".join(missing))
    empty = True
    for number, row in enumerate(reader):
        empty = False
        if number == most:
            raise InputError(str(path), "more rows", f"at most {most:,} rows a file: divide it")
        yield CsvRow(
            f"{path}, row {reader.line_num}", {key: of_cell((value or "").strip()) for key, value in row.items() if key}
        )
    if empty:
        raise InputError(str(path), "no rows", "at least one run is needed")
