"""The commands of a launch script in bash, with variables, arrays and tests worked out. Nothing of it is run.

tree-sitter's grammar reads it. What only the running shell knows (`$SLURM_NNODES`, the output of a command) keeps its
own spelling in a word, from `$` on, until the user says what it is.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import InputError

Node = Any  # tree_sitter.Node: the library loads when a script is read

LONGEST = 1 << 20
"""Characters of all words and values: a few lines that double a variable would ask for gigabytes."""

DEEPEST = 60
"""Of calls, and of commands that are texts of commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that the script would run: its words, the variables that are set for it, and its line."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int


@dataclass(slots=True)
class Script:
    """What a script would do.

    Attributes:
        commands: in their order.
        environment: what it exports.
        directives: the options of its #SBATCH lines.
        notes: tests that are not decided, and what is left out because of them.
    """

    commands: list[Command] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    directives: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_script(file: str, text: str, variables: Mapping[str, str]) -> Script:
    """Works a script out.

    Args:
        file: its name, for errors.
        text: the script, or one command.
        variables: of its environment; also its arguments, as "1", "2", ...

    Raises:
        InputError: it is not bash, or grows without bound.
    """
    return _Reader(file, dict(variables)).read(text)


_SIGNS = {"", "#", ":-", "-", ":=", "=", ":?", "?", ":+", "+"}
_INTERPRETERS = {"bash", "sh", "/bin/bash", "/bin/sh", "eval"}
_GROUPS = {
    "program", "compound_statement", "subshell", "do_group", "pipeline", "redirected_statement", "else_clause",
}  # fmt: skip
_DIRECTIVE = re.compile(r"^#SBATCH\s+(-{1,2}[A-Za-z][\w-]*)(?:[=\s]+(\S+))?")
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip


class _Reader:
    def __init__(self, file: str, variables: dict[str, str | list[str]]) -> None:
        self.file, self.variables, self.script = file, variables, Script()
        self.functions: dict[str, Node] = {}
        self.length, self.depth, self.base = 0, 0, 0

    def read(self, text: str) -> Script:
        for line in text.splitlines():
            if match := _DIRECTIVE.match(line):
                self.script.directives[_SHORT.get(match[1], match[1])] = match[2] or ""
        self._run(self._tree(text, 0))
        return self.script

    def _tree(self, text: str, line: int) -> Node:
        import tree_sitter
        import tree_sitter_bash

        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        root = parser.parse(text.encode()).root_node
        if root.has_error:
            bad = next((each for each in _walk(root) if each.is_error or each.is_missing), root)
            where = f"{self.file}, line {line + bad.start_point[0] + 1}"
            raise InputError(
                where, (_text(bad) or text).strip()[:80], "a script or command in the words of bash is needed"
            )
        return root

    def _line(self, node: Node) -> int:
        return self.base + int(node.start_point[0]) + 1

    # Statements.

    def _run(self, node: Node) -> None:
        kind = node.type
        if kind in _GROUPS:
            for each in node.named_children:
                if not each.type.endswith("_redirect"):
                    self._run(each)
        elif kind in {"for_statement", "while_statement", "c_style_for_statement"}:
            self._run(node.child_by_field_name("body"))  # once
        elif kind == "function_definition":
            self.functions[_text(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        elif (statement := self._statements.get(kind)) is not None:
            statement(node)

    @property
    def _statements(self) -> dict[str, Callable[[Node], object]]:
        return {
            "list": self._list, "variable_assignment": self._assign, "declaration_command": self._declare,
            "variable_assignments": self._declare, "command": self._command, "if_statement": self._if,
            "case_statement": self._case,
        }  # fmt: skip

    def _declare(self, node: Node) -> None:
        exports = _text(node).startswith("export")
        for each in node.named_children:
            name = self._assign(each) if each.type == "variable_assignment" else _text(each)
            value = self.variables.get(name)
            if exports and isinstance(value, str):
                self.script.environment[name] = value

    def _list(self, node: Node) -> None:
        first, second = node.named_children[0], node.named_children[-1]
        decided = self._holds(first) if first.type in {"test_command", "list"} else None
        if decided is None:
            self._run(first)
        wanted = any(each.type == "&&" for each in node.children)
        if decided is None or decided == wanted:
            self._run(second)

    def _if(self, node: Node) -> None:
        branches: list[tuple[Node | None, list[Node]]] = []
        condition = node.child_by_field_name("condition")
        at = [each for each in node.named_children if each.start_byte > (condition.end_byte if condition else 0)]
        body = [each for each in at if each.type not in {"elif_clause", "else_clause"}]
        branches.append((condition, body))
        for each in at:
            if each.type == "elif_clause":
                branches.append((each.named_children[0], each.named_children[1:]))
            elif each.type == "else_clause":
                branches.append((None, list(each.named_children)))
        for test, statements in branches:
            decided = True if test is None else self._holds(test)
            if decided is None:
                self.script.notes.append(
                    f"line {self._line(node)}: `if {_text(test)[:60]}` is not decided and left out"
                )
                return
            if decided:
                for each in statements:
                    self._run(each)
                return

    def _case(self, node: Node) -> None:
        value = " ".join(self._fields(node.child_by_field_name("value"), quoted=True))
        for item in node.named_children:
            if item.type != "case_item":
                continue
            stop = next((each.start_byte for each in item.children if each.type == ")"), 0)
            patterns = [
                " ".join(self._fields(each, quoted=True)) for each in item.named_children if each.end_byte <= stop
            ]
            if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                for each in item.named_children:
                    if each.start_byte > stop:
                        self._run(each)
                return

    def _assign(self, node: Node) -> str:
        name_node, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, appends = _text(name_node), any(each.type == "+=" for each in node.children)
        if name_node.type == "subscript":
            return name
        value: str | list[str]
        if value_node is None:
            value = ""
        elif value_node.type == "array":
            value = [word for each in value_node.named_children for word in self._fields(each)]
        else:
            value = " ".join(self._fields(value_node, quoted=True))
        before = self.variables.get(name)
        if appends and isinstance(value, list):
            value = [*([before] if isinstance(before, str) else before or []), *value]
        elif appends:
            value = f"{before if isinstance(before, str) else ' '.join(before or [])}{value}"
        self._count(value)
        self.variables[name] = value
        if name in self.script.environment and isinstance(value, str):
            self.script.environment[name] = value
        return name

    def _command(self, node: Node) -> None:
        environment: dict[str, str] = {}
        words: list[str] = []
        for each in node.named_children:
            if each.type == "variable_assignment":
                name, value = each.child_by_field_name("name"), each.child_by_field_name("value")
                environment[_text(name)] = " ".join(self._fields(value, quoted=True)) if value else ""
            elif each.type == "command_name":
                words += self._fields(each.named_children[0])
            elif not each.type.endswith("_redirect"):
                words += self._fields(each)
        self._count(words)
        if not words:
            return
        if words[0] in self.functions:
            self._call(words)
        elif words[0] == "set" or words[0] in {"shift", ":"}:
            pass
        else:
            self._add(words, environment, self._line(node))

    def _call(self, words: list[str]) -> None:
        if self.depth >= DEEPEST:
            raise InputError(self.file, words[0], "functions that call each other without end are not worked out")
        kept = {name: value for name, value in self.variables.items() if name.isdigit()}
        self.variables |= {str(at): word for at, word in enumerate(words[1:], 1)}
        self.depth += 1
        self._run(self.functions[words[0]])
        self.depth -= 1
        for at in range(1, len(words)):
            self.variables.pop(str(at), None)
        self.variables |= kept

    def _add(self, words: Sequence[str], environment: Mapping[str, str], line: int) -> None:
        """A command, and those that one of its words is the text of (`bash -c "..."`, `eval ...`)."""
        script = next((at for at, word in enumerate(words) if word in _INTERPRETERS), None)
        text = ""
        if script is not None:
            rest = list(words[script + 1 :])
            if words[script] == "eval":
                text = " ".join(rest)
            elif "c" in "".join(word for word in rest[:-1] if word.startswith("-")):
                text = rest[-1]
        if not text:
            self.script.commands.append(Command(words=tuple(words), environment=dict(environment), line=line))
            return
        if self.depth >= DEEPEST:
            raise InputError(self.file, text[:80], "commands in commands without end are not worked out")
        if script:
            self.script.commands.append(Command(words=tuple(words[:script]), environment=dict(environment), line=line))
        self.depth += 1
        base, self.base = self.base, line - 1
        self._run(self._tree(text, line - 1))
        self.base = base
        self.depth -= 1

    # Tests: true, false, or None where they cannot be decided here.

    def _holds(self, node: Node) -> bool | None:
        kind = node.type
        if kind in {"list", "binary_expression"}:
            return self._both(node)
        if kind in {"test_command", "parenthesized_expression", "redirected_statement", "negated_command"}:
            found = self._holds(node.named_children[0]) if node.named_children else None
            return not found if kind == "negated_command" and found is not None else found
        if kind == "unary_expression":
            return self._unary(_text(node.children[0]), node.named_children[-1])
        if kind in {"word", "string", "simple_expansion", "expansion"}:
            return self._known("".join(self._fields(node, quoted=True))) != ""
        return {"true": True, "false": False}.get(_text(node))

    def _unary(self, sign: str, value: Node) -> bool | None:
        if sign == "!":
            found = self._holds(value)
            return None if found is None else not found
        if sign in {"-z", "-n"}:
            return (self._known("".join(self._fields(value, quoted=True))) == "") == (sign == "-z")
        return None

    def _both(self, node: Node) -> bool | None:
        first, second = node.named_children[0], node.named_children[-1]
        sign = next((_text(each) for each in node.children[1:-1] if _text(each) not in {"", " "}), "")
        if sign in {"&&", "||", "-a", "-o"}:
            left, right = self._holds(first), self._holds(second)
            if sign in {"&&", "-a"}:
                return False if False in (left, right) else None if None in (left, right) else True
            return True if True in (left, right) else None if None in (left, right) else False
        one, other = (self._known("".join(self._fields(each, quoted=True))) for each in (first, second))
        if sign in {"=", "==", "!="}:
            return fnmatch.fnmatchcase(one, other) == (sign != "!=")
        left_number, right_number = self._integer(one), self._integer(other)
        if sign in _COMPARISONS and left_number is not None and right_number is not None:
            return _COMPARISONS[sign](left_number, right_number)
        return None

    @staticmethod
    def _known(text: str) -> str:
        """The text, as a shell has it in which nobody has set what the script does not set."""
        return re.sub(r"\$\{?\w+\}?", "", text) if "$" in text else text

    @staticmethod
    def _integer(text: str) -> int | None:
        return int(text) if re.fullmatch(r"-?\d+", text.strip()) else None

    # Words.

    def _fields(self, node: Node, *, quoted: bool = False) -> list[str]:
        """The words that one word of the script becomes."""
        kind, text = node.type, _text(node)
        if kind == "string":
            return self._string(node)
        if kind == "concatenation":
            return self._joined(node.children)
        if kind in {"simple_expansion", "expansion"}:
            return self._expansion(node, quoted=quoted)
        if kind in {"comment", "arithmetic_expansion"}:
            return [] if kind == "comment" else [self._arithmetic(_bare(node))]
        plain = {
            "raw_string": text.strip()[1:-1],
            "ansi_c_string": text[2:-1],
            "command_substitution": _bare(node),
        }
        return [plain[kind] if kind in plain else re.sub(r"\\(.)", r"\1", _unfolded(text))]

    def _joined(self, children: Sequence[Node]) -> list[str]:
        words = [""]
        for each in children:
            found = self._fields(each) if each.is_named else [_text(each)]
            if found:
                words[-1] += found[0]
                words += found[1:]
        return words

    def _string(self, node: Node) -> list[str]:
        """A text in double quotes: one word, or with an array in it as many as that has."""
        raw, start = node.text, node.start_byte
        words, at = [""], raw.index(b'"') + 1
        for each in [*node.named_children, None]:
            stop = raw.rindex(b'"') if each is None else each.start_byte - start
            words[-1] += _unfolded(raw[at:stop].decode())
            if each is None:
                break
            at = each.end_byte - start
            piece = raw[stop:at].decode()
            if each.type == "string_content":
                words[-1] += re.sub(r"\\([\"$`\\])", r"\1", _unfolded(piece))
                continue
            words[-1] += _unfolded(piece[: len(piece) - len(_BLANK.sub("", piece, count=1))])
            if found := self._fields(each, quoted=True):
                words[-1] += found[0]
                words += found[1:]
        return words

    def _expansion(self, node: Node, *, quoted: bool) -> list[str]:
        text = _bare(node)
        name, sign, word_nodes, every = self._parts(node)
        if name is None or sign not in _SIGNS:
            return [text]
        found: str | list[str] | None = self.variables.get(name)
        if name in {"@", "*"}:
            every = name
            found = [str(self.variables[str(at)]) for at in range(1, 100) if str(at) in self.variables]
        if sign == "#":
            return [str(len(found or ""))]
        missing = found is None or (sign.startswith(":") and found in ("", []))
        if sign.endswith("+"):
            return [] if missing else [word for each in word_nodes for word in self._fields(each, quoted=quoted)]
        if missing and sign and not sign.endswith("?"):
            found = "".join(word for each in word_nodes for word in self._fields(each, quoted=True))
            if sign.endswith("="):
                self.variables[name] = found
        if found is None:
            return [f"${name}" if sign else text]
        if isinstance(found, list) and every:
            return [" ".join(found)] if every == "*" and quoted else list(found)
        one = found if isinstance(found, str) else "".join(found[:1])
        return [one] if quoted else one.split()

    def _parts(self, node: Node) -> tuple[str | None, str, list[Node], str]:
        """An expansion's variable, its sign, what follows that, and @ or * of a whole array."""
        name, sign, words, every = None, "", [], ""
        for each in node.children:
            if each.type in {"variable_name", "special_variable_name"} and name is None:
                name = _bare(each)
            elif each.type == "subscript":
                name = _text(each.child_by_field_name("name"))
                index = _text(each.child_by_field_name("index"))
                if index in {"@", "*"}:
                    every = index
                else:
                    return None, "", [], ""
            elif each.is_named:
                words.append(each)
            elif _bare(each) not in {"$", "${", "}"}:
                sign = sign or _bare(each)
        return name, sign, words, every

    def _arithmetic(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            found = self.variables.get(match[1] or match[2])
            return found if isinstance(found, str) else match[0]

        body = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?|\$\{?(\d+)\}?", value, text[3:-2])
        try:
            return str(_integer_of(ast.parse(body.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return text

    def _count(self, value: str | Sequence[str]) -> None:
        self.length += len(value) if isinstance(value, str) else sum(map(len, value))
        if self.length > LONGEST:
            raise InputError(
                self.file, f"{self.length} characters", f"its words come to more than {LONGEST} characters"
            )


def _integer_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_integer_of(node.left), _integer_of(node.right))
    raise ValueError


def _text(node: Node) -> str:
    return "" if node is None else str(node.text.decode())


def _unfolded(text: str) -> str:
    return text.replace("\\\n", "")


_BLANK = re.compile(r"(?:\\\n|\s)*")


def _bare(node: Node) -> str:
    """A node's text without what its first token may hold before it."""
    return _BLANK.sub("", _text(node), count=1).strip()


def _walk(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += reversed(each.children)
