"""Pickling an optimizer whose options hold functions: what cannot be pickled is named, and copies work anyway."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon import ConfigError, Muon, NorMuon
from tests.support.reference import LR, assert_same_bits, copies, gradients, group, make_params, set_gradients

FIX = r"cannot be pickled.*top level of a module.*state_dict\(\)"


def of_module_level(rows: int, cols: int) -> float:
    return 0.1 * rows


def no_split(name: str, shape: tuple[int, ...]) -> None:
    return None


def make_local() -> dict[str, Any]:
    """An option of every kind that a user may write inside of a function."""

    @dataclass(frozen=True)
    class LocalRule(NorMuon):
        pass

    def scheme(batch: Tensor) -> Tensor:
        return batch

    return {
        "adjust_lr_fn": lambda rows, cols: 0.1 * rows,
        "split": lambda *_: None,
        "rule": LocalRule(),
        "scheme": scheme,
    }


def save(optimizer: Muon) -> None:
    torch.save([optimizer], io.BytesIO())


@pytest.mark.parametrize("store", [pickle.dumps, save])
@pytest.mark.parametrize("option", ["adjust_lr_fn", "split", "rule", "scheme"])
def test_the_option_is_named(option: str, store: Callable[[Muon], object]) -> None:
    local = {option: make_local()[option]}
    with pytest.raises(ConfigError, match=f"group 1: {option}=.*{FIX}"):
        store(Muon([group(make_params((4, 4)), split=None), group(make_params((4, 6)), prefix="later", **local)]))
    with pytest.raises(ConfigError, match=f"group 0: {option}=.*{FIX}"):
        store(Muon([group(make_params((4, 4)))], **local))
    usable = {"adjust_lr_fn": "match_rms_adamw", "split": None, "rule": "plain", "scheme": "keller"}
    with pytest.raises(ConfigError, match=f"optimizer.defaults: {option}=.*{FIX}"):
        store(Muon([group(make_params((4, 4)), **{option: usable[option]})], **local))


def test_functions_of_a_module() -> None:
    optimizer = Muon([group(make_params((4, 4)), rule=NorMuon(), split=no_split)], lr=LR, adjust_lr_fn=of_module_level)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["adjust_lr_fn"] is of_module_level


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy, lambda optimizer: copy.deepcopy([optimizer])[0]])
def test_copies_keep_local_functions(make_copy: Callable[[Muon], Muon]) -> None:
    params = make_params((4, 4), (4, 6))
    optimizer = Muon([group(params, rule=make_local()["rule"])], lr=LR, adjust_lr_fn=lambda rows, cols: 0.1 * rows)
    twin = make_copy(optimizer)
    ours, theirs = copies(params), twin.param_groups[0]["params"]
    plain = Muon([group(ours, rule=NorMuon())], lr=LR, adjust_lr_fn=of_module_level)
    for stepped, own in ((plain, ours), (twin, theirs)):
        set_gradients(own, gradients(params, 0))
        stepped.step()
    assert_same_bits(theirs, ours)


def test_picklers_that_store_code_are_let_through() -> None:
    """cloudpickle, which Ray uses under a name of its own, pickles local functions."""
    source = """
import pickle
class CodePickler(pickle.Pickler):
    def reducer_override(self, value):
        return (eval, ("__import__('math').hypot",)) if getattr(value, "__name__", "") == "<lambda>" else NotImplemented
def dump(value, file):
    CodePickler(file).dump(value)
"""
    for name, works in (("project.cloudpickle.fast", True), ("project.quick", False)):
        module: dict[str, Any] = {"__name__": name}
        exec(source, module)
        optimizer, file = (
            Muon([group(make_params((4, 4)))], lr=LR, adjust_lr_fn=lambda rows, cols: 0.1 * rows),
            io.BytesIO(),
        )
        if works:
            module["dump"](optimizer, file)
            assert isinstance(pickle.loads(file.getvalue()), Muon)
        else:
            with pytest.raises(ConfigError, match=FIX):
                module["dump"](optimizer, file)
