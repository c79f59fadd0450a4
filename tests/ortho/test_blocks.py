"""Cutting steps into blocks: what the simulation calls safe is safe on real matrices."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from meshmuon.ortho import Scheme, Workspace, keller, polar_express
from meshmuon.ortho.blocks import _cuts, _Outcome, _simulate, gram_blocks, standard_blocks
from meshmuon.ortho.iteration import iterate
from meshmuon.ortho.kernels.products import BlockedProducts
from meshmuon.ortho.remez import Quintic
from meshmuon.ortho.scratch import Scratch
from tests.support.bounds import orthogonalize_error

from .oracle import SPECTRA, expected, highest, largest_singular_value, of_kind, spectral_distance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCHEMES = {"polar_express": polar_express(), "keller": keller()}
ALL_CUTS = [blocks for count in range(1, 6) for blocks in _cuts(5, count)]


def run(x: Tensor, scheme: Scheme, blocks: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    batch = x.unsqueeze(0)
    result = torch.empty_like(batch)
    iterate(batch, scheme.steps, blocks, Scratch(Workspace(), batch, dtype, result), BlockedProducts())
    return result[0]


@lru_cache
def adversary(kind: str) -> Tensor:
    return of_kind(kind, 96, 256)


@lru_cache
def simulated(name: str, blocks: tuple[int, ...], dtype: torch.dtype) -> _Outcome:
    return _simulate(SCHEMES[name], blocks, torch.finfo(dtype).eps / 2)


# The choice


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 8])
def test_blocks_hold_every_step_once(steps: int, dtype: torch.dtype) -> None:
    for scheme in (keller(steps), polar_express(steps=steps)):
        blocks = gram_blocks(scheme, dtype)
        assert sum(blocks) == steps
        assert min(blocks) >= 1
        assert standard_blocks(scheme) == (1,) * steps


GENTLE = Scheme("gentle", (Quintic(1.5, -0.5, 0.0),) * 5, "Newton–Schulz of third order")


@pytest.mark.parametrize(
    ("scheme", "float32", "float16", "bfloat16"),
    [
        (polar_express(), (5,), (1, 1, 3), (1, 1, 1, 2)),
        (keller(), (5,), (1, 2, 2), (1, 2, 2)),
        (GENTLE, (5,), (5,), (3, 2)),
        (polar_express(1e-3, 4, 0.0, 0.0), (4,), (1, 1, 1, 1), (1, 1, 1, 1)),
        (polar_express(steps=8), (2, 2, 4), (1, 1, 2, 4), (1,) * 8),  # of whose cuts only few blocks are tried
    ],
    ids=lambda value: getattr(value, "source", str(value)),
)
def test_the_fewest_blocks_that_are_safe(
    scheme: Scheme, float32: tuple[int, ...], float16: tuple[int, ...], bfloat16: tuple[int, ...]
) -> None:
    """Bits depend on them, so all machines must find the same. In 16 bits no other step may share a block with the
    steepest.
    """
    assert [gram_blocks(scheme, dtype) for dtype in DTYPES] == [float32, bfloat16, float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_steps_are_planned_with_few_simulations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 2³¹ ways to cut 32 steps. At most 150 of each number of blocks, up to four, are tried, and two for
    the bounds.
    """
    tried: list[tuple[int, ...]] = []

    def counting(scheme: Scheme, blocks: tuple[int, ...], noise: float) -> _Outcome:
        tried.append(blocks)
        return _simulate(scheme, blocks, noise)

    monkeypatch.setattr("meshmuon.ortho.blocks._simulate", counting)
    assert sum(gram_blocks.__wrapped__(keller(32), dtype)) == 32
    assert len(tried) <= 4 * 150 + 2


def test_exact_arithmetic_simulates_the_polynomial() -> None:
    for scheme in SCHEMES.values():
        for blocks in ((5,), (2, 3), (1,) * 5):
            outcome = _simulate(scheme, blocks, 0.0)
            # diag(1, s) normalised has singular values on a grid, so the maximum is met up to the grid.
            assert outcome.overshoot == pytest.approx(highest(scheme.steps), rel=0.02)
            assert outcome.deviation == 0


# The choice meets reality


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_no_overshoot_where_the_simulation_calls_it_safe(name: str, dtype: torch.dtype) -> None:
    scheme = SCHEMES[name]
    limit = 1.05 * highest(scheme.steps)
    safe = [blocks for blocks in ALL_CUTS if simulated(name, blocks, dtype).overshoot <= limit]
    assert standard_blocks(scheme) in safe
    for blocks in safe:
        for kind in SPECTRA:
            assert largest_singular_value(run(adversary(kind), scheme, blocks, dtype)) <= limit, (blocks, kind)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_chosen_cut_deviates_no_more_than_the_standard_form_or_the_polynomial(name: str) -> None:
    scheme = SCHEMES[name]
    spread = max(abs(1 - scheme(10 ** (-3 * k / 200))) for k in range(201))
    for dtype in DTYPES:
        for kind in SPECTRA:
            x = adversary(kind)
            exact = expected(x, scheme.steps)
            standard = spectral_distance(run(x, scheme, (1,) * 5, dtype), exact)
            assert spectral_distance(run(x, scheme, gram_blocks(scheme, dtype), dtype), exact) <= max(
                spread, 1.25 * standard
            )


def test_one_block_in_bfloat16_is_called_unsafe_and_is() -> None:
    # Without this the tests above could hold because nothing ever goes wrong.
    scheme = polar_express()
    assert simulated("polar_express", (5,), torch.bfloat16).overshoot > 2
    worst = max(largest_singular_value(run(adversary(kind), scheme, (5,), torch.bfloat16)) for kind in SPECTRA)
    assert worst > 2


def multiplied_from_the_right(x: Tensor, scheme: Scheme) -> Tensor:
    """One block in plain float32, with the factors in the other order."""
    x, identity = x / x.norm(), torch.eye(len(x))
    gram, factor = x @ x.mT, identity
    for a, b, c in scheme.steps:
        quadratic = a * identity + b * gram + c * gram @ gram.mT
        factor, gram = factor @ quadratic, quadratic @ gram.mT @ quadratic.mT
    return factor @ x


def test_the_new_quadratic_is_multiplied_from_the_left() -> None:
    # On paper the factors commute. With the order reversed, rounding passes through the accumulated factor and the
    # small singular values beside a large one come out wrong by more than themselves.
    for kind in ("spike2", "spike3", "log"):
        x, exact = adversary(kind), expected(adversary(kind), polar_express().steps)
        result = run(x, polar_express(), (5,), torch.float32)
        if kind != "spike2":
            assert (
                spectral_distance(result, exact)
                < spectral_distance(multiplied_from_the_right(x, polar_express()), exact) / 1.5
            )
        bound = orthogonalize_error(x, polar_express(), form=(5,))
        assert spectral_distance(result, exact) < bound
        assert largest_singular_value(result) < highest(polar_express().steps) + bound


def test_every_cut_gives_the_same_polynomial() -> None:
    x = of_kind("log", 12, 20, dtype=torch.float64)
    exact = expected(x, polar_express().steps)
    for blocks in ALL_CUTS:
        bound = orthogonalize_error(x, polar_express(), form=blocks)
        assert spectral_distance(run(x, polar_express(), blocks, torch.float64), exact) < bound
