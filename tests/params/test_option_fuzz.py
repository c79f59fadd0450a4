"""Every option against every kind of value: what is wrong is refused by name before anything is written, what is right
works.

The oracle says of each value whether an option takes it, and is written apart from the checks themselves, so that the
test fails both ways: for a wrong value that passes and for a right one that is refused.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshmuon import (
    ConfigError,
    DistMuon,
    MeshmuonError,
    Muon,
    NorMuon,
    RoutingWarning,
    Scheme,
    get_default_muon_param_groups,
    keller,
)
from meshmuon.integrations.factory import muon_for
from meshmuon.params.option_table import OPTIONS
from tests.support.reference import LR, assert_same_bits, copies, gradients, make_params, set_gradients
from tests.support.tensors import assert_untouched, everything

MATRIX, VECTOR = (3, 4), (5,)
LARGEST = torch.finfo(torch.float32).max
FACTOR = 0.2 * math.sqrt(max(MATRIX))


class Thing:
    """Nothing that any option asks for."""

    def __repr__(self) -> str:
        return "Thing()"


def two_numbers(rows: int, cols: int) -> tuple[int, int]:
    return rows, cols


def fails(*args: Any) -> Any:
    raise KeyError("a user's own bug")


NUMBERS: list[Any] = [
    0, 1, 2, -1, 64, 65, 0.0, 0.5, 1.0, 1.5, -0.5, 5.0, math.nan, math.inf, -math.inf, 1e39, 1e300, 10**8, 10**400,
]  # fmt: skip
ODD_NUMBERS: list[Any] = [
    True, False, 1j, Decimal("0.5"), Fraction(1, 2), np.float64(0.5), np.float32(0.5), np.int64(1), np.bool_(True),
]  # fmt: skip
TENSORS: list[Any] = [
    torch.tensor(0.5), torch.tensor([0.25], dtype=torch.float64), torch.tensor(1), torch.tensor(True),
    torch.tensor([0.1, 0.2]),
    torch.tensor(math.nan), torch.tensor(1j), torch.empty(0), np.array([0.1, 0.2]), np.array(["auto", "skip"]),
]  # fmt: skip
TEXTS: list[Any] = ["", "x", "False", "True", "0.5", "auto", b"auto"]
COLLECTIONS: list[Any] = [
    [], (), {}, set(), [1], [0.5, 0.5], (0.9, 0.95), (0.9, 1.0), ("0.9", "0.95"), [None], {"a": 1}, {"experts"},
    ["experts"],
    [""],
]  # fmt: skip
SCHEMES: list[Any] = [
    [(3.4445, -4.775, 2.0315)] * 5, [(3.4445, math.nan, 2.0315)] * 5, [(math.inf, -4.775, 2.0315)], [(1e39, 0.0, 0.0)],
    (1.5, -0.5, 0.0), keller(5), keller(3), "keller",
]  # fmt: skip
OBJECTS: list[Any] = [
    None, Thing(), Thing, object, fails, two_numbers, NorMuon(), NorMuon, "normuon", "spectral", "flatten", "in_out",
]  # fmt: skip
DTYPES: list[Any] = [
    torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.complex64, torch.bool,
    "float32",
    (torch.bfloat16, torch.int8), [None, torch.int8], (torch.int8, torch.bool), (torch.int8,) * 3,
]  # fmt: skip
VALUES = [*NUMBERS, *ODD_NUMBERS, *TENSORS, *TEXTS, *COLLECTIONS, *SCHEMES, *OBJECTS, *DTYPES]


def as_number(value: Any) -> float:
    """What a value means where a number is asked for; NaN for what is none."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.dtype in (torch.float32, torch.float64) else math.nan
    if type(value) in (int, float, Fraction, np.float64, np.float32, np.int64):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return math.nan


def within(low: float, below: float, scale: float = 1.0) -> Callable[[Any], bool]:
    return lambda value: low <= as_number(value) * scale < below


def flag(value: Any) -> bool:
    return type(value) is bool


def whole(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def choice(*texts: str) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in texts


def dtype_of_floats(value: Any) -> bool:
    return not isinstance(value, (Tensor, np.ndarray)) and value in (None, torch.float32, torch.bfloat16, torch.float64)


def dtypes_on_the_wire(value: Any) -> bool:
    return all(map(dtype_of_floats, value if type(value) in (tuple, list) and len(value) == 2 else [value]))


def pair(value: Any) -> bool:
    return type(value) in (tuple, list) and len(value) == 2 and all(within(0, 1)(one) for one in value)


def scheme(value: Any) -> bool:
    if type(value) is str and value == "auto":  # also a value of other options
        return True
    if value is fails or value is two_numbers or value in (Thing, object, NorMuon):
        return True  # called in the step only, on a batch: here only its type can be judged
    return any(value is one for one in SCHEMES if one not in (SCHEMES[1], SCHEMES[2], SCHEMES[3], SCHEMES[6]))


def keys(value: Any) -> bool:
    return value is None or (type(value) in (list, tuple, set) and all(type(key) is str and key for key in value))


# Which values an option takes.
GROUP_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "lr": within(0, LARGEST, scale=max(FACTOR, 10.0)),  # AdamW's first step divides by 1 − beta1
    "momentum": within(0, 1),
    "weight_decay": within(0, LARGEST, scale=LR),
    "nesterov": flag,
    "maximize": flag,
    "none_grad": flag,
    "cautious_weight_decay": flag,
    "ns_steps": whole(1, 64),
    "adamw_betas": pair,
    "adamw_eps": within(0, LARGEST),
    "expert_keys": keys,
    "scheme": lambda value: type(value) is not np.ndarray and not isinstance(value, Tensor) and scheme(value),
    "adjust_lr_fn": choice("match_rms_adamw", "original", "spectral"),
    "conv": lambda value: value is None or choice("flatten", "adamw")(value),
    "split": lambda value: value is None or (type(value) is int and value == 1),
    "matrices": lambda value: value is None or (isinstance(value, dict) and not value),
    "rounding": choice("nearest", "stochastic"),
    "compute_dtype": dtype_of_floats,
    "momentum_dtype": dtype_of_floats,
    "rule": lambda value: isinstance(value, NorMuon) or choice("plain", "normuon", "muon_plus", "muoneq")(value),
}
OPTIMIZER_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "debug": flag,
    "use_distributed_muon": flag,
    "deterministic": flag,
    "cuda_graphs": flag,
    "allow_inactive": flag,
    "warmup_step": whole(0, 1024),
    "chunk_size": lambda value: type(value) is int and (value == -1 or value >= 1),
    "memory_budget": lambda value: value is None or whole(1)(value),
    "replicas": choice("auto", "share", "repeat"),
    "nonfinite": choice("propagate", "skip", "raise"),
    "comm_dtype": dtypes_on_the_wire,
    "replica_group": lambda value: value is None,
    "cost_model": lambda value: value is None,
    # AdamW's first step divides by 1 − beta1
    "adamw_lr": lambda value: value is None or within(0, LARGEST, scale=10.0)(value),
    "metrics": lambda value: value is None or (type(value) is int and value >= 1),
    "clip_config": lambda value: value is None or (isinstance(value, Mapping) and not value),
}
OF_ADAMW = {"adamw_betas": "betas", "adamw_eps": "eps"}  # torch's own keys, for groups
UNREAD = {
    "scheme": (fails, two_numbers, Thing, object, NorMuon),  # right by type; what they do shows only in a step
    "ns_steps": (64,),  # right, but the first step looks for safe blocks for seconds
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """``debug=True`` turns the logger on for good."""
    yield
    logging.getLogger("meshmuon").setLevel(logging.NOTSET)


def groups(params: list[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    return [
        {"params": params[:1], "names": ["layers.0.weight"], "use_muon": True, **options},
        {"params": params[1:], "names": ["norm.weight"], "use_muon": False, **options},
    ]


def build(params: list[nn.Parameter], **options: Any) -> Muon:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rates that nobody would train with, older names
        return Muon(groups(params), **{"lr": LR, **options})


def known(option: str, value: Any) -> bool:
    return any(value is one for one in UNREAD.get(option, ()))


def steps(optimizer: Muon, params: list[nn.Parameter]) -> None:
    set_gradients(params, gradients(params, 3))
    optimizer.step()


@contextmanager
def refused(option: str, value: Any) -> Iterator[None]:
    """Only an error of ours will do, and it names the option."""
    try:
        yield
    except MeshmuonError as error:
        named = "lr" if option == "adamw_lr" else OF_ADAMW.get(option, option)  # it becomes the lr of a group
        if named not in str(error):
            raise AssertionError(f"{option}={value!r}: the error does not name it: {error}") from error
        return
    except Exception as error:
        raise AssertionError(f"{option}={value!r} ended in {type(error).__name__}: {error}") from error
    raise AssertionError(f"{option}={value!r} was accepted")


@pytest.mark.parametrize("option", [*GROUP_OPTIONS, *OPTIMIZER_OPTIONS])
def test_the_constructor(option: str) -> None:
    right = {**GROUP_OPTIONS, **OPTIMIZER_OPTIONS}[option]
    for value in VALUES:
        params = make_params(MATRIX, VECTOR)
        if not right(value):
            with refused(option, value):
                build(params, **{option: value})
        else:
            optimizer = build(params, **{option: value})
            if not known(option, value):
                steps(optimizer, params)


@pytest.mark.parametrize("option", GROUP_OPTIONS)
def test_a_group_and_one_that_is_added(option: str) -> None:
    for key in {option, OF_ADAMW.get(option, option)}:
        for value in VALUES:
            params, late = make_params(MATRIX, VECTOR), make_params(MATRIX, VECTOR, seed=1)
            optimizer = build(params)
            place = 1 if option in OF_ADAMW else 0
            added = {**groups(late, **{key: value})[place], "names": ["late.weight"]}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RoutingWarning)
                if GROUP_OPTIONS[option](value):
                    Muon([added])
                    optimizer.add_param_group(added)
                    if not known(option, value):
                        steps(optimizer, params)
                    continue
                with refused(option, value):
                    Muon([added])
                with refused(option, value):
                    optimizer.add_param_group(added)
            assert len(optimizer.param_groups) == 2
            steps(optimizer, params)


@pytest.mark.parametrize("option", GROUP_OPTIONS)
def test_a_value_set_between_steps(option: str) -> None:
    """Nothing is written, and once the value is right again training goes on as if nothing had been."""
    for key in {option, OF_ADAMW.get(option, option)}:
        params = make_params(MATRIX, VECTOR)
        optimizer = build(params)
        steps(optimizer, params)
        twins, twin = copies(params), None
        twin = build(twins)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for value in VALUES:
            place = 1 if option in OF_ADAMW else 0
            group = optimizer.param_groups[place]
            had = {name: group[name] for name in (key,) if name in group}
            if GROUP_OPTIONS[option](value):
                continue
            group[key] = value
            before = everything(optimizer)
            set_gradients(params, gradients(params, 4))
            with refused(option, value):
                optimizer.step()
            assert_untouched(optimizer, before)
            assert all(param.grad is not None for param in params)
            del group[key]
            group.update(had)
        steps(optimizer, params)
        steps(twin, twins)
        assert_same_bits(params, twins)


@pytest.mark.parametrize("option", ["lr", "momentum", "scheme", "maximize", "use_muon", "params", "param_names"])
@pytest.mark.parametrize("begun", [False, True])
def test_an_option_that_was_deleted(option: str, begun: bool) -> None:
    params = make_params(MATRIX, VECTOR)
    optimizer = build(params)
    set_gradients(params, gradients(params, 0))
    if begun:
        optimizer.step()
    before, held = copies(params), optimizer.param_groups[0].pop(option)
    with refused(option, "nothing"):
        optimizer.step()
    if isinstance(held, list):
        optimizer.param_groups[0][option] = 3
        with refused(option, 3):
            optimizer.step()
    assert_same_bits(params, before)
    optimizer.param_groups[0][option] = held
    optimizer.step()


@pytest.mark.filterwarnings("ignore::meshmuon.RoutingWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_largest_learning_rate(dtype: torch.dtype, by_hand: bool) -> None:
    """lr·factor may be as large as the largest number of the dtype that a step computes in, and no larger."""
    largest = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max / (0.2 * math.sqrt(36))
    refusal = pytest.raises(ConfigError, match=r"lr=.* times adjust_lr_fn's 1\.2 for a 36×4 matrix")
    for lr, right in ((largest * (1 - 1e-14), True), (largest * (1 + 1e-14), False)):
        params = make_params((36, 4), (2, 2), (4, 36), dtype=dtype)
        before = copies(params)
        set_gradients(params, gradients(params, 0))
        with nullcontext() if right else refusal:
            written = [{"params": params, "names": list("abc"), "use_muon": True, "weight_decay": 0.0}]
            optimizer = Muon(written, lr=LR if by_hand else lr)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        assert right or all(map(torch.equal, params, before))


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_largest_learning_rate_of_adamw(contiguous: bool) -> None:
    """torch divides it by 1 − beta1 in the first step."""
    for lr, right in ((LARGEST * 0.0999, True), (LARGEST * 0.1001, False)):
        param = nn.Parameter(torch.ones(6) if contiguous else torch.ones(6, 2)[:, 0])
        optimizer = Muon([{"params": [param], "use_muon": False, "weight_decay": 0.0}], allow_inactive=True)
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.ones(6)
        if right:
            optimizer.step()
            assert param.isfinite().all()
        else:
            with pytest.raises(ConfigError, match=r"lr=.* divided by 1 - beta1"):
                optimizer.step()
            assert_same_bits([param], [torch.ones(6)])


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda rows, cols: math.nan, "must be at least 0 and finite"),
        (lambda rows, cols: math.inf, "must be at least 0 and finite"),
        (lambda rows, cols: -1.0, "must be at least 0 and finite"),
        (lambda rows, cols: "0.5", "must be a number"),
        (lambda rows, cols: None, "must be a number"),
        (lambda rows, cols: True, "must be a number"),
        (lambda rows, cols: 1 / 0, "failed with ZeroDivisionError"),
        (lambda rows: 1.0, "failed with TypeError"),
    ],
)
def test_what_a_function_for_the_learning_rate_gives(factor: Any, message: str) -> None:
    params = make_params(MATRIX, VECTOR)
    with pytest.raises(ConfigError, match=rf"adjust_lr_fn\(3, 4\).*{message}"):
        build(params, adjust_lr_fn=factor)
    optimizer = build(params)
    optimizer.param_groups[0]["adjust_lr_fn"] = factor
    before = copies(params)
    set_gradients(params, gradients(params, 0))
    with pytest.raises(ConfigError, match=rf"adjust_lr_fn\(3, 4\).*{message}"):
        optimizer.step()
    assert_same_bits(params, before)
    assert not optimizer.state


MODEL = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"model": None}, "model"),
        ({"model": list(MODEL.parameters())}, "model"),
        ({"model": MODEL.state_dict()}, "model"),
        *(({"is_muon_func": value}, "is_muon_func") for value in (5, "x", True, fails, lambda name: True)),
        *(
            ({"expert_keys": value}, "expert_keys")
            for value in (1, "experts", [""], [1], b"x", iter(["a"]), {"a": 1}, True)
        ),
        *(({"conv": value}, "conv") for value in ("unfold", 1, True, ["flatten"], np.array(["flatten"]))),
    ],
)
def test_default_groups(arguments: dict[str, Any], name: str) -> None:
    with refused(name, arguments[name]):
        get_default_muon_param_groups(**{"model": MODEL, **arguments})


@pytest.mark.parametrize("group", ["x", 5, Thing(), -100, [0]])
def test_groups_of_processes(group: Any) -> None:
    params = make_params(MATRIX)
    with refused("group", group):
        DistMuon(params, group=group)
    optimizer = build(make_params(MATRIX, VECTOR))
    with refused("replica_group", group):
        optimizer.replica_group = group
    assert optimizer.replica_group is None


def test_schemes_without_steps() -> None:
    with pytest.raises(ConfigError, match="scheme 'empty' has no steps"):
        Scheme("empty", (), "nowhere")


@pytest.mark.parametrize(
    "clip_config", [{"head_dim": 4, "threshold": t} for t in (1e39, 10**400, 1e-50, math.nan, "5", True, None)], ids=str
)
def test_thresholds(clip_config: dict[str, Any]) -> None:
    with refused("threshold", clip_config):
        build(make_params(MATRIX, VECTOR), clip_config=clip_config)


@pytest.mark.parametrize(
    "number",
    [np.float64(0.25), np.float32(0.25), Fraction(1, 4), torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)],
)
def test_odd_numbers_mean_their_value(number: Any) -> None:
    """Training has the same bits as with the plain number, and so has what is stored of it."""
    options = ("lr", "momentum", "weight_decay", "adamw_eps")
    params, twins = make_params(MATRIX, VECTOR), make_params(MATRIX, VECTOR)
    odd = build(params, **dict.fromkeys(options, number), adamw_betas=(number, number))
    plain = build(twins, **dict.fromkeys(options, 0.25), adamw_betas=(0.25, 0.25))
    for _ in range(3):
        steps(odd, params)
        steps(plain, twins)
    assert_same_bits(params, twins)
    fresh = build(make_params(MATRIX, VECTOR), lr=0.125)
    fresh.load_state_dict(odd.state_dict())
    for group in fresh.param_groups:
        assert [float(group[option]) for option in options] == [0.25] * 4
        assert [float(beta) for beta in group["adamw_betas"]] == [0.25] * 2
    if not isinstance(number, Tensor):
        assert all(type(group["lr"]) is float for group in odd.state_dict()["param_groups"])


# 1,200 calls in which several things are wrong at once: options, unknown keywords, the form of groups, parameters.

NAMES = [
    "fused", "foreach", "momentun", "warmup_steps", "learning_rate", "", "param_groups", "group", "beta1", "names",
    "use_muon", "ns_coefficients",
]  # fmt: skip
CALLS = 1200


class Raises:
    """An object of a user that fails whenever it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "clip_config", [Raises(), {"head_dim": 4, "threshold": Raises()}], ids=["threshold", "all of it"]
)
def test_what_cannot_be_shown(clip_config: Any) -> None:
    with refused("clip_config", "what fails whenever it is looked at"):
        build(make_params(MATRIX, VECTOR), clip_config=clip_config)


def odd_params(rng: random.Random) -> Any:
    """A parameter as nobody should have it, or something that is none."""
    weight = nn.Parameter(torch.ones(4, 6))
    values: dict[torch.dtype, Tensor] = {
        dtype: torch.ones(4, 6, dtype=dtype) for dtype in (torch.complex64, torch.float8_e4m3fn)
    }
    shaped = [(3,), (), (2, 3, 4), (2, 3, 4, 4), (0, 6)]
    return rng.choice(
        [
            weight, *(nn.Parameter(torch.ones(shape)) for shape in shaped), *map(nn.Parameter, values.values()),
            nn.Parameter(torch.ones(6, 1).expand(6, 6)), nn.Parameter(torch.ones(4, 6, device="meta")),
            nn.Parameter(torch.ones(4, 6, dtype=torch.int64), requires_grad=False),
            nn.Parameter(torch.ones(4, 6).to_sparse()),
            nn.Parameter(torch.ones(4, 6), requires_grad=False), nn.parameter.UninitializedParameter(), weight * 2,
            torch.ones(4, 6), torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
            torch.quantize_per_tensor(torch.ones(4, 6), 0.1, 0, torch.qint8), np.ones((4, 6)), nn.Linear(4, 6),
            ("name", weight), ("name", weight, 1), (weight, "name"), Raises(), *rng.sample(VALUES, 2),
        ]
    )  # fmt: skip


def odd_group(rng: random.Random, options: list[str]) -> Any:
    """A param group with a few things wrong, or something that is none."""
    params: Any = [odd_params(rng) for _ in range(rng.random() < 0.3)] + [nn.Parameter(torch.ones(4, 6))]
    if rng.random() < 0.1:
        params = rng.choice(
            [iter(params), tuple(params), params * 2, params[-1], {"a": params[-1]}, *rng.sample(VALUES, 2)]
        )
    written: Any = {"params": params, "use_muon": rng.random() < 0.7}
    changes: dict[Any, list[Any]] = {
        "names": [["a"], ["a", "a"], ["a", "b"], ["b", "a"], ["group1.param0"], [Raises()], iter(["a"]), *VALUES],
        "param_names": [["a"], ["a", "a"], ["b"], ["group0.param0"], *VALUES],
        "use_muon": [None, *VALUES],
        "reasons": [{"a": "convolution filter"}, {1: Raises()}, *VALUES],
        "matrices": [{"a": {"split": 2}}, {"a": {"experts": 2}}, {"a": {"flatten": 1}}, {"a": Raises()}, *VALUES],
        "split": [Raises(), lambda name, shape: Raises(), (2, 2), ((1, 1), 2), *VALUES],
        5: VALUES,
        "mine": [Raises(), *VALUES],
        "betas": VALUES,
        "eps": VALUES,
    }
    for key in rng.sample(list(changes), rng.random() < 0.4):
        written[key] = rng.choice(changes[key])
    for key in rng.sample(options, rng.random() < 0.3):
        written[key] = rng.choice([Raises(), *VALUES])
    if rng.random() < 0.1:
        written.pop(rng.choice(list(written)))
    return rng.choice([written] * 19 + [rng.choice(VALUES)])


def odd_call(rng: random.Random) -> str:
    """Builds something from random arguments; returns how that ended."""
    options = [name for option in OPTIONS for name in (option.name, *option.aliases)]
    groups = [odd_group(rng, options) for _ in range(rng.randrange(1, 3))]
    given = {name: rng.choice([Raises(), *VALUES]) for name in rng.sample([*options, *NAMES], rng.randrange(2))}
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 4, 2), nn.Linear(8, 6))
    params: Any = rng.choice(
        [groups] * 8 + [iter(groups), tuple(groups), groups[0], model.parameters(), Raises(), rng.choice(VALUES)]
    )
    ways: list[Callable[[], Any]] = [
        *[lambda: Muon(params, **given)] * 4,
        lambda: DistMuon(params, **given),
        lambda: muon_for(model, **given),
        lambda: build(make_params(MATRIX, VECTOR)).add_param_group(groups[0]),
        lambda: Muon(
            get_default_muon_param_groups(
                model, **{key: value for key, value in given.items() if key in ("conv", "split")}
            )
        ),
    ]
    try:
        made = rng.choice(ways)()
        str("" if made is None else made.routing_table())
    except MeshmuonError:
        return "refused"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} at {where.filename}:{where.lineno}"
    return "built"


@pytest.mark.filterwarnings("ignore")
def test_no_constructor_ends_in_an_error_that_is_not_ours() -> None:
    ends = Counter(odd_call(random.Random(seed)) for seed in range(CALLS))
    built, refused_calls = ends.pop("built", 0), ends.pop("refused", 0)
    assert not ends, "\n".join(f"{count}× {end}" for end, count in ends.most_common(20))
    assert min(built, refused_calls) > CALLS // 50  # both happen
