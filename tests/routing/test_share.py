"""How much of a model Muon trains: the last line of the routing table, and a warning if it is less than half."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, RoutingWarning, get_default_muon_param_groups


def model(depthwise: int = 0, **layers: nn.Module) -> nn.Module:
    """A matrix of 1,024 elements, depthwise filters of so many times 288, further layers, an embedding and a head."""
    many = {f"depthwise{k}": nn.Conv2d(32, 32, 3, groups=32, bias=False) for k in range(depthwise)}
    matrix = nn.Linear(32, 32, bias=False)
    return nn.ModuleDict(
        {"embed": nn.Embedding(1000, 32), **many, **layers, "mlp": matrix, "head": nn.Linear(32, 1000, bias=False)}
    )


def share(optimizer: Muon) -> str:
    table = optimizer.routing_table()
    assert str(table).splitlines()[-1] == table.share
    return table.share


def warned(*args: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = Muon(*args, **options)
        optimizer.routing_table()
    found = [str(warning.message) for warning in caught if issubclass(warning.category, RoutingWarning)]
    assert {warning.filename for warning in caught} <= {__file__}
    assert set(found) <= set(optimizer.routing_table().warnings)
    return found


def by_hand(*sizes: int) -> Muon:
    """The first parameter for Muon, a vector of the other size for AdamW."""
    with torch.device("meta"):
        matrix, vector = nn.Parameter(torch.empty(sizes[0], 1000)), nn.Parameter(torch.empty(sizes[1]))
    return Muon(
        [
            {"params": [matrix], "names": ["matrix"], "use_muon": True},
            {"params": [vector], "names": ["vector"], "use_muon": False},
        ]
    )


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((1, 1), ">99 % of 1,001 parameters; AdamW: the rest"),
        ((1, 3000), "25 % of 4,000 parameters; AdamW: the rest"),
        ((1, 999_000), "<1 % of 1 M parameters; AdamW: the rest"),
        ((1_870, 120_000), "94 % of 1.99 M parameters; AdamW: the rest"),
        ((999_000, 600_000), ">99 % of 1 B parameters; AdamW: the rest"),
        ((7_000_000, 240_000_000), "97 % of 7.24 B parameters; AdamW: the rest"),
    ],
)
def test_the_last_line(sizes: tuple[int, int], line: str) -> None:
    assert share(by_hand(*sizes)) == f"Muon: 1 matrix, {line}"


def test_all_of_a_model() -> None:
    layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 16, bias=False), "qkv": nn.Linear(8, 24, bias=False)})])
    assert share(Muon(layers)) == "Muon: 4 matrices, 100 % of 320 parameters"


def test_the_line_comes_after_warnings_and_counts_what_trains() -> None:
    """What is frozen after the optimizer was built is not counted any more, nor are its matrices."""
    whole = nn.ModuleDict({"one": nn.Linear(32, 32, bias=False), "two": nn.Linear(32, 32, bias=False)})
    with pytest.warns(RoutingWarning, match="moves entries by"):
        optimizer = Muon(whole, lr=0.5)
    assert share(optimizer) == "Muon: 2 matrices, 100 % of 2,048 parameters"
    whole["one"].requires_grad_(False)
    assert share(optimizer) == "Muon: 1 matrix, 100 % of 1,024 parameters"
    whole.requires_grad_(False)
    assert share(optimizer) == "Muon: 0 matrices, 0 % of 0 parameters"


def test_less_than_half_warns_once() -> None:
    """1,024 of 2,176 elements. The embedding and the head, with 64,000, do not count, nor do vectors."""
    assert warned(model(3)) == []
    norm = nn.LayerNorm(100_000)
    assert warned(model(3, norm=norm)) == []
    (text,) = warned(model(4, norm=norm))
    assert text == (
        "Muon trains 47 % of the elements of this model's weights of two and more dims, embeddings, heads and adapters "
        "apart; AdamW has the rest, 53 % for this reason: filter of a depthwise convolution. Give AdamW a rate of its "
        "own, adamw_lr=...: about a fourth of lr."
    )


class Blend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blend = nn.Parameter(torch.zeros(5, 32, 32))


def test_it_says_what_to_write() -> None:
    """What it says helps."""
    small = {f"conv{k}": nn.Conv2d(32, 8, 3) for k in range(2)}
    (text,) = warned(model(**small))
    assert 'side below 16: too small for Muon. To give these to Muon, write Muon(model, conv="flatten").' in text
    assert warned(model(**small), conv="flatten") == []
    _, text = warned(model(other=Blend()))
    assert "write Muon(model, expert_keys=[...]) with a part of their names" in text
    assert warned(model(other=Blend()), expert_keys=["blend"]) == []
    (text,) = warned(model(gates=nn.Linear(2000, 4)))
    advice = (
        "To give these to Muon, write Muon(get_default_muon_param_groups(model, is_muon_func=lambda name, param: ..."
    )
    assert f"{advice})) with a condition that decides of all weights. If AdamW" in text
    wanted = ("mlp.weight", "gates.weight")
    assert warned(get_default_muon_param_groups(model(gates=nn.Linear(2000, 4)), lambda name, _: name in wanted)) == []
    with pytest.raises(ConfigError, match=r"is_muon_func failed for embed.weight .* write a condition in its place"):
        get_default_muon_param_groups(model(), is_muon_func=lambda name, param: ...)  # type: ignore[arg-type, return-value]


def test_no_advice_that_would_be_refused() -> None:
    """The parts of a normed filter are no matrices, and no is_muon_func makes them any."""
    (text,) = warned(model(normed=nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 64, 3))))
    assert "reason: weight-norm part. Give AdamW a rate of its own" in text


def test_adapters_do_not_count() -> None:
    """Muon has LoRA's factors of a linear layer, and AdamW those of a convolution, which are larger."""
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Embedding(9, 32), nn.Conv2d(32, 64, 3), nn.Linear(64, 64), nn.Linear(64, 9))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["1", "2"]))
    assert sum(row.route == "muon" and not row.frozen for row in Muon(adapted).routing_table().rows) == 2
    assert warned(adapted) == []


def test_a_route_that_the_user_has_chosen_does_not_warn() -> None:
    def never_filters(name: str, param: torch.Tensor) -> bool:
        return param.dim() == 2 and "mlp" in name

    filters = {f"conv{k}": nn.Conv2d(32, 32, 3) for k in range(2)}
    assert warned(get_default_muon_param_groups(model(4), is_muon_func=never_filters)) == []
    assert warned(model(**filters), conv="adamw") == []
    groups = [{**group, "reasons": None} for group in get_default_muon_param_groups(model(4))]
    assert warned(groups) == []


def test_frozen_weights_do_not_count() -> None:
    partly = model(4)
    partly["depthwise0"].requires_grad_(False)
    assert warned(partly) == []


def test_a_group_that_is_added_is_not_a_model() -> None:
    optimizer = Muon(model())
    more = get_default_muon_param_groups(
        nn.ModuleDict({"more": nn.Conv2d(64, 64, 3, groups=64, bias=False), "x": nn.Linear(8, 8, bias=False)})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoutingWarning)
        for group in more:
            optimizer.add_param_group(group)
