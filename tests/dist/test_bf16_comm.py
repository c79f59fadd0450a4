"""bfloat16 on the wire: half the bytes, and an update whose error is bounded. ``test_cases.py`` draws all else.

The bound. Let u = 2⁻⁸ be bfloat16's unit roundoff (8 significant bits). What is sent of the matrix A is Ã with |Ã − A|
≤ u·|A| elementwise, hence ‖Ã − A‖ ≤ u·‖A‖ in the Frobenius norm, and the result NS(Ã) is rounded once more. With Q, Q̃
the orthogonal factors of A, Ã, and with d = ‖NS(A) − Q‖, d̃ = ‖NS(Ã) − Q̃‖ what the iteration leaves undone,

    ‖sent result − NS(A)‖ ≤ u·‖NS(Ã)‖ + ‖Q̃ − Q‖ + d + d̃.

For matrices of full rank n with smallest singular values s, s̃ the orthogonal factor moves by at most (R.-C. Li, SIAM
J. Matrix Anal. Appl. 16, 1995)

    ‖Q̃ − Q‖ ≤ 2/(s + s̃)·‖Ã − A‖ for square ones,   (2/(s + s̃) + 1/max(s, s̃))·‖Ã − A‖ for others.

With singular values between 1 and κ, ‖A‖ ≤ κ·√n and ‖NS(A)‖ ≈ √n, so that the relative error is at most about (κ + 1)·u
for square and (2κ + 1)·u for other matrices: 1.2 % and 2 % for κ = 2. The test computes every term of the bound in
float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import Muon
from tests.support.tensors import local
from tests.support.threads import run_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)
U = 2.0**-8
KAPPA = 2.0
NS_STEPS = 8


def well_conditioned(rows: int, cols: int, seed: int) -> Tensor:
    """Singular values evenly between 1 and KAPPA."""
    generator = torch.Generator().manual_seed(seed)
    n = min(rows, cols)
    left, _ = torch.linalg.qr(torch.randn(rows, n, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(cols, n, generator=generator, dtype=torch.float64))
    return (left * torch.linspace(1, KAPPA, n, dtype=torch.float64) @ right.T).float()


def update_of(grad: Tensor, param: Tensor, **options: Any) -> Tensor:
    """This rank's part of one update: a parameter of zeros, no momentum, no decay, lr 1 and no factor."""
    param = nn.Parameter(param)
    settings = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "ns_steps": NS_STEPS, **options}
    optimizer = Muon(
        [{"params": [param], "names": ["one"], "use_muon": True}], adjust_lr_fn=lambda rows, cols: 1.0, **settings
    )
    param.grad = grad
    optimizer.step()
    return -local(param)


def orthogonal_factor(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right


def smallest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double())[-1])


def bound(a: Tensor) -> float:
    """The bound of this module's docstring on the absolute error, each term computed."""
    sent = a.bfloat16().float()
    exact, rounded = (
        update_of(a.clone(), torch.zeros_like(a)).double(),
        update_of(sent.clone(), torch.zeros_like(a)).double(),
    )
    undone = float((exact - orthogonal_factor(a)).norm() + (rounded - orthogonal_factor(sent)).norm())
    s, s_sent = smallest(a), smallest(sent)
    sensitivity = 2 / (s + s_sent) + (0.0 if a.size(0) == a.size(1) else 1 / max(s, s_sent))
    return U * float(rounded.norm()) + sensitivity * U * float(a.double().norm()) + undone


LAYOUTS = {
    "FSDP": ((4,), (S0,), {}),
    "TP": ((3,), (S1,), {}),
    "HSDP, shared": ((2, 2), (R, S0), {"replicas": "share"}),
    "HSDP, repeated": ((2, 2), (R, S0), {"replicas": "repeat"}),
    "replicated, shared": ((3,), (R,), {"replicas": "share"}),
}


@pytest.mark.parametrize("shape", [(24, 24), (40, 17), (9, 30)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_error_of_the_update_is_within_the_bound(name: str, shape: tuple[int, int]) -> None:
    """See the module's docstring. The error is also at least u/8: bfloat16 was on the wire."""
    grid, placements, options = LAYOUTS[name]
    grad = well_conditioned(*shape, seed=sum(shape))
    exact = update_of(grad.clone(), torch.zeros(shape)).double()

    def main(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", grid)
        cut = [distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (grad, torch.zeros(shape))]
        mine = update_of(*cut, comm_dtype=torch.bfloat16, **options)
        whole = distribute_tensor(exact, mesh, placements, src_data_rank=None)
        return (mine.double() - local(whole)).square().sum()

    squares = run_threads(math.prod(grid), main)
    replicas = math.prod(size for size, one in zip(grid, placements, strict=True) if one == R)
    # a mean over replicas, which are equal
    relative = math.sqrt(sum(map(float, squares)) / replicas) / float(exact.norm())
    allowed = bound(grad) / float(exact.norm())
    square = shape[0] == shape[1]
    assert allowed <= 1.05 * ((KAPPA if square else 2 * KAPPA) + 1) * U, "the bound is not what the docstring says"
    assert U / 8 <= relative <= allowed, f"relative error {relative:.2e}, bound {allowed:.2e}"
