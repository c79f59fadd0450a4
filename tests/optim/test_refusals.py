"""Bad input: refused before anything is written, with a message that says what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import ConfigError, GradientError, MeshmuonError, Muon, StateError, UnsupportedError, keller
from tests.support.reference import LR, gradients, group, make_params, muon, run, set_gradients
from tests.support.tensors import assert_untouched, everything

RIGHT_CALL = r"Write Muon\(model, lr=\.\.\.\)"


def matrix() -> nn.Parameter:
    return make_params((4, 6))[0]


def empty(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 4, dtype=dtype), requires_grad=False)]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda: nn.Linear(3, 3).parameters(), f"got an iterable of Parameter, such as model.parameters.*{RIGHT_CALL}"),
        (lambda: list(nn.Linear(3, 3).parameters()), f"got an iterable of Parameter.*{RIGHT_CALL}"),
        (lambda: [("a", matrix()), ("b", matrix(), 1)], r"is not a \(name, parameter\) pair.*Write Muon\(model, lr="),
        (lambda: [("a", matrix()), matrix()], r"is not a \(name, parameter\) pair"),
        (lambda: [("a", 3)], r"\('a', 3\) is not a \(name, parameter\) pair"),
        (lambda: [(matrix(), "a")], r"is not a \(name, parameter\) pair"),
        (
            lambda: [("a", matrix()), ("a", matrix())],
            "two parameters are called a, and all names of an optimizer must differ",
        ),
        (lambda: [("a", empty(torch.float32)[0])], "no trainable parameters"),
        (lambda: {"params": [matrix()], "use_muon": True}, f"must be a list of groups, got dict.*{RIGHT_CALL}"),
        (matrix, f"must be a list of groups, got Parameter.*{RIGHT_CALL}"),
        (lambda: 3, f"must be a list of groups, got int.*{RIGHT_CALL}"),
        (list, f"params is empty.*{RIGHT_CALL}"),
        (lambda: iter(()), f"params is empty.*{RIGHT_CALL}"),
        (
            lambda: [{"params": [matrix()]}],
            f"group 0 needs use_muon=True or use_muon=False, it has .*'params'.*{RIGHT_CALL}",
        ),
        (lambda: [{"params": [matrix()], "use_muon": None}], "group 0 needs use_muon=True or use_muon=False"),
        (lambda: [{"params": [matrix()], "use_muon": "yes"}], "group 0 needs use_muon=True or use_muon=False"),
        (lambda: [group([matrix()]), {"use_muon": True}], f'group 1 has no "params".*{RIGHT_CALL}'),
        (lambda: [{"params": [], "use_muon": True}], r"group 0 \(use_muon=True\) is empty: leave it out"),
        (lambda: [group([matrix()]), {"params": [], "use_muon": False}], r"group 1 \(use_muon=False\) is empty"),
        (lambda: [{"params": {matrix()}, "use_muon": True}], "group 0: params is a set.*Pass a list"),
        (
            lambda: [{"params": [matrix(), matrix()], "names": ["a"], "use_muon": True}],
            "group 0 has 2 params but 1 names",
        ),
        (lambda: [{"params": [matrix()], "names": ["a", "b"], "use_muon": True}], "group 0 has 1 params but 2 names"),
        (lambda: [{"params": [matrix()], "names": [], "use_muon": True}], "group 0 has 1 params but 0 names"),
        (
            lambda: [{"params": [matrix()], "param_names": ["a", "b"], "use_muon": True}],
            "group 0 has 1 params but 2 names",
        ),
        (
            lambda: [{"params": ["w"], "names": ["w"], "use_muon": True}],
            f"group 0: w is a str, not a tensor.*{RIGHT_CALL}",
        ),
        (lambda: [{"params": [matrix(), ("b", matrix())], "use_muon": True}], "group0.param1 is a tuple, not a tensor"),
        (
            lambda: [{"params": [matrix()] * 2, "use_muon": True}],
            "group 0 holds a parameter twice, so it would be stepped twice",
        ),
        (lambda: [group([matrix() * 2])], "non-leaf"),
        (lambda: [group(empty(torch.int32))], r"dtype torch\.int32; Muon needs floating point"),
        (
            lambda: [group(empty(torch.complex64))],
            r"layers\.0\.weight is complex \(torch\.complex64\).*view_as_real\(param\)",
        ),
        (
            lambda: [group(empty(torch.complex64), use_muon=False)],
            r"others\.0\.weight is complex .*view_as_real\(param\)",
        ),
        (
            lambda: [group(make_params((2, 3, 4, 5)), expert_keys=["layers"])],
            r"more than two dims.*\(now \['layers'\]\)",
        ),
    ],
)
def test_params(params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Muon(params())


def test_a_name_twice() -> None:
    """It would hide a matrix in ``metrics()``, and a checkpoint could not tell the two apart."""
    told = (
        r"group {}: another parameter is called {} as well, and all names of an optimizer must differ\..*nn\.ModuleDict"
    )
    with pytest.raises(ConfigError, match=told.format(0, "a")):
        Muon([{"params": [matrix(), matrix()], "names": ["a", "a"], "use_muon": True}])
    with pytest.raises(ConfigError, match=told.format(1, "layers.0.weight")):
        Muon([group([matrix()]), group(make_params((5,)), use_muon=False, prefix="layers")])
    optimizer = muon([matrix()])
    with pytest.raises(ConfigError, match=told.format(1, "layers.0.weight")):
        optimizer.add_param_group(group([matrix()]))
    assert len(optimizer.param_groups) == 1


def test_groups_without_names_never_share_one() -> None:
    """Also those that another optimizer has named, and those that take the place of a group that was removed."""
    optimizer = Muon([{"params": [matrix()], "use_muon": True} for _ in range(3)])
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": [matrix()], "use_muon": True})
    moved = Muon(
        [
            {"params": [matrix()], "use_muon": True},
            *({**old, "params": [matrix()]} for old in optimizer.param_groups[1:]),
        ]
    )
    for made in (optimizer, moved):
        names = [name for written in made.param_groups for name in written["param_names"]]
        assert len(names) == len(set(names)) == 3


OVERLAPPING = {
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
    "strided": lambda: torch.randn(20).as_strided((4, 6), (3, 1)),
}


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("memory", OVERLAPPING)
def test_elements_that_share_an_address(memory: str, use_muon: bool) -> None:
    """A step would write several of them to one place: refused when the optimizer is built, or at the step that
    finds it.
    """
    message = r"\w+\.0\.weight has shape \(4, 6\) and strides .*share one address"
    param = nn.Parameter(OVERLAPPING[memory]())
    with pytest.raises(ConfigError, match=message):
        Muon([group([param], use_muon=use_muon)])
    later = matrix()
    optimizer = Muon([group([later], use_muon=use_muon)], allow_inactive=True)
    later.data = param.detach()
    later.grad = torch.ones(4, 6)
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
    Muon([group([matrix(), nn.Parameter(param.detach(), requires_grad=False), nn.Parameter(torch.randn(6, 4).T)])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, r"Muon: lr=-0\.001 must be at least 0"),
        ({"lr": torch.tensor([1e-3, 1e-3])}, "Muon: lr is a tensor of 2 elements .*; it must have one"),
        ({"momentum": 1.0}, r"Muon: momentum=1\.0 must be in \[0, 1\)"),
        ({"adamw_betas": (1.0, 0.95)}, r"Muon: adamw_betas\[0\]=1\.0 must be in \[0, 1\)"),
        ({"scheme": [(1.0, 2.0, 3.0)] * 2}, r"the scheme has 2 steps but ns_steps=5. Pass ns_steps=2"),
        ({"scheme": keller(1)}, "the scheme has 1 steps but ns_steps=5. Pass ns_steps=1"),
        ({"scheme": [(1.0, 2.0)]}, r"every step is a triple \(a, b, c\)"),
        ({"ns_steps": 0, "scheme": [(1.0, 2.0, 3.0)]}, "ns_steps=0 must be a whole number from 1 to 64"),
        ({"compute_dtype": torch.int8}, r"Muon: compute_dtype=torch\.int8 must be a floating point dtype"),
        ({"chunk_size": 0}, r"chunk_size=0 must be -1 .* or at least 1"),
        ({"memory_budget": 0}, "memory_budget=0 must be a positive number of bytes"),
    ],
    ids=str,
)
def test_what_is_said_of_options(options: dict[str, Any], message: str) -> None:
    """Also where no group uses the option yet. tests/params/test_option_fuzz.py has all options, and where they may
    be given.
    """
    for kinds in [(True, False), (True,), (False,)]:
        with pytest.raises(ConfigError, match=message):
            Muon([group([matrix()], use_muon=use_muon) for use_muon in kinds], **options)


def test_errors_are_also_the_usual_ones() -> None:
    """Code that catches ValueError, RuntimeError or NotImplementedError keeps working."""
    with pytest.raises(ValueError, match="lr"):
        muon([matrix()], lr=-1.0)
    assert issubclass(ConfigError, MeshmuonError)
    assert issubclass(GradientError, RuntimeError)
    assert issubclass(UnsupportedError, NotImplementedError)


def sparse(param: Tensor) -> Tensor:
    return torch.ones_like(param).to_sparse()


def complex_numbers(param: Tensor) -> Tensor:
    return torch.ones_like(param, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sparse, r"{} has a sparse gradient \(torch\.sparse_coo\).*sparse=False.*to_dense\(\)"),
        (complex_numbers, r"{} has a complex gradient \(torch\.complex64\).*view_as_real"),
    ],
)
@pytest.mark.parametrize(("position", "name"), [(1, r"layers\.1\.weight"), (3, r"norms\.1\.weight")])
def test_bad_gradients_write_nothing(bad: Any, message: str, position: int, name: str) -> None:
    """Even the parameters before the bad one keep every bit, in both routes, and so does all state."""
    params = make_params((4, 6), (6, 4), (5,), (3, 2))
    optimizer = Muon([group(params[:2]), group(params[2:], use_muon=False, prefix="norms")], lr=LR)
    run(optimizer, params, [0])
    before = everything(optimizer)
    set_gradients(params, gradients(params, 1))
    params[position].grad_dtype = None  # else torch itself refuses to assign a complex gradient
    params[position].grad = bad(params[position].detach())
    with pytest.raises(GradientError, match=message.format(name)):
        optimizer.step()
    assert_untouched(optimizer, before)
    assert params[0].grad is not None


@pytest.mark.parametrize("change", ["shape", "dtype", "stale gradient"])
def test_parameters_changed_under_their_state_write_nothing(change: str) -> None:
    params = make_params((4, 6), (6,))
    optimizer = Muon([group(params[:1]), group(params[1:], use_muon=False)], none_grad=False)
    run(optimizer, params, [0])
    params[1].data = torch.randn(6).double() if change == "dtype" else torch.randn(7)
    if change != "stale gradient":
        params[1].grad = torch.ones_like(params[1])
    before = everything(optimizer)
    with pytest.raises((StateError, GradientError), match=r"others\.0\.weight"):
        optimizer.step()
    assert_untouched(optimizer, before)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one real rank and one that is not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("use_muon", [True, False])
def test_partial_parameters(mesh: Any, use_muon: bool) -> None:
    param = nn.Parameter(DTensor.from_local(torch.zeros(4, 6), mesh, [Partial()]))
    with pytest.raises(
        ConfigError, match=r"\w+\.0\.weight has placements .*a sum that was never taken.*Redistribute it"
    ):
        Muon([group([param], use_muon=use_muon)])


class Unheard(Placement):
    """A placement from the future, which must not pass for one that is known."""


def test_unknown_placements(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()], src_data_rank=None))
    monkeypatch.setattr(DTensor, "placements", (Unheard(),))
    with pytest.raises(UnsupportedError, match=r"layers\.0\.weight has the placement .*which meshmuon does not know"):
        Muon([group([param])])


def test_meshes_whose_ranks_descend(mesh: Any) -> None:
    turned = DeviceMesh("cpu", [1, 0])
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 6), turned, [Shard(0)], src_data_rank=None))
    with pytest.raises(
        UnsupportedError, match=r"layers\.0\.weight is on the mesh 2 \(ranks 1,0\).*do not ascend along axis 0"
    ):
        Muon([group([param])])


def test_a_refused_group_is_not_added() -> None:
    params = [matrix()]
    optimizer = muon(params)
    for bad in ({"params": [matrix()]}, group(make_params((5,)), prefix="late"), group(params)):
        with pytest.raises(
            ValueError, match=r"use_muon|no rows and columns|is in another group of the optimizer already"
        ):
            optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    run(optimizer, params, [0])
