"""States of other Muons, in the layouts that they save, converted: the run goes on as it would have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshmuon import Muon, StateError
from meshmuon.checkpoint import convert_torch_state
from meshmuon.migrate import convert_dion_state, convert_keller_state, convert_motif_state, convert_nanochat_state
from tests.support.reference import (
    KELLER,
    assert_moved_alike,
    assert_same_bits,
    copies,
    make_params,
    newton_schulz,
    run,
)
from tests.support.tensors import put

MATRICES, OTHERS = ((24, 24), (48, 16), (16, 48), (24, 24)), ((5,), (40, 30))
NAMES = ["a.weight", "b.weight", "c.weight", "d.weight", "norm.bias", "table.weight"]
M = len(MATRICES)
THEIR_NAMES = [*NAMES[M:], *NAMES[:M]]
GROUPED_NAMES = [*NAMES[M:], "a.weight", "d.weight", "b.weight", "c.weight"]
FACTORS: dict[Any, Callable[[int, int], float]] = {
    "original": lambda rows, cols: max(1, rows / cols) ** 0.5,
    "spectral_norm": lambda rows, cols: (rows / cols) ** 0.5,
    "rms_norm": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
    None: lambda rows, cols: 1.0,
}


class Theirs(torch.optim.Optimizer):
    """Muon with momentum as a mean or, with ``is_sum``, as a sum, beside Adam with decoupled decay; float32
    products.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, is_sum: bool, nesterov: bool, factor: Any) -> None:
        muon = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
        adam = {"use_muon": False, "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
        # In another order than here.
        super().__init__([{"params": list(params[M:]), **adam}, {"params": list(params[:M]), **muon}], {})
        self._fresh, self._factor = 1.0 if is_sum else 1 - 0.9, FACTORS[factor]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = self._muon if group["use_muon"] else self._adam
                param.sub_(group["lr"] * update(self.state[param], param.grad, group))

    def _muon(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        mu, fresh = group["momentum"], self._fresh * grad
        buffer = state["momentum_buffer"] = mu * state.get("momentum_buffer", torch.zeros_like(grad)) + fresh
        return self._factor(*grad.shape) * newton_schulz(
            fresh + mu * buffer if group["nesterov"] else buffer, [KELLER] * 5
        )

    def _adam(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        state["step"] = step = state.get("step", 0) + 1
        corrected = []
        for key, beta, value in zip(("exp_avg", "exp_avg_sq"), group["betas"], (grad, grad.square()), strict=True):
            state[key] = beta * state.get(key, torch.zeros_like(grad)) + (1 - beta) * value
            corrected.append(state[key] / (1 - beta**step))
        return corrected[0] / (corrected[1].sqrt() + group["eps"])


def as_keller(optimizer: Theirs, world: int = 1) -> Any:
    """The state of Keller Jordan's, in which each rank has some of the momenta."""
    whole = optimizer.state_dict()
    if world == 1:
        return whole
    muons = whole["param_groups"][1]["params"]
    return [
        {
            **whole,
            "state": {k: e for k, e in whole["state"].items() if k not in muons or muons.index(k) % world == rank},
        }
        for rank in range(world)
    ]


def as_nanochat(optimizer: Theirs, world: int = 2) -> list[dict[str, Any]]:
    """The state as nanochat's ranks have it: stacked momenta with padding, large moments cut by rows."""
    whole = optimizer.state_dict()
    adam, muon = whole["param_groups"]
    groups, stacks = [{**adam, "kind": "adamw"}], []
    for shape in dict.fromkeys(MATRICES):  # one group per shape
        keys = [key for key, own in zip(muon["params"], MATRICES, strict=True) if own == shape]
        groups.append({**muon, "kind": "muon", "params": keys, "ns_steps": 5, "beta2": 0.9})
        each = -(-len(keys) // world)
        padded = [whole["state"][key]["momentum_buffer"] for key in keys]
        padded += [torch.full(shape, torch.nan)] * (each * world - len(keys))
        stacks.append((keys[0], torch.stack(padded).split(each)))
    ranks = []
    for rank in range(world):
        state: dict[Any, Any] = {key: {"momentum_buffer": parts[rank]} for key, parts in stacks}
        for key, name in zip(adam["params"], NAMES[M:], strict=True):
            entry, cut = whole["state"][key], name == "table.weight"
            state[key] = {k: v.chunk(world)[rank] if cut and isinstance(v, Tensor) else v for k, v in entry.items()}
        ranks.append({"state": state, "param_groups": groups})
    return ranks


def as_dion(optimizer: Theirs, adjust_lr: str | None = "rms_norm", *, counts_on_device: bool = True) -> dict[str, Any]:
    """The state as dion's ``Muon`` saves it: ``momentum`` for both kinds, ``variance``, steps per group or on the
    device.
    """
    whole = optimizer.state_dict()
    groups, state = [], {}
    for group in whole["param_groups"]:
        algorithm = "muon" if group["use_muon"] else "adamw"
        (beta1, beta2), mu = group.get("betas", (0.9, 0.95)), group.get("momentum", 0.95)
        options = {"mu": mu, "beta1": beta1, "beta2": beta2, "epsilon": group.get("eps", 1e-8), "cautious_wd": False}
        options |= {
            "lr": torch.tensor(group["lr"], dtype=torch.float64),
            "weight_decay": group["weight_decay"],
            "flatten": False,
        }
        options |= {"nesterov": group.get("nesterov", False), "adjust_lr": adjust_lr, "algorithm": algorithm, "step": 5}
        groups.append({**options, "params": group["params"]})
        for key in group["params"]:
            entry = whole["state"][key]
            if group["use_muon"]:
                state[key] = {"momentum": entry["momentum_buffer"]}
            else:
                state[key] = {"momentum": entry["exp_avg"], "variance": entry["exp_avg_sq"]}
                state[key] |= {"step_dev": torch.tensor(5.0)} if counts_on_device else {}
    return {"state": state, "param_groups": groups}


def as_motif(optimizer: Theirs) -> dict[str, Any]:
    """The state as Motif's ``Muon`` saves it: torch's name for momentum, ``moment1`` and ``moment2``, names of
    matrices only.
    """
    whole = optimizer.state_dict()
    groups, state = [], {}
    for group in whole["param_groups"]:
        options = {key: group[key] for key in ("lr", "weight_decay", "use_muon", "params")}
        options |= {"momentum": group.get("momentum", 0.95), "nesterov": group.get("nesterov", True), "ns_steps": 5}
        options |= {
            "adamw_betas": group.get("betas", (0.9, 0.95)),
            "adamw_eps": group.get("eps", 1e-8),
            "none_grad": True,
        }
        groups.append({**options, "names": NAMES[:M]} if group["use_muon"] else options)
        for key in group["params"]:
            entry = whole["state"][key]
            moments = {"step": torch.tensor(5.0), "moment1": entry.get("exp_avg"), "moment2": entry.get("exp_avg_sq")}
            state[key] = entry if group["use_muon"] else moments
    return {"state": state, "param_groups": groups}


SUM: dict[str, Any] = {"is_sum": True, "nesterov": True, "factor": "rms_norm"}
MEAN: dict[str, Any] = {"is_sum": False, "nesterov": True, "factor": "original"}
OWN_SCHEME: dict[str, Any] = {"scheme": "keller"}


class Case(NamedTuple):
    """An optimizer as it was built, its state as it saves it, and the optimizer that loads it as it is built."""

    convert: Any
    state: Callable[[Theirs], Any]
    names: list[str] = THEIR_NAMES
    theirs: dict[str, Any] = SUM
    ours: dict[str, Any] = OWN_SCHEME

    def saved(self) -> tuple[list[nn.Parameter], Theirs, Any]:
        params = make_params(*MATRICES, *OTHERS)
        optimizer = Theirs(params, **self.theirs)
        run(optimizer, params, range(5))
        return params, optimizer, self.state(optimizer)


def dion_case(adjust_lr: str | None, nesterov: bool, counts_on_device: bool) -> Case:
    own = {"adjust_lr_fn": FACTORS[None]} if adjust_lr is None else {}
    theirs = {"is_sum": True, "nesterov": nesterov, "factor": adjust_lr}
    state = partial(as_dion, adjust_lr=adjust_lr, counts_on_device=counts_on_device)
    return Case(convert_dion_state, state, THEIR_NAMES, theirs, OWN_SCHEME | own)


CASES = {
    "keller": Case(convert_keller_state, as_keller, THEIR_NAMES, MEAN, {}),
    "keller on 2": Case(convert_keller_state, partial(as_keller, world=2), THEIR_NAMES, MEAN, {}),
    **{
        f"nanochat on {n}": Case(convert_nanochat_state, partial(as_nanochat, world=n), GROUPED_NAMES, MEAN)
        for n in (1, 2, 4)
    },
    "motif": Case(convert_motif_state, as_motif, ours={**OWN_SCHEME, "lr": 0.03, "adjust_lr_fn": "original"}),
    "dion": dion_case("rms_norm", True, True),
    "dion, spectral": dion_case("spectral_norm", False, False),
    "dion without a rule": dion_case(None, False, True),
}


def ours(params: Sequence[nn.Parameter], **options: Any) -> Muon:
    of_muon = {"params": params[:M], "names": NAMES[:M], "use_muon": True}
    return Muon([of_muon, {"params": params[M:], "names": NAMES[M:], "use_muon": False}], **options)


@pytest.mark.parametrize("name", CASES)
def test_the_run_goes_on(name: str) -> None:
    """With the options of theirs, but its own scheme where theirs is not saved; sums are taken over bit for bit.

    The state is that of the live optimizer, which goes on as well: converting it must not change it.
    """
    case = CASES[name]
    params, optimizer, state = case.saved()
    start, mine = copies(params), copies(params)
    muon = ours(mine, **case.ours)
    muon.load_state_dict(case.convert(muon, state, iter(case.names)))
    if case.theirs["is_sum"]:
        assert_same_bits([muon.state[mine[0]]["momentum_buffer"]], [optimizer.state[params[0]]["momentum_buffer"]])
    matrices = muon.param_groups[0]
    assert [group["lr"] for group in muon.param_groups] == [0.02, 3e-3]
    assert (matrices["nesterov"], matrices["scheme"]) == (
        case.theirs["nesterov"],
        case.ours.get("scheme", ((3.4445, -4.7750, 2.0315),) * 5),
    )
    run(optimizer, params, range(5, 10))
    run(muon, mine, range(5, 10))
    assert_moved_alike(mine, params, start, 2e-4)


def test_nanochat_with_a_rule_that_keeps_memory() -> None:
    params, _, state = CASES["nanochat on 2"].saved()
    muon = ours(params, rule="normuon")
    muon.load_state_dict(convert_nanochat_state(muon, state, GROUPED_NAMES))
    run(muon, params, range(2))
    assert all(param.isfinite().all() for param in params)


def test_a_parameter_may_start_from_zero() -> None:
    """With an empty entry, and all of dion's before its first step, when they are zeros."""
    params, optimizer, state = CASES["dion"].saved()
    muon = ours(params)
    state["state"][state["param_groups"][1]["params"][0]] = {}
    converted = convert_dion_state(muon, state, THEIR_NAMES)["state"]
    assert not converted[0]
    assert_same_bits([converted[1]["momentum_buffer"]], [optimizer.state[params[1]]["momentum_buffer"]])
    for group in state["param_groups"]:
        group["step"] = 0
    assert not any(convert_dion_state(muon, state, THEIR_NAMES)["state"].values())


def test_options_of_dions_groups() -> None:
    params, _, state = CASES["dion"].saved()
    for group in state["param_groups"]:  # cautious_wd says nothing of AdamW's weights here, which do not decay
        group |= {"initial_lr": torch.tensor(0.5, dtype=torch.float64), "maximize": True, "cautious_wd": True}
    converted = convert_dion_state(ours(params), state, THEIR_NAMES)["param_groups"]
    assert [(group["maximize"], group["cautious_weight_decay"]) for group in converted] == [(True, True), (True, False)]
    assert {(type(group["lr"]), type(group["initial_lr"]), group["initial_lr"]) for group in converted} == {
        (float, float, 0.5)
    }


# Edits of states, in which ``norm.bias`` has key 0 and ``a.weight`` key 2.


def more_ranks(ranks: Any) -> Any:
    """Two more ranks, without any state; nor have the others state of Adam's."""
    momenta = [{**rank, "state": {k: v for k, v in rank["state"].items() if "momentum_buffer" in v}} for rank in ranks]
    return [*momenta, *({**rank, "state": {}} for rank in ranks)]


def cautious(state: Any) -> Any:
    return put("param_groups", 0, "weight_decay", value=0.1)(put("param_groups", 0, "cautious_wd", value=True)(state))


NOT_SAVED = "not what the other optimizer saves"
REFUSALS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("keller on 2", lambda ranks: ranks[0], r"b\.weight has no state on the 1 rank.*pass the states of all ranks"),
    ("keller", lambda state: [], "states is empty"),
    ("keller on 2", put(1, "param_groups", value=[]), "rank 1 has other param groups"),
    *(
        ("keller", wrong, "which is not a state_dict of Keller")
        for wrong in (lambda s: 3, lambda s: [s, {}], lambda s: {"o": s})
    ),
    (
        "keller",
        put("state", 0, value={"exp_avg": 1}),
        r"norm\.bias: step is None in its saved state, which has \['exp_avg'\]",
    ),
    ("nanochat on 2", lambda ranks: ranks[:1], r"table\.weight: exp_avg of 1 rank\(s\) has shape \(20, 30\)"),
    (
        "nanochat on 2",
        more_ranks,
        r"a\.weight: 2 momenta over 4 rank\(s\) are 1 per rank, the states have \[1, 1, 0, 0\]",
    ),
    ("nanochat on 2", put(1, "state", value={}), "some ranks only"),
    ("nanochat on 2", put(1, "state", 0, "step"), r"norm\.bias: step is None in its saved state"),
    ("nanochat on 1", put(0, "param_groups", 0, "kind"), rf"{NOT_SAVED} \(KeyError: 'kind'\)"),
    ("dion", put("param_groups", 0, "algorithm", value="lion"), "algorithm='lion'"),
    ("dion", cautious, "AdamW with cautious_wd=True"),
    (
        "dion",
        put("param_groups", 1, "adjust_lr", value="foo"),
        "adjust_lr='foo'; convert_dion_state knows None, 'spectral_norm'",
    ),
    ("dion", put("param_groups", 0, "step"), rf"{NOT_SAVED} \(KeyError: 'step'\)"),
    ("motif", put("param_groups", 1, "momentum"), rf"{NOT_SAVED} \(KeyError: 'momentum'\)"),
    *(("dion", put("state", 0, key), rf"norm\.bias: {key} is None in its saved") for key in ("momentum", "variance")),
    *(
        ("motif", put("state", 0, key), rf"norm\.bias: {key} is None in its saved")
        for key in ("step", "moment1", "moment2")
    ),
    *(("dion", put("state", 2, value=v), r"a\.weight: momentum is ") for v in ({"other": 1}, {"momentum": [1.0]})),
    *(
        ("motif", wrong, "which is not a state_dict of Motif")
        for wrong in (lambda s: s["state"], lambda s: [s], lambda s: None)
    ),
]


@pytest.mark.parametrize(("name", "edit", "message"), REFUSALS)
def test_a_state_that_is_not_theirs_is_refused(name: str, edit: Callable[[Any], Any], message: str) -> None:
    case = CASES[name]
    params, _, state = case.saved()
    with pytest.raises(StateError, match=message):
        case.convert(ours(params), edit(state), case.names)


def test_names_that_are_not_theirs_are_refused() -> None:
    params, _, state = CASES["motif"].saved()
    muon = ours(params)
    for names in (3, "abcdef", set(THEIR_NAMES), [1, 2, 3, 4, 5, 6], THEIR_NAMES[1:], [*THEIR_NAMES[1:], "a.weight"]):
        with pytest.raises(
            StateError, match=r"names=.* must be the list of the names of the saved optimizer's 6 parameters"
        ):
            convert_motif_state(muon, state, names)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"not all groups of the saved state have names.*pass names="):
        convert_motif_state(muon, state)
    with pytest.raises(
        StateError, match=r"a\.weight needs the state of torch\.optim\.Muon, but its state is from torch\.optim\.Adam"
    ):
        convert_motif_state(muon, state, NAMES)


def spoiled(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies of a state in which one thing, an option, a key or an entry's value, is of another kind."""
    places = [("param_groups", k, key) for k, group in enumerate(state["param_groups"]) for key in group]
    places += [("state", key, name) for key, entry in state["state"].items() for name in entry]
    for wrong in ("text", [1], {"a": 1}, [{}] * 2, torch.zeros(3), torch.zeros(2).to_sparse(), 1j):
        for where, key, name in places:
            broken = copy.deepcopy(state)
            broken[where][key][name] = wrong
            yield broken


@pytest.mark.parametrize("name", ["keller", "nanochat on 1", "motif", "dion", "torch"])
def test_what_is_of_another_kind_is_refused_in_a_sentence(name: str) -> None:
    if name == "torch":
        params = make_params(*MATRICES)
        torchs = torch.optim.Muon(list(zip(NAMES[:M], params, strict=True)))
        run(torchs, params, [0])
        muon, state = Muon([{"params": params, "names": NAMES[:M], "use_muon": True}]), torchs.state_dict()

        def convert(broken: Any) -> object:
            return convert_torch_state(muon, broken, None)
    else:
        case = CASES[name]
        params, _, state = case.saved()
        state = state[0] if isinstance(state, list) else state

        def convert(broken: Any) -> object:
            return case.convert(ours(params), broken, case.names)

    refused = 0
    for broken in spoiled(state):
        try:
            convert(broken)
        except StateError:
            refused += 1
    assert refused > 40
