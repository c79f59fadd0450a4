"""The table of options: signature, types, help and docs follow it, and an option that is added to it works everywhere."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshmuon
from meshmuon import ConfigError, DistMuon, Muon
from meshmuon.params.option_docs import markdown_table
from meshmuon.params.option_table import OPTIONS, Compared, Option, ParamGroup, Scope, group_options, optimizer_options
from meshmuon.state import param_state
from tests.support.reference import group, make_params, muon

from .test_option_fuzz import GROUP_OPTIONS, OPTIMIZER_OPTIONS

PACKAGE = Path(meshmuon.__file__).parent
PAGE = PACKAGE.parent / "docs" / "optimizer.md"
ALIASED = [option for option in optimizer_options() if option.aliases]
NO_OPTIONS = {"params", "param_names", "use_muon"}


def parameters(optimizer: type) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(optimizer.__init__).parameters)
    return {name: parameter for name, parameter in found.items() if name not in ("self", "params")}


def test_names_are_unique() -> None:
    names = [name for option in OPTIONS for name in (option.name, *option.aliases)]
    assert len(names) == len(set(names))


def test_the_signature_has_the_options_and_their_defaults() -> None:
    expected = {option.name: option.default for option in OPTIONS}
    for option in ALIASED:
        expected |= {option.name: None, **dict.fromkeys(option.aliases, option.default)}
    assert {name: parameter.default for name, parameter in parameters(Muon).items()} == expected
    # True == 1 and 1.0 == 1: types as well.
    assert {name: type(parameter.default) for name, parameter in parameters(Muon).items()} == {
        name: type(default) for name, default in expected.items()
    }


def test_the_signature_has_the_options_in_the_order_of_the_table() -> None:
    clear = {alias: option.name for option in ALIASED for alias in option.aliases}
    names = [clear.get(name, name) for name in parameters(Muon)]
    assert names[: -len(ALIASED)] == [option.name for option in OPTIONS]


def test_the_types_of_a_param_group_name_its_options() -> None:
    names = {name for option in group_options() for name in (option.name, *option.aliases)}
    assert set(ParamGroup.__annotations__) == names | NO_OPTIONS
    assert ParamGroup.__optional_keys__ == {alias for option in group_options() for alias in option.aliases}


def test_the_defaults_of_the_optimizer_are_the_options_of_groups() -> None:
    optimizer = muon(make_params((3, 4)))
    assert list(optimizer.defaults) == [option.name for option in group_options()]
    assert set(optimizer.state_dict()["param_groups"][0]) == {*NO_OPTIONS, *optimizer.defaults}


def test_every_option_has_an_oracle() -> None:
    """What the fuzzer knows of options is written apart from their checks; it must know all of them."""
    assert set(GROUP_OPTIONS) == {option.name for option in group_options()}
    assert set(OPTIMIZER_OPTIONS) == {name for option in optimizer_options() for name in (option.name, *option.aliases)}


def test_stored_dtypes_are_the_dtypes() -> None:
    hints = {name: hint.__forward_arg__ for name, hint in ParamGroup.__annotations__.items()}
    dtypes = {name for name, hint in hints.items() if hint == "torch.dtype | None"}
    assert dtypes
    assert dtypes == set(param_state._DTYPES)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help(option: Option) -> None:
    text = inspect.getdoc(Muon)
    assert text is not None
    assert len(re.findall(rf"^    {option.name}( \(per group\))?: \S", text, flags=re.MULTILINE)) == 1
    assert all(f"``{alias}``" in text for alias in option.aliases)
    assert "{options}" not in text
    assert max(map(len, text.splitlines())) <= 130


def test_the_table_in_the_docs() -> None:
    blocks = re.findall(r"<!-- options -->\n(.*?)\n<!-- /options -->", PAGE.read_text(), flags=re.DOTALL)
    assert blocks == [markdown_table()], "write the output of python -m meshmuon.params.option_docs between the markers"


# Names of one option.


@pytest.mark.parametrize("option", ALIASED, ids=lambda option: option.name)
def test_both_names_mean_the_same(option: Option) -> None:
    value = not option.default if isinstance(option.default, bool) else option.default - 2
    for name in (option.name, *option.aliases):
        optimizer = muon(make_params((3, 4)), **{name: value})
        found = {"waves_ahead": optimizer._plan_options.in_flight - 1, "reference_path": optimizer._reference}
        assert found[option.name] == value
    muon(make_params((3, 4)), **dict.fromkeys((option.name, *option.aliases), value))


@pytest.mark.parametrize("first", [2, 5, 7])
def test_names_that_contradict_each_other(first: int) -> None:
    with pytest.raises(ConfigError, match=f"waves_ahead={first} and warmup_step=3 are two names of one option: give waves_ahead"):
        muon(make_params((3, 4)), waves_ahead=first, warmup_step=3)


def test_flags_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="reference_path=False and use_distributed_muon=True are two names"):
        muon(make_params((3, 4)), reference_path=False, use_distributed_muon=True)


def test_errors_show_the_name_that_was_written() -> None:
    for name in ("waves_ahead", "warmup_step"):
        with pytest.raises(ConfigError, match=f"^{name}=-1 must be at least 0"):
            muon(make_params((3, 4)), **{name: -1})


@pytest.mark.parametrize("name", [name for option in optimizer_options() for name in (option.name, *option.aliases)])
def test_optimizer_options_in_a_group(name: str) -> None:
    with pytest.raises(ConfigError, match=f"group 0: {name} holds for the whole optimizer"):
        Muon([group(make_params((3, 4)), **{name: None})])


@pytest.mark.parametrize("name", ["reference_path", "use_distributed_muon"])
def test_dist_muon_has_no_reference_path(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no meaning for DistMuon"):
        DistMuon(make_params((3, 4)), **{name: True})


# An option is added: a row, a type, a parameter.

ROW = """\
    Option("added", 0.5, Scope.MUON_GROUPS, in_range(0.0, 1.0), Compared.BY_VALUE).with_help("An option that a test added."),
    Option("also_added", False, Scope.OPTIMIZER, check_flag, aliases=("once_added",)).with_help("Another one."),
"""
PARAMETERS = "        added: float = 0.5,\n        once_added: bool = False,\n        also_added: bool | None = None,\n"
PROGRAM = """
import torch
from meshmuon import ConfigError, Muon
from meshmuon.agree.descriptions import hyperparameters_of
from meshmuon.params.option_docs import markdown_table

def refused(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("accepted")

def make(**options):
    param = torch.nn.Parameter(torch.ones(3, 4))
    param.grad = torch.ones(3, 4)
    return [{"params": [param], "use_muon": True, **options}]

optimizer = Muon(make(), added=0.25)
assert optimizer.param_groups[0]["added"] == 0.25
assert Muon(make(added=0.75)).param_groups[0]["added"] == 0.75
assert refused(lambda: Muon(make(), added=1.0)) == "group 0: added=1.0 must be in [0, 1)."
optimizer.param_groups[0]["added"] = "x"
assert refused(optimizer.step) == "group 0: added='x' must be a number."
optimizer.param_groups[0]["added"] = 0.25
optimizer.step()
other = Muon(make())
other.load_state_dict(optimizer.state_dict())
assert other.param_groups[0]["added"] == 0.25
assert "added=0.25" in hyperparameters_of(optimizer.param_groups)[0]
assert "added (per group): An option that a test added." in Muon.__doc__
assert "`added`" in markdown_table()
assert refused(lambda: Muon(make(), once_added=1)) == "Muon: once_added=1 must be True or False."
assert "also_added" in refused(lambda: Muon(make(), also_added=False, once_added=True))
assert "also_added holds for the whole optimizer" in refused(lambda: Muon(make(also_added=True)))
"""


def inserted(path: Path, before: str, text: str) -> None:
    source = path.read_text()
    assert source.count(before) == 1, f"{path.name} has no single place to insert an option at"
    path.write_text(source.replace(before, text + before))


def test_adding_an_option_touches_the_table_and_the_signature(tmp_path: Path) -> None:
    copy = tmp_path / "meshmuon"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    inserted(copy / "params" / "option_table.py", ')\n"""In the order of', ROW)
    inserted(copy / "optim" / "muon.py", "        waves_ahead: int | None", PARAMETERS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_scopes() -> None:
    """Groups of one route do not read the options of the other."""
    assert {option.scope for option in group_options(True)} == {Scope.ALL_GROUPS, Scope.MUON_GROUPS}
    assert {option.scope for option in group_options(False)} == {Scope.ALL_GROUPS, Scope.ADAMW_GROUPS}
    assert {option.scope for option in optimizer_options()} == {Scope.OPTIMIZER}
    by_value: Any = [option for option in optimizer_options() if option.compared is Compared.BY_VALUE]
    assert not by_value, "only hyperparameters of groups are compared by value"
