"""Mutations found by walking the syntax tree: small, local, and named by what they replace."""

from __future__ import annotations

import ast
from typing import NamedTuple

__all__ = ["Change", "changes"]

_BINARY = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
}
_COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


class Change(NamedTuple):
    start: int  # bytes of the source to replace: [start, stop)
    stop: int
    line: int
    old: str
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def changes(source: bytes) -> list[Change]:
    """Every mutation of a file, in order. Messages of errors, decorators, annotations and ``__all__`` are left
    alone.
    """
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.changes))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.changes: list[Change] = []

    # What is skipped

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # What is changed

    def visit_Expr(self, node: ast.Expr) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            self._drop(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._drop(node)

    def visit_If(self, node: ast.If) -> None:
        self.generic_visit(node)
        self._negate(node.test)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        self._negate(node.test)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.generic_visit(node)
        for condition in node.ifs:
            self._replace(condition, "True")

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            # Requests to the operating system: beside "read an address" is "set flags", which takes the network down.
            if self._text(node).startswith("0x"):
                return
            self._replace(node, str(value + 1))
            self._replace(node, f"({value - 1})")
        elif isinstance(value, float):
            self._replace(node, repr(value * 1.1 if value else 1.0))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if type(node.op) in _BINARY and not any(_is_text(side) for side in (node.left, node.right)):
            self._between(node.left, node.right, *_BINARY[type(node.op)])

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        for left, operator, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
            self._between(left, right, *_COMPARE[type(operator)])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._between(node.values[0], node.values[1], old, new)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._replace(node, f"({self._text(node.operand)})")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            first, second = self._text(node.args[0]), self._text(node.args[1])
            if first != second and ast.unparse(node.func) not in ("isinstance", "getattr", "partial"):
                begin, end = self._start(node.args[0]), self._stop(node.args[1])
                middle = self._source[self._stop(node.args[0]) : self._start(node.args[1])].decode()
                self._add(begin, end, node.args[0].lineno, second + middle + first)

    def _drop(self, node: ast.stmt) -> None:
        self._add(self._start(node), self._stop(node), node.lineno, "pass")

    def _negate(self, test: ast.expr) -> None:
        """Swaps two branches. A comparison or a ``not`` is inverted anyway."""
        if not isinstance(test, ast.Compare | ast.UnaryOp) and ast.unparse(test) != "TYPE_CHECKING":
            self._replace(test, f"(not ({self._text(test)}))")

    def _replace(self, node: ast.expr, new: str) -> None:
        self._add(self._start(node), self._stop(node), node.lineno, new)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        begin, end = self._stop(left), self._start(right)
        gap = self._source[begin:end].decode()
        if gap.count(old) == 1:  # else a parenthesis or a comment makes it unclear
            at = begin + len(gap[: gap.index(old)].encode())
            self._add(at, at + len(old), left.lineno, new)

    def _add(self, start: int, stop: int, line: int, new: str) -> None:
        self.changes.append(Change(start, stop, line, self._source[start:stop].decode(), new))

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _stop(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._stop(node)].decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
