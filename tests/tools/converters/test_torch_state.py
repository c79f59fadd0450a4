"""State of ``torch.optim.Muon`` and ``torch.optim.AdamW``, converted: the run goes on as it would have with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon, RoutingWarning, Scheme, StateError
from meshmuon.checkpoint import convert_torch_state
from meshmuon.ortho.remez import Quintic
from tests.support.reference import (
    KELLER,
    LR,
    assert_moved_within_rounding,
    assert_same_bits,
    copies,
    gradients,
    make_params,
    run,
    set_gradients,
)
from tests.support.threads import run_threads

MATRICES, OTHERS = ((24, 24), (48, 16), (16, 48), (9, 1)), ((5,), (7, 2))
SHAPES = (*MATRICES, *OTHERS)
NAMES = ["a.weight", "b.weight", "c.weight", "d.weight", "norm.bias", "table.weight"]
M = len(MATRICES)


class Pair:
    """torch's two optimizers as one."""

    def __init__(self, params: Sequence[nn.Parameter], *, named: bool = True, adamw: Any = None, **muon: Any) -> None:
        members: list[Any] = list(zip(NAMES, params, strict=True)) if named else list(params)
        self.muon = torch.optim.Muon(members[:M], **{"lr": 0.02, **muon})
        self.adamw = torch.optim.AdamW(members[M:], **{"lr": 3e-3, "betas": (0.8, 0.9), "fused": True, **(adamw or {})})

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy(self.muon.state_dict()), copy.deepcopy(self.adamw.state_dict())


def ours(params: Sequence[nn.Parameter], **options: Any) -> Muon:
    groups = [
        {"params": params[:M], "names": NAMES[:M], "use_muon": True},
        {"params": params[M:], "names": NAMES[M:], "use_muon": False},
    ]
    return Muon(groups, **{"lr": LR, **options})


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "adjust_lr_fn": "original", "weight_decay": 0.0},
    {
        "momentum": 0.5,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "ns_steps": 7,
        "adjust_lr_fn": "match_rms_adamw",
        "lr": 0.01,
    },
    {"momentum": 0.0, "weight_decay": 0.3},
]


@pytest.mark.usefixtures("precise_torch")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("named", [True, False])
def test_five_steps_after_five_of_torch(options: dict[str, Any], named: bool) -> None:
    """All options come along: the optimizer that loads was built with its own defaults."""
    theirs = make_params(*SHAPES)
    pair = Pair(theirs, named=named, **options)
    run(pair, theirs, range(5))  # type: ignore[arg-type]
    mine, start = copies(theirs), copies(theirs)
    optimizer = ours(mine)
    names = {} if named else {"muon_names": NAMES[:M], "adamw_names": NAMES[M:]}
    optimizer.load_state_dict(convert_torch_state(optimizer, *pair.states(), **names))
    run(pair, theirs, range(5, 10))  # type: ignore[arg-type]
    run(optimizer, mine, range(5, 10))
    steps = (Quintic(*options.get("ns_coefficients", KELLER)),) * options.get("ns_steps", 5)
    assert_moved_within_rounding(mine[:M], theirs[:M], start[:M], 5, Scheme("torch's", steps, "torch"))
    assert_same_bits(mine[M:], theirs[M:])


def test_the_momentum_in_another_dtype() -> None:
    theirs = make_params(*SHAPES, dtype=torch.bfloat16)
    pair = Pair(theirs, momentum=0.75)
    run(pair, theirs, range(2))  # type: ignore[arg-type]
    optimizer = ours(copies(theirs), momentum_dtype=torch.float32)
    muon_state, adamw_state = pair.states()
    converted = convert_torch_state(optimizer, muon_state, adamw_state)
    buffer = muon_state["state"][1]["momentum_buffer"]
    assert buffer.dtype == torch.bfloat16
    assert_same_bits([converted["state"][1]["momentum_buffer"]], [buffer.float() * 4])
    assert not optimizer.state, "converting changes nothing"
    optimizer.load_state_dict(converted)
    muon_state["state"][1]["momentum_buffer"].zero_()
    assert optimizer.state[optimizer.param_groups[0]["params"][1]]["momentum_buffer"].any(), (
        "shares memory with torch's"
    )


def test_parameters_without_a_gradient_and_frozen_ones() -> None:
    theirs = make_params(*SHAPES)
    pair = Pair(theirs)
    theirs[1].grad, theirs[4].grad = torch.ones_like(theirs[1]), torch.ones_like(theirs[4])
    pair.step()
    mine = copies(theirs)
    mine[0].requires_grad_(False)
    optimizer = ours(mine)
    optimizer.load_state_dict(convert_torch_state(optimizer, *pair.states()))
    run(optimizer, mine[1:], [0])
    assert float(optimizer.state[mine[4]]["step"]) == 2.0
    assert float(optimizer.state[mine[5]]["step"]) == 1.0


@pytest.mark.usefixtures("precise_torch")
def test_sharded_parameters() -> None:
    """States of torch's optimizers on DTensors convert where they are."""
    start, step = make_params(*SHAPES), [gradients(make_params(*SHAPES), k) for k in range(2)]

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (2,))

        def cut(tensors: Sequence[Tensor]) -> list[Any]:
            return [
                distribute_tensor(value.detach().clone(), mesh, [Shard(0)], src_data_rank=None) for value in tensors
            ]

        def stepped(
            params: list[nn.Parameter], first: Sequence[Tensor], second: Sequence[Tensor]
        ) -> list[nn.Parameter]:
            set_gradients(params, first)
            pair = Pair(params)
            pair.adamw.step()
            for param, grad in zip(params[:M], first, strict=False):  # as after a first step without momentum
                pair.muon.state[param]["momentum_buffer"] = grad.clone()
            optimizer = ours(params)
            optimizer.load_state_dict(convert_torch_state(optimizer, *pair.states()))
            set_gradients(params, second)
            optimizer.step()
            return params

        whole = stepped(copies(start), *step)
        twins = stepped([nn.Parameter(shard) for shard in cut(start)], *map(cut, step))
        for a, b in zip(whole[:M], twins[:M], strict=True):
            assert torch.equal(b.detach().full_tensor(), a.detach())  # type: ignore[operator]

    run_threads(2, main)


def stepped_differently(muon: dict[str, Any], adamw: dict[str, Any]) -> Any:
    (group,) = muon["param_groups"]
    apart = [{**group, "params": [k], "param_names": [NAMES[k]], "lr": 0.1 * (k + 1)} for k in group["params"]]
    return {**muon, "param_groups": apart}, adamw


AMSGRAD, COUPLED = {"amsgrad": True}, {"decoupled_weight_decay": False, "weight_decay": 0.1}
REFUSALS: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (None, {"named": False}, {}, r"not all groups of the saved state have names.*pass muon_names="),
    (None, {"adamw": AMSGRAD}, {}, r"norm\.bias: its state is from AdamW with amsgrad=True"),
    (
        lambda m, a: (m, {**a, "param_groups": [a["param_groups"][0] | COUPLED]}),
        {},
        {},
        r"norm\.bias: its state is from Adam",
    ),
    (lambda m, a: (m, None), {}, {}, r"norm\.bias is in neither state"),
    (lambda m, a: (None, a), {}, {}, r"a\.weight is in neither state"),
    (
        lambda m, a: (a, m),
        {},
        {},
        r"not what the other optimizer saves \(KeyError: 'ns_steps'\): it is not whole, or the state of",
    ),
    (lambda m, a: (3, a), {}, {}, r"the saved state is a int, which is not a state_dict of torch\.optim\.Muon"),
    (
        stepped_differently,
        {},
        {},
        r"a\.weight was stepped with lr=0\.1, b\.weight with 0\.2, but here they are in one group",
    ),
    (
        None,
        {},
        {"muon_names": NAMES[:3]},
        r"muon_names=.* must be the list of the names of the saved optimizer's 4 parameters",
    ),
    (None, {}, {"muon_names": [*NAMES[:3], "typo"]}, r"d\.weight is in neither state"),
    (None, {}, {"adamw_names": ["norm.bias", "a.weight"]}, r"a\.weight is in the states of both"),
]


@pytest.mark.parametrize(("change", "options", "names", "message"), REFUSALS)
def test_what_cannot_be_converted(change: Any, options: dict[str, Any], names: dict[str, Any], message: str) -> None:
    theirs = make_params(*SHAPES)
    pair = Pair(theirs, **options)
    run(pair, theirs, [0])  # type: ignore[arg-type]
    states = pair.states() if change is None else change(*pair.states())
    with pytest.raises(StateError, match=message):
        convert_torch_state(ours(copies(theirs)), *states, **names)


def test_groups_are_the_optimizers_own() -> None:
    """Each takes the options that its parameters were stepped with; state of a parameter that it does not have is
    refused.
    """
    theirs = make_params(*SHAPES[:2])
    muon = torch.optim.Muon([{"params": [(NAMES[k], theirs[k])], "lr": 0.1 * (k + 1)} for k in range(2)])
    apart = Muon(
        [{"params": [param], "names": [name], "use_muon": True} for name, param in zip(NAMES, theirs, strict=False)]
    )
    apart.load_state_dict(convert_torch_state(apart, muon.state_dict(), None))
    assert [group["lr"] for group in apart.param_groups] == [0.1, 0.2]
    with pytest.raises(StateError, match=r"extra has state but is not one of the optimizer's parameters"):
        convert_torch_state(
            Muon([{"params": theirs[:1], "names": NAMES[:1], "use_muon": True}]),
            muon.state_dict(),
            None,
            muon_names=[NAMES[0], "extra"],
        )


def test_a_wrong_call_is_no_broken_state() -> None:
    """It is a TypeError, as of any function; what the call says of a state is still a StateError."""
    optimizer, (muon, adamw) = ours(make_params(*SHAPES)), Pair(make_params(*SHAPES)).states()
    call: Any = convert_torch_state
    for args, options, message in (
        ((optimizer, muon), {}, "missing a required argument: 'adamw_state'"),
        ((optimizer, muon, adamw), {"names": NAMES}, "unexpected keyword argument 'names'"),
        ((optimizer, muon, adamw, NAMES[:M]), {}, "too many positional arguments"),
        (
            (muon, adamw, optimizer),
            {},
            "convert_torch_state: the first argument is the Muon that will load the result, got {",
        ),
        (
            (torch.optim.Muon(make_params((2, 3))), muon, adamw),
            {},
            "convert_torch_state: the first argument is the Muon that",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call(*args, **options)
    with pytest.raises(StateError, match="not a state_dict of"):
        call(optimizer, adamw_state=adamw, muon_state=3)


def test_matrices_that_torch_kept_whole_warn() -> None:
    """Groups built as the warning says do not."""
    model = nn.ModuleDict({name: nn.MultiheadAttention(8, 2) for name in "ab"})
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    others = [(name, param) for name, param in model.named_parameters() if param.dim() != 2]
    states = torch.optim.Muon(matrices).state_dict(), torch.optim.AdamW(others).state_dict()
    told = r"a\.in_proj_weight \(and 1 more\) was one matrix under .* and is 3 here.*goes on with other matrices"
    with pytest.warns(RoutingWarning, match=told) as caught:
        convert_torch_state(Muon(model, adamw_lr=1e-3), *states)
    assert [warning.filename for warning in caught] == [__file__]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    # by the constructor, of the same names
    with pytest.warns(RoutingWarning, match="looks like several projections fused"):
        whole = Muon(groups)
    convert_torch_state(whole, *states)  # a RoutingWarning would be an error
