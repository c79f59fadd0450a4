"""Checkpoints of earlier versions load, on the layout that saved them and on one device, and the run goes on.

The weights after two further steps are those that the version which saved had then, within what rounding explains on
any machine. ``write_checkpoints.py`` has written the files.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from meshmuon import MeshmuonError

from .bounds import Bounds
from .case import ONE_DEVICE
from .cases import LAYOUTS
from .ranks import Ranks
from .run import Outcome, assembled
from .write_checkpoints import FOLDER, KINDS, load


@cache
def bounds_of(name: str) -> Bounds:
    return Bounds(KINDS[name].case.on_one_device)


def check(name: str, outcomes: list[Outcome]) -> None:
    tensors, wanted = assembled(outcomes), torch.load(FOLDER / name / "weights.pt", weights_only=True)
    params = KINDS[name].case.params
    assert set(wanted) == {param.name for param in params}
    for k, param in enumerate(params):
        weight = tensors[param.name, "weight"]
        assert (weight.dtype, weight.shape) == (wanted[param.name].dtype, wanted[param.name].shape)
        bounds_of(name).check_weight(k, weight, wanted[param.name])
        if weight.dtype == torch.bfloat16:  # other random bits would change half of the elements
            assert (weight != wanted[param.name]).double().mean() < 0.1, param.name


LOADED = {name: kind for name, kind in KINDS.items() if not kind.refused}


@pytest.mark.parametrize("name", LOADED)
def test_a_checkpoint_loads_where_it_was_saved(name: str, ranks: Ranks) -> None:
    layout = KINDS[name].case.layout
    check(name, ranks.run(layout.world, load, name, FOLDER / name, backend=layout.backend))


@pytest.mark.parametrize(
    "name", [name for name, kind in LOADED.items() if not kind.sharded and kind.case.layout.world > 1]
)
def test_a_checkpoint_loads_on_one_device(name: str) -> None:
    check(name, [load(name, FOLDER / name, ONE_DEVICE)])


@pytest.mark.parametrize("name", [name for name, kind in LOADED.items() if kind.how != "plain"])
def test_a_checkpoint_loads_on_other_shards(name: str, ranks: Ranks) -> None:
    check(name, ranks.run(3, load, name, FOLDER / name, LAYOUTS["FSDP × 3"]))


@pytest.mark.parametrize("name", sorted(KINDS.keys() - LOADED.keys()))
def test_what_is_given_up_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(MeshmuonError, match=KINDS[name].refused):
        load(name, FOLDER / name, ONE_DEVICE)


def test_the_files_are_small_and_complete() -> None:
    assert {folder.name for folder in FOLDER.iterdir() if folder.is_dir()} == set(KINDS)
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 2_000_000
