"""Documents that somebody damaged, by accident or on purpose: strategies of hypothesis for values, data and texts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), "", " ", "0", "-1", "1e999", "nan", "\x00", "a\x9b31m", "a\nb", "../../etc/passwd",
    "\u202egpj", "\ud800", "=1+1", "a" * 5000, [], {}, [1, 2, 3], {"a": 1}, [[]], {"": {}}, [None] * 1000, DEEP,
)  # fmt: skip
"""What stands where something else was meant."""

PIECES = (
    "", "\n", "\x00", "\r", ",", ":", "|", '"', "'", "[", "]", "{", "}", "#", "-", "nan", "inf", "1e999", "0", "-1",
    "9" * 400, "\x9b", "\u202e", "\ufffd", "\x1b[31m", "a" * 2000, " " * 2000, "[" * 300, "- " * 200, "None", "true",
)  # fmt: skip
"""What stands somewhere in a text."""


MAX_DEPTH = 6


def places(data: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a document, the document itself included; no further down than documents go."""
    yield path
    if len(path) == MAX_DEPTH:
        return
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from places(value, (*path, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from places(value, (*path, index))


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> Any:
    """A good document with one to three of its values replaced, removed, renamed or joined by others."""
    data = {"": copy.deepcopy(good)}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([("", *place) for place in places(data[""])]))
        parent: Any = data
        for step in path[:-1]:
            parent = parent[step]
        if not isinstance(parent, dict | list):
            continue
        act = draw(st.sampled_from(("replace", "remove", "rename", "add")))
        value = copy.deepcopy(draw(st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=20)))
        if act == "replace" or len(path) == 1 or isinstance(parent, list):
            parent[path[-1]] = value
        elif act == "remove":
            del parent[path[-1]]
        elif act == "rename":
            parent[draw(st.text(max_size=10))] = parent.pop(path[-1])
        else:
            parent[draw(st.text(max_size=10))] = value
    return data[""]


@st.composite
def spoiled(draw: st.DrawFn, good: str) -> str:
    """A good text, cut, repeated, shuffled or with something else in it at up to four places."""
    text = good
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, max(len(text) - 1, 0)))
        end = draw(st.integers(begin, min(begin + 60, len(text))))
        act = draw(st.sampled_from(("replace", "number", "drop", "repeat", "end", "lines")))
        if act == "replace":
            text = text[:begin] + draw(st.sampled_from(PIECES) | st.text(max_size=8)) + text[end:]
        elif act == "number":
            numbers = [i for i, letter in enumerate(text) if letter.isdigit()]
            at = draw(st.sampled_from(numbers)) if numbers else 0
            text = text[:at] + draw(st.sampled_from(PIECES)) + text[at + 1 :]
        elif act == "drop":
            text = text[:begin] + text[end:]
        elif act == "repeat":
            text = text[:end] + text[begin:end] + text[end:]
        elif act == "end":
            text = text[:end]
        else:
            lines = text.splitlines(keepends=True)
            text = "".join(draw(st.permutations(lines))) if len(lines) < 200 else text
    return text


@st.composite
def flipped(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with some of its bytes changed, or cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 20))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.sampled_from((len(data), len(data) // 2, 100, draw(st.integers(0, len(data))))))])
