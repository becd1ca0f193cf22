"""A Python file as what it computes: its statements without docstrings, annotations and formatting. No torch.

`kvbench.runs.code` makes run ids of them.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

# Fields of a node that change no number.
UNCOUNTED = frozenset({"annotation", "ctx", "kind", "returns", "type_comment", "type_ignores", "type_params"})
# Annotations that make another thing of a dataclass' field.
FIELD_KINDS = frozenset({"ClassVar", "InitVar", "KW_ONLY"})


class Import(NamedTuple):
    """What an import binds a name to: `name` of `module`, or the module itself where `name` is empty."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """The name from the top of its package; a module's, where it is one."""
        return f"{self.module}.{self.name}" if self.name else self.module


class Use(NamedTuple):
    """A name in a statement, and the attribute that is taken of it, if any."""

    name: str
    attribute: str


class Statement(NamedTuple):
    """A top-level statement: its syntax, with a blank for each name of the module, and these names as they come."""

    syntax: str
    uses: list[Use]


class Source(NamedTuple):
    """A parsed file.

    Attributes:
        statements: those at the top that compute something; an import is none.
        definitions: by name, which of `statements` bind it.
        imports: by name, what imports anywhere in the file bind it to; those for type checkers alone are left out.
    """

    statements: list[Statement]
    definitions: Mapping[str, list[int]]
    imports: Mapping[str, set[Import]]


@functools.cache  # the arms of a sweep ask for much the same files
def parsed(source: bytes, package: str) -> Source:
    """A file's statements and names.

    Args:
        source: its bytes.
        package: the dotted name of the package that it lies in, for relative imports.

    Raises:
        SyntaxError: it is no Python.
    """
    writer = _Writer(package)
    written = [found for node in ast.parse(source).body if (found := writer.statement(node)).words]
    definitions: dict[str, list[int]] = defaultdict(list)
    for place, found in enumerate(written):
        for name in found.binds:
            definitions[name].append(place)
    known = definitions.keys() | writer.imports.keys()
    statements = []
    for words, names, _ in written:
        words = words.copy()
        for place, use in names.items():
            words[place] = "" if use.name in known else ".".join(use)
        statements.append(Statement("\n".join(words), [use for use in names.values() if use.name in known]))
    return Source(statements, dict(definitions), dict(writer.imports))


class _Written(NamedTuple):
    """A statement as words, names among them that may be the module's by their places, and the names that it binds."""

    words: list[str]
    names: dict[int, Use]
    binds: set[str]


class _Writer(ast.NodeVisitor):
    """Writes the statements of one file."""

    def __init__(self, package: str) -> None:
        self.imports: dict[str, set[Import]] = defaultdict(set)
        self._package = package.split(".")
        self._out = _Written([], {}, set())
        self._local: set[str] | None = None  # names of the outermost function and of what is in it
        self._in_class = False

    def statement(self, node: ast.stmt) -> _Written:
        """A top-level statement, written."""
        self._out = _Written([], {}, set())
        self.visit(node)
        return self._out

    def generic_visit(self, node: ast.AST) -> None:
        """A node's kind and fields. Empty ones are left out, as other versions of Python have others."""
        self._fields(node)

    def _fields(self, node: ast.AST, *without: str) -> None:
        self._out.words.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            if value is not None and value != [] and field not in UNCOUNTED and field not in without:
                self._out.words.append(field)
                self._write(value)
        self._out.words.append(")")

    def _write(self, value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                self._write(each)
            self._out.words.append("]")
        elif isinstance(value, ast.AST):
            self.visit(value)
        else:
            self._out.words.append(repr(value))

    def _bind(self, name: str) -> None:
        if self._local is not None:
            self._local.add(name)
        elif not self._in_class:
            self._out.binds.add(name)

    def _use(self, name: str, attribute: str) -> None:
        self._out.names[len(self._out.words)] = Use(name, attribute)
        self._out.words.append("")

    @contextmanager
    def _inside(self, in_class: bool, function: bool) -> Iterator[None]:
        """The body of a class or function; names of an outermost function are none of the module's."""
        before, outermost, begin = self._in_class, function and self._local is None, len(self._out.words)
        self._in_class = in_class
        if outermost:
            self._local = set()
        yield
        self._in_class = before
        if outermost:
            local, self._local = self._local or set(), None
            for place, use in list(self._out.names.items()):
                if place >= begin and use.name in local:
                    self._out.words[place] = ".".join(self._out.names.pop(place))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id)
            self._out.words.append(node.id)
        else:
            self._use(node.id, "")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self._use(node.value.id, node.attr)
        else:
            self._fields(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring, or "..."
            self._fields(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        """Nothing, as of a docstring."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self._in_class:  # a field of a dataclass, maybe
            self._fields(node)
            words = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.annotation)}
            self._out.words.extend(sorted(words & FIELD_KINDS))
        elif node.value is not None:
            self._fields(ast.Assign([node.target], node.value))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        with self._inside(in_class=True, function=False):
            self._fields(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name)
        self._write(node.decorator_list)
        self._function(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._write([*node.args.defaults, None, *node.args.kw_defaults])  # which are of the scope around it
        with self._inside(in_class=False, function=True):
            self._fields(node, "decorator_list")

    visit_Lambda = _function

    def visit_arguments(self, node: ast.arguments) -> None:
        self._fields(node, "defaults", "kw_defaults")

    def visit_arg(self, node: ast.arg) -> None:
        self._bind(node.arg)
        self._fields(node)

    def _comprehension(self, node: ast.AST) -> None:
        with self._inside(in_class=False, function=True):
            self._fields(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _capture(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self._bind(node.name)
        self._fields(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = _capture

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", "")):
            for each in node.orelse:
                self.visit(each)
        else:
            self._fields(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imports[alias.asname or alias.name].add(Import(alias.name, ""))
            if not alias.asname and "." in alias.name:  # binds "a" of "a.b", and has both there
                top = alias.name.partition(".")[0]
                self.imports[top].add(Import(top, ""))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        around = self._package[: len(self._package) - node.level + 1] if node.level else []
        module = ".".join([*around, *([node.module] if node.module else [])])
        for alias in node.names:
            self.imports[alias.asname or alias.name].add(Import(module, alias.name))
