"""What a terminal obeys, or what hides, is in no new name, and nothing of it reaches a terminal or a log."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
from commands import Command
from fleet_records import node
from markdown_it import MarkdownIt
from rich.text import Text
from store_records import CLUSTER, MODEL

from autotune.cli import output
from autotune.errors import InputError
from autotune.shown import LogFormatter, as_cell, as_markdown, of_cell, shown
from autotune.specs import ApiKey, ClusterSpec, ModelSpec
from storage import open_store

HOSTILE = ("\x1b[2J", "\x9b2J", "\x7f", "a\nb", "a\rb", "a\x85b", "\u2028", "\u202e", "\u2066", "\u200f", "\ufeff")
VISIBLE = ("llama3-8b", "Modell für Ärzte", "模型", "a b/c:d@e", "🙂")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_new_name_has_it(text: str) -> None:
    name = f"my{text}model"
    for read in (
        lambda: ModelSpec.from_data(MODEL.to_data() | {"name": name}),
        lambda: ClusterSpec.from_data(CLUSTER.to_data() | {"name": name}),
        lambda: ClusterSpec.from_data(CLUSTER.to_data() | {"device": CLUSTER.device.to_data() | {"name": name}}),
        lambda: ApiKey.from_data({"id": "k", "name": name, "role": "read", "created_at": "2026-01-01T00:00:00Z"}),
    ):
        with pytest.raises(InputError, match=r"name.*cannot be used"):
            read()


@pytest.mark.parametrize("name", VISIBLE)
def test_what_is_seen_is_a_name(name: str) -> None:
    assert ModelSpec.from_data(MODEL.to_data() | {"name": name}).name == name
    assert shown(name) == name


def test_a_name_that_an_earlier_release_stored_is_read_and_printed_without_harm(
    autotune: Command, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as store:
        store.put_model(MODEL.model_copy(update={"name": "my\x9b2J\u202emodel"}))
    assert "my\x9b2J\u202emodel" in [
        each["name"] for each in autotune("models", "list", "--db", url, "--json").data["models"]
    ]
    listed = autotune("models", "list", "--db", url).out
    assert r"my\x9b2J\u202emodel" in listed
    assert not {"\x9b", "\u202e"} & set(listed)


def test_nothing_that_is_printed_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    for text in HOSTILE:
        row = {"name": f"<{text}>", "reason": f"bad{text}"}
        output.tell(row, f"told {text}", as_json=False)
        output.tell_list("rows", [row], ("<name", "name"), ("<reason", "reason"), empty="", as_json=False, title=text)
        output.console().print(output.facts(text, text, {text: text}))
        output.console().print(Text(text))
        output.error_console().print(f"why: {text}", soft_wrap=True)
        output.print_error(f"no such name {text}")
        launch = {"target": text, "argv": [text], "config": text, "config_name": text, "notes": [text]}
        output.print_launch(launch)  # as an older release answers
        placeholders = [{"name": text, "about": text}]
        output.print_launch(launch | {"version": text, "environment": {text: text}, "placeholders": placeholders})
    printed = "".join(capsys.readouterr())
    assert r"\x9b2J" in printed
    assert not set("".join(HOSTILE)) & set(printed) - set("ab\n[2J")


def test_colours_of_our_own_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    output.console().print("red \x9b2J", style="red")
    assert capsys.readouterr().out == "\x1b[31mred \\x9b2J\x1b[0m\n"


def test_a_logged_text_is_one_line() -> None:
    try:
        raise ValueError("first\x9b2J\nERROR forged")
    except ValueError:
        record = logging.LogRecord(
            "autotune", logging.ERROR, "file", 1, "node %s", ("a\nERROR b\x1b[2J",), sys.exc_info()
        )
    line, *trace = LogFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert line == r"ERROR node a\nERROR b\x1b[2J"
    assert r"ValueError: first\x9b2J" in trace


def test_doors_of_the_command_line_refuse_it(autotune: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    open_store(url).close()
    model = tmp_path / "model.yaml"
    model.write_text(MODEL.model_copy(update={"name": "mine"}).to_yaml())
    for arguments in (
        ("keys", "create", "ada\x9b2J", "--db", url),
        ("models", "import", str(model), "--name", "my\u202emodel", "--db", url),
        ("cluster", "add", "a100-80gb-sxm:2x8", "--name", "my\x85pool", "--db", url),
        ("worker", "--name", node("a").name, "--topology", "rack\x9b2J", "--db", url),
    ):
        done = autotune(*arguments)
        assert done.status == 2, done.err
        assert "without control characters" in done.err
        assert not {"\x9b", "\x85", "\u202e"} & set(done.err)
    with open_store(url) as store:
        assert (store.models(), store.clusters(), store.keys()) == ([], [], [])


MARKUP = (
    "![x](https://evil.example/pixel)", "[click](javascript:alert(1))", "<img src=x onerror=alert(1)>",
    "<https://evil.example>", "https://evil.example", "www.evil.example",
    "`code` **bold** _slanted_ ~~gone~~", "a | b | c", "a\\| b",
    "&lt;b&gt;", "[x]: https://evil.example", "two\nlines\n\n# heading", "ends with a backslash \\",
)  # fmt: skip


@pytest.mark.parametrize("text", MARKUP)
def test_text_in_markdown_stays_text(text: str) -> None:
    written = as_markdown(text)
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = reader.parse(f"it: {written}\n\n| {written} | second |\n|---|---|\n")
    said = [token for token in tokens if token.type == "inline"]
    assert all({child.type for child in token.children or []} <= {"text", "text_special"} for token in said)
    texts = ["".join(child.content for child in token.children or []) for token in said]
    line = " ".join(text.split())
    assert texts == [f"it: {line}", line, "second"]
    assert not re.search(r"https?://|www\.", written)  # which some readers make links of without any brackets


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"])
def test_a_cell_that_a_spreadsheet_would_compute_is_text(begin: str) -> None:
    text = f"{begin}HYPERLINK(...)"
    assert as_cell(text) == f"'{text}"
    assert of_cell(as_cell(text)) == text


@pytest.mark.parametrize("text", ["", "a=b", "'quoted'", "'", "tp2-pp1", "5"])
def test_any_other_cell_stays_as_it_is(text: str) -> None:
    assert as_cell(text) == of_cell(text) == text
