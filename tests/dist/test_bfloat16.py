"""CPUs that multiply bfloat16: every layout has the bits of one device there, and ranks with different CPUs are
told so.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon, PlanMismatchError, torch_compat
from tests.support.cases import Case, Param
from tests.support.random_layouts import Layouts, cases
from tests.support.threads import run_threads
from tests.support.units import bfloat16_units

from .test_cases import Drawn, run_case, run_hostile

S0, S1 = Shard(0), Shard(1)
MATRICES = ((24, 40), (24, 40), (40, 24), (32, 32), (3, 20, 24), (48, 130), (130, 48))


@pytest.fixture(autouse=True)
def units() -> Iterator[None]:
    with bfloat16_units(smallest=1):
        yield


@pytest.mark.parametrize(
    ("shape", "placements"), [((2,), (S0,)), ((3,), (S0,)), ((3,), (S1,)), ((2, 2), (S1, S0))], ids=str
)
@pytest.mark.parametrize("scheme", ["auto", "keller"])
@pytest.mark.parametrize("reference", [False, True])
def test_every_layout_has_the_bits_of_one_device(
    shape: tuple[int, ...], placements: tuple[Shard, ...], scheme: str, reference: bool
) -> None:
    """Also where products of 16 bits round by address, by memory order and by company."""
    params = tuple(Param(shape, 0, placements) for shape in MATRICES)
    case = Case(params, {"scheme": scheme, "use_distributed_muon": reference}, steps=2)
    if not reference:
        run_case(case, Layouts(shape))
    run_hostile(case, Layouts(shape), company=True)


@settings(max_examples=10, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(cases(steps=2))
def test_any_case_has_the_bits_of_one_device(drawn: Drawn) -> None:
    case, layouts, replica_group = drawn
    run_case(case, layouts, replica_group=replica_group)


@pytest.mark.parametrize("options", [{}, {"compute_dtype": torch.bfloat16}], ids=["default", "bfloat16"])
def test_ranks_with_other_cpus_raise_one_error_that_says_what_to_pass(options: dict[str, torch.dtype]) -> None:
    def main(rank: int) -> str:
        def stepped(**options: torch.dtype) -> None:
            whole = nn.Parameter(torch.ones(16, 24))
            param = nn.Parameter(distribute_tensor(whole.detach(), init_device_mesh("cpu", (2,)), [S0]))
            optimizer = Muon([{"params": [param], "param_names": ["up"], "use_muon": True, **options}])
            param.grad = torch.ones_like(param)
            optimizer.step()

        stepped(compute_dtype=torch.float32)
        with pytest.raises(PlanMismatchError) as raised:
            stepped(**options)
        return str(raised.value)

    with patch.object(torch_compat, "cpu_multiplies_bfloat16", lambda: dist.get_rank() == 0):
        texts = run_threads(2, main)
    assert len(set(texts)) == 1
    assert "up: rank 1 has" in texts[0]
    assert texts[0].endswith("Not all of these CPUs multiply bfloat16: pass compute_dtype=torch.float32 on every rank.")
