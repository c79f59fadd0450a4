"""What was dropped is refused with what to write instead, and nothing in the table is still there."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.nn import Linear

import meshmuon
from meshmuon import ConfigError, Muon, StateError, UnknownOptionError
from meshmuon.dropped import COMMANDS, NAMES, OPTIONS, VALUES
from meshmuon.params.option_table import OPTIONS as TABLE
from meshmuon.tools.cli.main import main


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options_are_refused(name: str) -> None:
    with pytest.raises(UnknownOptionError) as refusal:
        Muon(Linear(16, 16), **{name: True})
    assert str(refusal.value) == f"{name}=True is no option of Muon any more: {OPTIONS[name]}"
    assert name not in {key for option in TABLE for key in (option.name, *option.aliases)}


@pytest.mark.parametrize("written", sorted(VALUES))
def test_values_are_refused(written: str) -> None:
    name, _, text = written.partition("=")
    value = getattr(torch, text.removeprefix("torch.")) if text.startswith("torch.") else text
    for given in [value, (None, value)][: 2 if name == "comm_dtype" else 1]:
        with pytest.raises(ConfigError) as refusal:
            Muon(Linear(16, 16), **{name: given})
        assert str(refusal.value).endswith(f"{written} is gone: {VALUES[written]}.")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_are_refused_where_they_are_imported(name: str) -> None:
    module, _, last = f"meshmuon.{name}".rpartition(".")
    with pytest.raises(ImportError) as refusal:
        exec(f"from {module} import {last}")
    assert str(refusal.value) == f"meshmuon.{name} is gone: {NAMES[name]}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    assert f"{command} is gone: {COMMANDS[command]}" in capsys.readouterr().err


def test_what_never_was_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        import_module("meshmuon.never")
    assert not hasattr(meshmuon, "never")


def test_options_are_refused_in_param_groups_and_states() -> None:
    weight = Linear(16, 16).weight
    group = {"params": [weight], "names": ["w"], "use_muon": True}
    with pytest.raises(
        UnknownOptionError, match=r"^group 0: expert_dims is no option of Muon any more: write matrices="
    ):
        Muon([{**group, "expert_dims": "in_out"}])
    optimizer = Muon([group])
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["expert_dims"] == "out_in"  # as earlier versions saved the default
    optimizer.load_state_dict(saved)
    assert "expert_dims" not in optimizer.param_groups[0]
    saved["param_groups"][0]["expert_dims"] = "in_out"
    with pytest.raises(
        StateError, match=r"group 0 of the state_dict was saved with expert_dims='in_out': write matrices="
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(("option", "value"), [("momentum_dtype", "torch.int8"), ("rule", "hyperball")])
def test_states_that_were_saved_with_a_value_are_refused(option: str, value: str) -> None:
    weight = Linear(16, 16).weight
    optimizer = Muon([{"params": [weight], "names": ["w"], "use_muon": True}])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0][option] = value
    if option == "momentum_dtype":
        state = saved["state"][0]
        state |= {
            "momentum_buffer": state["momentum_buffer"].to(torch.int8),
            "momentum_scale": torch.ones(16, 1).bfloat16(),
        }
    with pytest.raises(StateError, match=f"^group 0 of the state_dict .*{option}={value} is gone: "):
        optimizer.load_state_dict(saved)
