"""Would the unit tests notice a wrong line? Changes one line at a time, in a copy, and runs the tests that cover it.

Run: make mutants [SAMPLE=200] [SEED=1] [ARGS="autotune/cost --json"]     (0 as SAMPLE: all of them)

1. The tests run once under coverage.py, which notes for each line the tests that reach it, and each test's time.
2. A random sample of all possible changes is drawn: comparisons, arithmetic, and/or/not, constants, min and max,
   returned values, removed statements.
3. For each the tests that reach the changed statement run, the quickest first, until one fails: the mutant is killed.
   A constant outside of functions is reached by the tests that reach a use of its name.

mutmut 3 was read and not taken: it changes no constants outside of functions, no properties and no cached functions,
and knows tests by function, not by line.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autotune/cost", "autotune/search", "autotune/regression", "autotune/fleet")
TESTS = (
    "tests/unit", "tests/golden", "tests/probes/test_trace.py",
    "tests/service/test_fleet_campaign.py", "tests/service/test_fleet_faults.py",
)  # fmt: skip
"""Tests that start no servers and no ranks."""

EQUIVALENT = Path("benchmarks/mutants_equivalent.yaml")
"""Changes that no test can notice, each with the reason; they are left out of the share."""

PRELOADED = (
    "alembic.command", "hypothesis.strategies", "numpy", "optuna", "pandas", "psutil", "pydantic", "pytest",
    "rich.console", "rich.table", "scipy.linalg", "scipy.special", "scipy.stats", "sqlalchemy.orm", "typer", "yaml",
    "autotune.specs", "autotune.catalog",
)  # fmt: skip
"""What tests import and no mutant changes: loaded once, before the processes that run mutants are forked."""

PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--hypothesis-seed=1")
FORKED = ("-x", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning")  # its plugins are loaded before
CONTROLS = 500
"""Tests that have to pass without any change, run as a mutant's are."""

MEMORY_BYTES = 8 * 2**30
COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
CALCULATED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.MatMult: ("@", "*"),
}  # fmt: skip
SWAPPED = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "floor": "ceil"}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
OTHER_VALUE = {"bool": "not ({})", "int": "({}) + 1", "float": "({}) * 1.5", "FloatColumn": "({}) * 1.5", "str": '""'}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change: bytes `start` to `end` of a file become `text`.

    `lines` are those of the statement; `names` what it defines where it runs when the module is imported.
    """

    file: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    lines: tuple[int, int]
    names: tuple[str, ...]

    def applied(self, source: bytes) -> bytes:
        """The file's text with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


class Changes:
    """All changes of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file, self._source = file, source
        self._begins = [0]
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self._statement: ast.stmt | ast.Lambda | None = None
        self._outside: tuple[str, ...] | None = ()
        self._returns = ""

    def all(self) -> Iterator[Mutant]:
        """In the order of the file."""
        yield from self._below(ast.parse(self._source))

    def _below(self, node: ast.AST) -> Iterator[Mutant]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._in_statement(child, inside=isinstance(node, FUNCTIONS) and name == "body")
                elif isinstance(child, ast.AST):
                    yield from self._in_expression(child)

    def _in_statement(self, node: ast.stmt, inside: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        before = self._statement, self._outside, self._returns
        self._statement = node
        if inside:
            self._outside = None
        elif self._outside is not None:
            self._outside = _defined(node)
        if isinstance(node, FUNCTIONS):
            self._returns = ast.unparse(node.returns) if node.returns else ""
        yield from self._of_statement(node)
        yield from self._below(node)
        self._statement, self._outside, self._returns = before

    def _of_statement(self, node: ast.stmt) -> Iterator[Mutant]:
        targets = node.targets if isinstance(node, ast.Assign) else []
        kept = any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)
        called = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
        if kept or called or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
            yield self._change(node, "removed statement", "pass")
        if isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
            text = OTHER_VALUE.get(self._returns, "[]" if self._returns.startswith(("list", "Sequence")) else "None")
            yield self._change(node.value, "return value", text.format(self._text(node.value)))
        if isinstance(node, (ast.If, ast.While)):
            yield from self._negated(node.test)

    def _in_expression(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.JoinedStr() | ast.keyword(arg="strict"):
                return
            case ast.Compare() | ast.BinOp() | ast.BoolOp() | ast.UnaryOp():
                yield from self._of_operators(node)
            case ast.Constant(value=bool() | int() | float()):
                yield self._change(node, "constant", _other(node.value))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in SWAPPED:
                yield self._change(node, "min or max", self._text(node)[: -len(name)] + SWAPPED[name])
            case ast.IfExp():
                yield from self._negated(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    yield from self._negated(test)
        if isinstance(node, ast.Lambda) and self._outside is not None:
            yield from self._in_lambda(node)
        else:
            yield from self._below(node)

    def _of_operators(self, node: ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp) -> Iterator[Mutant]:
        match node:
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    yield from self._between(left, right, "comparison", COMPARED[type(op)])
            case ast.BinOp() if type(node.op) in CALCULATED:
                yield from self._between(node.left, node.right, "arithmetic", CALCULATED[type(node.op)])
            case ast.BoolOp():
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._between(left, right, "boolean", words)
            case ast.UnaryOp(op=ast.Not()):
                yield self._change(node, "boolean", self._text(node).replace("not", "", 1))
            case ast.UnaryOp(op=ast.USub()):
                yield self._change(node, "arithmetic", self._text(node).replace("-", "", 1))

    def _in_lambda(self, node: ast.Lambda) -> Iterator[Mutant]:
        before = self._statement, self._outside
        self._statement, self._outside = node, None
        yield from self._below(node)
        self._statement, self._outside = before

    def _negated(self, test: ast.expr) -> Iterator[Mutant]:
        if not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield self._change(test, "boolean", f"(not ({self._text(test)}))")

    def _between(self, left: ast.AST, right: ast.AST, operator: str, words: tuple[str, str]) -> Iterator[Mutant]:
        _, start = self._span(left)
        end, _ = self._span(right)
        between = self._source[start:end].decode()
        text = re.sub(re.escape(words[0]).replace(r"\ ", r"\s+"), words[1], between, count=1)
        if text != between:
            yield self._made(right, operator, start, end, text)

    def _change(self, node: ast.AST, operator: str, text: str) -> Mutant:
        return self._made(node, operator, *self._span(node), text)

    def _made(self, node: ast.AST, operator: str, start: int, end: int, text: str) -> Mutant:
        line = self._source[:start].count(b"\n") + 1
        statement = self._statement
        assert statement is not None
        last = statement.end_lineno or statement.lineno
        if (body := getattr(statement, "body", None)) and isinstance(body, list):
            last = max(body[0].lineno - 1, statement.lineno)
        names = self._outside or ()
        return Mutant(self._file, line, operator, start, end, text, (statement.lineno, last), names)

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self._begins[node.lineno - 1] + node.col_offset,
            self._begins[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def _other(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return str(not value)
    return repr(value * 1.5 or 1.0) if isinstance(value, float) else str(value + 1)


def _defined(node: ast.stmt) -> tuple[str, ...]:
    """What a statement outside of functions defines; for a function with default values its own name."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    return tuple(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)) or ("",)


class Uses(ast.NodeVisitor):
    """Where functions use each name: name -> lines."""

    def __init__(self, tree: ast.AST) -> None:
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.inside: set[int] = set()
        self._depth = 0
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        """Notes a node's name, and goes on below it."""
        function = isinstance(node, (*FUNCTIONS, ast.Lambda))
        if self._depth and hasattr(node, "lineno"):
            self.inside.add(node.lineno)
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            if name:
                self.lines[name].add(node.lineno)
        if isinstance(node, FUNCTIONS):
            body = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
            self.lines[node.name].update(body)
        self._depth += function
        self.generic_visit(node)
        self._depth -= function


class Cover:
    """Which tests reach which lines, and how long each takes."""

    def __init__(self, tree: Path, lines: Mapping[str, Mapping[int, set[str]]], seconds: Mapping[str, float]) -> None:
        self._lines, self.seconds = lines, seconds
        self._uses = {file: Uses(ast.parse((tree / file).read_bytes())) for file in lines}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant, the quickest first."""
        here = self._lines.get(mutant.file, {})
        found: set[str] = set()
        if mutant.names:
            for file, uses in self._uses.items():
                for name in mutant.names:
                    for line in uses.lines.get(name, ()):
                        found |= self._lines[file].get(line, set())
            if not found and mutant.file in self._uses:
                found.update(*(here.get(line, set()) for line in self._uses[mutant.file].inside))
        else:
            first, last = mutant.lines
            found.update(*(here.get(line, set()) for line in range(first, last + 1)))
        return sorted(found & self.seconds.keys(), key=lambda test: self.seconds[test])


class Recorder:
    """A pytest plugin that tells coverage.py which test runs, and notes how long each test took."""

    def __init__(self, cover: Any) -> None:
        self._cover, self.seconds, self._bad = cover, Counter[str](), set[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """What runs from now on is this test."""
        self._cover.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        """What runs from now on is no test."""
        self._cover.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes set-up, call and tear-down."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self._bad.add(report.nodeid)

    def passing(self) -> dict[str, float]:
        """The seconds of the tests that can tell of a mutant."""
        return {test: seconds for test, seconds in self.seconds.items() if test not in self._bad}


def record(tree: Path, sources: Sequence[str], tests: Sequence[str], answer: Path) -> None:
    """Runs tests under coverage.py, and writes what they reach."""
    import coverage
    import pytest

    cover = coverage.Coverage(data_file=None, config_file=False, source=list(sources))
    cover.start()
    recorder = Recorder(cover)
    pytest.main([*PYTEST, "--timeout=300", *tests], plugins=[recorder])
    cover.stop()
    data = cover.get_data()
    lines = {
        str(Path(file).relative_to(tree)): {
            line: sorted(set(contexts) - {""}) for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    answer.write_text(json.dumps({"lines": lines, "seconds": recorder.passing()}))


def recorded(copies: Sequence[Path], sources: Sequence[str]) -> Cover:
    """What the tests of a copy reach; each copy runs a share of the test files."""
    files = [str(file.relative_to(ROOT)) for tests in TESTS for file in _python_files(ROOT / tests, "test_*.py")]
    files.sort(key=lambda file: -(ROOT / file).stat().st_size)
    running = []
    for index, copy in enumerate(copies):
        arguments = ["--record", str(copy / "cover.json"), *sources, "--", *files[index :: len(copies)]]
        command = [sys.executable, str(copy / "benchmarks/mutants.py"), *arguments]
        running.append(subprocess.Popen(command, cwd=copy, env=_environment(copy), stdout=subprocess.PIPE, text=True))
    for process in running:
        out, _ = process.communicate()
        print(out.strip().splitlines()[-1] if out.strip() else "no tests ran", file=sys.stderr)
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = {}
    for copy in copies:
        found = json.loads((copy / "cover.json").read_text())
        seconds |= found["seconds"]
        for file, by_line in found["lines"].items():
            for line, tests in by_line.items():
                lines[file][int(line)].update(tests)
    return Cover(copies[0], lines, seconds)


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "COVERAGE_CORE": "ctrace"}


def copied(folder: Path) -> Path:
    """A copy of the working tree, beside what the tests look for beside it."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def start_worker(copies: Any) -> None:
    """Moves a process of the pool into a copy of its own, and loads what all mutants need."""
    tree = copies.get()
    os.chdir(tree)
    os.environ |= _environment(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for point in entry_points(group="pytest11"):
        if point.name != "schemathesis":
            point.load()
    for name in PRELOADED:
        import_module(name)


def run_mutant(mutant: Mutant, tests: Sequence[str], limit_s: float) -> str:
    """Whether the tests notice: killed, survived, or timeout."""
    path = Path(mutant.file)
    source = path.read_bytes()
    path.write_bytes(mutant.applied(source))
    # A compiled file is known by its source's size and time in whole seconds: no two versions share one.
    os.utime(path, (time.time(), time.time() + random.randrange(10**6)))
    try:
        return forked(tests, limit_s)
    finally:
        path.write_bytes(source)
        os.utime(path, (time.time(), time.time() + random.randrange(10**6, 2 * 10**6)))


def forked(tests: Sequence[str], limit_s: float) -> str:
    """Runs tests in a process of their own."""
    child = os.fork()
    if not child:
        status = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nowhere, descriptor)
            import pytest

            status = int(pytest.main([*PYTEST, *FORKED, *tests]))
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "survived" if status == 0 else "killed"
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "timeout"
    finally:
        with suppress(ProcessLookupError):  # what a stopped test had started
            os.killpg(child, signal.SIGKILL)


def _python_files(path: Path, pattern: str = "*.py") -> list[Path]:
    if not path.exists():
        raise SystemExit(f"there is no {path}")
    return [path] if path.is_file() else sorted(path.rglob(pattern))


def drawn(tree: Path, paths: Sequence[str], sample: int, seed: int) -> tuple[list[Mutant], int]:
    """(a sample of the mutants that are another program, how many changes there are)."""
    files = sorted(file for path in paths for file in _python_files(tree / path))
    mutants = [m for file in files for m in Changes(str(file.relative_to(tree)), file.read_bytes()).all()]
    random.Random(seed).shuffle(mutants)
    found: list[Mutant] = []
    for mutant in mutants:
        if sample and len(found) == sample:
            break
        source = (tree / mutant.file).read_bytes()
        try:
            other = ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            other = False
        if other:
            found.append(mutant)
    return found, len(mutants)


def described(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """The changed lines, before and after."""
    source = (tree / mutant.file).read_bytes()
    changed = mutant.applied(source)
    begin = source.rfind(b"\n", 0, mutant.start) + 1
    end = source.find(b"\n", mutant.end)
    after = changed[begin : end + len(changed) - len(source)]
    return " ".join(source[begin:end].decode().split()), " ".join(after.decode().split())


def main() -> None:
    """Draws, runs and prints."""
    if sys.argv[1:2] == ["--record"]:
        split = sys.argv.index("--")
        record(Path.cwd(), sys.argv[3:split], sys.argv[split + 1 :], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(PACKAGES), help="packages or files to change")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autotune-mutants-") as folder:
        answer = measure([path.rstrip("/") for path in options.paths], options, Path(folder))
    print(json.dumps(answer, indent=2) if options.json else as_text(answer))


def measure(paths: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that is printed."""
    started = time.monotonic()
    copies = [copied(folder / str(index)) for index in range(options.jobs)]
    mutants, possible = drawn(copies[0], paths, options.sample, options.seed)
    cover = recorded(copies, sorted({path.split("/")[0] for path in paths}))
    recorded_s = time.monotonic() - started
    texts = {mutant: described(copies[0], mutant) for mutant in mutants}
    reasons = {
        (item["line"], item["changed"]): item["why"] for item in yaml.safe_load((ROOT / EQUIVALENT).read_text()) or ()
    }
    results = {mutant: "equivalent" for mutant in mutants if texts[mutant] in reasons}
    tests = {mutant: cover.tests_of(mutant) for mutant in mutants if mutant not in results}
    results |= {mutant: "no test" for mutant, found in tests.items() if not found}
    fork = multiprocessing.get_context("fork")
    waiting = fork.SimpleQueue()
    for copy in copies:
        waiting.put(copy)
    with ProcessPoolExecutor(options.jobs, fork, start_worker, (waiting,)) as pool:
        controls = sorted(cover.seconds, key=lambda test: cover.seconds[test])[:CONTROLS]
        for outcome in [pool.submit(forked, controls, 300.0) for _ in copies]:
            if outcome.result() != "survived":
                raise SystemExit("the tests fail without any change where mutants are run")
        running = {
            pool.submit(run_mutant, mutant, found, 30.0 + 5.0 * sum(cover.seconds[test] for test in found)): mutant
            for mutant, found in tests.items()
            if found
        }
        for future in as_completed(running):
            mutant = running[future]
            results[mutant] = future.result()
            change = f": {texts[mutant][1]}" if results[mutant] == "survived" else ""
            place = f"{len(results)}/{len(mutants)} {mutant.file}:{mutant.line}"
            print(f"{place} {results[mutant]}{change}", file=sys.stderr, flush=True)
    counts = Counter(results.values())
    killed, judged = counts["killed"] + counts["timeout"], len(mutants) - counts["equivalent"]
    return {
        "paths": list(paths),
        "seed": options.seed,
        "possible": possible,
        "mutants": judged,
        "killed": killed,
        "killed_by_timeout": counts["timeout"],
        "killed_share": round(killed / max(judged, 1), 4),
        "survivors": [
            {
                "at": f"{mutant.file}:{mutant.line}",
                "operator": mutant.operator,
                "before": texts[mutant][0],
                "after": texts[mutant][1],
                "tests": len(tests[mutant]),
            }
            for mutant in sorted(results, key=lambda each: (each.file, each.line))
            if results[mutant] in ("survived", "no test")
        ],
        "equivalent": [
            {"at": f"{mutant.file}:{mutant.line}", "after": texts[mutant][1], "why": reasons[texts[mutant]]}
            for mutant in results
            if results[mutant] == "equivalent"
        ],
        "seconds": round(time.monotonic() - started),
        "seconds_of_cover": round(recorded_s),
    }


def as_text(answer: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        f"{each['at']} ({each['operator']}, {each['tests']} tests)\n  - {each['before']}\n  + {each['after']}"
        for each in answer["survivors"]
    ]
    lines += [f"{each['at']} is equivalent: {each['why']}" for each in answer["equivalent"]]
    drawn_from = f"{answer['mutants']} mutants of {answer['possible']} possible ones (seed {answer['seed']})"
    share = f"{answer['killed']} killed ({answer['killed_share']:.1%}), {len(answer['survivors'])} survived"
    return "\n".join([*lines, f"{drawn_from}: {share}; {answer['seconds']} s"])


if __name__ == "__main__":
    main()
