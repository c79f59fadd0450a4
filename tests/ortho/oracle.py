"""What the tests of the orthogonalisation compare with: published numbers, a Remez of its own, matrices of known
spectrum.

The Polar Express coefficients were computed by other code in float64; ``mp_polar_express`` below is a third
computation, in 800 digits and from the textbook system, without any of the substitutions that ``meshmuon.ortho.remez``
makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from mpmath import lu_solve, matrix, mpf, sqrt, workdps
from torch import Tensor

Triple = tuple[float, float, float]

# l = 1e-3, safety = 0, cushion = 0, 10 steps. Without safety the steps do not depend on how many follow.
EXACT: tuple[Triple, ...] = (
    (8.47032880384807, -25.10807470666187, 18.629275599118007),
    (4.1828341832939415, -3.1087011098892416, 0.5806066813500492),
    (3.9618572789615993, -2.954063746359378, 0.5629761179538962),
    (3.2865862170279607, -2.4647201345312824, 0.5073576938614549),
    (2.273749994434039, -1.6446603679080691, 0.4161909274978862),
    (1.8887161973518287, -1.2651572253386005, 0.3765189255574907),
    (1.8750008858532836, -1.2500009842794817, 0.3750000984265288),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
)

# Largest |1 − p(x)| over [1e-3, 1] after so many steps of EXACT, in high precision.
WORST_EXACTLY = (
    "0.991529696304",
    "0.964572013324",
    "0.859770700521",
    "0.545893283861",
    "0.113448457382",
    "0.000916472188726",
    "4.81102937064e-10",
    "6.95975644733e-29",
    "2.10698839372e-85",
    "5.84610279214e-255",
)


# l = 1e-3, safety = 0.01, cushion = 0.02, 5 steps; the last one is not stretched by the safety factor.
SAFE: tuple[Triple, ...] = (
    (8.237312490495563, -23.15774741455822, 16.68056841144593),
    (4.0824419990648275, -2.8930477353325803, 0.5252849256975638),
    (3.9263479922546565, -2.8547468034765298, 0.5318022422894989),
    (3.2982187133085166, -2.4245419810267084, 0.48632008358844114),
    (2.3200073128898095, -1.6862169729967604, 0.4206802734023509),
)


class MpQuintic(NamedTuple):
    a: mpf
    b: mpf
    c: mpf

    def __call__(self, x: mpf) -> mpf:
        return x * (self.a + x * x * (self.b + x * x * self.c))


def mp_best_quintic(low: mpf, high: mpf) -> tuple[MpQuintic, mpf]:
    """The minimax quintic for 1 on [low, high] and its error, by the textbook exchange, in the digits of the
    context.
    """
    inner = [low + (high - low) * k / 4 for k in (1, 3)]
    error = mpf(0)
    for _ in range(100):
        rows = [[x, x**3, x**5, mpf(-1) ** k] for k, x in enumerate([low, *inner, high])]
        a, b, c, levelled = lu_solve(matrix(rows), matrix([mpf(1)] * 4))
        root = sqrt(9 * b * b - 20 * a * c)
        inner = sorted(sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
        previous, error = error, abs(levelled)
        if abs(error - previous) <= error * mpf(10) ** -25:
            return MpQuintic(a, b, c), error
    raise ArithmeticError(f"no convergence on [{low}, {high}]: more digits are needed")


@lru_cache
def mp_polar_express(steps: int, safety: float, cushion: float) -> tuple[tuple[Triple, ...], tuple[mpf, ...]]:
    """The Polar Express recursion for l = 1e-3: its steps, rounded to float64, and 1 minus the lower end after each.

    The tenth interval has a width of 1e-85, where the exchange loses three times as many digits.
    """
    with workdps(800):
        low, high = mpf(1e-3), mpf(1)
        rows: list[Triple] = []
        gaps: list[mpf] = []
        for step in range(steps):
            floor = max(low, mpf(cushion) * high)
            quintic, _ = mp_best_quintic(floor, high)
            if floor > low:
                centred = 2 / (quintic(low) + quintic(high))
                quintic = MpQuintic(*(value * centred for value in quintic))
            if step < steps - 1:
                stretch = 1 + mpf(safety)
                quintic = MpQuintic(quintic.a / stretch, quintic.b / stretch**3, quintic.c / stretch**5)
            rows.append((float(quintic.a), float(quintic.b), float(quintic.c)))
            low = quintic(low)
            high = 2 - low
            gaps.append(1 - low)
        return tuple(rows), tuple(gaps)


# Spectra that are hard for rounding: many sizes at once, exact zeros, one direction that dwarfs the others.
SPECTRA = ("random", "log", "linear", "rank8", "spike2", "spike3")


def spectrum(kind: str, n: int) -> Tensor:
    """Singular values of an n-row matrix, float64, largest 1. ``random`` is that of a Gaussian matrix twice as wide."""
    if kind == "random":
        singular = torch.linalg.svdvals(gaussian(n, 2 * n, dtype=torch.float64))
        return singular / singular[0]
    if kind == "log":
        return torch.logspace(0, -3, n, dtype=torch.float64)
    if kind == "linear":
        return torch.linspace(1, 0, n, dtype=torch.float64)
    if kind == "rank8":
        return torch.cat([torch.ones(min(8, n)), torch.zeros(max(n - 8, 0))]).double()
    small = {"spike2": 1e-2, "spike3": 1e-3}[kind]
    return torch.cat([torch.ones(1), torch.full((n - 1,), small)]).double()


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_spectrum(values: Tensor, rows: int, cols: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rows × cols matrix with the given singular values and random singular vectors."""
    u, _ = torch.linalg.qr(gaussian(rows, values.numel(), seed=seed, dtype=torch.float64))
    v, _ = torch.linalg.qr(gaussian(cols, values.numel(), seed=seed + 1, dtype=torch.float64))
    return ((u * values) @ v.mT).to(dtype)


def of_kind(kind: str, rows: int, cols: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return with_spectrum(spectrum(kind, min(rows, cols)), rows, cols, seed=seed, dtype=dtype)


def apply_steps(steps: Sequence[Sequence[float]], x: Tensor) -> Tensor:
    """The composed polynomial, element by element."""
    for a, b, c in steps:
        square = x * x
        x = x * (a + square * (b + square * c))
    return x


def expected(x: Tensor, steps: Sequence[Sequence[float]]) -> Tensor:
    """U·f(S/‖S‖)·Vᵀ in float64, for x of any scale: what orthogonalize promises."""
    x = x.double()
    largest = float(x.abs().max())
    if largest == 0:
        return torch.zeros_like(x)
    u, s, vh = torch.linalg.svd(x / largest, full_matrices=False)
    return (u * apply_steps(steps, s / torch.linalg.vector_norm(s))) @ vh


@lru_cache
def highest(steps: tuple[Triple, ...]) -> float:
    """Largest value of the composed polynomial on [0, 1], up to 1e-6."""
    grid = torch.cat(
        [torch.logspace(-7, 0, 20001, dtype=torch.float64), torch.linspace(0, 1, 20001, dtype=torch.float64)]
    )
    return float(apply_steps(steps, grid).max())


def spectral_distance(x: Tensor, y: Tensor) -> float:
    """Largest singular value of x − y: how far any direction is from where it belongs."""
    return largest_singular_value(x.double() - y.double())


def largest_singular_value(x: Tensor) -> float:
    if not bool(x.isfinite().all()):
        return math.inf
    x = x.double()
    gram = x @ x.mT if x.size(-2) <= x.size(-1) else x.mT @ x
    return math.sqrt(float(torch.linalg.eigvalsh(gram).max()))
