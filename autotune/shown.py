"""What of a text from elsewhere reaches a terminal, a log or a name: nothing that a terminal obeys or that hides.

A name with U+009B in it moves the cursor of whoever lists it, one with U+202E turns the rest of the line around, and
a line feed in a logged text begins what looks like another line of the log.
"""

from __future__ import annotations

import logging
import re

from autotune.errors import InputError, masked, printable

HIDDEN = r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
"""Inside a regular expression's brackets, of any dialect: the controls C0, DEL and C1; line and paragraph separators;
what changes the direction of writing or has no width."""

PLAIN = f"^[^{HIDDEN}]+$"
NAME_RULE = "text without control characters, line breaks, and marks of direction or without width"
_HIDDEN, _BREAKS = re.compile(f"[{HIDDEN}]"), re.compile("([\t\n])")


def is_plain(text: str) -> bool:
    """Whether every character of a name is seen as what it is."""
    return _HIDDEN.search(text) is None


def require_plain(what: str, text: str) -> None:
    """Raises InputError for a text that is not plain."""
    if not is_plain(text):
        raise InputError(what, text, NAME_RULE)


def shown(text: str, *, one_line: bool = False) -> str:
    r"""The text as it may be printed: U+009B as \x9b. Tabs and line feeds stay, unless it is to be one line."""
    if one_line:
        return printable(text)
    return "".join(part if part in {"\t", "\n"} else printable(part) for part in _BREAKS.split(text))


_MARKUP = re.compile(r"[\\`*_\[\]<>&!|~#$]|:(?=//)|(?<=www)\.", re.IGNORECASE)
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff0b\uff0d\uff1d\uff20]")


def as_markdown(text: str) -> str:
    """One line of text in Markdown: no link, image, HTML, emphasis or cell of a table comes of what is in it.

    It is not to be the first of its line, where a dash or a number would begin a list.
    """
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def as_cell(text: str) -> str:
    """A text in a CSV file. One that a spreadsheet would compute gets an apostrophe (OWASP: CSV injection)."""
    return f"'{text}" if _FORMULA.match(text) else text


def of_cell(cell: str) -> str:
    """The text of such a cell."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell, 1) else cell


class LogFormatter(logging.Formatter):
    """One line a message, whatever is in it; below it the traceback, if there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        return shown(super().formatMessage(record), one_line=True)

    def format(self, record: logging.LogRecord) -> str:
        """The line and the traceback, without passwords."""
        return masked(shown(super().format(record)))
