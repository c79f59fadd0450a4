"""What the optimizer is compared with: Muon written plainly in float64, and small helpers that every theme uses.

The reference works matrix by matrix and knows nothing of batches, forms or buffers:

    M ← momentum·M + G,   U = G + momentum·M with Nesterov, else M,
    p ← p·(1 − lr·weight_decay),   p ← p − lr·factor(rows, cols)·orthogonal(U).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshmuon import Muon
from meshmuon.ortho import Scheme, keller
from tests.support.bounds import moved_error

KELLER = (3.4445, -4.7750, 2.0315)
KELLER_5 = (KELLER,) * 5
FIVE_OF_KELLER = keller()
LR = 0.005  # usual enough for every rule that no warning is due

FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
    "original": lambda rows, cols: (rows / cols) ** 0.5 if rows > cols else 1.0,
    "spectral": lambda rows, cols: rows**0.5 / cols**0.5,
}

Shape = tuple[int, ...]
Orthogonalise = Callable[[Tensor], Tensor]


def newton_schulz(update: Tensor, steps: Sequence[Sequence[float]], eps: float = 0.0) -> Tensor:
    """The standard form on one matrix, in the dtype of ``update``, divided by its norm or by ``eps`` if that is
    larger.
    """
    x: Tensor = update.mT if update.size(0) > update.size(1) else update
    x = x / x.norm().clamp(min=max(eps, torch.finfo(x.dtype).tiny))
    for a, b, c in steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if update.size(0) > update.size(1) else x


def polar_factor(batch: Tensor) -> Tensor:
    """U·Vᵀ by SVD, of a matrix or a batch."""
    left, _, right = torch.linalg.svd(batch, full_matrices=False)
    factor: Tensor = left @ right
    return factor


class Reference:
    """Plain Muon in float64 on copies of ``params``."""

    def __init__(self, params: Iterable[Tensor], *, experts: bool = False) -> None:
        self.params = [param.detach().double().clone() for param in params]
        self.buffers = [torch.zeros_like(param) for param in self.params]
        self._experts = experts

    def step(
        self,
        grads: Iterable[Tensor | None],
        *,
        lr: float = LR,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust: str | Callable[[int, int], float] = "match_rms_adamw",
        maximize: bool = False,
        steps: Sequence[Sequence[float]] = KELLER_5,
        orthogonalise: Orthogonalise | None = None,
    ) -> None:
        factor = FACTORS[adjust] if isinstance(adjust, str) else adjust
        for param, buffer, grad in zip(self.params, self.buffers, grads, strict=True):
            if grad is None:
                continue
            exact = -grad.double() if maximize else grad.double()
            buffer.mul_(momentum).add_(exact)
            update = exact + momentum * buffer if nesterov else buffer
            param.mul_(1 - lr * weight_decay)
            for matrix, target in zip(self._matrices(update), self._matrices(param), strict=True):
                result = newton_schulz(matrix, steps) if orthogonalise is None else orthogonalise(matrix)
                target.sub_(lr * factor(*matrix.shape) * result)

    def _matrices(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor) if self._experts else [tensor.reshape(tensor.size(0), -1)]


def make_params(*shapes: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in random_tensors(*shapes, dtype=dtype, seed=seed)]


def random_tensors(*shapes: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """Fixed gradients of one step; their size changes from step to step, as in training."""
    made = random_tensors(*(tuple(param.shape) for param in params), seed=1000 + step)
    return [(grad * (1.0 + step % 3)).to(param.dtype) for grad, param in zip(made, params, strict=True)]


def set_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def group(
    params: Sequence[Tensor], *, use_muon: bool = True, prefix: str | None = None, **options: Any
) -> dict[str, Any]:
    prefix = prefix or ("layers" if use_muon else "others")
    names = [f"{prefix}.{k}.weight" for k in range(len(params))]
    return {"params": list(params), "names": names, "use_muon": use_muon, **options}


def engine_muon(params: Any, build: type[Muon] = Muon, **options: Any) -> Muon:
    """``Muon`` that may also be given what the plan decides for users: ``form``."""
    form = options.pop("form", None)
    optimizer = build(params, **options)
    if form is not None:
        optimizer._settings = replace(optimizer._settings, form=form)
    optimizer._reset()
    return optimizer


def muon(params: Sequence[Tensor], **options: Any) -> Muon:
    """Muon on ``params`` alone, with the reference's defaults."""
    return engine_muon([group(params)], **{"lr": LR, "scheme": "keller", **options})


def adamw(params: Sequence[Tensor], **options: Any) -> Muon:
    """The AdamW part on ``params`` alone."""
    return Muon([group(params, use_muon=False)], **{"lr": LR, "allow_inactive": True, **options})


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    """Steps with the fixed gradients of ``steps``."""
    for step in steps:
        set_gradients(params, gradients(params, step))
        optimizer.step()


def run_beside(
    reference: Reference,
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    numbers: Iterable[int],
    **options: Any,
) -> None:
    """``run``, with the same steps of the reference, which is told ``options``."""
    for number in numbers:
        run(optimizer, params, [number])
        reference.step(gradients(params, number), **options)


def run_alike(*runs: tuple[torch.optim.Optimizer, Sequence[Tensor]], steps: Iterable[int]) -> None:
    """Several optimizers on the fixed gradients of ``steps``, each on its own parameters."""
    for step in steps:
        for optimizer, params in runs:
            run(optimizer, params, [step])


class Run:
    """An optimizer on param groups, fed with fixed gradients."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.optimizer = Muon(groups, **{"lr": LR, **options})

    @property
    def params(self) -> list[Tensor]:
        return [param for one in self.optimizer.param_groups for param in one["params"]]

    def step(self, number: int, *, without: Sequence[int] = (), bad: tuple[int, float] | None = None) -> None:
        """``bad`` is a parameter and what the last element of its gradient is."""
        grads: list[Tensor | None] = [*gradients(self.params, number)]
        for k in without:
            grads[k] = None
        if bad is not None and (spoilt := grads[bad[0]]) is not None:
            spoilt.view(-1)[-1] = bad[1]
        set_gradients(self.params, grads)
        self.optimizer.step()

    def everything(self) -> list[Tensor]:
        """Parameters and state, by name."""
        entries = [self.optimizer.state.get(param, {}) for param in self.params]
        return [*self.params, *(entry[key] for entry in entries for key in sorted(entry))]


def copies(params: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def gapped(param: Tensor) -> nn.Parameter:
    """The same numbers in every second column of a larger tensor: neither contiguous nor dense."""
    return nn.Parameter(torch.stack([param.detach(), torch.zeros_like(param)], dim=-1).flatten(-2)[..., ::2])


def assert_same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype, f"tensor {index}: {a.dtype} is not {b.dtype}"
        assert torch.equal(a, b), f"tensor {index} differs by {(a - b).abs().max().item():g}"


def assert_moved_alike(
    actual: Iterable[Tensor], expected: Iterable[Tensor], start: Iterable[Tensor], tolerance: float
) -> None:
    """The two results differ by less than ``tolerance`` times the way they came, in Frobenius norm, tensor by
    tensor.
    """
    for index, (a, b, s) in enumerate(zip(actual, expected, start, strict=True)):
        way = (b.double() - s.double()).norm()
        assert way > 0, f"tensor {index} did not move"
        error = ((a.double() - b.double()).norm() / way).item()
        assert math.isfinite(error), f"tensor {index} is not finite"
        assert error < tolerance, (
            f"tensor {index} {tuple(a.shape)}: relative error {error:g} is not below {tolerance:g}"
        )


def assert_moved_within_rounding(
    actual: Iterable[Tensor],
    expected: Iterable[Tensor],
    start: Iterable[Tensor],
    updates: int,
    scheme: Scheme = FIVE_OF_KELLER,
    **dtypes: Any,
) -> None:
    """The two results differ by no more than the rounding of ``updates`` steps explains: see ``moved_error``."""
    for a, b, s in zip(actual, expected, start, strict=True):
        tolerance = moved_error(s.detach(), b.detach(), updates=updates, scheme=scheme, **dtypes)
        assert tolerance < 0.25, "rounding hides everything"
        assert_moved_alike([a], [b], [s], tolerance)
