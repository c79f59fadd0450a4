"""Filters of convolutions by default: which go to Muon, as which matrix, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import ConfigError, Muon, StateError, get_default_muon_param_groups
from tests.support.tensors import seeded

LR = 4e-3


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """Named as torchvision's."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Residual(width, width), Residual(width, width))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width))
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.fc(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(images))))).mean((2, 3)))
        return out


def why(model: nn.Module, **options: Any) -> dict[str, tuple[str, int, str]]:
    """Route, number of matrices and reason of all filters."""
    rows = Muon(model, lr=LR, allow_inactive=True, **options).routing_table().rows
    return {row.name.removesuffix(".weight"): (row.route, row.matrices, row.why) for row in rows if len(row.shape) > 2}


def beside(**layers: nn.Module) -> nn.Module:
    """The layers in a model with enough for Muon, so that nothing is warned of."""
    return nn.ModuleDict(
        {"first": nn.Embedding(10, 128), **layers, "mlp": nn.Linear(128, 128), "last": nn.Linear(128, 128)}
    )


def steps(model: nn.Module, optimizer: Muon, count: int = 2) -> None:
    for step in range(count):
        model(seeded((4, 3, 16, 16), step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_resnet_just_works() -> None:
    model = ResNet()
    optimizer = Muon(model, lr=LR)
    blocks = {name for name, param in model.named_parameters() if name.startswith("layer") and param.dim() == 4}
    assert len(blocks) == 9
    assert {row.name for row in optimizer.routing_table().rows if row.route == "muon"} == blocks
    assert why(model)["conv1"] == ("adamw", 0, "filter that sees the pixels: at most 4 channels")
    assert (
        str(optimizer.routing_table()).splitlines()[-1]
        == "Muon: 9 matrices, 97 % of 43,162 parameters; AdamW: the rest"
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    steps(model, optimizer)
    assert not [name for name, param in model.named_parameters() if torch.equal(param, before[name])]


def test_a_filter_steps_as_its_flattened_matrix() -> None:
    """With the rate of the shape (out, in·kernel), also where torch keeps channels last."""
    weight, gradient = seeded((24, 16, 3, 3), 0), seeded((24, 16, 3, 3), 1)
    stepped, rates = [], []
    for layer in (nn.Conv2d(16, 24, 3), nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last), nn.Linear(144, 24)):
        model = beside(layer=layer)
        with torch.no_grad():
            layer.weight.copy_(weight.view(layer.weight.shape))
        optimizer = Muon(model, lr=0.02, adjust_lr_fn="original", adamw_lr=1e-3)
        layer.weight.grad = gradient.clone().view(layer.weight.shape)
        optimizer.step()
        stepped.append(layer.weight.detach().reshape(24, 144))
        rates += [row.lr for row in optimizer.routing_table().rows if row.name == "layer.weight"]
    assert torch.equal(stepped[0], stepped[1])
    assert torch.equal(stepped[0], stepped[2])
    assert rates == [0.02] * 3  # √max(1, 24/144); of (24, 16) it would be more


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(128, 16, 1), None),
        (nn.Conv2d(5, 16, 2), None),
        (nn.Conv3d(16, 16, 3), None),
        (nn.Conv2d(15, 16, 1), "filter with a side below 16: too small for Muon"),
        (nn.Conv2d(128, 15, 3), "filter with a side below 16: too small for Muon"),
        (nn.Conv2d(32, 32, 3, groups=32), "filter of a depthwise convolution"),
        (nn.Conv2d(32, 64, 3, groups=32), "filter of a depthwise convolution"),
        (nn.ConvTranspose2d(32, 32, 3, groups=32), "filter of a depthwise convolution"),
        (nn.Conv2d(64, 64, 3, groups=2), "filter of a grouped convolution"),
        (nn.Conv2d(1, 64, 7), "filter that sees the pixels: at most 4 channels"),
        (nn.Conv2d(4, 64, 7), "filter that sees the pixels: at most 4 channels"),
        (nn.Conv3d(3, 64, 3), "filter that sees the pixels: at most 4 channels"),
        (nn.Conv1d(1, 64, 80), "filter that sees the signal: at most 4 channels"),
        (nn.ConvTranspose2d(64, 3, 4), "filter that gives the pixels: at most 4 channels"),
    ],
)
def test_each_kind_has_its_reason(layer: nn.Module, reason: str | None) -> None:
    route, matrices, found = why(beside(layer=layer))["layer"]
    assert (route, matrices) == (("muon", 1) if reason is None else ("adamw", 0))
    assert found == (reason or "matrix, filter (out, in·kernel)")


def test_transposed_convolutions_are_stored_in_out() -> None:
    """A pixel of ``in`` channels gives out·kernel numbers: rules that are not symmetric see that."""
    model = beside(up=nn.ConvTranspose2d(32, 16, 2))
    assert why(model)["up"] == ("muon", 1, "matrix, filter (in, out·kernel)")
    rows = {row.name: row for row in Muon(model, lr=0.02, adjust_lr_fn="spectral", adamw_lr=1e-3).routing_table().rows}
    assert rows["up.weight"].lr == pytest.approx(0.02 * (64 / 32) ** 0.5)


class PatchEmbed(nn.Module):
    """The name of the module does not tell what it is, its class does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(16, 128, 2, 2)


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ({"patch_embed": nn.Conv2d(16, 128, 2, 2)}, "patch_embed"),
        ({"patchify": nn.Conv2d(16, 128, 2, 2)}, "patchify"),
        ({"front": PatchEmbed()}, "front.proj"),
    ],
)
def test_patch_embeddings(layers: dict[str, nn.Module], name: str) -> None:
    """Also of latents, which have more channels than pixels."""
    assert why(beside(**layers))[name] == ("adamw", 0, "patch embedding")


def test_layers_between_stages_are_no_patch_embeddings() -> None:
    """ConvNeXt's: a stride as large as the kernel. Nor are the blocks of a network that embeds patches."""
    assert why(beside(downsample=nn.Conv2d(32, 64, 2, 2)))["downsample"][0] == "muon"
    backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Sequential(Residual(16, 16), Residual(16, 16)))
    found = why(beside(patch_embed=backbone))
    assert found["patch_embed.0"] == ("adamw", 0, "patch embedding")
    assert found["patch_embed.1.1.conv2"][0] == "muon"


class Encoder(nn.Module):
    """As Whisper's: two convolutions over a spectrum, then blocks, here with one convolution each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(80, 128, 3), nn.Conv1d(128, 128, 3)
        self.layers = nn.ModuleList(nn.ModuleDict({"conv": nn.Conv1d(128, 128, 3)}) for _ in range(2))


def test_a_1d_stem() -> None:
    """Of the model, or of a part that is not a repeated block."""
    for prefix, model in (("", Encoder()), ("audio_tower.", beside(audio_tower=Encoder()))):
        found = why(model)
        assert found[f"{prefix}conv1"] == ("adamw", 0, "1-D stem")
        others = [f"{prefix}{name}" for name in ("conv2", "layers.0.conv", "layers.1.conv")]
        assert {found[name][0] for name in others} == {"muon"}


def test_heads_of_convolutions() -> None:
    """By name, or as the last layer of the model if that is 1 × 1."""
    body = [nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)]
    assert why(nn.Sequential(*body, nn.Conv2d(32, 21, 1)))["2"] == ("adamw", 0, "output head: the last layer")
    assert why(nn.Sequential(*body, nn.Conv2d(32, 21, 3)))["2"][0] == "muon"
    assert why(beside(cls_head=nn.Conv2d(32, 91, 3)))["cls_head"] == ("adamw", 0, "output head: by name")


def test_fused_filters_are_split() -> None:
    model = beside(attn=nn.ModuleDict({"qkv": nn.Conv2d(32, 96, 1), "proj": nn.Conv2d(32, 32, 1)}))
    assert why(model)["attn.qkv"] == ("muon", 3, "fused q, k, v, filter (out, in·kernel)")


def test_conv_decides() -> None:
    """ "adamw" is the old way, and "flatten" takes all but grouped ones."""
    layers = {
        "stem": nn.Conv2d(3, 32, 3),
        "dense": nn.Conv2d(32, 32, 3),
        "small": nn.Conv2d(32, 8, 1),
        "up": nn.ConvTranspose2d(32, 32, 2),
    }
    model = beside(**layers, depthwise=nn.Conv2d(32, 32, 3, groups=32))
    routes = {
        conv: {name for name, (route, _, _) in why(model, conv=conv).items() if route == "muon"}
        for conv in (None, "adamw", "flatten")
    }
    assert routes == {None: {"dense", "up"}, "adamw": set(), "flatten": set(layers)}
    assert why(model, conv="adamw")["dense"] == ("adamw", 0, 'conv="adamw"')
    assert why(model, conv="flatten")["stem"] == ("muon", 1, 'conv="flatten"')


def test_is_muon_func_decides_about_filters_too() -> None:
    groups = get_default_muon_param_groups(ResNet(), is_muon_func=lambda name, param: name == "conv1.weight")
    rows = [row for row in Muon(groups).routing_table().rows if row.route == "muon"]
    assert [(row.name, row.matrices, row.why) for row in rows] == [("conv1.weight", 1, "is_muon_func")]


def test_what_is_left_out_by_conv_adamw_is_named_if_nothing_is_left() -> None:
    told = r'go to AdamW \(conv="adamw"\): .* Leave out conv="adamw", or write Muon\(model, conv="flatten"\)'
    with pytest.raises(ConfigError, match=told):
        Muon(ResNet(), conv="adamw")


Build = Callable[[nn.Module], Muon]
BUILD: dict[str, Build] = {
    "default": lambda model: Muon(model, lr=LR),
    "adamw": lambda model: Muon(model, lr=LR, conv="adamw"),
}


class WithHidden(ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(images))))).mean((2, 3))
        out: Tensor = self.head(F.relu(self.fc(features)))
        return out


@pytest.mark.filterwarnings("error")
def test_checkpoints_with_filters_in_adamw() -> None:
    """They load with ``conv="adamw"``, which is not stored: older versions knew no such option."""
    model = WithHidden()
    optimizer = BUILD["adamw"](model)
    steps(model, optimizer)
    state = optimizer.state_dict()
    assert {group.get("conv") for group in state["param_groups"]} == {None}
    again = BUILD["adamw"](WithHidden())
    again.load_state_dict(state)
    assert len(again.state) == len(optimizer.state)
    with pytest.raises(StateError, match=r'layer1\.0\.conv1\.weight.* use_muon=True.*Muon\(model, conv="adamw"\)'):
        BUILD["default"](WithHidden()).load_state_dict(state)


@pytest.mark.filterwarnings("error")
def test_filters_that_were_in_adamw_start_from_zero_with_strict_false() -> None:
    """As the error advises, also where the checkpoint says what is inside other weights of Muon."""
    model = beside(conv=nn.Conv2d(32, 32, 3), qkv=nn.Linear(32, 96), proj=nn.Linear(32, 32))
    state, optimizer = Muon(model, lr=LR, conv="adamw").state_dict(), Muon(model, lr=LR)
    expected = optimizer.routing_table()
    assert [row.matrices for row in expected.rows if row.name in ("conv.weight", "qkv.weight")] == [1, 3]
    with pytest.raises(StateError, match="With strict=False they start from zero"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(state, strict=False)
    assert optimizer.routing_table() == expected


@pytest.mark.filterwarnings("error")
def test_checkpoints_with_filters_in_muon() -> None:
    model = WithHidden()
    optimizer = BUILD["default"](model)
    steps(model, optimizer)
    state = optimizer.state_dict()
    again = BUILD["default"](WithHidden())
    again.load_state_dict(state)
    assert [row.matrices for row in again.routing_table().rows] == [
        row.matrices for row in optimizer.routing_table().rows
    ]
    with pytest.raises(StateError, match=r'layer1\.0\.conv1\.weight.* use_muon=False.*leave out conv="adamw"'):
        BUILD["adamw"](WithHidden()).load_state_dict(state)


def test_state_that_was_copied_without_its_groups() -> None:
    """As dcp.load does: the groups say Muon, the state of a filter is AdamW's."""
    model = WithHidden()
    optimizer = BUILD["default"](model)
    steps(model, optimizer)
    state = optimizer.state_dict()
    state["state"][0] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros(16, 16, 3, 3),
        "exp_avg_sq": torch.zeros(16, 16, 3, 3),
    }
    with pytest.raises(StateError, match=r'layer1\.0\.conv1\.weight is optimized by Muon.*Muon\(model, conv="adamw"\)'):
        BUILD["default"](WithHidden()).load_state_dict(state)
