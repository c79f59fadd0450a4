"""Parameters that are frozen when the optimizer is built: in their groups, without cost, and trained once they are
unfrozen.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshmuon import (
    ConfigError,
    DistMuon,
    Muon,
    NorMuon,
    PlanMismatchError,
    clip_grad_norm_,
    get_default_muon_param_groups,
)
from tests.support.tensors import like, local, same, seeded
from tests.support.threads import run_threads

LR = 2e-3
FROZEN = ("embed.", "blocks.0.")  # of every kind: a table, a matrix, biases and norms


class Net(nn.Module):
    """An embedding, which alone has weight decay from AdamW, and blocks."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(blocks))
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                param.copy_(seeded(param.shape, k))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def parts(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if name.startswith(FROZEN)]


def freeze(model: nn.Module, frozen: bool = True) -> nn.Module:
    for param in parts(model):
        param.requires_grad_(not frozen)
    return model


def give_gradients(model: nn.Module, step: int, without: Iterable[Tensor] = ()) -> None:
    """Only the parameters of a whole model are numbered, so that one that is frozen changes no other's gradient."""
    left_out = set(map(id, without))
    for k, param in enumerate(model.parameters()):
        given = param.requires_grad and id(param) not in left_out
        param.grad = like(param, seeded(param.shape, 1000 + 100 * step + k)) if given else None


def train(model: nn.Module, optimizer: Muon, steps: Iterable[int], without: Iterable[Tensor] = ()) -> None:
    for step in steps:
        give_gradients(model, step, without)
        optimizer.step()


def assert_alike(model: nn.Module, optimizer: Muon, expected: nn.Module, reference: Muon) -> None:
    """Parameters and state, bit for bit."""
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        same(local(param), local(other), name)
        mine, theirs = optimizer.state.get(param, {}), reference.state.get(other, {})
        assert list(mine) == list(theirs), name
        for key, value in mine.items():
            same(local(value), local(theirs[key]), f"{key} of {name}")


Build = Callable[[nn.Module], Muon]


def unfrozen_like_one_without_gradients(build: Build, wrap: Callable[[nn.Module], object] = lambda model: None) -> None:
    """Freeze, 5 steps, unfreeze, 5 steps; beside it an optimizer whose parameters trained, but had no gradients at
    first.
    """
    model, expected = freeze(Net()), Net()
    wrap(model)
    wrap(expected)
    optimizer, reference = build(model), build(expected)
    train(model, optimizer, range(5))
    assert not any(param in optimizer.state for param in parts(model))
    assert {one.name for one in optimizer.plan().params} == {"blocks.1.0.weight", "blocks.2.0.weight"}
    train(expected, reference, range(5), without=parts(expected))
    freeze(model, False)
    train(model, optimizer, range(5, 10))
    train(expected, reference, range(5, 10))
    assert all(param in optimizer.state for param in parts(model))
    if isinstance(optimizer, DistMuon) and optimizer.replica_group is not None:
        optimizer.consolidate()
        reference.consolidate()  # type: ignore[attr-defined]
    assert_alike(model, optimizer, expected, reference)


def prepared(model: nn.Module) -> Muon:
    optimizer = Muon(model, lr=LR)
    optimizer.prepare()
    assert {name for name, param in model.named_parameters() if param in optimizer.state} == {
        name for name, param in model.named_parameters() if param.requires_grad
    }
    return optimizer


def offloaded(model: nn.Module) -> Muon:
    optimizer = Muon(model, lr=LR)
    optimizer.turn_on_cpu_offload()
    return optimizer


BUILDS: dict[str, Build] = {
    "plain": lambda model: Muon(model, lr=LR),
    "default groups": lambda model: Muon(get_default_muon_param_groups(model), lr=LR),
    "measured": lambda model: Muon(model, lr=LR, metrics=1),
    "skipping": lambda model: Muon(model, lr=LR, nonfinite="skip"),
    "normuon": lambda model: Muon(model, lr=LR, rule="normuon"),
    "bfloat16 momentum": lambda model: Muon(model, lr=LR, momentum_dtype=torch.bfloat16),
    "offloaded": offloaded,
    "DistMuon": lambda model: DistMuon(model, lr=LR),
}


@pytest.mark.parametrize("name", BUILDS)
def test_unfrozen_later(name: str) -> None:
    unfrozen_like_one_without_gradients(BUILDS[name])


def test_unfrozen_later_and_prepared() -> None:
    """Also a second time, for what was unfrozen."""
    model, expected = freeze(Net()), Net()
    optimizer, reference = prepared(model), Muon(expected, lr=LR)
    train(model, optimizer, range(5))
    train(expected, reference, range(5), without=parts(expected))
    freeze(model, False)
    optimizer.prepare()
    assert all(param in optimizer.state for param in parts(model))
    train(model, optimizer, range(5, 10))
    train(expected, reference, range(5, 10))
    assert_alike(model, optimizer, expected, reference)


def shard(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


LAYOUTS: dict[str, tuple[Build, Callable[[nn.Module], object]]] = {
    "FSDP2": (lambda model: Muon(model, lr=LR), shard),
    "FSDP2, prepared": (prepared, shard),
    "DDP": (lambda model: Muon(model, lr=LR, replica_group=dist.group.WORLD), lambda model: None),
    "DDP, shared": (
        lambda model: Muon(model, lr=LR, replica_group=dist.group.WORLD, replicas="share"),
        lambda model: None,
    ),
    "DistMuon": (lambda model: DistMuon(model, lr=LR), lambda model: None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unfrozen_later_on_two_ranks(name: str) -> None:
    build, wrap = LAYOUTS[name]

    run_threads(2, lambda rank: unfrozen_like_one_without_gradients(build, wrap))


def test_ranks_that_unfreeze_others_raise_together() -> None:
    def on_rank(rank: int) -> str:
        model = freeze(Net())
        optimizer = Muon(model, lr=LR, replica_group=dist.group.WORLD)
        train(model, optimizer, range(2))
        if rank == 1:
            freeze(model, False)
        give_gradients(model, 2)
        with pytest.raises(PlanMismatchError, match=r"blocks\.0\.0\.weight .* freeze the same parameters") as caught:
            optimizer.step()
        return str(caught.value)

    first, second = run_threads(2, on_rank)
    assert first == second


def test_frozen_again_while_another_is_unfrozen() -> None:
    """Ranks agree on what is awake though only the owner of a matrix has its state."""

    def on_rank(rank: int) -> None:
        model, expected = Net(), Net()
        model.blocks[0].requires_grad_(False)
        optimizer = DistMuon(model, lr=LR)
        reference = Muon(expected, lr=LR, adjust_lr_fn="original", weight_decay=0.0)
        for step in range(6):
            if step == 2:
                model.blocks[1].requires_grad_(False)
            if step == 4:
                model.blocks[0].requires_grad_(True)
            idle = [
                other
                for mine, other in zip(model.parameters(), expected.parameters(), strict=True)
                if not mine.requires_grad
            ]
            train(model, optimizer, [step])
            train(expected, reference, [step], without=idle)
        optimizer.consolidate()
        assert_alike(model, optimizer, expected, reference)

    run_threads(2, on_rank)


@pytest.mark.parametrize("both_load", [True, False])
def test_a_rank_that_was_started_anew(both_load: bool) -> None:
    """It has the state of what was trained and is frozen now, as the other rank; or both go back to before it was
    trained.
    """

    def on_rank(rank: int) -> None:
        donor = freeze(Net())
        earlier = Muon(donor, lr=LR)
        train(donor, earlier, [0])
        if not both_load:
            freeze(donor, False)
            train(donor, earlier, [1])
        saved = copy.deepcopy(earlier.state_dict())
        model = freeze(Net())
        optimizer = Muon(model, lr=LR, replica_group=dist.group.WORLD)
        train(model, optimizer, [0])
        freeze(model, False)
        train(model, optimizer, [1])
        freeze(model)
        if rank == 1:
            model = freeze(Net())
            optimizer = Muon(model, lr=LR, replica_group=dist.group.WORLD)
        if both_load or rank == 1:
            model.load_state_dict(donor.state_dict())
            optimizer.load_state_dict(saved)
        freeze(donor)
        for step in (2, 3):
            train(model, optimizer, [step])
            train(donor, earlier, [step])
            freeze(model, False)
            freeze(donor, False)
        assert_alike(model, optimizer, donor, earlier)

    run_threads(2, on_rank)


def test_a_gradient_by_hand() -> None:
    """A frozen parameter that is given a gradient is stepped, as by every optimizer of torch."""
    model, expected = freeze(Net()), Net()
    optimizer, reference = Muon(model, lr=LR), Muon(expected, lr=LR)
    train(model, optimizer, [0])
    train(expected, reference, [0], without=parts(expected))
    give_gradients(expected, 1)
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert other.grad is not None
        param.grad = other.grad.clone()
    optimizer.step()
    reference.step()
    assert_alike(model, optimizer, expected, reference)


def test_zero_grad_and_clipping() -> None:
    """An unfrozen parameter's gradient is cleared: it would otherwise grow, and any clipping would shrink the
    others by it.
    """
    model = freeze(Net())
    optimizer = Muon(model, lr=0.0)
    tokens, norms = torch.arange(10), []
    for step in range(6):
        if step == 2:
            freeze(model, False)
        model(tokens).square().sum().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        assert float(clip_grad_norm_(optimizer, 1e9)) == pytest.approx(norms[-1])
        optimizer.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    assert norms[0] == norms[1] < norms[2] == norms[3] == norms[5]


def test_a_grad_scaler() -> None:
    """It skips a step while they are frozen, and one right after they are unfrozen."""
    model, expected = freeze(Net()), Net()
    optimizer, reference = Muon(model, lr=LR), Muon(expected, lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(8):
        if step == 4:
            freeze(model, False)
        give_gradients(model, step)
        for grad in [param.grad for param in model.parameters() if param.grad is not None]:
            scaler.scale(torch.ones(()))
            grad.mul_(scaler.get_scale() if step not in (2, 4) else torch.inf)
        if step not in (2, 4):
            train(expected, reference, [step], without=parts(expected) if step < 4 else ())
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.skipped_steps == 2
    assert_alike(model, optimizer, expected, reference)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    model, expected = freeze(Net()), Net()
    optimizer, reference = Muon(model, lr=LR), Muon(expected, lr=LR)
    train(model, optimizer, range(2))
    train(expected, reference, range(2), without=parts(expected))
    model, optimizer = copied((model, optimizer))
    train(model, optimizer, range(2, 4))
    assert not any(param in optimizer.state for param in parts(model))
    freeze(model, False)
    train(model, optimizer, range(4, 6))
    train(expected, reference, range(2, 4), without=parts(expected))
    train(expected, reference, range(4, 6))
    assert_alike(model, optimizer, expected, reference)


def test_alternating_as_in_a_gan() -> None:
    """One optimizer for both nets, each frozen in the other's turns, as one optimizer for each; and no plan is made
    anew.
    """
    both, alone = (nn.ModuleDict({"generator": Net(2), "critic": Net(2)}) for _ in range(2))
    optimizer = Muon(both, lr=LR)
    optimizers = {name: Muon(net, lr=LR) for name, net in alone.items()}
    tokens, plans = torch.arange(10), []
    both["generator"].requires_grad_(False)
    for step in range(20):
        turn, other = ("critic", "generator") if step % 2 == 0 else ("generator", "critic")
        both[turn].requires_grad_(True)
        both[other].requires_grad_(False)
        for nets in (both, alone):
            made = nets["generator"](tokens)
            loss = (made * nets["critic"](tokens)).sum()
            (loss if turn == "critic" else -loss).backward()
        optimizer.step()
        optimizers[turn].step()
        optimizer.zero_grad()
        alone.zero_grad()
        plans.append(optimizer.plan())
    assert all(plan is plans[2] for plan in plans[2:]), "each net has had its first turn"
    for (name, param), expected in zip(both.named_parameters(), alone.parameters(), strict=True):
        same(param.detach(), expected.detach(), name)


def test_the_routing_table_says_frozen() -> None:
    optimizer = Muon(freeze(Net()), lr=LR)
    rows = {row.name: row for row in optimizer.routing_table().rows}
    frozen, trained = rows["blocks.0.0.weight"], rows["blocks.1.0.weight"]
    assert (frozen.route, frozen.frozen, trained.frozen) == ("muon", True, False)
    assert (frozen.lr, frozen.rms, frozen.matrices) == (trained.lr, trained.rms, trained.matrices)
    assert rows["embed.weight"].frozen
    assert rows["embed.weight"].route == "adamw"
    lines = str(optimizer.routing_table()).splitlines()
    assert any(
        "blocks.0.*.weight" in line or ("blocks.0.0.weight" in line and "muon, frozen" in line) for line in lines
    )
    assert any("embed.weight" in line and "adamw, frozen" in line for line in lines)
    assert any("blocks.*.*.weight" in line and "frozen" not in line for line in lines)
    for param in optimizer.param_groups[0]["params"]:
        param.requires_grad_(True)
    assert "muon, frozen" not in str(optimizer.routing_table())


def test_the_same_routes_as_if_they_trained() -> None:
    """Groups are the same, but for those that no step could train."""
    trained, model = get_default_muon_param_groups(Net()), freeze(Net())
    model.register_parameter("quantised", nn.Parameter(torch.ones(16, 16, dtype=torch.uint8), requires_grad=False))
    model.register_parameter("float8", nn.Parameter(torch.ones(16, 16).to(torch.float8_e4m3fn), requires_grad=False))
    groups = get_default_muon_param_groups(model)
    keys = ("names", "reasons", "use_muon", "weight_decay")
    assert [[group.get(key) for key in keys] for group in groups] == [
        [group.get(key) for key in keys] for group in trained
    ]


def test_warnings_are_about_what_trains() -> None:
    """What is frozen is not said to be trained."""
    model = nn.ModuleDict({"adapter": nn.Linear(8, 8), "blend": nn.Module()})
    model["blend"].w = nn.Parameter(torch.zeros(4, 8, 8))
    for frozen in (False, True):
        model["blend"].requires_grad_(not frozen)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = Muon(model, lr=LR)
        told = [str(warning.message) for warning in caught]
        assert sum("blend.w has more than two dims" in text for text in told) == (not frozen), told
    model["blend"].requires_grad_(True)
    assert any("blend.w has more than two dims" in text for text in optimizer.routing_table().warnings)


def test_options_that_do_not_fit_a_frozen_parameter() -> None:
    """They are refused once it is unfrozen, before anything is written."""
    fused, other = (nn.Parameter(seeded(shape, 1)) for shape in ((8, 6), (6, 6)))
    groups = [
        {"params": [("fused", fused.requires_grad_(False))], "use_muon": True, "split": (4, 4)},
        {"params": [("other", other)], "use_muon": True},
    ]
    optimizer = Muon(groups, lr=LR, rule=NorMuon(axis="columns"))
    other.grad = seeded((6, 6), 2)
    optimizer.step()
    before = other.detach().clone()
    fused.requires_grad_(True)
    other.grad, fused.grad = seeded((6, 6), 3), seeded((8, 6), 3)
    with pytest.raises(ConfigError, match=r"^fused: NorMuon keeps one number per column"):
        optimizer.step()
    same(other.detach(), before, "other")
    fused.grad = None
    fused.requires_grad_(False)
    optimizer.param_groups[0]["rule"] = "plain"
    optimizer.step()
    assert not torch.equal(other, before)


def test_all_matrices_frozen() -> None:
    """Refused in the words of the cause where we have found them, and allowed if it is intended."""
    model = Net()
    for block in model.blocks:
        block[0].requires_grad_(False)  # type: ignore[index]
    optimizer = Muon(model, lr=LR)
    for step in range(2):
        give_gradients(model, step)
        with pytest.raises(
            ConfigError, match=r"no matrix for Muon: all .* frozen \(requires_grad=False\).*allow_inactive=True"
        ):
            optimizer.step()
    assert not optimizer.state
    intended = Muon(model, lr=LR, allow_inactive=True)
    train(model, intended, range(2))
    model.requires_grad_(True)
    train(model, intended, range(2, 4))
    train(model, optimizer, range(2, 4))
    assert len(optimizer.state) == len(intended.state) == len(list(model.parameters()))


@pytest.mark.parametrize("options", [{}, {"metrics": 1}, {"nonfinite": "skip"}], ids=str)
def test_everything_is_frozen(options: dict[str, Any]) -> None:
    """In groups by hand; steps do nothing until something is unfrozen, also after going back to a checkpoint from
    before.
    """
    model, expected = Net(), Net()
    optimizer = Muon(get_default_muon_param_groups(model), lr=LR, allow_inactive=True, **options)
    reference = Muon(expected, lr=LR, allow_inactive=True)
    start, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        model.requires_grad_(False)
        train(model, optimizer, range(2))
        assert not optimizer.state
        assert not optimizer.plan().params
        model.requires_grad_(True)
        train(model, optimizer, range(2, 4))
        model.requires_grad_(False)
        optimizer.load_state_dict(saved)
        model.load_state_dict(start)
    model.requires_grad_(True)
    train(model, optimizer, range(2, 4))
    train(expected, reference, range(2, 4))
    assert_alike(model, optimizer, expected, reference)


def test_qk_clip_with_a_frozen_layer() -> None:
    """The layer's logits are accepted, and its weights stay."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    model = nn.ModuleDict({"layers": nn.ModuleList(Attention() for _ in range(2))})
    model["layers"][0].requires_grad_(False)  # type: ignore[index]
    model["layers"][1].k_proj.requires_grad_(False)  # type: ignore[index]
    optimizer = Muon(model, lr=0.0, clip_config={"head_dim": 8, "threshold": 10})
    before = copy.deepcopy(model)
    give_gradients(model, 0)
    logits = {layer: torch.tensor([40.0]) for layer in range(2)}
    optimizer.step(qk_logits=logits)
    for (name, param), old in zip(model.named_parameters(), before.parameters(), strict=True):
        expected = old * 0.5 if name.startswith("layers.1.q_proj") else old
        same(param.detach(), expected.detach(), name)
    model.requires_grad_(True)
    give_gradients(model, 1)
    optimizer.step(qk_logits=logits)
    unfrozen, old = (one["layers"][0].k_proj.weight.detach() for one in (model, before))  # type: ignore[index]
    same(unfrozen, old * 0.5, "unfrozen")


def llama_7b(layers: int) -> nn.ModuleDict:
    """The shapes of Llama 2 7B, frozen, and one adapter that trains."""
    sizes = {"q_proj": (4096, 4096), "k_proj": (4096, 4096), "v_proj": (4096, 4096), "o_proj": (4096, 4096)}
    sizes |= {"gate_proj": (11008, 4096), "up_proj": (11008, 4096), "down_proj": (4096, 11008)}
    frozen = [
        nn.ModuleDict({name: nn.Linear(*size[::-1], bias=False, device="meta") for name, size in sizes.items()})
        for _ in range(layers)
    ]
    norms = [nn.RMSNorm(4096, device="meta") for _ in range(2 * layers + 1)]
    table = nn.ModuleDict({"embed_tokens": nn.Embedding(32000, 4096, device="meta")})
    rest = nn.ModuleList([*frozen, *norms, table]).requires_grad_(False)
    adapter = nn.ModuleDict({"lora_A": nn.Linear(64, 8, bias=False), "lora_B": nn.Linear(8, 64, bias=False)})
    return nn.ModuleDict({"rest": rest, "adapter": adapter})


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """How often each function is called, Python's and C's."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            seen[getattr(argument, "__qualname__", repr(argument))] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def test_a_frozen_base_costs_nothing() -> None:
    """A step makes the same calls whether 11 or 290 frozen parameters lie beside the adapter; no state, nothing
    planned.
    """
    calls = []
    for layers in (1, 32):
        model = llama_7b(layers)
        optimizer = Muon(model, lr=LR)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))

        def step(optimizer: Muon = optimizer, model: nn.ModuleDict = model) -> None:
            for param in model["adapter"].parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()

        for _ in range(3):
            step()
        calls.append(calls_of(step))
        assert len(optimizer.state) == 2
        assert len(optimizer.plan().params) == 2
        assert set(optimizer.state_dict()["state"]) == {
            k
            for k, param in enumerate(param for group in optimizer.param_groups for param in group["params"])
            if param.requires_grad
        }
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) > 100


def test_adding_what_has_been_unfrozen_is_answered_with_nothing_has_to_be_added() -> None:
    model = freeze(Net())
    optimizer = Muon(model, lr=LR)
    freeze(model, False)
    late = {"params": [model.get_parameter("blocks.0.0.weight")], "names": ["late"], "use_muon": True}
    with pytest.raises(ConfigError, match=r"group 3: late is in another group .* nothing has to be added"):
        optimizer.add_param_group(late)
    give_gradients(model, 0)
    optimizer.step()
    assert late["params"][0] in optimizer.state
