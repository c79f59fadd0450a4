"""Every synchronisation of the package, found in its source, and the package without one of them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.distributed.tensor import Shard

import meshmuon

from .programs import HEAD_DIM, HEADS, Program, ProgramParam
from .runs import Outcome, run_program

ROOT = Path(meshmuon.__file__).parent
# What orders work of different streams, or the host behind a stream, and what protects memory that several streams use.
_STATEMENTS = {"wait", "wait_stream", "wait_event", "main_waits", "record_stream", "synchronize", "settle", "wait_for"}
_SWITCHES = {"stream", "on_side_stream"}
_MARKS = {"main_mark", "side_mark", "record_event"}
_ARGUMENTS = {"non_blocking", "pin_memory"}  # without them, the host waits for a copy
# Waits for gloo and for connections, in host memory; between steps; for a measurement. Files, or functions of a file.
_NO_STREAMS = {"transport/failures.py", "transport/host_channel.py"} | {
    f"transport/collectives.py {function}" for function in ("_gathered.gathered", "broadcast", "swap_with")
}
_NO_STEP = ("tools", "plan")  # which no step calls
_NO_STEP_CLASSES = {"Hardware"}  # reports and measurements of the doctor


@dataclass(frozen=True)
class Removal:
    """One synchronisation that is taken away."""

    file: str  # relative to the package
    function: str  # qualified name
    line: int
    what: str  # its source
    kind: str  # "wait", "switch", "mark", "argument" or "uses"
    ordinal: int  # its number among the candidates of the file

    @property
    def site(self) -> str:
        """Where it is, without a line number, which every other change would change."""
        return f"{self.file} {self.function}"

    def __str__(self) -> str:
        return f"{self.site}: {self.what}"


class _Finder(ast.NodeTransformer):
    """Finds all candidates of a file; takes away that with number ``without``."""

    def __init__(self, file: str, without: int | None = None) -> None:
        self._file, self._without = file, without
        self._scope: list[str] = []
        self.found: list[Removal] = []

    def _candidate(self, node: ast.AST, kind: str, what: str) -> bool:
        """Notes a candidate; whether it is the one to take away."""
        self.found.append(
            Removal(self._file, ".".join(self._scope), getattr(node, "lineno", 0), what, kind, len(self.found))
        )
        return len(self.found) - 1 == self._without

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scoped(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # A protocol says what its implementations do, and does nothing.
        protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        return node if protocol or node.name in _NO_STEP_CLASSES else self._scoped(node)

    def _scoped(self, node: Any) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node  # type: ignore[no-any-return]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if (
            isinstance(call, ast.Call)
            and _name(call) in _STATEMENTS
            and self._candidate(node, "wait", ast.unparse(call))
        ):
            # wait_for(dist.all_reduce(…), …)
            kept = [argument for argument in call.args if isinstance(argument, ast.Call)]
            return ast.copy_location(ast.Expr(kept[0]) if kept else ast.Pass(), node)
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        kept = []
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _name(call) in _SWITCHES:
                if self._candidate(call, "switch", f"with {ast.unparse(call)}"):
                    continue
                if len(call.args) > 1 and self._candidate(
                    call, "uses", f"the gradients in {ast.unparse(call.func)}(…)"
                ):
                    call.args = call.args[:1]
            kept.append(item)
        node.items = kept or [_nothing(node)]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _name(node) in _MARKS and self._candidate(node, "mark", ast.unparse(node)):
            # A mark that lies before all work: an event that was never recorded.
            return ast.copy_location(ast.parse("__import__('torch').cuda.Event()", mode="eval").body, node)
        for keyword in list(node.keywords):
            asynchronous = keyword.arg in _ARGUMENTS and not _is_false(keyword.value)
            if asynchronous and self._candidate(node, "argument", f"{keyword.arg} in {ast.unparse(node)}"):
                node.keywords.remove(keyword)
        return self.generic_visit(node)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _nothing(node: ast.AST) -> ast.withitem:
    return ast.withitem(ast.parse("__import__('contextlib').nullcontext()", mode="eval").body)


def all_removals() -> list[Removal]:
    """Every synchronisation of the package."""
    found: list[Removal] = []
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT)
        if file.as_posix() not in _NO_STREAMS and file.parts[0] not in _NO_STEP:
            finder = _Finder(file.as_posix())
            finder.visit(ast.parse(path.read_text()))
            found += [removal for removal in finder.found if removal.site not in _NO_STREAMS]
    return found


@contextmanager
def without(removal: Removal) -> Iterator[None]:
    """The package without one synchronisation: the function's code is exchanged in place, for all who have imported
    it.
    """
    path = ROOT / removal.file
    finder = _Finder(removal.file, removal.ordinal)
    tree = ast.fix_missing_locations(finder.visit(ast.parse(path.read_text())))
    changed = _code_of(compile(tree, str(path), "exec"), removal.function.split("."))
    module = importlib.import_module(f"meshmuon.{removal.file.removesuffix('.py').replace('/', '.')}")
    function = _function(module, removal.function.split("."))
    original = function.__code__
    assert original.co_freevars == changed.co_freevars, f"{removal}: the function refers to other variables"
    function.__code__ = changed
    try:
        yield
    finally:
        function.__code__ = original


def _code_of(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        code = next(
            constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_name == name
        )
    return code


def _function(module: ModuleType, names: list[str]) -> FunctionType:
    found: Any = module
    for name in names:
        found = vars(found)[name]
    while hasattr(found, "__wrapped__"):  # a context manager
        found = found.__wrapped__
    while not isinstance(found, FunctionType):
        found = found.fget if isinstance(found, property) else found.__func__
    return found


def reported(program: Program, usual: Outcome) -> str:
    """How a run of ``program`` shows that something is missing; empty if it does not. ``usual`` is a run without a
    removal.
    """
    outcome = run_program(program)
    for kind in ("race", "lifetime"):
        if outcome.of(kind):
            return kind
    if {str(finding) for finding in outcome.of("host wait")} - {str(finding) for finding in usual.of("host wait")}:
        return "host wait"
    lost = usual.beside_main - outcome.beside_main or usual.busy_waits - outcome.busy_waits
    return "lost overlap" if lost else ""


S0 = (Shard(0),)
IN_TURNS = {"warmup_step": 1, "chunk_size": 1}  # one matrix per wave


def weights(count: int, placements: Any = None, *, shape: tuple[int, ...] = (6, 4), in_host: range = range(0)) -> Any:
    """Matrices, of which those numbered ``in_host`` are in host memory."""
    return tuple(ProgramParam(f"layers.{k}.weight", shape, placements, in_host=k in in_host) for k in range(count))


def scenario(mesh: tuple[int, ...], params: tuple[ProgramParam, ...], options: Any = None, **more: Any) -> Program:
    return Program(mesh, params, options={"ns_steps": 1, **(options or {})}, **{"steps": 2, **more})


BIAS = ProgramParam("bias", (5,), use_muon=False)
EXPERTS = ProgramParam("layers.9.experts.weight", (4, 5, 3), S0, in_host=True)  # whole on their ranks
ATTENTION = tuple(ProgramParam(f"layers.0.self_attn.{name}_proj.weight", (HEADS * HEAD_DIM, 5)) for name in "qk")
RULED = {"rule": "normuon", "nesterov": False}
SCENARIOS = {
    "waves": scenario((2,), weights(5, S0), IN_TURNS | RULED),
    "offload": scenario((1,), (*weights(2), BIAS), events=((1, "offload"), (2, "grow"), (2, "save"))),
    "a copy of an offloaded optimizer": scenario((1,), weights(1), steps=3, events=((1, "offload"), (3, "copy"))),
    "DistMuon": scenario((2,), (*weights(3), BIAS), {"chunk_size": 1}, optimizer="DistMuon"),
    # AdamW's reductions would order the last exchange, too.
    "DistMuon without AdamW": scenario((2,), weights(2), optimizer="DistMuon"),
    "weights in host memory": scenario((2,), weights(4, S0, in_host=range(4)), IN_TURNS),
    # So that waves of others are the last ones. The rule allocates memory.
    "weights in host memory before others": scenario(
        (2,), weights(4, S0, in_host=range(1)), IN_TURNS | {"rule": "muon_plus"}
    ),
    "weights in host memory after others": scenario(
        (2,), (*weights(6, S0, in_host=range(1, 6, 2)), EXPERTS), IN_TURNS | RULED
    ),
    # Without exchanges; three matrices on each rank.
    "weights in host memory, whole on their ranks": scenario(
        (2,), (replace(EXPERTS, shape=(6, 5, 3)),), {"chunk_size": 1}
    ),
    "prepared": scenario((2,), weights(2, S0), events=((0, "prepare"),)),
    "metrics": scenario((2,), (*weights(2, S0), replace(BIAS, placements=S0)), {"metrics": 1}, steps=5),
    "logits in pinned memory": scenario(
        (1,),
        ATTENTION,
        {"clip_config": {"head_dim": HEAD_DIM, "threshold": 10.0}},
        steps=3,
        qk_clip=True,
        host_logits=True,
    ),
}
"""Small programs that together need every synchronisation of the package."""
