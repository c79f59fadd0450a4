"""Models that ``torch.export`` or ``torch.fx`` has rebuilt, as pipelining does: classes and graphs tell what was
there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from ..torch_compat import traced_class

_CUTS = ("split", "split_with_sizes", "chunk")


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module; for one that ``torch.export`` has rebuilt, the class that it was traced from."""
    name = traced_class(module)
    return type(module) if name is None else _class_named(name)


def is_instance(module: nn.Module, classes: type | tuple[type, ...]) -> bool:
    """``isinstance``, which also sees through a rebuilt module."""
    return issubclass(class_of(module), classes)


@functools.cache
def _class_named(name: str) -> type[nn.Module]:
    """The class of this qualified name, or an empty one of the same name if the program does not have it."""
    parts = name.split(".")
    for k in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:k]))
        for part in parts[k:]:
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    return type(parts[-1], (nn.Module,), {})


def looked_up_in_graphs(model: nn.Module) -> Iterator[Tensor]:
    """The parameters in which the graphs of a model look up rows: embeddings, whatever holds them."""
    for module, node in _calls(model):
        if _function_of(node) in ("embedding", "embedding_bag"):
            yield from (param for _, param in _params_of(module, node) if param.dim() == 2)


def convolved_in_graphs(model: nn.Module) -> Iterator[tuple[Tensor, str, int]]:
    """The filters in the graphs of a model, with the name of the function (``conv2d``, ``conv_transpose1d``) and
    its groups.
    """
    for module, node in _calls(model):
        function = _function_of(node)
        if function.startswith("conv") and function[-1:] == "d":
            position = 7 if "transpose" in function else 6  # input, weight, bias, stride, padding, …
            groups = node.kwargs.get("groups", node.args[position] if len(node.args) > position else 1)
            for argument, param in _params_of(module, node):
                if argument is node.args[1]:
                    yield param, function, groups if isinstance(groups, int) else 1


def cut_in_graph(modules: tuple[nn.Module, ...], parts: tuple[str, ...], outputs: int) -> tuple[int, ...] | None:
    """The sizes into which a graph around a linear layer cuts its outputs; None if there is no graph or it does not cut
    them.

    ``modules`` and ``parts`` are those of a ``ParamPlace``.
    """
    for depth, module in enumerate(modules[:-1]):
        layer = ".".join(parts[depth:-1])
        for node in _nodes(module):
            if node.op == "call_module" and node.target == layer:
                cuts = {sizes for user in node.users if (sizes := _sizes_of_cut(user, node, outputs)) is not None}
                if len(cuts) == 1:
                    return cuts.pop()
    return None


def _sizes_of_cut(node: fx.Node, source: fx.Node, outputs: int) -> tuple[int, ...] | None:
    if node.op not in ("call_function", "call_method") or _function_of(node) not in _CUTS or node.args[:1] != (source,):
        return None
    given = node.args[1] if len(node.args) > 1 else next(iter(node.kwargs.values()), None)
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    value = source.meta.get("val")
    if dim != -1 and not (isinstance(value, Tensor) and dim == value.dim() - 1):
        return None
    if isinstance(given, (list, tuple)):
        sizes = tuple(size for size in given if isinstance(size, int))
    elif isinstance(given, int) and given > 0:
        size = -(-outputs // given) if _function_of(node) == "chunk" else given
        sizes = (size,) * (outputs // size)
    else:
        return None
    return sizes if len(sizes) > 1 and sum(sizes) == outputs and all(size > 0 for size in sizes) else None


def _nodes(module: nn.Module) -> Iterator[fx.Node]:
    graph = getattr(module, "graph", None)
    if isinstance(graph, fx.Graph):
        yield from graph.nodes


def _calls(model: nn.Module) -> Iterator[tuple[nn.Module, fx.Node]]:
    for module in model.modules():
        yield from ((module, node) for node in _nodes(module) if node.op == "call_function")


def _function_of(node: fx.Node) -> str:
    """The same ``split`` for ``aten.split.Tensor``, ``torch.split`` and ``Tensor.split``."""
    if isinstance(node.target, str):
        return node.target
    name = str(getattr(node.target, "__name__", ""))
    return name.partition(".")[0]


def _params_of(module: nn.Module, node: fx.Node) -> Iterator[tuple[Any, Tensor]]:
    """The arguments of a call that are parameters of the module, and these."""
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            value: Any = module
            for part in str(argument.target).split("."):
                value = getattr(value, part, None)
            if isinstance(value, nn.Parameter):
                yield argument, value
