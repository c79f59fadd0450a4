"""An oracle that knows no table: which linear layers a module cuts into parts, read from the source of its own
forward.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence

from torch import nn

_RESHAPES = {"view", "reshape", "transpose", "permute", "contiguous", "unflatten", "unsqueeze", "to", "float"}
_CUTS = {"chunk", "split", "unbind", "tensor_split"}


@functools.cache
def cut_layers(owner: type[nn.Module]) -> frozenset[str]:
    """The attributes of a class whose outputs its methods cut along the last dim: ``q, k = self.qk(x).chunk(2,
    dim=-1)``.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    return frozenset(layer for method in methods for layer in _Reader().read(method.body))


class _Reader:
    """Follows the outputs of layers through variables and reshapes, statement by statement."""

    def __init__(self) -> None:
        self._variables: dict[str, str] = {}  # variable → layer that its value comes from

    def read(self, statements: Sequence[ast.stmt]) -> Iterator[str]:
        for statement in statements:
            bodies = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            if not any(bodies):
                yield from (layer for node in ast.walk(statement) if (layer := self._cut(node)) is not None)
                self._assign(statement)
            for body in bodies:
                yield from self.read(body)

    def _assign(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign):
            return
        for target in statement.targets:
            if isinstance(target, ast.Name):
                layer = self._source(statement.value)
                self._variables.pop(target.id, None)
                if layer is not None:
                    self._variables[target.id] = layer

    def _cut(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CUTS:
            function = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            value = node.args[0] if function and node.args else node.func.value
            given = [
                *node.args[2 if function else 1 :],
                *(keyword.value for keyword in node.keywords if keyword.arg == "dim"),
            ]
            # dim 0, also by default
            rows = not given or any(isinstance(dim, ast.Constant) and dim.value == 0 for dim in given)
            return None if rows and node.func.attr != "unbind" else self._source(value)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            first, last = node.slice.elts[0], node.slice.elts[-1]
            if isinstance(first, ast.Constant) and first.value is Ellipsis and isinstance(last, ast.Slice):
                return self._source(node.value)
        return None

    def _source(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._variables.get(node.id)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
            return node.func.attr
        return self._source(node.func.value) if node.func.attr in _RESHAPES else None
