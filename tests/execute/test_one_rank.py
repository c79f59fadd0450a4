"""Steps of one rank, seen from a scheme: what is orthogonalised, which gradients are left by then, and when plans
are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon import Muon
from meshmuon.device import Graphs
from meshmuon.execute import ortho_batch
from tests.support.reference import (
    LR,
    assert_same_bits,
    copies,
    engine_muon,
    gradients,
    group,
    make_params,
    run,
    set_gradients,
)


def test_the_plan_is_kept_until_the_work_changes() -> None:
    params = make_params((12, 20), (20, 12))
    optimizer = Muon([group(params)], lr=LR)
    run(optimizer, params, [0])
    plan = optimizer.plan()
    for step in range(3):  # other numbers, the same work
        optimizer.param_groups[0].update(lr=LR * (step + 1), nesterov=step % 2 == 0, momentum=0.9 + 0.01 * step)
        run(optimizer, params, [step])
    set_gradients(params, [gradients(params, 3)[0], None])  # a missing gradient is a matter of the step
    optimizer.step()
    run(optimizer, params, [4])
    assert optimizer.plan() is plan
    optimizer.param_groups[0]["ns_steps"] = 3
    run(optimizer, params, [5, 6])
    assert optimizer.plan() is not plan


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_graphs_are_asked_for_by_option_only(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = ortho_batch.replay_for

    def replay_for(device: torch.device, work: Callable[[], None], graphs: Graphs | None) -> Callable[[], None]:
        asked.append(graphs is not None)
        return original(device, work, graphs)

    monkeypatch.setattr(ortho_batch, "replay_for", replay_for)
    params = make_params((12, 20), (20, 12))
    run(engine_muon([group(params)], lr=LR, cuda_graphs=cuda_graphs), params, [0])
    assert asked == [cuda_graphs] * 2


@pytest.mark.parametrize("none_grad", [True, False])
def test_gradients_are_freed_after_their_last_use(none_grad: bool) -> None:
    """While a batch is orthogonalised, gradients of matrices still to come must be there, and no others."""
    experts, empty = make_params((4, 6, 5), (0, 4))
    present: list[bool] = []

    def watch(batch: Tensor) -> Tensor:
        present.append(experts.grad is not None)
        return batch

    options: dict[str, Any] = {"scheme": watch, "chunk_size": 1, "expert_keys": ["experts"], "none_grad": none_grad}
    run(engine_muon([group([experts, empty], prefix="experts")], lr=LR, **options), [experts, empty], [0])
    assert present == [True] * 3 + [not none_grad]
    assert [param.grad is None for param in (experts, empty)] == [none_grad] * 2  # also what has no elements


@pytest.mark.parametrize("nesterov", [True, False])
def test_what_is_orthogonalised(nesterov: bool) -> None:
    """The scheme sees G + momentum·M, or M, in float32, and does not touch the momentum."""
    params = make_params((6, 8), (6, 8), dtype=torch.bfloat16)
    before, seen = copies(params), list[Tensor]()

    def watch(batch: Tensor) -> Tensor:
        seen.append(batch.clone())
        return torch.zeros_like(batch)

    options: dict[str, Any] = {"scheme": watch, "nesterov": nesterov, "momentum": 0.5, "momentum_dtype": torch.float32}
    optimizer = Muon([group(params)], lr=LR, weight_decay=0.0, **options)
    momenta = [torch.zeros(6, 8) for _ in params]
    for step in range(2):
        run(optimizer, params, [step])
        grads = [grad.float() for grad in gradients(params, step)]
        momenta = [0.5 * momentum + grad for momentum, grad in zip(momenta, grads, strict=True)]
        pairs = zip(grads, momenta, strict=True)
        expected = [grad + 0.5 * momentum for grad, momentum in pairs] if nesterov else momenta
        assert torch.equal(seen[step], torch.stack(expected)), "halves are exact, so that each sum is rounded once"
        assert_same_bits([optimizer.state[param]["momentum_buffer"] for param in params], momenta)
    assert_same_bits(params, before)
