"""A Python file as what it computes: its statements without docstrings, annotations and formatting. No torch.

`kvbench.runs.code` makes run ids of them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import symtable
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    text, writer = importlib.util.decode_source(source), _Writer(package)
    scopes = symtable.symtable(text, package, "exec").get_children()
    written = [found for node in ast.parse(text).body if (found := writer.statement(node)).words]
    definitions: dict[str, list[int]] = defaultdict(list)
    for place, found in enumerate(written):
        for name in _bound(found.node):
            definitions[name].append(place)
    known = definitions.keys() | writer.imports.keys()
    statements = []
    for node, words, names in written:
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        open_names = known - _local(scope for scope in scopes if scope.get_lineno() in lines)
        uses = {place: use for place, use in names.items() if use.name in open_names}
        words = ["" if place in uses else word for place, word in enumerate(words)]
        statements.append(Statement("\n".join(words), list(uses.values())))
    return Source(statements, dict(definitions), dict(writer.imports))


def _bound(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds in its module, and perhaps some of comprehensions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _local(scopes: Iterable[symtable.SymbolTable]) -> set[str]:
    """Names that are those of a class or function wherever they stand in it."""
    tables = list(scopes)
    for table in tables:
        tables += table.get_children()
    symbols = [(symbol.get_name(), symbol.is_global()) for table in tables for symbol in table.get_symbols()]
    return {name for name, outer in symbols if not outer} - {name for name, outer in symbols if outer}


class _Written(NamedTuple):
    """A statement as words, and those among them that may be names of the module, by their places."""

    node: ast.stmt
    words: list[str]
    names: dict[int, Use]


class _Writer(ast.NodeVisitor):
    """Writes the statements of one file."""

    def __init__(self, package: str) -> None:
        self.imports: dict[str, set[Import]] = defaultdict(set)
        self._package = package.split(".")
        self._words: list[str] = []
        self._names: dict[int, Use] = {}
        self._in_class = False

    def statement(self, node: ast.stmt) -> _Written:
        """A top-level statement, written."""
        self._words, self._names = [], {}
        self.visit(node)
        return _Written(node, self._words, self._names)

    def generic_visit(self, node: ast.AST) -> None:
        """A node's kind and fields. Empty ones are left out, as other versions of Python have others."""
        self._words.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            if value is not None and value != [] and field not in UNCOUNTED:
                self._words.append(field)
                self._write(value)
        self._words.append(")")

    def _write(self, value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                self._write(each)
            self._words.append("]")
        elif isinstance(value, ast.AST):
            self.visit(value)
        else:
            self._words.append(repr(value))

    def _use(self, name: str, attribute: str) -> None:
        self._names[len(self._words)] = Use(name, attribute)
        self._words.append(f"{name}.{attribute}")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._words.append(node.id)
        else:
            self._use(node.id, "")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self._use(node.value.id, node.attr)
        else:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring, or "..."
            self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        """Nothing, as of a docstring."""

    def _scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self._in_class = self._in_class, isinstance(node, ast.ClassDef)
        self.generic_visit(node)
        self._in_class = before

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _scope

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self._in_class:  # a field of a dataclass, maybe
            self.generic_visit(node)
            words = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.annotation)}
            self._words += sorted(words & FIELD_KINDS)
        elif node.value is not None:
            self.generic_visit(ast.Assign([node.target], node.value))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", "")):
            for each in node.orelse:
                self.visit(each)
        else:
            self.generic_visit(node)

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
