"""Places in a source file, named by function and syntax-tree pattern instead of by text.

A pattern is Python code with two additions:

    ``$name``   any expression, or any identifier where Python wants one; the same name twice must match the same code twice
    ``...``     any number of arguments, elements, operands or statements

``torch.add($grad, $buffer, alpha=$momentum, ...)`` matches the call whatever its variables are called and however it is laid out.
An expression matches anywhere; statements match a run of statements; ``name: $type = 0.1`` also matches a parameter's default.
"""

from __future__ import annotations

import ast
import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PatternError", "Place", "apply", "places", "scopes", "single_place"]

_HOLE, _REST, _REST_KEYWORDS = "HOLE_", "REST_", "REST_KEYWORDS"
_IGNORED = {"ctx", "kind", "type_comment", "lineno", "col_offset", "end_lineno", "end_col_offset", "type_params"}
_MOST_LISTED = 8

Bindings = dict[str, Any]  # hole → node; rest → list of nodes


class PatternError(Exception):
    """A pattern that does not match exactly one place."""


@dataclass(frozen=True)
class Place:
    """Where a pattern matches: ``count`` items from ``index`` in a list field, or a whole field where ``index`` is None."""

    parent: ast.AST
    field: str
    index: int | None
    count: int
    line: int
    text: str
    bindings: Bindings


def scopes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Qualified name and node of every function and class, ``""`` for the module itself."""
    if not prefix:
        yield "", tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            yield name, node
            yield from scopes(node, f"{name}.")
        else:
            yield from (scope for scope in scopes(node, prefix) if scope[0])


def single_place(tree: ast.AST, function: str, pattern: str, replacement: str) -> Place:
    """The one place in ``function`` where ``pattern`` matches.

    Raises:
        PatternError: it matches nowhere or several times; the message says where it looked and what is there.
    """
    scope = [node for name, node in scopes(tree) if name == function]
    matching = [place for node in scope for place in places(node, pattern, replacement)]
    if len(matching) == 1:
        return matching[0]
    shown = "\n".join(f"    {line}" for line in pattern.splitlines())
    where = f"in {function}()" if function else "in the module"
    if matching:
        listed = "\n".join(f"    line {place.line}: {place.text}" for place in matching)
        raise PatternError(f"the pattern\n{shown}\nmatches {len(matching)} places {where}, not one:\n{listed}")
    message = f"the pattern\n{shown}\nmatches nowhere {where}."
    if not scope:
        message = f"there is no {function}(), where the pattern\n{shown}\nshould match. There are: {_names(tree)}."
    elsewhere = [name for name, node in scopes(tree) if any(True for _ in places(node, pattern, replacement))]
    if elsewhere:
        message += f"\nIt matches in {elsewhere[-1] or 'the module'}()."  # the innermost one
    for node in scope:
        message += f"\nThe nearest code there:\n{_nearest(node, pattern)}"
    raise PatternError(message)


def places(scope: ast.AST, pattern: str, replacement: str) -> Iterator[Place]:
    """Every place in ``scope`` where ``pattern`` matches, nested ones too; a place twice where it matches in two ways."""
    sought = _parse(pattern)
    if _is_expression(sought) and _is_expression(_parse(replacement)):
        yield from _expressions(scope, sought[0].value)  # type: ignore[attr-defined]
    else:
        yield from _statements(scope, sought)
        if len(sought) == 1 and isinstance(sought[0], (ast.Assign, ast.AnnAssign)):
            yield from _defaults(scope, sought[0])


def apply(tree: ast.AST, place: Place, replacement: str) -> str:
    """Puts ``replacement`` into ``place`` of ``tree``; returns it as text."""
    new = [_Fill(place.bindings).visit(statement) for statement in _parse(replacement)] or [ast.Pass()]
    if place.field in ("defaults", "kw_defaults"):
        items: list[ast.AST] = [new[0].value]
    elif isinstance(getattr(place.parent, place.field), list) and isinstance(getattr(place.parent, place.field)[0], ast.stmt):
        items = new
    else:
        items = [new[0].value]
    if place.index is None:
        setattr(place.parent, place.field, items[0])
    else:
        getattr(place.parent, place.field)[place.index : place.index + place.count] = items
    ast.fix_missing_locations(tree)
    return "; ".join(ast.unparse(item) for item in new) if replacement else "(nothing)"


def _parse(text: str) -> list[ast.stmt]:
    tree = ast.parse(re.sub(r"\$(\w+)", rf"{_HOLE}\1", text))
    return _NumberRests().visit(tree).body  # type: ignore[no-any-return]


class _NumberRests(ast.NodeTransformer):
    def __init__(self) -> None:
        self._count = 0

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if node.value is not ...:
            return node
        self._count += 1
        return ast.Name(f"{_REST}{self._count}", ast.Load())


def _is_expression(statements: Sequence[ast.stmt]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


def _expressions(scope: ast.AST, sought: ast.expr) -> Iterator[Place]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.expr):
                    at = index if isinstance(value, list) else None
                    for bindings in _match(sought, node, {}):
                        yield Place(parent, field, at, 1, node.lineno, ast.unparse(node), bindings)


def _statements(scope: ast.AST, sought: list[ast.stmt]) -> Iterator[Place]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for index in range(len(value) - len(sought) + 1):
                    run = value[index : index + len(sought)]
                    for bindings in _match_list(sought, run, {}):
                        text = "; ".join(ast.unparse(statement) for statement in run)
                        yield Place(parent, field, index, len(sought), run[0].lineno, text, bindings)


def _defaults(scope: ast.AST, sought: ast.Assign | ast.AnnAssign) -> Iterator[Place]:
    for arguments in ast.walk(scope):
        if not isinstance(arguments, ast.arguments):
            continue
        positional = [*arguments.posonlyargs, *arguments.args]
        first = len(positional) - len(arguments.defaults)
        defaults = [("defaults", k, positional[first + k], value) for k, value in enumerate(arguments.defaults)]
        keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        defaults += [("kw_defaults", k, arg, value) for k, (arg, value) in enumerate(keyword) if value is not None]
        for field, index, arg, value in defaults:
            target = ast.Name(arg.arg, ast.Store())
            parameter: ast.stmt = ast.Assign([target], value, lineno=arg.lineno)
            if arg.annotation is not None:
                parameter = ast.AnnAssign(target, arg.annotation, value, simple=1)
            for bindings in _match(sought, parameter, {}):
                yield Place(arguments, field, index, 1, arg.lineno, ast.unparse(parameter), bindings)


def _match(pattern: Any, node: Any, bindings: Bindings) -> Iterator[Bindings]:
    """Every way to bind the holes of ``pattern`` so that it equals ``node``."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(_HOLE):
        if isinstance(node, ast.expr):
            yield from _bind(pattern.id, node, bindings)
    elif isinstance(pattern, str) and pattern.startswith(_HOLE):
        if isinstance(node, str):
            yield from _bind(pattern, ast.Name(node, ast.Load()), bindings)
    elif isinstance(pattern, list):
        if isinstance(node, list):
            yield from _match_list(pattern, node, bindings)
    elif isinstance(pattern, ast.AST):
        if type(pattern) is type(node):
            yield from _match_fields(pattern, node, [name for name in pattern._fields if name not in _IGNORED], bindings)
    elif type(pattern) is type(node) and pattern == node:
        yield bindings


def _match_fields(pattern: ast.AST, node: ast.AST, names: Sequence[str], bindings: Bindings) -> Iterator[Bindings]:
    if not names:
        yield bindings
    elif names[0] == "keywords" and isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        yield from _match_keywords(pattern, node, bindings)
    else:
        for bound in _match(getattr(pattern, names[0]), getattr(node, names[0]), bindings):
            yield from _match_fields(pattern, node, names[1:], bound)


def _match_keywords(pattern: ast.Call, node: ast.Call, bindings: Bindings) -> Iterator[Bindings]:
    """Keywords in any order; more than those of the pattern only where it has ``...`` among its arguments."""
    left = list(node.keywords)
    for keyword in pattern.keywords:
        same = next((candidate for candidate in left if candidate.arg == keyword.arg), None)
        bound = None if same is None else next(_match(keyword.value, same.value, bindings), None)
        if same is None or bound is None:
            return
        left.remove(same)
        bindings = bound
    rest = next((_rest_of(arg) for arg in pattern.args if _rest_of(arg)), None)
    if rest is not None:
        yield {**bindings, f"{_REST_KEYWORDS}{rest}": left}
    elif not left:
        yield bindings


def _match_list(patterns: Sequence[Any], nodes: Sequence[Any], bindings: Bindings) -> Iterator[Bindings]:
    if not patterns:
        if not nodes:
            yield bindings
    elif rest := _rest_of(patterns[0]):
        for count in range(len(nodes) + 1):
            yield from _match_list(patterns[1:], nodes[count:], {**bindings, rest: list(nodes[:count])})
    elif nodes:
        for bound in _match(patterns[0], nodes[0], bindings):
            yield from _match_list(patterns[1:], nodes[1:], bound)


def _rest_of(node: Any) -> str | None:
    inner = node.value if isinstance(node, ast.Expr) else node
    return inner.id if isinstance(inner, ast.Name) and inner.id.startswith(_REST) else None


def _bind(hole: str, node: ast.expr, bindings: Bindings) -> Iterator[Bindings]:
    if hole not in bindings:
        yield {**bindings, hole: node}
    elif any(True for _ in _match(bindings[hole], node, {})):
        yield bindings


class _Fill(ast.NodeTransformer):
    """Puts what a pattern has bound into a replacement."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and value.startswith(_HOLE):
                setattr(node, field, self._bindings[value].id)
            elif isinstance(value, list):
                filled: list[Any] = []
                for item in value:
                    rest = _rest_of(item)
                    filled += copy.deepcopy(self._bindings[rest]) if rest else [item]
                    if rest and isinstance(node, ast.Call):
                        node.keywords += copy.deepcopy(self._bindings.get(f"{_REST_KEYWORDS}{rest}", []))
                setattr(node, field, filled)
        super().generic_visit(node)
        for field, value in ast.iter_fields(node):
            if field == "body" and value == []:
                setattr(node, field, [ast.Pass()])
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._bindings[node.id]) if node.id.startswith(_HOLE) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        if len(node.values) > 1:
            return node
        return node.values[0] if node.values else ast.Constant(isinstance(node.op, ast.And))


def _names(tree: ast.AST) -> str:
    return ", ".join(name for name, _ in scopes(tree) if name)


def _nearest(scope: ast.AST, pattern: str) -> str:
    """The code of ``scope`` of the pattern's kind that looks most like it."""
    sought: ast.AST = _parse(pattern)[0]
    if isinstance(sought, ast.Expr):
        sought = sought.value
    text = pattern.replace("$", "")
    alike = [node for node in ast.walk(scope) if type(node) is type(sought) and node is not scope]
    alike.sort(key=lambda node: -difflib.SequenceMatcher(None, text, ast.unparse(node)).ratio())
    lines = [f"    line {node.lineno}: {ast.unparse(node)}" for node in alike[:_MOST_LISTED]]  # type: ignore[attr-defined]
    return "\n".join(lines) or f"    (no {type(sought).__name__} at all)"
