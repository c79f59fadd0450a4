"""Update rules on every layout: the bits of one device, and the same memory, wherever its shards are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, Muon, PlanMismatchError, polar_express
from tests.support.bounds import moved_error, orthogonalize_error
from tests.support.cases import Case, Param, build, gradient, initial, place
from tests.support.random_layouts import Layouts, cases
from tests.support.tensors import local, same
from tests.support.threads import run_threads

RULES = ("normuon", "muon_plus", "muoneq")


def stepped(case: Case, params: list[nn.Parameter], grads: Any, **options: Any) -> tuple[list[Tensor], list[Tensor | None], Muon]:
    """Parameters and what their rule remembers after all steps."""
    optimizer = build(case, params, **options)
    for step in range(case.steps):
        for k, param in enumerate(params):
            param.grad = grads(step, k)
        optimizer.step()
    return params, [optimizer.state[param].get("rule_memory") for param in params], optimizer


def on_one_device(case: Case) -> tuple[list[Tensor], list[Tensor | None]]:
    params = [nn.Parameter(value, requires_grad=not one.frozen) for value, one in zip(initial(case), case.params, strict=True)]
    return stepped(case, params, lambda step, k: gradient(case, step, k))[:2]


def check_rules(case: Case, layouts: Layouts, *, replica_group: bool = False, **options: Any) -> None:
    values, memory = on_one_device(case)

    def main(rank: int) -> None:
        meshes = layouts.build()
        more = {**options, **({"replica_group": dist.group.WORLD} if replica_group else {})}

        def grad(step: int, k: int) -> Tensor | None:
            value = gradient(case, step, k)
            return None if value is None else place(case, meshes, k, value)

        params = [
            nn.Parameter(place(case, meshes, k, value), requires_grad=not one.frozen)
            for k, (value, one) in enumerate(zip(initial(case), case.params, strict=True))
        ]
        found, kept, _ = stepped(case, params, grad, **more)
        for k in range(len(params)):
            same(local(found[k]), local(place(case, meshes, k, values[k].detach())), f"parameter {k}")
            mine, wanted = kept[k], memory[k]
            assert (mine is None) == (wanted is None), f"memory {k}"
            if mine is not None and wanted is not None:
                assert mine.shape == wanted.shape
                assert isinstance(mine, DTensor) == isinstance(params[k], DTensor)
                same(local(mine), local(place(case, meshes, k, wanted)), f"memory {k}")

    run_threads(layouts.world, main)


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(cases(), st.sampled_from(RULES), st.booleans())
def test_any_layout(drawn: tuple[Case, Layouts, bool], rule: str, cautious: bool) -> None:
    case, layouts, replica_group = drawn
    options = {**case.options, "rule": rule, "cautious_weight_decay": cautious, "weight_decay": 0.5}
    check_rules(replace(case, options=options), layouts, replica_group=replica_group)


LAYOUTS = {
    "FSDP": ((4,), (Shard(0),)),
    "FSDP on the inputs": ((3,), (Shard(1),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "TP×FSDP": ((2, 2), (Shard(0), Shard(1))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replicas", ["share", "repeat"])
def test_fused_weights_and_experts(layout: str, rule: str, replicas: str) -> None:
    """Parts of a fused weight have rows of the parameter's memory; flipped experts remember per column."""
    shape, placements = LAYOUTS[layout]
    experts = tuple(Shard(one.dim + 1) if isinstance(one, Shard) else one for one in placements)
    params = (Param((12, 5), 0, placements), Param((3, 4, 12), 0, experts), Param((7, 3), None))
    options = {
        "rule": rule,
        "replicas": replicas,
        "expert_dims": "in_out",
        "split": lambda name, shape: (2, 7, 3) if 12 in shape else None,
    }
    check_rules(Case(params, options, 4), Layouts(shape))


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_path_agrees(rule: str) -> None:
    params = (Param((9, 6), 0, (Shard(0),)), Param((4, 6, 5), 0, (Shard(2),)), Param((5, 8), 0, (Shard(1),)))
    options = {"rule": rule, "split": lambda name, shape: (4, 5) if shape[0] == 9 else None}
    check_rules(Case(params, options, 3), Layouts((3,)), use_distributed_muon=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world", [2, 3])
def test_data_parallel_without_a_wrapper(rule: str, world: int) -> None:
    """Owners alone remember; after ``consolidate`` everyone does."""
    shapes = [(6, 4), (3, 5, 4), (8, 8), (5, 7)]

    def optimizer_of(params: list[nn.Parameter], **options: Any) -> DistMuon:
        names = [f"{k}.experts" if p.dim() == 3 else str(k) for k, p in enumerate(params)]
        return DistMuon([{"params": params, "names": names, "use_muon": True}], expert_keys=["experts"], rule=rule, **options)

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(3)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]

    def gradients(step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    whole = parameters()
    alone = optimizer_of(whole)
    for step in range(4):
        for param, grad in zip(whole, gradients(step), strict=True):
            param.grad = grad
        alone.step()

    # Means of squares of a row of an update, each below about 1: off by no more than twice what the update is.
    bound_of_memory = [2 * orthogonalize_error(grad, polar_express()) for grad in gradients(0)]

    def main(rank: int) -> None:
        params = parameters()
        optimizer = optimizer_of(params)
        for step in range(4):
            for param, grad in zip(params, gradients(step), strict=True):
                param.grad = grad.clone()
            optimizer.step()
        optimizer.consolidate()
        for k, (param, wanted) in enumerate(zip(params, whole, strict=True)):
            # Means over two ranks are exact, and over three rounded once.
            bound = 10 * moved_error(parameters()[k].detach(), wanted.detach(), updates=4, scheme=polar_express())
            bound *= (wanted - parameters()[k]).norm().item()
            torch.testing.assert_close(param, wanted, rtol=0, atol=bound)
            assert ("rule_memory" in optimizer.state[param]) == (rule == "normuon")
            if rule == "normuon":
                mine, theirs = optimizer.state[param]["rule_memory"], alone.state[wanted]["rule_memory"]
                torch.testing.assert_close(mine, theirs, rtol=0, atol=bound_of_memory[k], msg=f"memory {k}")

    run_threads(world, main)


def test_memory_is_resharded_by_a_checkpoint() -> None:
    """What one mesh saved, cut anew by torch for another one, goes on as if nothing had happened."""
    case = Case((Param((10, 6), 0, (Shard(0),)), Param((6, 9), 0, (Shard(1),))), {"rule": "normuon"}, 3)
    values, memory = on_one_device(replace(case, steps=6))

    def first(rank: int) -> dict[str, Any]:
        mesh = [init_device_mesh("cpu", (2,))]
        params = [nn.Parameter(place(case, mesh, k, value)) for k, value in enumerate(initial(case))]
        _, _, optimizer = stepped(case, params, lambda step, k: place(case, mesh, k, gradient(case, step, k)))  # type: ignore[arg-type]
        saved = optimizer.state_dict()
        state = {key: {name: one.full_tensor() for name, one in entry.items()} for key, entry in saved["state"].items()}
        return {"params": [p.full_tensor().detach() for p in params], "state": state, "param_groups": saved["param_groups"]}

    saved = run_threads(2, first)[0]

    def second(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        cut = [Shard(1)], [Shard(0)]
        params = [nn.Parameter(distribute_tensor(v, mesh, cut[k], src_data_rank=None)) for k, v in enumerate(saved["params"])]
        optimizer = build(case, params)
        state = {
            key: {name: distribute_tensor(one, mesh, cut[key], src_data_rank=None) for name, one in entry.items()}
            for key, entry in saved["state"].items()
        }
        optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
        for step in range(3, 6):
            for k, param in enumerate(params):
                param.grad = distribute_tensor(gradient(case, step, k), mesh, cut[k], src_data_rank=None)  # type: ignore[arg-type]
            optimizer.step()
        for k, param in enumerate(params):
            same(param.full_tensor(), values[k], f"parameter {k}")
            same(optimizer.state[param]["rule_memory"].full_tensor(), memory[k], f"memory {k}")  # type: ignore[arg-type]

    run_threads(3, second)


def test_ranks_with_different_rules_are_told_so() -> None:
    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None))
        groups = [{"params": [param], "names": ["w"], "use_muon": True}]
        optimizer = Muon(groups, rule="normuon" if rank else "muon_plus")
        param.grad = torch.ones_like(param)
        with pytest.raises(PlanMismatchError) as raised:
            optimizer.step()
        return str(raised.value)

    texts = run_threads(2, main)
    assert texts[0] == texts[1]
    assert "NorMuon(beta2=0.95)" in texts[0]
    assert "MuonPlus()" in texts[0]
