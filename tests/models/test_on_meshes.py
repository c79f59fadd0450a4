"""The option ``matrices`` on sharded parameters: the same bits as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshmuon import Interleaved, Muon
from tests.support.threads import run_threads

MATRICES: dict[str, dict[str, Any]] = {
    "layers.*.c_attn.weight": {"dims": "in_out", "split": (8, 8, 8)},
    "layers.*.query_key_value.weight": {"split": Interleaved((4, 4, 4), 2)},
    "layers.*.experts.gate_up_proj": {"experts": True, "dims": "in_out", "split": Interleaved((1, 1), 6)},
    "layers.*.experts.w2": {"experts": 3, "dims": "in_out"},
    "layers.*.rel_attn.q": {"flatten": True, "dims": "in_out"},
}
SHAPES = {
    "layers.0.c_attn.weight": (8, 24),
    "layers.0.query_key_value.weight": (24, 8),
    "layers.0.experts.gate_up_proj": (3, 8, 12),
    "layers.0.experts.w2": (18, 8),
    "layers.0.rel_attn.q": (8, 2, 5),
}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(place: Any, rule: str) -> dict[str, Tensor]:
    """The parameters after two steps; ``place`` puts a tensor where it belongs."""
    params = {name: nn.Parameter(place(value)) for name, value in values(0).items()}
    group = {"params": list(params.values()), "names": list(params), "use_muon": True, "matrices": MATRICES}
    optimizer = Muon([group], lr=0.02, adjust_lr_fn="spectral", rule=rule, comm_dtype=torch.float32)
    for step in (1, 2):
        for name, grad in values(step).items():
            params[name].grad = place(grad)
        optimizer.step()
    return {
        name: param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()
        for name, param in params.items()
    }


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rule", ["plain", "muon_plus"])
def test_as_on_one_device(dim: int, rule: str) -> None:
    expected = trained(lambda value: value, rule)

    def main(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (4,))
        return trained(lambda value: distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None), rule)

    for found in run_threads(4, main):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
