"""States of other Muons, in the layouts that they save, converted: the run goes on as it would have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import Muon, StateError
from meshmuon.checkpoint import convert_torch_state
from meshmuon.migrate import convert_dion_state, convert_keller_state, convert_motif_state, convert_nanochat_state
from tests.support.reference import KELLER, assert_moved_alike, assert_same_bits, copies, make_params, newton_schulz, run

MATRICES, OTHERS = ((24, 24), (48, 16), (16, 48), (24, 24)), ((5,), (40, 30))
NAMES = ["a.weight", "b.weight", "c.weight", "d.weight", "norm.bias", "table.weight"]
M = len(MATRICES)
Factor = Callable[[int, int], float]


class Theirs(torch.optim.Optimizer):
    """Muon with momentum as a mean or, with ``is_sum``, as a sum, beside Adam with decoupled decay; float32 products."""

    def __init__(
        self, params: Sequence[nn.Parameter], *, is_sum: bool, nesterov: bool, factor: Callable[[int, int], float]
    ) -> None:
        muon = {"params": list(params[:M]), "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
        adam = {
            "params": list(params[M:]),
            "use_muon": False,
            "lr": 3e-3,
            "betas": (0.8, 0.95),
            "eps": 1e-10,
            "weight_decay": 0.0,
        }
        super().__init__([adam, {**muon, "nesterov": nesterov}], {})  # another order than here
        self._fresh, self._factor = 1.0 if is_sum else 1 - 0.9, factor

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
        return self._factor(*grad.shape) * newton_schulz(fresh + mu * buffer if group["nesterov"] else buffer, [KELLER] * 5)

    def _adam(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        state["step"] = step = state.get("step", 0) + 1
        for key, beta, value in zip(("exp_avg", "exp_avg_sq"), group["betas"], (grad, grad.square()), strict=True):
            state[key] = beta * state.get(key, torch.zeros_like(grad)) + (1 - beta) * value
        first, second = (
            state[key] / (1 - beta**step) for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
        )
        return first / (second.sqrt() + group["eps"])


def ours(params: Sequence[nn.Parameter], **options: Any) -> Muon:
    groups = [
        {"params": params[:M], "names": NAMES[:M], "use_muon": True},
        {"params": params[M:], "names": NAMES[M:], "use_muon": False},
    ]
    return Muon(groups, **options)


def saved(
    *,
    is_sum: bool = False,
    nesterov: bool = True,
    factor: Callable[[int, int], float] = lambda rows, cols: max(1, rows / cols) ** 0.5,
) -> tuple[list[nn.Parameter], Theirs]:
    params = make_params(*MATRICES, *OTHERS)
    optimizer = Theirs(params, is_sum=is_sum, nesterov=nesterov, factor=factor)
    run(optimizer, params, range(5))
    return params, optimizer


def saved_sums(nesterov: bool, factor: Factor) -> tuple[list[nn.Parameter], Theirs]:
    return saved(is_sum=True, nesterov=nesterov, factor=factor)


THEIR_NAMES = [*NAMES[M:], *NAMES[:M]]


def test_a_run_of_keller_jordans_goes_on() -> None:
    params, optimizer = saved()
    start, mine = copies(params), copies(params)
    state = copy.deepcopy(optimizer.state_dict())
    muon = ours(mine)
    muon.load_state_dict(convert_keller_state(muon, state, THEIR_NAMES))
    assert [group["lr"] for group in muon.param_groups] == [0.02, 3e-3]
    assert muon.param_groups[0]["adjust_lr_fn"] == "original"
    run(optimizer, params, range(5, 10))
    run(muon, mine, range(5, 10))
    assert_moved_alike(mine, params, start, 2e-4)


def test_states_of_several_ranks_are_put_together() -> None:
    params, optimizer = saved()
    whole = optimizer.state_dict()
    muons = whole["param_groups"][1]["params"]
    ranks = [
        {
            **whole,
            "state": {key: entry for key, entry in whole["state"].items() if key not in muons or muons.index(key) % 2 == rank},
        }
        for rank in range(2)
    ]
    muon = ours(copies(params))
    expected, merged = (convert_keller_state(muon, states, THEIR_NAMES) for states in (whole, ranks))
    assert expected["param_groups"] == merged["param_groups"]
    for key, entry in expected["state"].items():
        assert_same_bits(merged["state"][key].values(), entry.values())
    with pytest.raises(StateError, match=r"b\.weight has no state on the 1 rank.*pass the states of all ranks"):
        convert_keller_state(muon, ranks[0], THEIR_NAMES)


def as_nanochat(optimizer: Theirs, world: int) -> list[dict[str, Any]]:
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
            entry = whole["state"][key]
            cut = name == "table.weight"
            state[key] = {k: v.chunk(world)[rank] if cut and isinstance(v, Tensor) else v for k, v in entry.items()}
        ranks.append({"state": state, "param_groups": groups})
    return ranks


GROUPED_NAMES = [*NAMES[M:], "a.weight", "d.weight", "b.weight", "c.weight"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_momentum_of_nanochat_goes_on(world: int) -> None:
    params, optimizer = saved()
    start, mine = copies(params), copies(params)
    muon = ours(mine, scheme="keller")
    muon.load_state_dict(convert_nanochat_state(muon, as_nanochat(optimizer, world), GROUPED_NAMES))
    assert muon.param_groups[0]["scheme"] == "keller"
    run(optimizer, params, range(5, 10))
    run(muon, mine, range(5, 10))
    assert_moved_alike(mine, params, start, 2e-4)


def test_nanochat_with_a_rule_that_keeps_memory() -> None:
    params, optimizer = saved()
    muon = ours(params, rule="normuon")
    muon.load_state_dict(convert_nanochat_state(muon, as_nanochat(optimizer, 2), GROUPED_NAMES))
    run(muon, params, range(2))
    assert all(param.isfinite().all() for param in params)


def test_missing_ranks_and_names_are_refused() -> None:
    params, optimizer = saved()
    muon, ranks = ours(params), as_nanochat(optimizer, 2)
    with pytest.raises(StateError, match=r"table\.weight: exp_avg of 1 rank\(s\) has shape \(20, 30\)"):
        convert_nanochat_state(muon, ranks[:1], GROUPED_NAMES)
    empty = {**ranks[0], "state": {}}
    adamless = [{**rank, "state": {k: v for k, v in rank["state"].items() if "momentum_buffer" in v}} for rank in ranks]
    with pytest.raises(StateError, match=r"a\.weight: 2 momenta over 4 rank\(s\) are 1 per rank, the states have \[1, 1, 0, 0\]"):
        convert_nanochat_state(muon, [*adamless, empty, empty], GROUPED_NAMES)
    with pytest.raises(StateError, match="names has 5 different names for 6 parameters"):
        convert_nanochat_state(muon, ranks, GROUPED_NAMES[1:])
    with pytest.raises(
        StateError, match=r"a\.weight needs the state of torch\.optim\.Muon, but its state is from torch\.optim\.Adam"
    ):
        convert_keller_state(muon, optimizer.state_dict(), NAMES)
    with pytest.raises(StateError, match="states is empty"):
        convert_keller_state(muon, [], THEIR_NAMES)
    with pytest.raises(StateError, match="rank 1 has other param groups"):
        convert_keller_state(muon, [optimizer.state_dict(), ranks[0]], THEIR_NAMES)
    with pytest.raises(StateError, match="some ranks only"):
        convert_nanochat_state(muon, [ranks[0], {**ranks[1], "state": {}}], GROUPED_NAMES)


def as_dion(optimizer: Theirs, adjust_lr: str | None, *, counts_on_device: bool) -> dict[str, Any]:
    """The state as dion's ``Muon`` saves it: ``momentum`` for both kinds, ``variance``, steps per group or on the device."""
    whole = optimizer.state_dict()
    groups, state = [], {}
    for group in whole["param_groups"]:
        algorithm = "muon" if group["use_muon"] else "adamw"
        (beta1, beta2), mu = group.get("betas", (0.9, 0.95)), group.get("momentum", 0.95)
        options = {"mu": mu, "beta1": beta1, "beta2": beta2, "epsilon": group.get("eps", 1e-8), "cautious_wd": False}
        options |= {"lr": torch.tensor(group["lr"], dtype=torch.float64), "weight_decay": group["weight_decay"], "flatten": False}
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
    """The state as Motif's ``Muon`` saves it: torch's name for momentum, ``moment1`` and ``moment2``, names of matrices only."""
    whole = optimizer.state_dict()
    groups, state = [], {}
    for group in whole["param_groups"]:
        options = {key: group[key] for key in ("lr", "weight_decay", "use_muon", "params")}
        options |= {"momentum": group.get("momentum", 0.95), "nesterov": group.get("nesterov", True), "ns_steps": 5}
        options |= {"adamw_betas": group.get("betas", (0.9, 0.95)), "adamw_eps": group.get("eps", 1e-8), "none_grad": True}
        groups.append({**options, "names": NAMES[:M]} if group["use_muon"] else options)
        for key in group["params"]:
            entry = whole["state"][key]
            moments = {"step": torch.tensor(5.0), "moment1": entry.get("exp_avg"), "moment2": entry.get("exp_avg_sq")}
            state[key] = entry if group["use_muon"] else moments
    return {"state": state, "param_groups": groups}


DION_RULES = {
    "spectral_norm": lambda rows, cols: (rows / cols) ** 0.5,
    "rms_norm": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
    None: lambda rows, cols: 1.0,
}


def goes_on(params: list[nn.Parameter], optimizer: Theirs, convert: Callable[[Muon], dict[str, Any]], **options: Any) -> Muon:
    """Demands that both make the same next steps from the converted state."""
    start, mine = copies(params), copies(params)
    muon = ours(mine, scheme="keller", **options)
    muon.load_state_dict(convert(muon))
    matrix = next(iter(optimizer.param_groups[1]["params"]))
    assert_same_bits([muon.state[mine[0]]["momentum_buffer"]], [optimizer.state[matrix]["momentum_buffer"]])
    run(optimizer, params, range(5, 10))
    run(muon, mine, range(5, 10))
    assert_moved_alike(mine, params, start, 2e-4)
    return muon


@pytest.mark.parametrize("counts_on_device", [True, False])
@pytest.mark.parametrize(("adjust_lr", "nesterov"), [("spectral_norm", False), ("rms_norm", True), (None, False)])
def test_a_run_of_dions_goes_on(adjust_lr: str | None, nesterov: bool, counts_on_device: bool) -> None:
    params, optimizer = saved_sums(nesterov, DION_RULES[adjust_lr])
    state = as_dion(optimizer, adjust_lr, counts_on_device=counts_on_device)
    own = {"adjust_lr_fn": DION_RULES[None]} if adjust_lr is None else {}
    muon = goes_on(params, optimizer, lambda muon: convert_dion_state(muon, state, THEIR_NAMES), **own)
    assert (muon.param_groups[0]["nesterov"], muon.param_groups[0]["scheme"]) == (nesterov, "keller")


def test_a_run_of_motifs_goes_on() -> None:
    params, optimizer = saved_sums(True, DION_RULES["rms_norm"])
    state = as_motif(optimizer)
    goes_on(params, optimizer, lambda muon: convert_motif_state(muon, state, THEIR_NAMES), lr=0.03, adjust_lr_fn="original")
    with pytest.raises(StateError, match=r"Motif names the matrices only.*pass names="):
        convert_motif_state(ours(copies(params)), state)


def test_dions_state_before_its_first_step_and_of_lion() -> None:
    params, optimizer = saved_sums(False, DION_RULES["rms_norm"])
    state = as_dion(optimizer, "rms_norm", counts_on_device=True)
    for group in state["param_groups"]:
        group["step"] = 0
    muon = ours(params)
    assert not any(convert_dion_state(muon, state, THEIR_NAMES)["state"].values())
    state["param_groups"][0]["algorithm"] = "lion"
    with pytest.raises(StateError, match="algorithm='lion'"):
        convert_dion_state(muon, state, THEIR_NAMES)


SUMS: dict[str, tuple[Any, Any, str]] = {
    "dion": (convert_dion_state, lambda optimizer: as_dion(optimizer, "rms_norm", counts_on_device=True), "momentum"),
    "motif": (convert_motif_state, as_motif, "momentum_buffer"),
}


@pytest.mark.parametrize("whose", SUMS)
def test_a_state_that_is_not_theirs_is_refused(whose: str) -> None:
    params, optimizer = saved_sums(True, DION_RULES["rms_norm"])
    convert, make, momentum = SUMS[whose]
    muon, state = ours(params), copy.deepcopy(make(optimizer))
    adam_key, muon_key = (group["params"][0] for group in state["param_groups"])
    for other in ({}, {"param_groups": state["param_groups"]}, [state], None, {**state, "state": {0: 1}}, {"state": {}}):
        with pytest.raises(
            StateError, match=r"the saved state is a .*, which is not a state_dict of .*: pass what its state_dict"
        ):
            convert(muon, other, THEIR_NAMES)
    with pytest.raises(StateError, match=r"group 0 of the saved state has no .*the state of another optimizer"):
        convert(muon, optimizer.state_dict(), THEIR_NAMES)
    for names in (3, "abcdef", set(THEIR_NAMES), [1, 2, 3, 4, 5, 6]):
        with pytest.raises(StateError, match=r"names=.* must be the list of the names"):
            convert(muon, state, names)
    for entry in ({"other": 1}, {momentum: None}, {momentum: [1.0]}):
        broken = {**state, "state": {**state["state"], muon_key: entry}}
        with pytest.raises(StateError, match=rf"a\.weight: {momentum} is .* in its saved state, which has"):
            convert(muon, broken, THEIR_NAMES)
    for key in {"dion": ("momentum", "variance"), "motif": ("step", "moment1", "moment2")}[whose]:
        rest = {k: value for k, value in state["state"][adam_key].items() if k != key}
        with pytest.raises(StateError, match=rf"norm\.bias: {key} is None in its saved state"):
            convert(muon, {**state, "state": {**state["state"], adam_key: rest}}, THEIR_NAMES)
    emptied = {**state, "state": {**state["state"], muon_key: {}}}
    converted = convert(muon, emptied, iter(THEIR_NAMES))["state"]
    assert not converted[0]
    assert_same_bits([converted[1]["momentum_buffer"]], [optimizer.state[params[1]]["momentum_buffer"]])


def test_a_rank_without_its_entries_or_another_optimizers_is_refused() -> None:
    params, optimizer = saved()
    muon, state, ranks = ours(params), optimizer.state_dict(), as_nanochat(optimizer, 2)
    first = state["param_groups"][0]["params"][0]
    for states in (3, [state, {}], {"optimizer": state}):
        with pytest.raises(StateError, match="which is not a state_dict of Keller Jordan's Muon"):
            convert_keller_state(muon, states, THEIR_NAMES)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"norm\.bias: step is None in its saved state, which has \['exp_avg'\]"):
        convert_keller_state(muon, {**state, "state": {**state["state"], first: {"exp_avg": params[0]}}}, THEIR_NAMES)
    broken = {**ranks[1], "state": {**ranks[1]["state"], first: {"exp_avg": params[0]}}}
    with pytest.raises(StateError, match=r"norm\.bias: step is None in its saved state, which has \['exp_avg'\]"):
        convert_nanochat_state(muon, [ranks[0], broken], GROUPED_NAMES)
    with pytest.raises(StateError, match="group 0 of the saved state has no kind, which nanochat's MuonAdamW saves"):
        convert_nanochat_state(muon, state, THEIR_NAMES)


def test_options_of_dions_groups() -> None:
    params, optimizer = saved_sums(True, DION_RULES["rms_norm"])
    state = as_dion(optimizer, "rms_norm", counts_on_device=True)
    muon, groups = ours(params), state["param_groups"]
    tensors = [{**group, "initial_lr": torch.tensor(0.5, dtype=torch.float64)} for group in groups]
    for group in convert_dion_state(muon, {**state, "param_groups": tensors}, THEIR_NAMES)["param_groups"]:
        assert (type(group["lr"]), type(group["initial_lr"]), group["initial_lr"]) == (float, float, 0.5)
    chosen = [{**group, "maximize": True, "cautious_wd": group["algorithm"] == "muon"} for group in groups]
    converted = convert_dion_state(muon, {**state, "param_groups": chosen}, THEIR_NAMES)["param_groups"]
    assert [(group["maximize"], group["cautious_weight_decay"]) for group in converted] == [(True, True), (True, False)]
    cautious = [{**group, "cautious_wd": True, "weight_decay": 0.1} for group in groups]
    with pytest.raises(StateError, match=r"stepped by AdamW with cautious_wd=True"):
        convert_dion_state(muon, {**state, "param_groups": cautious}, THEIR_NAMES)
    stepless = [{key: value for key, value in group.items() if key != "step"} for group in groups]
    with pytest.raises(StateError, match=r"group 0 of the saved state has no step, which dion's Muon or NorMuon saves"):
        convert_dion_state(muon, {**state, "param_groups": stepless}, THEIR_NAMES)
    unknown = [{**group, "adjust_lr": "foo"} for group in groups]
    with pytest.raises(StateError, match="adjust_lr='foo'; convert_dion_state knows None, 'spectral_norm', 'rms_norm'"):
        convert_dion_state(muon, {**state, "param_groups": unknown}, THEIR_NAMES)


def spoiled(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies of a state in which one thing, an option, a key or an entry's value, is of another kind."""
    places = [("param_groups", k, key) for k, group in enumerate(state["param_groups"]) for key in group]
    places += [("state", key, name) for key, entry in state["state"].items() for name in entry]
    for wrong in ("text", [1], {"a": 1}, [{}] * 2, torch.zeros(3), torch.zeros(2).to_sparse(), 1j):
        for where, key, name in places:
            broken = copy.deepcopy(state)
            broken[where][key][name] = wrong
            yield broken


@pytest.mark.parametrize("whose", ["keller", "nanochat", "motif", "dion", "torch"])
def test_what_is_of_another_kind_is_refused_in_a_sentence(whose: str) -> None:
    params, means = saved()
    sums = saved_sums(True, DION_RULES["rms_norm"])[1]
    torchs = torch.optim.Muon(list(zip(NAMES[:M], params[:M], strict=True)))
    torchs.step()
    cases: dict[str, tuple[Any, Any, list[str]]] = {
        "keller": (means.state_dict(), convert_keller_state, THEIR_NAMES),
        "nanochat": (as_nanochat(means, 1)[0], convert_nanochat_state, GROUPED_NAMES),
        "motif": (as_motif(sums), convert_motif_state, THEIR_NAMES),
        "dion": (as_dion(sums, "rms_norm", counts_on_device=True), convert_dion_state, THEIR_NAMES),
        "torch": (torchs.state_dict(), lambda muon, state, _: convert_torch_state(muon, state, None), NAMES[:M]),
    }
    state, convert, names = cases[whose]
    matrices = Muon([{"params": params[:M], "names": NAMES[:M], "use_muon": True}])
    muon, refused = matrices if whose == "torch" else ours(params), 0
    for broken in spoiled(state):
        try:
            convert(muon, broken, names)
        except StateError:
            refused += 1
    assert refused > 40
