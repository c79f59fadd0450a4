"""Which saved parameter is which, of which shard and of which step; and 600 wrong states, each refused whole or
loaded.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import MeshmuonError, Muon, OrthogonalizeError, StateError
from tests.support.reference import LR, assert_same_bits
from tests.support.tensors import seeded
from tests.support.threads import run_threads

MATRICES, NORMS, BIASES = ("a", "b", "c"), ("n", "m"), ("o",)
SHAPES = {**dict.fromkeys(MATRICES, (6, 4)), **dict.fromkeys((*NORMS, *BIASES), (5,))}


class Model(nn.Module):
    """Equal shapes throughout, so that nothing but names tells parameters apart."""

    def __init__(self, names: Sequence[str] = tuple(SHAPES)) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(seeded(SHAPES.get(name, (6, 4)), ord(name))))

    def __getitem__(self, name: str) -> nn.Parameter:
        param = getattr(self, name)
        assert isinstance(param, nn.Parameter)
        return param


def build(
    model: Model, *groups: Sequence[str], options: dict[int, dict[str, Any]] | None = None, **others: Any
) -> Muon:
    """A group per tuple of names, or the matrices and the rest."""
    written = [
        {
            "params": [(name, model[name]) for name in names],
            "use_muon": model[names[0]].dim() == 2,
            **(options or {}).get(k, {}),
        }
        for k, names in enumerate(groups or (MATRICES, (*NORMS, *BIASES)))
    ]
    return Muon(written, **{"lr": LR, "scheme": "keller", **others})


def give(model: Model, step: int) -> None:
    for name, param in model.named_parameters():
        param.grad = seeded(param.shape, 1000 * step + ord(name))


def train(model: Model, optimizer: Muon, steps: range) -> None:
    for step in steps:
        give(model, step)
        optimizer.step()


def saved_run(**options: Any) -> tuple[Model, Muon, dict[str, Any]]:
    model = Model()
    optimizer = build(model, **options)
    train(model, optimizer, range(2))
    return model, optimizer, copy.deepcopy(optimizer.state_dict())


def order(model: Model, optimizer: Muon) -> list[str]:
    """The names of the parameters as ``optimizer.state`` has them."""
    return [name for param in optimizer.state for name in SHAPES if model[name] is param]


def same_state(
    model: Model, optimizer: Muon, other: Model, of_other: Muon, names: Sequence[str] = tuple(SHAPES)
) -> None:
    for name in names:
        mine, theirs = optimizer.state[model[name]], of_other.state[other[name]]
        assert list(mine) == list(theirs)
        assert_same_bits(mine.values(), theirs.values())


# Names

CUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "another order": (("c", "a", "b"), ("o", "n", "m")),
    "groups in another order": ((*NORMS, *BIASES), MATRICES),
    "three groups": (MATRICES, NORMS, BIASES),
    "a group per parameter": tuple((name,) for name in reversed(SHAPES)),
}


@pytest.mark.parametrize("cut", CUTS)
def test_the_same_names_load_right_wherever_they_are(cut: str) -> None:
    model, optimizer, saved = saved_run(options={0: {"lr": 0.004}, 1: {"weight_decay": 0.3, "initial_lr": 0.5}})
    twin = Model()
    twin.load_state_dict(model.state_dict())
    fresh = build(twin, *CUTS[cut])
    fresh.load_state_dict(saved)
    same_state(twin, fresh, model, optimizer)
    for loaded in fresh.param_groups:
        expected = (
            {"lr": 0.004, "weight_decay": 0.1}
            if loaded["use_muon"]
            else {"lr": LR, "weight_decay": 0.3, "initial_lr": 0.5}
        )
        assert {key: loaded[key] for key in expected} == expected, "a resumed run goes on as it was"
    train(model, optimizer, range(2, 4))
    train(twin, fresh, range(2, 4))
    assert_same_bits([twin[name] for name in SHAPES], [model[name] for name in SHAPES])
    assert order(twin, fresh) == [name for names in CUTS[cut] for name in names]


def test_names_of_wrappers_are_the_same_names() -> None:
    model, optimizer, saved = saved_run()
    for saved_group in saved["param_groups"]:
        saved_group["param_names"] = [f"module._orig_mod.{name}" for name in saved_group["param_names"]][::-1]
        saved_group["params"].reverse()
    fresh_model = Model()
    fresh = build(fresh_model)
    fresh.load_state_dict(saved)
    same_state(fresh_model, fresh, model, optimizer)


def test_a_layer_inserted_and_another_removed() -> None:
    """By position, the state of ``b`` would have become that of ``x``, without a word."""
    model, optimizer, saved = saved_run()
    names = ("a", "x", "b", *NORMS, *BIASES)
    twin = Model(names)
    fresh = build(twin, ("a", "x", "b"), (*NORMS, *BIASES))
    with pytest.raises(
        StateError, match=r"It lacks x; the optimizer lacks c\. .*load_state_dict\(state_dict, strict=False\)"
    ):
        fresh.load_state_dict(saved)
    assert not fresh.state
    fresh.load_state_dict(saved, strict=False)  # what the error says
    same_state(twin, fresh, model, optimizer, ("a", "b", *NORMS, *BIASES))
    assert twin.x not in fresh.state, "starts from zero"
    train(twin, fresh, range(2, 3))
    assert_same_bits([fresh.state[twin.x]["momentum_buffer"]], [seeded((6, 4), 2000 + ord("x"))])


def test_many_names_are_shortened() -> None:
    _, _, saved = saved_run()
    names = tuple("efghij")
    with pytest.raises(
        StateError, match=r"It lacks e, f, g, h and 2 more; the optimizer lacks a, b, c, n and 2 more\."
    ):
        build(Model(names), names).load_state_dict(saved)


def test_merged_groups_take_what_they_agree_on() -> None:
    model = Model()
    optimizer = build(
        model, MATRICES, NORMS, BIASES, options={1: {"lr": 0.3}, 2: {"lr": 0.2, "weight_decay": 0.0}}, adamw_eps=1e-5
    )
    train(model, optimizer, range(2))
    fresh_model = Model()
    fresh = build(fresh_model, options={1: {"lr": 0.1, "weight_decay": 0.05}})
    with pytest.warns(UserWarning, match="its parameters were in 2 groups with") as caught:
        fresh.load_state_dict(optimizer.state_dict())
    texts = sorted(str(one.message) for one in caught)
    assert [re.sub(r"^.*groups with ", "", text) for text in texts] == [
        "lr=0.3, 0.2; it keeps its own, 0.1.",
        "weight_decay=0.1, 0.0; it keeps its own, 0.05.",
    ]
    loaded = fresh.param_groups[1]
    assert (loaded["lr"], loaded["weight_decay"], loaded["adamw_eps"]) == (0.1, 0.05, 1e-5)
    same_state(fresh_model, fresh, model, optimizer)


def test_a_scheduler_goes_on_with_another_number_of_groups() -> None:
    """As docs/checkpoints.md shows: a run that was begun with one group of AdamW goes on with two, with the same
    bits.
    """

    def begun(model: Model, *cuts: Sequence[str]) -> tuple[Muon, Any]:
        optimizer = build(model, *cuts)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model, twin = Model(), Model()
    (optimizer, scheduler), (fresh, fresh_scheduler) = begun(model), begun(twin, MATRICES, NORMS, BIASES)
    train(model, optimizer, range(2))
    scheduler.step()
    twin.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = [group["initial_lr"] for group in fresh.param_groups]
    fresh_scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": rates})
    for one, stepped, schedule in ((model, optimizer, scheduler), (twin, fresh, fresh_scheduler)):
        schedule.step()
        train(one, stepped, range(2, 4))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [group["lr"] for group in fresh.param_groups] == [*rates, rates[1]]
    same_state(twin, fresh, model, optimizer)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_changed_route_is_refused() -> None:
    _, _, saved = saved_run()
    model = Model()
    groups = [
        {"params": [(name, model[name]) for name in ("a", "b")], "use_muon": True},
        {"params": [(name, model[name]) for name in ("c", *NORMS, *BIASES)], "use_muon": False},
    ]
    with pytest.raises(
        StateError, match=r"group 1 \(c, …\) has use_muon=False, the state_dict's has True.*strict=False"
    ):
        Muon(groups, lr=LR).load_state_dict(saved)
    optimizer = Muon(groups, lr=LR)
    optimizer.load_state_dict(saved, strict=False)
    assert model["c"] not in optimizer.state, "it starts from zero"
    assert all(
        torch.equal(optimizer.state[model[name]]["momentum_buffer"], saved["state"][k]["momentum_buffer"])
        for k, name in enumerate("ab")
    )
    assert all(optimizer.state[model[name]]["step"] == 2 for name in (*NORMS, *BIASES))
    train(model, optimizer, range(2, 3))


def test_some_groups_without_names() -> None:
    """Groups whose names are left out on both sides are matched by position, as long as no other name contradicts."""
    model = Model()

    def unnamed(model: Model, matrices: Sequence[str]) -> Muon:
        named = [(name, model[name]) for name in matrices]
        return Muon(
            [{"params": named, "use_muon": True}, {"params": [model["n"], model["m"]], "use_muon": False}], lr=LR
        )

    optimizer = unnamed(model, MATRICES)
    train(model, optimizer, range(2))
    saved, twin = optimizer.state_dict(), Model()
    fresh = unnamed(twin, ("b", "c", "a"))
    fresh.load_state_dict(saved)
    same_state(twin, fresh, model, optimizer, (*MATRICES, *NORMS))
    with pytest.raises(StateError, match=r"group 0: parameter 0 is c, in the state_dict it is a, .*give every group"):
        build(Model(), ("c", "b", "a"), NORMS).load_state_dict(saved)


# torch.distributed.checkpoint

WAYS = {"as it is": {}, "flattened": {"flatten_optimizer_state_dict": True}, "full": {"full_state_dict": True}}


@pytest.mark.parametrize(
    ("way", "cut"),
    [
        (way, cut)
        for way in WAYS
        for cut in ("another order", "three groups")
        if (way, cut) != ("full", "three groups")  # torch itself raises KeyError
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_groups_through_dcp(way: str, cut: str, tmp_path: Any) -> None:
    options = StateDictOptions(**WAYS[way])
    model = Model()
    optimizer = build(model, options={1: {"weight_decay": 0.3}})
    train(model, optimizer, range(2))
    state = {"optimizer": copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))}
    twin = Model()
    fresh = build(twin, *CUTS[cut])
    if way == "flattened":  # otherwise dcp.load itself needs equally many groups
        dcp.save(state, checkpoint_id=tmp_path)
        state = {"optimizer": get_optimizer_state_dict(twin, fresh, options=options)}
        dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(twin, fresh, state["optimizer"], options=options)
    same_state(twin, fresh, model, optimizer)
    assert [loaded["weight_decay"] for loaded in fresh.param_groups] == [0.1, *[0.3] * (len(CUTS[cut]) - 1)]


# Ranks


def sharded(
    names: Sequence[str] = tuple(SHAPES), dtype: torch.dtype = torch.float32, replicated: Sequence[str] = ()
) -> Model:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Model(names)
    for name in names:
        placement = Replicate() if name in replicated else Shard(0)
        whole = distribute_tensor(model[name].detach().to(dtype), mesh, [placement], src_data_rank=None)
        setattr(model, name, nn.Parameter(whole))
    return model


def step_sharded(model: Model, optimizer: Muon, step: int, without: Sequence[str] = ()) -> None:
    for name, param in model.named_parameters():
        value = seeded(param.shape, 1000 * step + ord(name)).to(param.dtype)
        cut = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined]
        param.grad = None if name in without else cut
    optimizer.step()


def test_state_is_gathered_under_its_own_name() -> None:
    """One rank alone has called ``state_dict()`` before parameters had their first gradients, in another order than
    theirs.
    """

    def rank_main(rank: int) -> tuple[dict[str, float], list[str]]:
        model = sharded()
        optimizer = build(model)
        step_sharded(model, optimizer, 0, without=("a", "b", "n"))
        if rank == 0:
            optimizer.state_dict()
        step_sharded(model, optimizer, 1, without=("a", "n"))
        step_sharded(model, optimizer, 2)
        assert order(model, optimizer) == list(SHAPES)
        whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        state = whole["state"]
        assert isinstance(state, dict)
        return {name: float(state[name]["momentum_buffer"].double().sum()) for name in MATRICES}, list(state)

    (sums, names), (_, other_names) = run_threads(2, rank_main)
    assert names == other_names == list(SHAPES)
    expected: dict[str, Tensor] = {name: torch.zeros(6, 4) for name in MATRICES}
    for step, missing in enumerate(("ab", "a", "")):
        for name in MATRICES:
            if name not in missing:
                expected[name] = 0.95 * expected[name] + seeded((6, 4), 1000 * step + ord(name))
    assert sums == pytest.approx({name: float(value.double().sum()) for name, value in expected.items()}, abs=1e-5)


def test_the_order_of_state_does_not_tell_when_it_was_created() -> None:
    model = Model()
    optimizer = build(model)
    for step, name in enumerate(reversed(SHAPES)):
        model.zero_grad()
        model[name].grad = seeded(SHAPES[name], step)
        if step < 3:  # the AdamW part alone
            model["a"].grad = torch.zeros(6, 4)
        optimizer.step()
        assert order(model, optimizer) == sorted(order(model, optimizer), key=list(SHAPES).index)
    entry = optimizer.state[model["n"]]
    entry["mine"], entry["step"] = 1, entry.pop("step")
    assert list(optimizer.state_dict()["state"]) == list(range(len(SHAPES)))
    assert list(optimizer.state_dict()["state"][3]) == ["step", "exp_avg", "exp_avg_sq", "mine"]


@pytest.mark.parametrize("alone", [True, False], ids=["one rank loads", "all load"])
@pytest.mark.parametrize("kind", ["adamw", "rounding"])
def test_states_of_different_steps(kind: str, alone: bool) -> None:
    """Refused in the first step after loading, on all ranks alike; then the right state is loaded and all goes on."""
    names = MATRICES if kind == "rounding" else tuple(SHAPES)
    dtype = torch.bfloat16 if kind == "rounding" else torch.float32

    def rank_main(rank: int) -> tuple[str, list[Tensor]]:
        model = sharded(names, dtype, replicated=names)
        groups = [names] if kind == "rounding" else []
        optimizer = build(model, *groups, rounding="stochastic" if kind == "rounding" else "nearest")
        states = []
        for step in range(3):
            step_sharded(model, optimizer, step)
            states.append(copy.deepcopy(optimizer.state_dict()))
        if not alone or rank == 1:
            optimizer.load_state_dict(states[1 if rank == 1 else 2])
        before = [param.full_tensor().clone() for param in model.parameters()]  # type: ignore[attr-defined]
        texts = []
        for _ in range(2):  # not only once
            with pytest.raises(StateError) as caught:
                step_sharded(model, optimizer, 3)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
        assert_same_bits([param.full_tensor() for param in model.parameters()], before)  # type: ignore[attr-defined]
        optimizer.load_state_dict(states[2])
        step_sharded(model, optimizer, 3)
        return texts[0], [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]

    (text, weights), (other_text, other_weights) = run_threads(2, rank_main)
    assert text == other_text
    what = (
        "step 3, that of rank 1 step 2"
        if kind == "adamw"
        else r"rounding_counter \d+/3, that of rank 1 rounding_counter \d+/2"
    )
    assert re.match(
        rf"{'n' if kind == 'adamw' else 'a'}: the state of rank 0 has {what}\. .*load the same checkpoint", text
    ), text
    assert_same_bits(weights, other_weights)


def test_dcp_of_a_plain_state_dict_on_another_mesh(tmp_path: Any) -> None:
    """``dcp.save({"optimizer": optimizer})`` saves the state_dict as it is, and loads it into the tensors of
    another mesh.
    """
    whole: dict[str, Tensor] = {}

    def save(rank: int) -> None:
        model = sharded()
        optimizer = build(model)
        step_sharded(model, optimizer, 0)
        dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=False)  # type: ignore[dict-item]
        whole.update({name: optimizer.state[model[name]]["momentum_buffer"].full_tensor() for name in MATRICES})

    def load(rank: int) -> None:
        model = sharded()
        optimizer = build(model)
        step_sharded(model, optimizer, 5)
        dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path)  # type: ignore[dict-item]
        for name in MATRICES:
            assert_same_bits([optimizer.state[model[name]]["momentum_buffer"].full_tensor()], [whole[name]])
        step_sharded(model, optimizer, 6)

    run_threads(2, save)
    run_threads(3, load)


# Wrong states


class Unreadable:
    """Refuses to be shown, compared and copied."""

    def __repr__(self) -> str:
        raise OSError("no text")

    def __eq__(self, other: object) -> bool:
        raise OSError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("no copy")


def cyclic() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    return nested


VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: -1, lambda: 3, lambda: float("nan"), lambda: 10**400, lambda: "text",
    lambda: b"bytes", lambda: "float23", lambda: "<not stored: a.b>", list, dict, tuple, lambda: [1, 2],
    lambda: ["a", "b", "c"], lambda: [[0], {}], lambda: {"a": 1}, lambda: {0: {}}, lambda: {(1,): 2}, lambda: {1, 2},
    lambda: range(3), lambda: iter([1]), lambda: 1j, lambda: torch.zeros(3), lambda: torch.zeros(6, 4),
    lambda: torch.zeros(2, dtype=torch.int64), lambda: torch.tensor(1.0),
    lambda: torch.zeros(6, 4, dtype=torch.complex64), lambda: torch.zeros(6, 4, device="meta"), lambda: torch.float32,
    cyclic, deep, Unreadable, lambda: nn.Linear(2, 2), lambda: len, lambda: str.upper,
    lambda: torch.zeros(6, 4).to_sparse(), object,
]  # fmt: skip


def places(state_dict: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Every container of a state_dict with each of its keys: where a wrong value may be put."""
    found: list[tuple[Any, Any]] = [(state_dict, key) for key in state_dict]
    for saved in state_dict["param_groups"]:
        found += [(saved, key) for key in saved]
        found += [(saved[key], k) for key in ("params", "param_names") for k in range(len(saved[key]))]
    found += [(state_dict["param_groups"], k) for k in range(len(state_dict["param_groups"]))]
    found += [(state_dict["state"], key) for key in state_dict["state"]]
    return found + [(entry, key) for entry in state_dict["state"].values() for key in entry]


def spoil(state_dict: dict[str, Any], rng: random.Random) -> Any:
    """The state_dict with one to three things replaced, removed or added."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            container, key = rng.choice(places(state_dict))
        except Exception:  # an earlier change has left nothing to look into
            return state_dict
        change = rng.random()
        if isinstance(container, Tensor):  # an earlier change has put it there
            continue
        if change < 0.75:
            container[key] = rng.choice(VALUES)()
        elif change < 0.9:
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(("new", 77, (1, 2)))] = rng.choice(VALUES)()
        elif isinstance(container, list):
            container.append(rng.choice(VALUES)())
    return state_dict


def picture(optimizer: Muon) -> list[Any]:
    """All that loading may write, with the identity of each tensor and its bits."""
    entries = [[(key, id(value), value.clone()) for key, value in entry.items()] for entry in optimizer.state.values()]
    return [*entries, *([(key, id(value)) for key, value in group.items()] for group in optimizer.param_groups)]


def same_picture(before: list[Any], after: list[Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return torch.equal(one, other)
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(same, one, other))
        return bool(one == other)

    return same(before, after)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(6))
def test_wrong_states_are_refused_whole(part: int) -> None:
    """Whatever is wrong: the error is meshmuon's and nothing was written, or the state loads, saves again and steps."""
    model = Model()
    optimizer = build(model, options={0: {"rule": "normuon", "split": (3, 3)}})
    train(model, optimizer, range(1))
    good, refused = copy.deepcopy(optimizer.state_dict()), 0
    for number in range(100 * part, 100 * (part + 1)):
        wrong = spoil(copy.deepcopy(good), random.Random(number))
        before = picture(optimizer)
        try:
            optimizer.load_state_dict(wrong)
        except MeshmuonError:
            refused += 1
            assert same_picture(before, picture(optimizer)), f"state {number} was refused after it was written"
        else:
            optimizer.state_dict()
            with suppress(OrthogonalizeError):  # of a scheme that is a function, which need not be able to
                train(model, optimizer, range(1))
            optimizer.load_state_dict(copy.deepcopy(good))
    assert refused > 50


@pytest.mark.parametrize(
    "wrong", [None, [], 3, "state", {}, {"state": {}}, {"state": [], "param_groups": {}}], ids=repr
)
def test_what_is_no_state_dict_at_all(wrong: Any) -> None:
    with pytest.raises(StateError, match="not the state_dict of an optimizer"):
        build(Model()).load_state_dict(wrong)


@pytest.mark.parametrize(
    "memory", [torch.ones(1, 4).expand(6, 4), torch.ones(30).as_strided((6, 4), (3, 1))], ids=["expanded", "strided"]
)
def test_saved_momentum_whose_elements_share_an_address(memory: Tensor) -> None:
    """A step would fail in its middle."""
    model = Model()
    optimizer = build(model)
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = memory
    with pytest.raises(StateError, match=r"a: several elements of its saved momentum_buffer share one address"):
        optimizer.load_state_dict(saved)
    saved["state"][0]["momentum_buffer"] = (
        memory.clone(memory_format=torch.contiguous_format).T.clone().T
    )  # another order is none
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))


def test_any_mapping_may_hold_the_state_of_a_parameter() -> None:
    model = Model()
    optimizer = build(model, options={0: {"momentum_dtype": torch.float64}})
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    proxies = {key: MappingProxyType(entry) for key, entry in saved["state"].items()}
    optimizer.load_state_dict({**saved, "state": proxies})
    for entry, loaded in zip(saved["state"].values(), optimizer.state.values(), strict=True):
        assert_same_bits(loaded.values(), entry.values())


@pytest.mark.parametrize(
    "value", [str.upper, [].append, len, cyclic()], ids=["a C method", "bound", "built-in", "holds itself"]
)
def test_values_that_cannot_be_stored(value: Any) -> None:
    """As a user's own value in a group, and as a scheme."""
    for key in ("mine", "scheme") if callable(value) else ("mine",):
        optimizer = build(Model(), options={0: {key: value}})
        saved = optimizer.state_dict()
        assert saved["param_groups"][0][key].startswith("<not stored: "), saved["param_groups"][0][key]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0][key] is value
