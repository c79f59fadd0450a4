"""Groups are read at every step: schedulers, tensor learning rates and values changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from meshmuon import Muon, orthogonalize, polar_express
from meshmuon.ortho import Scheme, keller
from tests.support.bounds import orthogonalize_error, unit
from tests.support.reference import (
    FIVE_OF_KELLER,
    KELLER,
    KELLER_5,
    Reference,
    adamw,
    assert_moved_within_rounding,
    assert_same_bits,
    copies,
    gradients,
    group,
    make_params,
    muon,
    newton_schulz,
    polar_factor,
    run,
    run_beside,
)

SHAPES = ((12, 12), (20, 8), (8, 20))


def compare_changing(
    change: Callable[[dict[str, Any], int], dict[str, Any]], steepest: Scheme = FIVE_OF_KELLER, steps: int = 4
) -> None:
    """Steps beside the reference; ``change`` edits the group before each and returns what the reference is told.

    ``steepest`` is the scheme among those in use that enlarges rounding most.
    """
    start = make_params(*SHAPES, dtype=torch.float64)
    params, reference = copies(start), Reference(start)
    optimizer = muon(params)
    for step in range(steps):
        options = change(optimizer.param_groups[0], step)
        run_beside(reference, optimizer, params, [step], **options)
    assert_moved_within_rounding(params, reference.params, start, steps, steepest)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("lr", (0.01, 0.002, 0.0, 0.004)),
        ("momentum", (0.95, 0.5, 0.0, 0.8)),
        ("nesterov", (True, False, True, False)),
        ("weight_decay", (0.1, 0.0, 3.0, 0.5)),
        ("adjust_lr_fn", ("match_rms_adamw", "original", "spectral", lambda rows, cols: rows + 2.0 * cols)),
        ("maximize", (True, True, True, True)),
    ],
)
def test_values_changed_by_hand(key: str, values: tuple[Any, ...]) -> None:
    def change(target: dict[str, Any], step: int) -> dict[str, Any]:
        target[key] = values[step]
        return {"adjust" if key == "adjust_lr_fn" else key: values[step]}

    compare_changing(change)


def test_schemes_changed_by_hand() -> None:
    schemes: list[tuple[Any, int, dict[str, Any]]] = [
        ("keller", 5, {"steps": [KELLER] * 5}),
        ("keller", 2, {"steps": [KELLER] * 2}),
        ([(1.5, -0.5, 0.0)], 3, {"steps": [(1.5, -0.5, 0.0)] * 3}),
        (polar_factor, 3, {"orthogonalise": polar_factor}),
        ("polar_express", 3, {"steps": polar_express(steps=3).steps}),
        ("polar_express", 6, {"steps": polar_express(steps=6).steps}),
    ]

    def change(target: dict[str, Any], step: int) -> dict[str, Any]:
        target["scheme"], target["ns_steps"], options = schemes[step]
        return options

    compare_changing(change, polar_express(steps=10), steps=6)


@pytest.mark.parametrize(("dtype", "lr"), [(torch.float32, 2.0**-8), (torch.float64, 0.005)], ids=str)
def test_tensor_lr_has_the_bits_of_a_number(dtype: torch.dtype, lr: float) -> None:
    """A number that the tensor's dtype holds exactly gives the same bits either way."""
    params, vectors = make_params(*SHAPES), make_params((4,), (5,))
    numbers, number_vectors = copies(params), copies(vectors)
    tensor = torch.tensor(lr, dtype=dtype)
    first = Muon([group(params), group(vectors, use_muon=False)], lr=tensor)
    second = Muon([group(numbers), group(number_vectors, use_muon=False)], lr=lr)
    run(first, [*params, *vectors], range(3))
    run(second, [*numbers, *number_vectors], range(3))
    assert_same_bits([*params, *vectors], [*numbers, *number_vectors])
    assert tensor.item() == lr


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_schedulers_change_a_tensor_lr_in_place(shape: tuple[int, ...]) -> None:
    params = make_params(*SHAPES)
    numbers = copies(params)
    tensor = torch.full(shape, 2.0**-8)
    optimizers = [muon(params, lr=tensor), muon(numbers, lr=2.0**-8)]
    schedulers = [lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in optimizers]
    for step in range(4):
        for optimizer, scheduler, own in zip(optimizers, schedulers, (params, numbers), strict=True):
            run(optimizer, own, [step])
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] is tensor
    assert float(tensor) == 2.0**-12
    assert_same_bits(params, numbers)


def test_adamw_values_changed_by_hand() -> None:
    params = make_params((6,), (3, 3))
    twins = copies(params)
    optimizer = adamw(params, lr=0.1)
    oracle = torch.optim.AdamW(twins, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(4):
        for key, value in (
            ("lr", 0.1 / (step + 1)),
            ("betas", (0.5 + step / 10, 0.9)),
            ("eps", 10.0**-step),
            ("weight_decay", step),
        ):
            optimizer.param_groups[0][key] = value
            oracle.param_groups[0][key] = value
        run(optimizer, params, [step])
        run(oracle, twins, [step])
    assert_same_bits(params, twins)


def test_compute_dtype_is_used() -> None:
    """The step has the bits of the same products in that dtype, and each dtype has bits of its own."""
    start = [nn.Parameter(torch.zeros(24, 24))]  # a step from zero is the update times the rate
    (grad,) = gradients(start, 0)
    seen = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        params = copies(start)
        optimizer = muon(params, compute_dtype=dtype, momentum=0.0, lr=2.0**-8, adjust_lr_fn=lambda rows, cols: 1.0)
        run(optimizer, params, [0])
        update = orthogonalize(grad, keller(), dtype=dtype)
        assert_same_bits(params, [-(2.0**-8) * update])
        assert (update - newton_schulz(grad.double(), KELLER_5)).norm() < orthogonalize_error(
            grad, keller(), dtype=dtype, frobenius=True
        ) + unit(torch.float32) * update.norm()
        assert not any(torch.equal(update, other) for other in seen), "the dtype changes nothing"
        seen.append(update)
