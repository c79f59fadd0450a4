"""Schemes: coefficients against other computations, worst-case errors, and what a user may write."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from mpmath import mpf
from torch import Tensor

from meshmuon import ConfigError
from meshmuon.ortho import Scheme, keller, polar_express, resolve_scheme
from meshmuon.ortho.remez import Quintic
from meshmuon.ortho.schemes import MAX_STEPS

from .oracle import EXACT, SAFE, WORST_EXACTLY, Triple, apply_steps, mp_polar_express

FACTORS = [(0.01, 0.02), (0.02, 0.02), (0.0, 0.02407327424182761), (0.0, 0.0)]  # safety and cushion
KELLER = (3.4445, -4.7750, 2.0315)


def grid() -> Tensor:
    return torch.cat(
        [torch.logspace(-3, 0, 40001, dtype=torch.float64), torch.linspace(1e-3, 1, 40001, dtype=torch.float64)]
    )


@pytest.mark.parametrize(("safety", "cushion"), FACTORS)
@pytest.mark.parametrize("steps", [5, 6, 7, 8, 10])
def test_polar_express_equals_a_computation_in_800_digits(safety: float, cushion: float, steps: int) -> None:
    ours = polar_express(1e-3, steps, safety, cushion).steps
    rows, _ = mp_polar_express(steps, safety, cushion)
    assert len(ours) == steps
    for our_step, their_step in zip(ours, rows, strict=True):
        assert our_step == pytest.approx(their_step, rel=1e-12)


@pytest.mark.parametrize(("published", "safety", "cushion"), [(EXACT, 0.0, 0.0), (SAFE, 0.01, 0.02)])
def test_polar_express_equals_published_numbers(published: tuple[Triple, ...], safety: float, cushion: float) -> None:
    for our_step, their_step in zip(polar_express(1e-3, len(published), safety, cushion).steps, published, strict=True):
        assert our_step == pytest.approx(their_step, rel=1e-10)


def test_published_worst_errors_are_those_of_the_exact_recursion() -> None:
    _, gaps = mp_polar_express(10, 0.0, 0.0)
    for gap, published in zip(gaps, WORST_EXACTLY, strict=True):
        assert float(gap / mpf(published)) == pytest.approx(1, rel=1e-11)


@pytest.mark.parametrize("steps", range(1, 11))
def test_worst_error_of_the_composition(steps: int) -> None:
    scheme = polar_express(1e-3, steps, 0.0, 0.0)
    worst = float((1 - apply_steps(scheme.steps, grid())).abs().max())
    # At the upper end of its interval every quintic is steep: the rounding of the first step, 5e-15, is amplified a
    # thousand times by the fifth. From the seventh on the error is cubed instead.
    rounding = 1e-11 if steps < 7 else 1e-15
    assert worst == pytest.approx(float(WORST_EXACTLY[steps - 1]), rel=1e-9, abs=rounding)
    assert 1 - scheme(1e-3) == pytest.approx(float(WORST_EXACTLY[steps - 1]), rel=1e-11, abs=1e-15)


@pytest.mark.parametrize("steps", [5, 6, 8, 10])
def test_safety_stretches_every_step_but_the_last(steps: int) -> None:
    # A singular value that rounding pushed 1 % above its interval still converges, and the last step is the best
    # quintic.
    scheme = polar_express(1e-3, steps, 0.01, 0.0)
    values = apply_steps(scheme.steps[:-1], 1.01 * grid())
    assert (
        float(values.max())
        <= 2 - float(apply_steps(scheme.steps[:-1], torch.tensor(1e-3, dtype=torch.float64))) + 1e-12
    )
    last = scheme.steps[-1]
    assert last == pytest.approx(mp_polar_express(steps, 0.01, 0.0)[0][-1], rel=1e-12)


def test_cushion_keeps_steps_from_looking_further_down() -> None:
    steep, gentle = polar_express(1e-3, 5, 0.0, 0.0), polar_express(1e-3, 5, 0.0, 0.1)
    assert gentle.steps[0].a < 0.95 * steep.steps[0].a
    # What the interval really becomes stays centred on 1.
    low = high = 1.0
    for k, step in enumerate(gentle.steps):
        low = step(1e-3 if k == 0 else low)
        high = float(apply_steps(gentle.steps[: k + 1], grid()).max())
        assert low + high == pytest.approx(2, abs=1e-8)


def test_defaults_of_the_schemes() -> None:
    assert polar_express() == polar_express(l=1e-3, steps=5, safety=0.01, cushion=0.02)
    assert polar_express().source == "minimax by Remez, l=0.001, safety=0.01, cushion=0.02"
    assert keller() == keller(5)
    assert keller(9).steps == (KELLER,) * 9
    assert (keller().name, polar_express().name) == ("keller", "polar_express")


def test_keller_ends_where_its_description_says() -> None:
    values = apply_steps(keller(5).steps, torch.logspace(-2.7, 0, 100001, dtype=torch.float64))
    assert 0.68 < float(values.min()) < 0.70
    assert 1.20 < float(values.max()) < 1.21


def test_scheme_is_a_function_of_one_singular_value() -> None:
    scheme = Scheme("two", (Quintic(2.0, -1.0, 0.0), Quintic(1.0, 0.0, 1.0)), "here")
    first = 2 * 0.5 - 0.5**3
    assert scheme(0.5) == pytest.approx(first + first**5, rel=1e-15)
    assert scheme(0.0) == 0.0


def test_schemes_are_hashable_and_survive_pickling() -> None:
    for scheme in (keller(3), polar_express(steps=3)):
        assert pickle.loads(pickle.dumps(scheme)) == scheme
        assert hash(pickle.loads(pickle.dumps(scheme))) == hash(scheme)


# What a user may write


@pytest.mark.parametrize("steps", [1, 3, 5, MAX_STEPS])
def test_names_give_as_many_steps_as_asked_for(steps: int) -> None:
    assert resolve_scheme("keller", steps) == keller(steps)
    assert resolve_scheme("polar_express", steps) == polar_express(steps=steps)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        # it is repeated
        *((triple, (KELLER,) * 4) for triple in (KELLER, list(KELLER), [KELLER], (KELLER,), [list(KELLER)])),
        (torch.tensor([KELLER], dtype=torch.float64), (KELLER,) * 4),
        ((2, -1, 0), ((2.0, -1.0, 0.0),) * 4),
        (
            [[3, -3, 1], [2, -2, 1], [1.5, -0.5, 0], KELLER],
            ((3.0, -3.0, 1.0), (2.0, -2.0, 1.0), (1.5, -0.5, 0.0), KELLER),
        ),
    ],
    ids=str,
)
def test_triples(given: Any, steps: tuple[tuple[float, float, float], ...]) -> None:
    scheme = resolve_scheme(given, 4)
    assert isinstance(scheme, Scheme)
    assert (scheme.name, scheme.steps) == ("custom", steps)
    assert all(isinstance(step, Quintic) and all(isinstance(value, float) for value in step) for step in scheme.steps)


def test_a_scheme_and_a_callable_are_left_as_they_are() -> None:
    def polar(batch: Tensor) -> Tensor:
        return batch

    scheme = polar_express(1e-4, 7)
    assert resolve_scheme(scheme, 7) is scheme
    assert resolve_scheme(polar, 5) is polar


@pytest.mark.parametrize(
    ("scheme", "steps", "message"),
    [
        (
            "chebyshev",
            5,
            r"'chebyshev' is unknown. Write one of .'auto', 'halley', 'hybrid', .*, a list of \(a, b, c\)",
        ),
        ([(1, 2, 3), (1, 2, 3)], 5, r"the scheme has 2 steps but ns_steps=5. Pass ns_steps=2."),
        (keller(3), 5, r"the scheme has 3 steps but ns_steps=5. Pass ns_steps=3."),
        ([], 5, r"the scheme has 0 steps but ns_steps=5"),
        ([(1, 2)], 5, r"every step is a triple \(a, b, c\) of numbers"),
        ([(1, 2, 3, 4)], 5, r"every step is a triple \(a, b, c\) of numbers"),
        ([("a", "b", "c")], 5, r"scheme=\[\('a', 'b', 'c'\)\]: every step is a triple"),
        ((1.0, 2.0), 5, r"every step is a triple"),
        (3.5, 5, r"scheme=3.5: every step is a triple"),
        (None, 5, r"scheme=None: every step is a triple"),
    ],
)
def test_unusable_schemes_are_refused(scheme: Any, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_scheme(scheme, steps)


@pytest.mark.parametrize("scheme", ["keller", "polar_express", [KELLER]])
@pytest.mark.parametrize("steps", [0, -1, MAX_STEPS + 1, 2.0, "5", True, None])
def test_unusable_numbers_of_steps_are_refused(scheme: Any, steps: Any) -> None:
    for usable in (1, 2):  # equal to True and 2.0: what was computed for them must not be handed out
        resolve_scheme(scheme, usable)
    with pytest.raises(ConfigError, match=rf"ns_steps={steps!r} must be a whole number from 1 to 64; 5 is usual."):
        resolve_scheme(scheme, steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"l": low}, rf"polar_express: l={low} is outside \(0, 1\).*use 1e-3")
            for low in (0.0, 1.0, -1e-3, 2.0, float("nan"))
        ),
        *(({"safety": value}, rf"safety={value} and cushion=0.02 must be in \[0, 1\)") for value in (-0.01, 1.0)),
        *(
            ({"cushion": value}, rf"safety=0.01 and cushion={value} must be in .*use 0.01 and 0.02")
            for value in (-0.1, 1.0)
        ),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        polar_express(**options)


@pytest.mark.parametrize("l", [1e-6, 1e-4, 0.1, 0.999])
def test_any_bound_is_brought_near_one(l: float) -> None:  # noqa: E741
    scheme = polar_express(l, 14, 0.0, 0.0)
    values = apply_steps(scheme.steps, torch.logspace(0, float(torch.tensor(l).log10()), 5001, dtype=torch.float64))
    assert float((values - 1).abs().max()) < 1e-14


@pytest.mark.parametrize("l", [1e-6, 1e-3, 0.1, 0.999])
@pytest.mark.parametrize("safety", [0.0, 0.01])
@pytest.mark.parametrize("cushion", [0.0, 0.1])
def test_steps_may_go_on_after_the_interval_has_vanished(l: float, safety: float, cushion: float) -> None:  # noqa: E741
    for steps in range(1, 21):
        scheme = polar_express(l, steps, safety, cushion)
    assert scheme(l) == pytest.approx(1, abs=1e-6)
    assert scheme(1.0) == pytest.approx(1, abs=1e-6)
