"""Every operation of a step that rounds, and that neither address nor place nor company nor threads change a bit of
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import Muon
from meshmuon.execute.elementwise import accumulate, apply, look_ahead
from meshmuon.ortho import Workspace, aligned_matrices, orthogonalize, pitch, polar_express
from meshmuon.ortho.workspace import ALIGNMENT, aligned_empty, is_aligned
from tests.support.hostile import HostileArithmetic, fresh_trials, misplaced
from tests.support.reference import assert_same_bits, engine_muon, gradients, group, make_params

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Operations, without what marks them as in place or over lists.
VIEWS = {"expand", "permute", "squeeze", "transpose", "unsqueeze", "view", "unsafe_view"}
PARTS = {"alias", "detach", "diagonal", "select", "slice", "split", "split_with_sizes"}
MADE = {"empty", "empty_like", "ones_like", "zeros", "zeros_like", "full_like", "lift_fresh"}
COPIED = {"cat", "clone", "copy", "fill", "index", "masked_fill", "stack", "where", "zero"}
EXACT = COPIED | {"abs", "amax", "amin", "aminmax", "clamp", "max", "maximum", "neg"}
ONCE = {"add", "div", "mul", "pow", "reciprocal", "sqrt", "sub", "to_copy"}
BY_TRIAL = {"add", "fused_adamw"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# of aligned 32 × 32 blocks; see tests/ortho/test_rational.py
FACTORS = {"linalg_cholesky_ex", "linalg_solve_triangular"}
REDUCTIONS = {"sum", "linalg_vector_norm"}


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)  # another fixture puts it back


class Recorder(TorchDispatchMode):
    """Names of the operations that make floating point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        if func._schema.name.startswith("aten::_f") or any(
            isinstance(one, Tensor) and one.is_floating_point() for one in results
        ):
            self.names.add(func._schema.name.removeprefix("aten::").removeprefix("_foreach").strip("_"))
        if func._schema.name == "aten::pow":
            assert args[1] == 2
        return result


OPTIONS: list[dict[str, Any]] = [
    {},
    {"rule": "normuon"},
    {"rule": "muon_plus"},
    {"rule": "muoneq"},
    {"cautious_weight_decay": True},
    {"nesterov": False},
    {"scheme": "keller", "form": "standard"},
    {"form": "gram"},
    {"deterministic": True},
    {"maximize": True},
    {"lr": torch.tensor(0.01)},
    {"compute_dtype": torch.float64},
    {"compute_dtype": torch.bfloat16},
    {"nonfinite": "skip"},
    {"momentum_dtype": torch.bfloat16},
    {"scheme": [(1.5, -0.5, 0.0)] * 5},
    {"scheme": "zolotarev"},
    {"scheme": "halley"},
    {"scheme": "hybrid"},
]


def optimizer_with(options: dict[str, Any], dtype: torch.dtype) -> tuple[Muon, list[Any]]:
    matrices, others = (
        make_params((8, 12), (12, 8), (3, 9, 9), (400, 400), dtype=dtype),
        make_params((5,), (3, 4), dtype=dtype),
    )
    groups = [group(matrices, prefix="experts"), group(others, use_muon=False)]
    return engine_muon(groups, **{"lr": 0.01, "expert_keys": ["experts"], **options}), [*matrices, *others]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_operation_of_a_step_is_listed(dtype: torch.dtype) -> None:
    recorder = Recorder()
    for options in [*OPTIONS, *([{"rounding": "stochastic"}] if dtype == torch.bfloat16 else [])]:
        optimizer, params = optimizer_with(options, dtype)
        for step in range(2):
            for param, grad in zip(params, gradients(params, step), strict=True):
                param.grad = grad
            if step == 0:  # the first step tries out what the machine does
                optimizer.step()
            else:
                with recorder:
                    optimizer.step()
    assert recorder.names <= VIEWS | PARTS | MADE | EXACT | ONCE | BY_TRIAL | PRODUCTS | FACTORS | REDUCTIONS
    assert {"bmm", "fused_adamw", "sum", "div", "add"} <= recorder.names, "the recorder sees nothing"


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parent.parent / "docs" / "proofs.md").read_text()
    rows = {
        line.split("|")[1].strip(): set(re.findall(r"`(\w+)`", line.split("|")[2]))
        for line in page.splitlines()
        if line.count("|") > 3
    }
    assert {name.strip("_") for name in rows["exact"]} <= EXACT
    assert ONCE - {"to_copy"} <= {name.strip("_") for name in rows["rounded once"]}
    assert rows["products"] >= PRODUCTS
    assert rows["factors"] >= FACTORS
    assert rows["reductions"] >= REDUCTIONS


SIZES = (1, 3, 8, 17, 64, 1003)


def cut(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    """Pieces of a flat tensor at addresses that no allocator would choose."""
    return [misplaced(piece, 1 + k % 15) for k, piece in enumerate(torch.split(tensor, sizes))]


def pieces_of(total: int) -> list[int]:
    sizes, k = [], 0
    while sum(sizes) < total:
        sizes.append(min(SIZES[k % len(SIZES)], total - sum(sizes)))
        k += 1
    return sizes


ONE_ROUNDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "root": lambda a, b: a.abs().sqrt(),
    "square": lambda a, b: a.square(),
    "reciprocal": lambda a, b: 0.3 / b,
    "scaled": lambda a, b: a.clone().mul_(0.95),
    "conversion": lambda a, b: a.double().mul(b.double()).to(a.dtype),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ONE_ROUNDING)
def test_operations_that_round_once(name: str, dtype: torch.dtype, threads: None) -> None:
    operation, total = ONE_ROUNDING[name], 70_001  # more than torch gives to one thread
    a, b = (torch.randn(total, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    whole, sizes = operation(a, b), pieces_of(total)
    found = torch.cat([operation(x, y) for x, y in zip(cut(a, sizes), cut(b, sizes), strict=True)])
    assert torch.equal(found, whole)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(p, g, m) for p in FLOATS for g in (p, torch.float32) for m in (p, torch.float32)], ids=str
)
def test_momentum_look_ahead_and_update(dtypes: tuple[torch.dtype, ...], hostile: bool, threads: None) -> None:
    """The three elementwise parts of a step on a whole tensor and on pieces of it."""
    total = 40_009
    wide = torch.float64 if dtypes[0] == torch.float64 else torch.float32
    made = [torch.randn(total, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    tensors = [one.to(dtype) for one, dtype in zip(made, (*dtypes, wide), strict=True)]

    def run(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], views: list[Tensor]) -> list[Tensor]:
        accumulate(buffers, grads, 0.95)
        look_ahead(views, grads, buffers, 0.95)
        kept = [view.clone() for view in views]
        apply(params, views, 0.999, 0.013)
        return [torch.cat(some) for some in (params, buffers, kept)]

    sizes = pieces_of(total)
    with fresh_trials(), HostileArithmetic() if hostile else nullcontext():
        whole, found = run(*[[one.clone()] for one in tensors]), run(*[cut(one, sizes) for one in tensors])
    assert_same_bits(found, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9, 17), (16, 16), (1, 33), (33, 1), (40, 100)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_reductions_see_one_matrix(shape: tuple[int, int], dtype: torch.dtype, turned: bool, threads: None) -> None:
    """Sums over a diagonal, norms of rows, sums over outputs: alone as in company, at any address."""
    batch = aligned_matrices((7, *shape), dtype, torch.device("cpu"))
    batch.copy_(torch.randn(7, *shape, generator=torch.Generator().manual_seed(3)))

    def reduced(matrices: Tensor) -> list[Tensor]:
        seen = matrices.mT if turned else matrices
        squares = torch.linalg.vector_norm(seen, dim=-1, keepdim=True).square()
        trace = torch.sum(seen.diagonal(dim1=1, dim2=2), dim=1)
        return [squares, squares.sum(-2, keepdim=True), trace]

    together = reduced(batch)
    for k in range(7):
        for alone in (batch[k : k + 1], misplaced(batch[k : k + 1].contiguous(), 3)):
            assert_same_bits(reduced(alone), [one[k : k + 1] for one in together])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(5, 9, 9), (1, 9, 9), (3, 16, 4), (4, 1, 1), (0, 3, 3), (2, 0, 3)], ids=str)
def test_every_matrix_begins_at_a_multiple_of_64_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    workspace = Workspace()
    for batch in (
        aligned_matrices(shape, dtype, torch.device("cpu")),
        workspace.take_matrices("x", shape, dtype, torch.device("cpu")),
    ):
        assert batch.shape == shape
        assert [matrix.data_ptr() % ALIGNMENT for matrix in batch if matrix.numel()] == [0] * (
            shape[0] if batch.numel() else 0
        )
        assert all(matrix.is_contiguous() for matrix in batch)
        assert batch.numel() == 0 or is_aligned(batch)
        assert pitch(*shape[1:], dtype) * dtype.itemsize - shape[1] * shape[2] * dtype.itemsize < ALIGNMENT


def test_alignment_does_not_rely_on_the_allocator() -> None:
    with HostileArithmetic():
        assert torch.empty(10).data_ptr() % ALIGNMENT
        for dtype in FLOATS:
            flat = aligned_empty(100, dtype, torch.device("cpu"))
            assert (flat.numel(), flat.data_ptr() % ALIGNMENT) == (100, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9, 9), (7, 17), (31, 33), (100, 130), (33, 31), (390, 391)], ids=str)
def test_orthogonalize_a_batch_is_a_loop(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Wherever the caller's batch and result lie."""
    batch = torch.randn(3, *shape, dtype=dtype, generator=torch.Generator().manual_seed(4))
    with HostileArithmetic():
        together = orthogonalize(batch, polar_express())
        shifted = orthogonalize(misplaced(batch, 5), polar_express(), out=misplaced(batch, 7))
        alone = torch.stack([orthogonalize(matrix, polar_express()) for matrix in batch])
    assert torch.equal(together, alone)
    assert torch.equal(shifted, alone)


def test_products_of_any_step_are_aligned() -> None:
    """Under all options at once: a product with a misaligned operand would be changed by the hostile machine."""
    for options in OPTIONS:
        found = []
        for chunk_size in (-1, 1):
            with fresh_trials(), HostileArithmetic() as arithmetic:
                optimizer, params = optimizer_with({**options, "chunk_size": chunk_size}, torch.float32)
                for param, grad in zip(params, gradients(params, 0), strict=True):
                    param.grad = misplaced(grad, 3)
                optimizer.step()
            assert arithmetic.nudged, "the trial of scaled sums at least"
            found.append([param.detach() for param in params])
        assert_same_bits(found[0], found[1])
