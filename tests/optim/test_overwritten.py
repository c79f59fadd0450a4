"""A backward pass whose saved weights a step has overwritten raises, whatever the layout, as on one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from meshmuon import DistMuon, Muon, clip_grad_norm_
from meshmuon.optim.muon_step import Overwritten
from tests.support.small_model import on_mesh, world_mesh
from tests.support.tensors import seeded
from tests.support.threads import run_threads

CLIP = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 1.0}
QK = ("layers.0.wq.weight", "layers.0.wk.weight")
by_either = pytest.mark.parametrize("use_muon", [True, False], ids=["Muon", "AdamW"])
on_either_path = pytest.mark.parametrize("use_distributed_muon", [False, True], ids=["plan", "reference"])


def make(params: list[nn.Parameter], *, use_muon: bool = True, names: tuple[str, ...] = (), **options: Any) -> Muon:
    group = {
        "params": params,
        "use_muon": use_muon,
        "names": names or [f"layers.{k}.weight" for k in range(len(params))],
    }
    return Muon([group], lr=0.01, allow_inactive=not use_muon, **options)


def sharded_weights(count: int) -> list[nn.Parameter]:
    mesh = world_mesh()
    return [nn.Parameter(on_mesh(seeded((8, 8), k), mesh)) for k in range(count)]


def gradient(*weights: nn.Parameter) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)


def refuses(loss: Tensor) -> None:
    # of to_local()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been modified inplace"):
        loss.backward()


@by_either
@pytest.mark.parametrize("options", [{}, {"cautious_weight_decay": True}, {"use_distributed_muon": True}], ids=str)
def test_plain_weights(use_muon: bool, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = make([weight], use_muon=use_muon, **options)
    gradient(weight)
    loss = weight.square().sum()
    optimizer.step()
    refuses(loss)


def test_weights_that_kernels_of_a_device_write() -> None:
    """Autograd does not see such kernels. No device is here: weights that the host cannot read stand for those on a
    GPU.
    """
    written, idle = (torch.zeros(8, 8, device="meta") for _ in range(2))
    with torch.inference_mode():
        untracked = torch.zeros(8, 8, device="meta")
    records: Any = [SimpleNamespace(param=weight) for weight in (written, idle, untracked)]
    Overwritten().mark(records, lambda k: k != 1)
    assert (written._version, idle._version) == (1, 0)


@on_either_path
def test_weights_without_a_gradient_are_not_overwritten(use_distributed_muon: bool) -> None:
    """Also under a plan that covers them: a backward pass through such a weight still works, through the other it
    raises.
    """

    def body(rank: int) -> None:
        weights = sharded_weights(2)
        optimizer = make(weights, use_distributed_muon=use_distributed_muon)
        for active in ((0, 1), (0,), (1,), (0, 1)):
            optimizer.zero_grad()
            losses = [weight.square().sum() for weight in weights]
            gradient(*(weights[k] for k in active))
            optimizer.step()
            for k, loss in enumerate(losses):
                if k in active:
                    refuses(loss)
                else:
                    loss.backward()

    run_threads(2, body)


@by_either
@on_either_path
@pytest.mark.parametrize("local", [False, True], ids=["DTensor", "to_local"])
def test_sharded_weights(use_muon: bool, use_distributed_muon: bool, local: bool) -> None:
    """Also where a model works on the local tensors itself, as tensor parallel modules do."""

    def body(rank: int) -> None:
        (weight,) = sharded_weights(1)
        optimizer = make([weight], use_muon=use_muon, use_distributed_muon=use_distributed_muon)
        gradient(weight)
        optimizer.step()  # the first one makes a plan, the second is an ordinary one
        gradient(weight)
        used: Any = weight
        loss = (used.to_local() if local else used).square().sum()
        optimizer.step()
        refuses(loss)

    run_threads(2, body)


def test_a_gradient_that_only_another_rank_has() -> None:
    """The step changes the weight of both."""

    def body(rank: int) -> None:
        (weight,) = sharded_weights(1)
        optimizer = make([weight])
        if rank == 0:
            gradient(weight)
        loss = weight.square().sum()
        optimizer.step()
        refuses(loss)

    run_threads(2, body)


def test_weights_that_only_qk_clip_changes() -> None:
    def body(rank: int) -> None:
        weights = sharded_weights(3)
        optimizer = make(weights, names=(*QK, "layers.0.mlp.weight"), clip_config={**CLIP})
        gradient(weights[2])
        loss = weights[0].square().sum()
        optimizer.step(qk_logits={0: torch.tensor([4.0, 9.0])})
        refuses(loss)

    run_threads(2, body)


def test_dist_muon() -> None:
    def body(rank: int) -> None:
        weights = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))]
        optimizer = DistMuon(weights, lr=0.1)
        gradient(*weights)
        losses = [weight.square().sum() for weight in weights]
        optimizer.step()
        for loss in losses:  # of the weight that this rank owns and of the other
            refuses(loss)

    run_threads(2, body)


@by_either
def test_fsdp2_gathers_no_changed_weight_for_a_forward_pass_of_before(use_muon: bool) -> None:
    """With torch's own optimizers this backward pass silently mixes the old activations with the new weights."""

    def body(rank: int) -> None:
        layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for module in (*layers, layers):
            fully_shard(module, mesh=world_mesh(), reshard_after_forward=True)
        optimizer = make(list(layers.parameters()), use_muon=use_muon)
        x = torch.ones(3, 8, requires_grad=True)
        for _ in range(2):  # ordinary training is not disturbed
            layers(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layers(x).sum().backward()
        loss = layers(x).sum()
        optimizer.step()
        refuses(loss)

    run_threads(2, body)


def test_fsdp2_weights_that_stay_whole_are_not_overwritten() -> None:
    """The backward pass finds the very weights of the forward pass, and its gradients are right."""

    def body(rank: int) -> None:
        layer = nn.Linear(8, 8, bias=False)
        nn.init.constant_(layer.weight, 2.0)
        fully_shard(layer, mesh=world_mesh(), reshard_after_forward=False)
        optimizer = make(list(layer.parameters()))
        x = torch.ones(3, 8, requires_grad=True)
        layer(x).sum().backward()
        x.grad = None
        loss = layer(x).sum()
        optimizer.step()
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3, 8), 16.0))

    run_threads(2, body)


def test_clipped_gradients() -> None:
    def body(rank: int) -> None:
        (weight,) = sharded_weights(1)
        saved = torch.ones_like(weight).requires_grad_()
        loss = saved.square().sum()
        weight.grad = saved.detach()
        clip_grad_norm_([weight], 0.5)
        refuses(loss)

    run_threads(2, body)
