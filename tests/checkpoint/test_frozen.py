"""Checkpoints and freezing: written before and after unfreezing, and by versions that left frozen parameters out of
groups.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshmuon import Muon, StateError, get_default_muon_param_groups
from tests.support.tensors import local, same
from tests.support.threads import run_threads

from .kept_model import FLAT, Net, freeze, kept_model, train, unpack

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LR = 2e-3


def named_state(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    """The parameters, and what state there is, by name."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state.get(param, {}).items()}
    return found


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        same(local(actual[name]), local(value), name)


def whole(model: nn.Module) -> nn.Module:
    return model


# What an earlier version wrote.


def loaded_plainly(folder: Path, model: nn.Module, **options: Any) -> Muon:
    optimizer = Muon(get_default_muon_param_groups(model, **options), lr=0.5 * LR)
    optimizer.load_state_dict(torch.load(folder / "plain.pt", weights_only=True)["optimizer"])
    return optimizer


def loaded_by_dcp(name: str, options: StateDictOptions | None, folder: Path, model: nn.Module, **further: Any) -> Muon:
    """As docs/checkpoints.md says: by an optimizer with the groups of that version."""
    earlier = Muon(get_default_muon_param_groups(model, frozen=False), lr=0.5 * LR)
    state = {"optimizer": get_optimizer_state_dict(model, earlier, options=options)}
    dcp.load(state, checkpoint_id=folder / name)
    set_optimizer_state_dict(model, earlier, state["optimizer"], options=options)
    optimizer = Muon(get_default_muon_param_groups(model, **further), lr=0.5 * LR)
    optimizer.load_state_dict(earlier.state_dict())
    return optimizer


LOADS: dict[str, Callable[..., Muon]] = {
    "plain": loaded_plainly,
    "dcp": lambda *args, **further: loaded_by_dcp("dcp", None, *args, **further),
    "flat": lambda *args, **further: loaded_by_dcp("flat", FLAT, *args, **further),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_an_earlier_version_wrote(name: str, tmp_path: Path) -> None:
    """Its state is loaded, and training goes on as with its groups; what it had left out trains once it is unfrozen."""
    saved = torch.load(unpack(tmp_path) / "plain.pt", weights_only=True)
    runs = []
    for frozen in (True, False):
        model = kept_model()
        model.load_state_dict(saved["model"])
        optimizer = LOADS[name](tmp_path, model, frozen=frozen)
        states = [
            optimizer.state[model.get_parameter(key)] for key in saved["optimizer"]["param_groups"][0]["param_names"]
        ]
        same(states[0]["momentum_buffer"], saved["optimizer"]["state"][0]["momentum_buffer"], "momentum")
        groups = {group["param_names"][-1]: group for group in optimizer.param_groups}
        assert [
            (groups[last]["momentum"], groups[last]["lr"]) for last in ("blocks.1.0.weight", "blocks.1.1.bias")
        ] == [(0.9, LR)] * 2
        train(model, optimizer, range(3, 6))
        runs.append((model, optimizer))
    (model, optimizer), (expected, reference) = runs
    assert_same(named_state(model, optimizer), named_state(expected, reference))
    freeze(model, False)
    before = named_state(model, optimizer)
    train(model, optimizer, range(6, 8))
    assert all(not torch.equal(param, before[key]) for key, param in model.named_parameters())
    assert len(optimizer.state) == len(list(model.parameters()))


def test_what_an_earlier_version_left_out_and_trains_now(tmp_path: Path) -> None:
    saved = torch.load(unpack(tmp_path) / "plain.pt", weights_only=True)["optimizer"]
    optimizer = Muon(Net(), lr=LR)
    with pytest.raises(StateError, match=r"lacks blocks\.0\.0\.weight, .*strict=False"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved, strict=False)
    assert len(optimizer.state) == 4


# Before and after the unfreezing.


def run(after: bool, wrap: Callable[[nn.Module], nn.Module] = whole) -> tuple[nn.Module, Muon]:
    """Three steps with a frozen part; with ``after`` two more that train everything."""
    model = kept_model()
    wrap(model)
    optimizer = Muon(model, lr=LR)
    train(model, optimizer, range(3))
    if after:
        freeze(model, False)
        train(model, optimizer, range(3, 5))
    return model, optimizer


@pytest.mark.parametrize("unfrozen", [False, True], ids=["into frozen", "into unfrozen"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_plain_before_and_after_unfreezing(after: bool, unfrozen: bool, tmp_path: Path) -> None:
    """In every combination training goes on with equal bits, the frozen part unfrozen after loading if it was not
    before.
    """
    model, optimizer = run(after)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    weights, saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert ("frozen" in saved) is not after
    other = freeze(Net(), not unfrozen)
    other.load_state_dict(weights)
    resumed = Muon(other, lr=0.5 * LR)
    resumed.load_state_dict(saved)
    assert_same(named_state(other, resumed), named_state(model, optimizer))
    for net in (model, other):
        freeze(net, False)
    train(model, optimizer, range(5, 8))
    train(other, resumed, range(5, 8))
    assert_same(named_state(other, resumed), named_state(model, optimizer))


def test_lost_state_is_no_frozen_parameter() -> None:
    _, optimizer = run(after=False)
    saved = copy.deepcopy(optimizer.state_dict())
    number = next(iter(saved["state"]))
    del saved["state"][number]
    with pytest.raises(StateError, match=r"blocks\.1\.0\.weight trains, but the state_dict has nothing for it"):
        Muon(freeze(Net()), lr=LR).load_state_dict(saved)


def test_into_an_optimizer_without_the_frozen_ones() -> None:
    """As one of a trainer that leaves them out; one that has been trained is still missed."""
    _, optimizer = run(after=False)
    other = kept_model()
    Muon(get_default_muon_param_groups(other, frozen=False), lr=LR).load_state_dict(optimizer.state_dict())
    _, optimizer = run(after=True)
    with pytest.raises(StateError, match=r"the optimizer lacks blocks\.0\.0\.weight"):
        Muon(get_default_muon_param_groups(other, frozen=False), lr=LR).load_state_dict(optimizer.state_dict())


def by_dcp(
    source: tuple[nn.Module, Muon], target: tuple[nn.Module, Muon], folder: Path, flat: bool, *, partial: bool = False
) -> None:
    options = FLAT if flat else None
    dcp.save({"optimizer": get_optimizer_state_dict(*source, options=options)}, checkpoint_id=folder)
    state = {"optimizer": get_optimizer_state_dict(*target, options=options)}
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=partial))
    set_optimizer_state_dict(*target, state["optimizer"], options=options)


CASES = [(after, flat) for after in (False, True) for flat in (False, True)]


def check_dcp(after: bool, flat: bool, folder: Path, wrap: Callable[[nn.Module], nn.Module] = whole) -> None:
    """Unfrozen before loading as it was when saved, then with equal bits; a part that was frozen then starts from
    zero.
    """
    model, optimizer = run(after, wrap)
    for unfrozen in (False, True):
        other = freeze(Net(), not unfrozen)
        wrap(other)
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        resumed, needs_partial = Muon(other, lr=0.5 * LR), unfrozen and not after
        if needs_partial:
            with pytest.raises(CheckpointException, match="Missing key"):
                by_dcp((model, optimizer), (other, resumed), folder / "strictly", flat)
        by_dcp((model, optimizer), (other, resumed), folder / f"{unfrozen}", flat, partial=needs_partial)
        if after and not unfrozen:  # torch skips frozen parameters in loading
            assert not any(param in resumed.state for param in other.get_submodule("blocks.0").parameters())
            continue
        copied = copy.deepcopy((model, optimizer)) if wrap is whole else run(after, wrap)
        for net in (other, copied[0]):
            freeze(net, False)  # type: ignore[arg-type]
        train(*copied, range(5, 8))
        train(other, resumed, range(5, 8))
        assert_same(named_state(other, resumed), named_state(*copied))


@pytest.mark.parametrize(("after", "flat"), CASES)
def test_dcp_before_and_after_unfreezing(after: bool, flat: bool, tmp_path: Path) -> None:
    check_dcp(after, flat, tmp_path)


def test_full_state_dicts_before_and_after_unfreezing() -> None:
    """Gathered ones, as of Accelerate; what was frozen when it was saved needs torch's strict=False."""
    model, optimizer = run(after=False)
    full = StateDictOptions(full_state_dict=True)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))
    other = Net()
    other.load_state_dict(model.state_dict())
    resumed = Muon(other, lr=0.5 * LR)
    set_optimizer_state_dict(other, resumed, saved, options=StateDictOptions(full_state_dict=True, strict=False))
    freeze(model, False)
    train(model, optimizer, range(5, 8))
    train(other, resumed, range(5, 8))
    assert_same(named_state(other, resumed), named_state(model, optimizer))


def test_dcp_on_two_ranks(tmp_path: Path) -> None:
    """FSDP2 in both directions."""

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    def on_rank(rank: int) -> None:
        for after in (False, True):
            check_dcp(after, False, tmp_path / f"{after}", shard)

    run_threads(2, on_rank)


def test_what_an_earlier_version_left_out_keeps_what_is_known_of_its_matrices() -> None:
    """Its checkpoints say what is inside the weights that trained, and nothing of the frozen ones, of another name."""

    def layer(rows: int) -> nn.Module:
        return nn.Linear(16, rows, bias=False)

    towers = {
        "vision": nn.ModuleList(nn.ModuleDict({"qkv": layer(48), "proj": layer(16)}) for _ in range(2)),
        "text": nn.ModuleList(nn.ModuleDict({"c_attn": layer(48), "c_proj": layer(16)}) for _ in range(3)),
        "head": layer(5),
    }
    model = nn.ModuleDict(towers)
    for frozen in (towers["vision"], model.get_submodule("text.0")):
        frozen.requires_grad_(False)
    earlier = Muon(get_default_muon_param_groups(model, frozen=False), lr=LR)
    optimizer = Muon(model, lr=LR)
    expected = optimizer.routing_table()
    assert [row.matrices for row in expected.rows if "qkv" in row.name or "c_attn" in row.name] == [3] * 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(earlier.state_dict())
    assert optimizer.routing_table() == expected
