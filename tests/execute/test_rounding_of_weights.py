"""Weights of 16 bits: formed in float32, rounded once, to nearest or stochastically."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshmuon.execute import rounding
from meshmuon.execute.elementwise import apply
from meshmuon.execute.rounding import (
    Elements,
    RandomWords,
    RoundingScratch,
    advance_counters,
    elements_held,
    round_stochastically,
)
from meshmuon.layout import Ranges

CPU = torch.device("cpu")
MASK_64 = (1 << 64) - 1


def counter(key: int = 7, count: int = 0) -> Tensor:
    return torch.tensor([key, count])


def whole(*shape: int) -> Elements:
    held: list[Ranges] = [((0, size),) if size else () for size in shape]
    return elements_held(shape, held, CPU).hashed()


def rounded(numbers: Tensor, *, key: int = 7, count: int = 0) -> Tensor:
    copy = numbers.clone()
    round_stochastically(copy, RandomWords.of(counter(key, count), whole(*numbers.shape)), RoundingScratch())
    return copy


def mixed(word: int) -> int:
    """SplitMix64's permutation, in Python's integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK_64
    return word ^ (word >> 31)


def noise_of(key: int, count: int, row: int, col: int) -> int:
    """The 16 random bits of an element, as the module describes them, in Python's integers."""
    gamma = 0x9E3779B97F4A7C15
    seed = mixed((mixed(key) + count * gamma) & MASK_64)
    hashes = mixed((row + gamma) & MASK_64) ^ seed, mixed((col - gamma) & MASK_64) ^ mixed((seed + gamma) & MASK_64)
    words = [((hashed * 0x94D049BB133111EB) & MASK_64) >> 32 for hashed in hashes]
    word = ((words[0] ^ words[1]) * 0x7FEB352D) & 0xFFFFFFFF
    return (((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF) >> 16


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", [(3, 37), (1, 1), (2, 3, 5), (70,)], ids=str)
def test_the_random_bits_are_those_of_exact_integers(
    shape: tuple[int, ...], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operation of torch may saturate, whether an element is in a vector or at the end of a tensor.

    A counter on a device is not read: torch then computes what Python does here.
    """
    monkeypatch.setattr(rounding, "known_to_host", lambda tensor: known)
    key, count = 5248332056365267182, 1234
    ones = torch.full(shape, 1.0).view(torch.int32)
    for low in (1, 0x7FFF, 0xFFFF):
        found = rounded((ones + low).view(torch.float32), key=key, count=count).view(torch.int32) - ones
        rows = [(k // shape[-1], k % shape[-1]) for k in range(math.prod(shape))]
        expected = [(noise_of(key, count, row, col) + low) >> 16 << 16 for row, col in rows]
        assert found.flatten().tolist() == expected


def test_numbers_of_bfloat16_and_numbers_that_are_not_finite_stay() -> None:
    special = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        math.inf,
        -math.inf,
        torch.finfo(torch.bfloat16).max,
        torch.finfo(torch.bfloat16).tiny,
    ]
    for count in range(50):
        found = rounded(torch.tensor(special), count=count)
        assert torch.equal(found.view(torch.int32), torch.tensor(special).view(torch.int32))
    every_nan = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for count in range(50):
        assert rounded(every_nan, count=count).bfloat16().isnan().all()


def test_both_signs_are_rounded_alike() -> None:
    numbers = torch.randn(40, 60, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded(-numbers), -rounded(numbers))


@pytest.mark.parametrize("low", [1, 0x0800, 0x4000, 0x8000, 0xC000, 0xFFFF])
def test_the_mean_is_exact(low: int) -> None:
    """Of n roundings a binomial number goes up: within five standard deviations of n·low/2¹⁶, one in 1.7 million
    tests fails.
    """
    number = (torch.tensor([1.0]).view(torch.int32) + low).view(torch.float32)
    up = 0
    for count in range(8):
        up += int((rounded(number.expand(300, 400).clone(), key=11, count=count) > 1.0).sum())
    n, probability = 8 * 300 * 400, low / (1 << 16)
    assert abs(up - n * probability) <= 5 * math.sqrt(n * probability * (1 - probability)) + 1


def test_neighbours_steps_and_parameters_are_independent() -> None:
    """Correlations of 2·10⁵ signs: the standard deviation is 1/√n."""

    def signs(key: int, count: int) -> Tensor:
        half = (torch.tensor([1.0]).view(torch.int32) + 0x8000).view(torch.float32)
        return (rounded(half.expand(401, 503).clone(), key=key, count=count) > 1.0).float() * 2 - 1

    base = signs(3, 5)
    pairs = [(base, signs(3, 6)), (base, signs(4, 5)), (base[1:], base[:-1]), (base[:, 1:], base[:, :-1])]
    rectangle = base[1:, 1:] * base[:-1, :-1], base[1:, :-1] * base[:-1, 1:]  # the bits of four corners
    for first, second in (*pairs, rectangle):
        assert abs(float((first * second).mean())) <= 5 / math.sqrt(first.numel())


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, update = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    return weight.to(dtype), update


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rate", [0.013, torch.tensor(0.013)], ids=["number", "tensor"])
def test_to_nearest_is_float32_rounded_once(dtype: torch.dtype, rate: float | Tensor) -> None:
    weight, update = tensors((30, 50), dtype)
    expected = (weight.float() * 0.9997 - update * 0.013).to(dtype)
    apply([weight], [update], 0.9997, rate)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_stochastically_is_float32_rounded_to_a_neighbour(cautious: bool, wire: torch.dtype) -> None:
    weight, update = tensors((30, 50), torch.bfloat16)
    update = update.to(wire)
    change = update.float() * 0.013
    decayed = weight.float() * 0.99
    if cautious:
        decayed = torch.where(weight.float() * change >= 0, decayed, weight.float())
    exact = decayed - change
    apply([weight], [update], 0.99, 0.013, cautious=cautious, counters=[(counter(), whole(30, 50))])
    ulp = torch.exp2(torch.frexp(exact).exponent.float() - 8)
    assert bool(((weight.float() - exact).abs() < ulp).all())
    nearest = exact.bfloat16()
    assert 0.1 < float((weight != nearest).float().mean()) < 0.4  # a quarter of all numbers goes to the other neighbour
    assert torch.equal(weight.float(), rounded(exact))


@pytest.mark.parametrize("rate", [0.25, -0.25])
def test_cautious_decay_of_bfloat16(rate: float) -> None:
    """Where the update is zero or moves the weight towards zero; a negative rate turns the update round."""
    weight = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0]).bfloat16()
    update = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0]) * (1 if rate > 0 else -1)
    apply([weight], [update], 0.5, rate, cautious=True)
    assert weight.tolist() == [0.25, 1.25, -0.25, -1.25, 0.5, -0.5]


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_rate_of_zero_changes_nothing(stochastic: bool) -> None:
    weight = torch.tensor([0.0, -0.0, 1.0, -3.0]).bfloat16()
    before = weight.clone()
    for update in (-1.0, 1.0):
        counters = [(counter(), whole(4))] if stochastic else None
        apply([weight], [torch.full((4,), update)], torch.tensor(1.0), torch.tensor(0.0), counters=counters)
        assert torch.equal(weight.view(torch.int16), before.view(torch.int16))


def test_decay_below_half_a_unit_is_lost_to_nearest_and_kept_stochastically() -> None:
    """1 − 2⁻¹⁰ a step for 512 steps: exp(−1/2) on average. Of n weights the mean deviates by at most their spread
    over √n.
    """
    nearest, stochastic = torch.ones(100, 100).bfloat16(), torch.ones(100, 100).bfloat16()
    tracked, elements = counter(), whole(100, 100)
    for _ in range(512):
        apply([nearest], [torch.zeros(100, 100)], 1 - 2**-10, 0.01)
        apply([stochastic], [torch.zeros(100, 100)], 1 - 2**-10, 0.01, counters=[(tracked, elements)])
        advance_counters([tracked], None)
    assert bool((nearest == 1).all())
    values, expected = stochastic.double(), (1 - 2**-10) ** 512
    assert abs(float(values.mean()) - expected) <= 5 * float(values.std()) / 100
    assert float(values.std()) < 0.1


def test_a_counter_counts_once_and_not_a_skipped_step() -> None:
    first, second = counter(1, 5), counter(2, 8)
    advance_counters([first, None, second, first], None)
    assert [first.tolist(), second.tolist()] == [[1, 6], [2, 9]]
    for skipped in (True, False):
        advance_counters([first, second], torch.tensor(skipped))
    assert [first.tolist(), second.tolist()] == [[1, 7], [2, 10]]
