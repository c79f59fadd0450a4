"""A backward pass whose saved weights a step has overwritten raises, whatever the layout, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import DistMuon, Muon, clip_grad_norm_
from tests.support.threads import run_threads

OVERWRITTEN = "modified by an inplace operation|has been modified inplace"  # the latter of what to_local() gave
CLIP = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 1.0}
QK = ("layers.0.wq.weight", "layers.0.wk.weight")


def make(params: list[nn.Parameter], *, use_muon: bool, names: list[str] | None = None, **options: Any) -> Muon:
    group = {"params": params, "use_muon": use_muon, "names": names or [f"layers.{k}.weight" for k in range(len(params))]}
    return Muon([group], lr=0.01, allow_inactive=not use_muon, **options)


def gradient(weight: nn.Parameter, value: float = 1.0) -> None:
    weight.grad = torch.full_like(weight, value)


@pytest.mark.parametrize("use_muon", [True, False], ids=["Muon", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"cautious_weight_decay": True}, {"use_distributed_muon": True}], ids=str)
def test_plain_weights(use_muon: bool, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = make([weight], use_muon=use_muon, **options)
    gradient(weight)
    loss = weight.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        loss.backward()


def on_two_ranks(body: Callable[[Any], None]) -> None:
    run_threads(2, lambda rank: body(init_device_mesh("cpu", (2,))))


def sharded_weight(mesh: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)]))


@pytest.mark.parametrize("reference", [False, True], ids=["plan", "reference"])
def test_weights_without_a_gradient_are_not_overwritten(reference: bool) -> None:
    """Also under a plan that covers them: a backward pass through such a weight still works, through the other it raises."""

    def body(mesh: Any) -> None:
        weights = [sharded_weight(mesh) for _ in range(2)]
        optimizer = make(weights, use_muon=True, use_distributed_muon=reference)
        for active in ((0, 1), (0,), (1,), (0, 1)):
            optimizer.zero_grad()
            losses = [weight.square().sum() for weight in weights]
            for k in active:
                gradient(weights[k])
            optimizer.step()
            for k, loss in enumerate(losses):
                if k in active:
                    with pytest.raises(RuntimeError, match=OVERWRITTEN):
                        loss.backward()
                else:
                    loss.backward()

    on_two_ranks(body)


@pytest.mark.parametrize("use_muon", [True, False], ids=["Muon", "AdamW"])
@pytest.mark.parametrize("reference", [False, True], ids=["plan", "reference"])
@pytest.mark.parametrize("local", [False, True], ids=["DTensor", "to_local"])
def test_sharded_weights(use_muon: bool, reference: bool, local: bool) -> None:
    """Also where a model works on the local tensors itself, as tensor parallel modules do."""

    def body(mesh: Any) -> None:
        weight = sharded_weight(mesh)
        optimizer = make([weight], use_muon=use_muon, use_distributed_muon=reference)
        gradient(weight)
        optimizer.step()  # the first one makes a plan, the second is an ordinary one
        gradient(weight)
        loss = (weight.to_local() if local else weight).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            loss.backward()

    on_two_ranks(body)


def test_a_gradient_that_only_another_rank_has() -> None:
    """The step changes the weight of both."""

    def body(rank: int) -> None:
        weight = sharded_weight(init_device_mesh("cpu", (2,)))
        optimizer = make([weight], use_muon=True)
        if rank == 0:
            gradient(weight)
        loss = weight.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            loss.backward()

    run_threads(2, body)


def test_weights_that_only_qk_clip_changes() -> None:
    def body(mesh: Any) -> None:
        weights = [sharded_weight(mesh), sharded_weight(mesh)]
        other = sharded_weight(mesh)
        optimizer = make([*weights, other], use_muon=True, names=[*QK, "layers.0.mlp.weight"], clip_config={**CLIP})
        gradient(other)
        loss = weights[0].square().sum()
        optimizer.step(qk_logits={0: torch.tensor([4.0, 9.0])})
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            loss.backward()

    on_two_ranks(body)


def test_dist_muon() -> None:
    def body(rank: int) -> None:
        weights = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))]
        optimizer = DistMuon(weights, lr=0.1)
        for weight in weights:
            gradient(weight, 1.0 + rank)
        losses = [weight.square().sum() for weight in weights]
        optimizer.step()
        for loss in losses:  # of the weight that this rank owns and of the other
            with pytest.raises(RuntimeError, match=OVERWRITTEN):
                loss.backward()

    run_threads(2, body)


@pytest.mark.parametrize("use_muon", [True, False], ids=["Muon", "AdamW"])
def test_fsdp2_gathers_no_changed_weight_for_a_forward_pass_of_before(use_muon: bool) -> None:
    """With torch's own optimizers this backward pass silently mixes the old activations with the new weights."""

    def body(mesh: Any) -> None:
        layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(layers, mesh=mesh, reshard_after_forward=True)
        params = list(layers.parameters())
        optimizer = make(params, use_muon=use_muon)
        x = torch.ones(3, 8, requires_grad=True)
        for _ in range(2):  # ordinary training is not disturbed
            layers(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layers(x).sum().backward()
        loss = layers(x).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            loss.backward()

    on_two_ranks(body)


def test_fsdp2_weights_that_stay_whole_are_not_overwritten() -> None:
    """The backward pass finds the very weights of the forward pass, and its gradients are right."""

    def body(mesh: Any) -> None:
        layer = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            layer.weight.fill_(2.0)
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        optimizer = make(list(layer.parameters()), use_muon=True)
        x = torch.ones(3, 8, requires_grad=True)
        layer(x).sum().backward()
        x.grad = None
        loss = layer(x).sum()
        optimizer.step()
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x.grad, 16.0))

    on_two_ranks(body)


def test_clipped_gradients() -> None:
    def body(mesh: Any) -> None:
        weight = sharded_weight(mesh)
        gradient(weight)
        assert weight.grad is not None
        saved = weight.grad.requires_grad_()
        loss = saved.square().sum()
        weight.grad = saved.detach()
        clip_grad_norm_([weight], 0.5)
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            loss.backward()

    on_two_ranks(body)
