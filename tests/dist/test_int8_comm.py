"""Rounding on the wire: every layout that sends ends with the bits of the reference path on one device, which rounds
alike.

Blocks of int8 have 3 or 4 elements in most of these tests, so that small matrices have several, and layouts cut them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import ConfigError, Interleaved, Muon
from meshmuon.execute import buffers, elementwise, int8, program_builder, rounding
from meshmuon.plan import NO_WAVE, wire
from tests.dist.test_cases import GENERATE, Drawn
from tests.support.cases import SCALES, Case, Held, Param, check, held_by, place, placed_like, sharded, single
from tests.support.counting import counted
from tests.support.random_layouts import cases
from tests.support.tensors import local, same
from tests.support.threads import run_threads

DTYPES = [
    torch.int8,
    torch.int8,
    (torch.bfloat16, torch.int8),
    (torch.int8, torch.bfloat16),
    (None, torch.int8),
    (torch.int8, None),
    (torch.float64, torch.int8),
    torch.bfloat16,
    torch.bfloat16,
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float64),
    (None, torch.float16),
    torch.float64,
    torch.float32,  # narrower than the updates of float64 parameters
]


def test_the_routing_table_says_what_is_gathered_unrounded() -> None:
    """300 columns over two ranks: 150 each. Rows never cut blocks, and results in int8 need no holder to know a
    scale.
    """

    def notes(rank: int) -> list[tuple[str, ...]]:
        mesh, found = init_device_mesh("cpu", (2,)), []
        for dtype in (torch.int8, (torch.bfloat16, torch.int8), None):
            weights = [distribute_tensor(torch.zeros(8, 300), mesh, [Shard(k)], src_data_rank=None) for k in (0, 1, 1)]
            group = {
                "params": list(map(torch.nn.Parameter, weights)),
                "names": ["rows", "cut", "too"],
                "use_muon": True,
            }
            found.append(Muon([group], comm_dtype=dtype).routing_table().notes)
        return found

    for in_int8, *others in run_threads(2, notes):
        (note,) = in_int8
        assert note.startswith("cut (and 1 more): gathered unrounded")
        assert others == [(), ()]


@pytest.mark.parametrize("rule", ["plain", "hyperball"])
@pytest.mark.parametrize("dtypes", [torch.int8, (torch.bfloat16, torch.int8)], ids=str)
@pytest.mark.parametrize("more", [{}, {"nonfinite": "skip", "momentum_dtype": torch.int8}], ids=["floats", "int8"])
def test_odd_pieces_beside_others(rule: str, dtypes: Any, more: dict[str, Any]) -> None:
    """Of nine rows that take turns, rank 0 has 1, 2 and 4 of a part: two views, whose numbers are in memory of
    their own.
    """
    params = Param((6, 6), placements=(Shard(0),)), Param((9, 6), placements=(Shard(0),), split=Interleaved((1, 2), 3))
    case = Case(params, {"rule": rule, "comm_dtype": dtypes, **more})
    expected = single(replace(case, options={**case.options, "use_distributed_muon": True}))
    run_threads(2, lambda rank: check(case, [init_device_mesh("cpu", (2,))], expected))


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (wire, int8, buffers, program_builder):
            stack.enter_context(patch.object(module, "BLOCK", size))
        yield


PIECES = {
    "rows in turns": Param((16, 6), placements=(Shard(0),), split=Interleaved((2, 2), 4)),
    "two ranges of columns, whole blocks": Param((5, 16), placements=(_StridedShard(1, split_factor=2),)),
    "two ranges of columns, cut blocks": Param((5, 12), placements=(_StridedShard(1, split_factor=2),)),
    "replicas that do not send": Param((7, 10), placements=(Replicate(),)),
    "numbers of float64": Param((7, 10), placements=(Shard(1),), dtype=torch.float64),
}


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the end five elements at a time, too."""
    case = Case((PIECES[kind],), {"comm_dtype": torch.int8, "replicas": "share"})
    with blocks_of(4):
        expected = single(replace(case, options={**case.options, "use_distributed_muon": True}))
        for _ in range(2):
            run_threads(2, lambda rank: check(case, [init_device_mesh("cpu", (2,))], expected))
            monkeypatch.setattr(int8, "_AT_ONCE", 5)
            monkeypatch.setattr(elementwise, "_FILLED_AT_ONCE", 5)
            monkeypatch.setattr(rounding, "_CHUNK", {"cpu": 5})


@settings(max_examples=30, phases=GENERATE, deadline=None)
@given(cases(steps=3), st.sampled_from(DTYPES), st.sampled_from([3, 4, 128]), st.booleans())
def test_any_case_has_the_bits_of_the_rounding_reference_path(
    drawn: Drawn, dtypes: Any, block: int, in_int8: bool
) -> None:
    """``in_int8`` is of the momentum, too."""
    case, layouts, replica_group = drawn
    options = {**case.options, "comm_dtype": dtypes, **({"momentum_dtype": torch.int8} if in_int8 else {})}
    case = replace(case, options=options, threads=1, divided=replica_group)
    held: Held = run_threads(layouts.world, lambda rank: held_by(case, layouts.build()))

    def main(rank: int) -> list[Any]:
        meshes, steps, moves = layouts.build(), list[Any](), dict[int, set[bool]]()

        def watch(optimizer: Muon) -> None:
            try:
                names = [param.name for param in optimizer.plan().params]
            except ConfigError:  # all steps so far were skipped
                return
            for task in optimizer.plan().tasks:
                moves.setdefault(int(names[task.param].split(".")[1]), set()).add(task.wave != NO_WAVE)
            if not case.spoilt:
                steps.append((optimizer.plan(), sent.watch(optimizer)))

        values, states, _ = sharded(case, meshes, held, watch=watch)
        for k, param in enumerate(case.params):
            expected = rounded if moves.get(k) == {True} else plain
            if len(moves.get(k, ())) == 1 or not param.muon:
                same(values[k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
            if param.muon and "momentum_buffer" in rounded[1][k]:
                whole = place(case, meshes, k, rounded[1][k]["momentum_buffer"])
                same(states[k]["momentum_buffer"], local(whole), f"momentum {k}")
            if param.muon and SCALES in rounded[1][k]:
                scales = states[k][SCALES]
                same(local(scales), local(placed_like(rounded[1][k][SCALES], scales)), f"scales {k}")
        return steps

    with blocks_of(block):
        plain = single(case, held)
        rounded = single(replace(case, options={**options, "use_distributed_muon": True}, prepares=False), held)
        with counted() as sent:
            ranks = run_threads(layouts.world, main)
        remembers = any(name in str(options["rule"]).lower() for name in ("normuon", "drag"))
        if ranks[0] and not remembers:  # rule state, which the plan does not count
            for rank in range(len(ranks)):
                sent.check(rank)  # that it sends the bytes of its plan, scales included
