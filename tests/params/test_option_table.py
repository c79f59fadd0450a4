"""The table of options: signature, types, help and docs follow it, and an option that is added to it works
everywhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from torch import nn

import meshmuon
from meshmuon import ConfigError, DistMuon, Muon, OptionNameWarning
from meshmuon.dropped import SAVED
from meshmuon.integrations.factory import muon_for
from meshmuon.optim import muon as muon_module
from meshmuon.params import arguments, option_table
from meshmuon.params.option_table import OPTIONS, TIERS, Option, ParamGroup, group_options, optimizer_options
from tests.support.reference import group, make_params, muon

from .test_option_fuzz import GROUP_OPTIONS, OPTIMIZER_OPTIONS

PACKAGE = Path(meshmuon.__file__).parent
PAGE = PACKAGE.parent / "docs" / "optimizer.md"
TORCHS_NAMES = {alias: option for option in group_options() for alias in option.aliases}
NO_OPTIONS = {"params", "param_names", "use_muon"}


MOTIF = {  # a contract with users of other Muon optimizers: positional arguments and their defaults
    "lr": 1e-3, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "adamw_betas": (0.9, 0.95),
    "adamw_eps": 1e-8, "none_grad": True, "debug": False, "clip_config": None, "warmup_step": 5, "chunk_size": -1,
    "use_distributed_muon": False, "expert_keys": None,
}  # fmt: skip


def parameters(optimizer: type) -> dict[str, inspect.Parameter]:
    in_signature = dict(inspect.signature(optimizer.__init__).parameters)
    return {name: parameter for name, parameter in in_signature.items() if name not in ("self", "params", "unknown")}


def test_names_are_unique() -> None:
    names = [name for option in OPTIONS for name in (option.name, *option.aliases)]
    assert len(names) == len(set(names))


def test_the_signature_has_the_options_and_their_defaults() -> None:
    expected = {option.name: option.default for option in OPTIONS}
    expected |= dict.fromkeys(TORCHS_NAMES)
    assert {name: parameter.default for name, parameter in parameters(Muon).items()} == expected
    # True == 1 and 1.0 == 1: types as well.
    assert {name: type(parameter.default) for name, parameter in parameters(Muon).items()} == {
        name: type(default) for name, default in expected.items()
    }


def test_the_signature_begins_as_motif_s_and_goes_on_in_tiers() -> None:
    names = list(parameters(Muon))
    assert [(name, parameters(Muon)[name].default) for name in names[: len(MOTIF)]] == list(MOTIF.items())
    kinds = [parameter.kind for parameter in parameters(Muon).values()]
    assert set(kinds[len(MOTIF) :]) == {inspect.Parameter.KEYWORD_ONLY}
    keywords = [name for option in OPTIONS for name in (option.name, *option.aliases) if name not in MOTIF]
    assert names[len(MOTIF) :] == keywords


def literals(hint: Any) -> set[Any]:
    """All choices that a type names."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return {choice for part in get_args(hint) if get_origin(hint) in (Union, UnionType) for choice in literals(part)}


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if isinstance(option.default, str) or option.name == "conv"]
)
def test_the_types_name_the_choices_that_are_accepted(option: Option) -> None:
    """What editors complete is what the check accepts: the error lists the same names."""
    choices = literals(eval(Muon.__init__.__annotations__[option.name], vars(muon_module)))
    assert option.default is None or option.default in choices
    with pytest.raises(ConfigError, match=option.name) as refused:
        muon(make_params((3, 4)), **{option.name: "wrong"})
    assert set(re.findall(r"'(\w+)'", str(refused.value))) == choices | {"wrong"}
    if option.name in ParamGroup.__annotations__:
        assert literals(eval(ParamGroup.__annotations__[option.name].__forward_arg__, vars(option_table))) == choices


def test_the_types_of_a_param_group_name_its_options() -> None:
    names = {name for option in group_options() for name in (option.name, *option.aliases)}
    assert set(ParamGroup.__annotations__) == names | NO_OPTIONS
    assert ParamGroup.__optional_keys__ == {alias for option in group_options() for alias in option.aliases}


def test_the_defaults_of_the_optimizer_are_the_options_of_groups() -> None:
    optimizer = muon(make_params((3, 4)))
    assert list(optimizer.defaults) == [option.name for option in group_options()]
    assert set(optimizer.state_dict()["param_groups"][0]) == {*NO_OPTIONS, *optimizer.defaults, *SAVED}


def test_every_option_has_an_oracle() -> None:
    """What the fuzzer knows of options is written apart from their checks; it must know all of them."""
    assert set(GROUP_OPTIONS) == {option.name for option in group_options()}
    assert set(OPTIMIZER_OPTIONS) == {option.name for option in optimizer_options()}


def test_help() -> None:
    text = inspect.getdoc(Muon)
    assert text is not None
    for tier, options in TIERS.items():
        section = re.search(rf"^{tier}:\n((?:    .*\n)+)", text, flags=re.MULTILINE)
        assert section is not None
        assert re.findall(r"^    (\w+)(?: \(per group\))?: \S", section[1], flags=re.MULTILINE) == [
            o.name for o in options if o.help
        ]
        assert all(f"``{alias}``" in section[1] for option in options for alias in option.aliases)
    assert "{options}" not in text
    assert max(map(len, text.splitlines())) <= 130


def test_the_table_in_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PAGE.parent / "site")
    options = importlib.import_module("options")
    blocks = re.findall(r"<!-- options -->\n(.*?)\n<!-- /options -->", PAGE.read_text(), flags=re.DOTALL)
    assert blocks == [options.markdown_tables()], "write the output of python docs/site/options.py between the markers"


# Names of one option.


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_unwarned", set(arguments._MISLEADING))


def test_names_that_mislead_warn_once_of_what_they_mean() -> None:
    for name, value, text in (
        ("warmup_step", 500, r"warmup_step=500 .*waves.* does not warm up the lr\.$"),
        ("use_distributed_muon", True, "use_distributed_muon=True .*slow reference path.* distributed without it"),
    ):
        with pytest.warns(OptionNameWarning, match=text) as caught:
            muon(make_params((3, 4)), **{name: value})
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            muon(make_params((3, 4)), **{name: value})


@pytest.mark.filterwarnings("error")
def test_their_defaults_warn_of_nothing() -> None:
    muon(make_params((3, 4)), warmup_step=5, use_distributed_muon=False, chunk_size=-1, debug=False)


def test_the_line_of_the_user_is_shown() -> None:
    for build in (Muon, DistMuon):
        arguments._unwarned.add("warmup_step")
        with pytest.warns(OptionNameWarning) as caught:
            build([group(make_params((3, 4)))], warmup_step=3)
        assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fused", "AdamW's part is always fused"),
        ("foreach", "works on many parameters at once"),
        ("capturable", "cuda_graphs=True"),
        ("amsgrad", "no such variant"),
        ("form", "each matrix takes the form with the fewest FLOPs"),
        ("ns_coefficients", r"scheme=\[\(a, b, c\)\]"),
        ("warmup_steps", "Use a scheduler"),
        ("learning_rate", "it is called lr"),
        ("momentun", r"did you mean momentum"),
        ("ns_step", "did you mean ns_steps"),
        ("weight_deca", "did you mean weight_decay"),
        ("qwertyuiop", "docs/optimizer.md lists them"),
    ],
)
@pytest.mark.parametrize("build", [Muon, DistMuon, partial(muon_for, nn.Linear(3, 4))])
def test_what_is_no_option(build: Any, name: str, hint: str) -> None:
    args = () if isinstance(build, partial) else ([group(make_params((3, 4)))],)
    with pytest.raises(ConfigError, match=f"^{name}=True is not an option of Muon.*{hint}") as refused:
        build(*args, **{name: True})
    assert isinstance(refused.value, TypeError)  # as Python's own


def test_torch_s_names_of_adamw_s_options() -> None:
    matrix, vector = make_params((3, 4), (5,))
    groups = [group([matrix]), group([vector], use_muon=False, prefix="norms")]
    for options in (
        {"betas": (0.5, 0.75), "eps": 1e-3},
        {"adamw_betas": (0.5, 0.75), "adamw_eps": 1e-3, "betas": [0.5, 0.75]},
    ):
        for optimizer in (Muon(groups, **options), Muon([groups[0], {**groups[1], **options}])):
            found = optimizer.param_groups[1]
            assert (tuple(found["adamw_betas"]), found["adamw_eps"]) == ((0.5, 0.75), 1e-3)
    # keys that a group does not use are kept
    Muon([{**groups[0], "betas": "unused", "fused": True}], betas=(0.5, 0.75))


@pytest.mark.parametrize(("name", "one", "other"), [("betas", (0.5, 0.75), (0.5, 0.76)), ("eps", 1e-3, 1e-4)])
def test_torch_s_names_that_contradict_ours(name: str, one: Any, other: Any) -> None:
    adamw = group(make_params((5,)), use_muon=False)
    wrong = {name: one, f"adamw_{name}": other}
    with pytest.raises(ConfigError, match=f"adamw_{name}=.* and {name}=.* are two names of one option"):
        Muon([adamw], **wrong)
    with pytest.raises(ConfigError, match=f"adamw_{name}=.* and {name}=.* are two names of one option"):
        Muon([{**adamw, **wrong}])


def test_errors_show_the_name_that_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^warmup_step=-1 must be at least 0"):
        muon(make_params((3, 4)), warmup_step=-1)


@pytest.mark.parametrize("name", [option.name for option in optimizer_options()])
def test_optimizer_options_in_a_group(name: str) -> None:
    with pytest.raises(ConfigError, match=f"group 0: {name} holds for the whole optimizer"):
        Muon([group(make_params((3, 4)), **{name: None})])
