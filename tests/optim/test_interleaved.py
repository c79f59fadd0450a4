"""A fused weight whose parts take turns, saved and loaded. Its bits on every layout are a matter of ``test_cases.py``."""

from __future__ import annotations

import io

import torch
from torch import nn

from meshmuon import Interleaved, Muon
from tests.support.tensors import same, seeded

SHAPE, SPLIT = (3, 5, 14), Interleaved((1, 1), 7)


def build() -> tuple[nn.Parameter, Muon]:
    param = nn.Parameter(seeded(SHAPE, 0))
    group = {"params": [param], "names": ["experts.fused"], "use_muon": True, "split": SPLIT}
    return param, Muon([group], lr=0.01, expert_keys=["experts"], expert_dims="in_out", rule="normuon")


def train(param: nn.Parameter, optimizer: Muon, steps: range) -> None:
    for step in steps:
        param.grad = seeded(SHAPE, step + 1)
        optimizer.step()


def test_a_checkpoint_is_plain_data_and_the_next_steps_are_the_same() -> None:
    expected, optimizer = build()
    train(expected, optimizer, range(3))
    param, optimizer = build()
    train(param, optimizer, range(1))
    file = io.BytesIO()
    torch.save({"param": param.detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed, other = build()
    resumed.data.copy_(loaded["param"])
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["split"] == ((1, 1), 7)
    other.param_groups[0]["split"] = SPLIT
    assert other.state_dict()["param_groups"][0]["split"] == ((1, 1), 7)
    train(resumed, other, range(1, 3))
    same(resumed.detach(), expected.detach(), "resumed")
