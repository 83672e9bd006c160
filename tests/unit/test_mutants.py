"""What `make mutants` changes, and which tests it takes for each change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.mutants import Changes, Cover, Mutant


def mutants(source: str) -> list[Mutant]:
    return list(Changes("a.py", source.encode()).all())


def changed(source: str) -> list[str]:
    """The text after each change."""
    return [mutant.applied(source.encode()).decode() for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a < b", ["a <= b"]),
        ("a is  not b", ["a is b"]),
        ("(a) not in (b)", ["(a) in (b)"]),
        ("0 <= a < n", ["0 < a < n", "0 <= a <= n", "1 <= a < n"]),
        ("a + (b)", ["a - (b)"]),
        ("a ** 2", ["a * 2", "a ** 3"]),
        ("a @ b", ["a * b"]),
        ("a and b or c", ["a and b and c", "a or b or c"]),
        ("not a", [" a"]),
        ("-a", ["a"]),
        ("x = 1, 0.5, 0.0, True", ["x = 2, 0.5, 0.0, True", "x = 1, 0.75, 0.0, True", "x = 1, 0.5, 1.0, True",
                                   "x = 1, 0.5, 0.0, False"]),
        ("np.minimum(a, b)", ["pass", "np.maximum(a, b)"]),
        ("b if a else c", ["b if (not (a)) else c"]),
        ("[a for a in b if a]", ["[a for a in b if (not (a))]"]),
        ("a.b = c", ["pass"]),
        ("a += b", ["pass"]),
        ("zip(a, strict=True)", ["pass"]),
        ("f'{a:.1f} of {b + 1}'", []),
        ("a: int = b", []),
        ("if TYPE_CHECKING:\n    import torch", []),
        ("'é' + 1", ["'é' - 1", "'é' + 2"]),
    ],
)  # fmt: skip
def test_each_change_is_another_program(source: str, found: Sequence[str]) -> None:
    assert sorted(changed(source)) == sorted(found)


@pytest.mark.parametrize(
    ("returns", "value"),
    [
        ("bool", "not (a)"),
        ("float", "(a) * 1.5"),
        ("int", "(a) + 1"),
        ("str", '""'),
        ("list[int]", "[]"),
        ("X", "None"),
    ],
)
def test_another_value_of_the_same_type_is_returned(returns: str, value: str) -> None:
    assert changed(f"def f() -> {returns}:\n    return a") == [f"def f() -> {returns}:\n    return {value}"]


SOURCE = """\
LIMIT = 2

def used(a=1):
    return (
        a
        < LIMIT
    )

@cache(1)
def other(b):
    if b > 3:
        b = 4
    return b
"""


def test_a_change_is_tried_by_the_tests_that_reach_its_statement_the_quickest_first(tmp_path: Path) -> None:
    """A constant outside of functions by those that reach a use of it, a default value by those of its function."""
    (tmp_path / "a.py").write_text(SOURCE)
    lines = {
        1: {"later"},
        4: {"slow", "quick"},
        6: {"slow", "quick"},
        11: {"slow", "third"},
        12: {"third"},
        13: {"slow"},
    }
    cover = Cover(tmp_path, {"a.py": lines}, {"slow": 2.0, "quick": 1.0, "third": 3.0})
    found = {(mutant.line, mutant.operator): cover.tests_of(mutant) for mutant in mutants(SOURCE)}
    assert found == {
        (1, "constant"): ["quick", "slow"],
        (3, "constant"): ["quick", "slow"],
        (5, "return value"): ["quick", "slow"],
        (5, "comparison"): ["quick", "slow"],
        (11, "comparison"): ["slow", "third"],
        (11, "constant"): ["slow", "third"],
        (12, "constant"): ["third"],
        (13, "return value"): ["slow"],
    }
