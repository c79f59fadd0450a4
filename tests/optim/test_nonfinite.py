"""Gradients that are not finite, and GradScaler: a step is made as a whole or not at all.

What runs on a GPU, where the host must not wait to know, is forced on CPU by ``masked``: the step is then made with numbers under
which nothing changes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import ConfigError, GradientError, Muon, polar_express
from meshmuon.optim import adamw, collect, nonfinite
from meshmuon.state import param_state
from tests.support.bounds import unit
from tests.support.reference import LR, assert_moved_within_rounding, gradients, group, make_params, set_gradients
from tests.support.tensors import assert_bits

BAD = [math.nan, math.inf, -math.inf]
MATRICES, VECTORS = ((6, 4), (4, 9), (6, 4)), ((5,), (7, 3))


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows nothing of any tensor, as of those on a GPU."""
    for module in (nonfinite, collect, adamw):
        monkeypatch.setattr(module, "known_to_host", lambda tensor: False)


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "device":
        request.getfixturevalue("masked")
    return str(request.param)


class Run:
    """Matrices for Muon, the rest for AdamW, fed with fixed gradients of which some are spoilt."""

    def __init__(self, nonfinite: str = "skip", dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.matrices = make_params(*MATRICES, dtype=dtype)
        self.vectors = make_params(*VECTORS, dtype=dtype, seed=1)
        groups = [group(self.matrices), group(self.vectors, use_muon=False, prefix="norms")]
        self.optimizer = Muon(groups, nonfinite=nonfinite, **{"lr": LR, **options})

    @property
    def params(self) -> list[Tensor]:
        return [param for one in self.optimizer.param_groups for param in one["params"]]

    def step(self, number: int, bad: tuple[int, float] | None = None) -> None:
        grads = gradients(self.params, number)
        if bad is not None:
            grads[bad[0]].view(-1)[-1] = bad[1]
        set_gradients(self.params, grads)
        self.optimizer.step()

    def everything(self) -> list[Tensor]:
        found = list(self.params)
        for param in self.params:
            entry = self.optimizer.state.get(param, {})
            found += [entry[key] for key in sorted(entry)]
        return found


def snapshot(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("k", range(5))
def test_skip_leaves_everything_as_it_is(k: int, bad: float, path: str) -> None:
    """One element of any gradient, of Muon's or AdamW's; later steps are those of a run that never saw it."""
    run, expected = Run(), Run()
    for step in range(2):
        run.step(step)
        expected.step(step)
    before = snapshot(run.everything())
    run.step(2, (k, bad))
    assert_bits(run.everything(), before)
    assert run.optimizer.skipped_steps == 1
    run.step(2, (k, bad))
    run.step(3)
    expected.step(3)
    assert_bits(run.everything(), expected.everything())
    assert (run.optimizer.skipped_steps, expected.optimizer.skipped_steps) == (2, 0)


def test_a_first_step_that_is_skipped(path: str) -> None:
    """What state there is afterwards, if any, is zeros."""
    run, expected = Run(), Run()
    start = snapshot(run.params)
    run.step(0, (1, math.nan))
    assert_bits(run.params, start)
    assert not any(bool(value.any()) for entry in run.optimizer.state.values() for value in entry.values())
    assert run.optimizer.skipped_steps == 1
    run.step(1)
    expected.step(1)
    assert_bits(run.everything(), expected.everything())


def test_signs_of_zeros_survive_a_masked_skip(masked: None) -> None:
    """Momentum and weights of −0 stay −0."""
    run = Run(nesterov=True)
    run.step(0)
    for entry in run.optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                value.view(-1)[::2] = -0.0
    for param in (*run.vectors, *run.matrices):
        param.data.view(-1)[::2] = -0.0
    before = snapshot(run.everything())
    run.step(1, (0, math.nan))
    assert_bits(run.everything(), before)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"scheme": "keller"},
        {"use_distributed_muon": True},
        {"momentum_dtype": torch.bfloat16},
        {"none_grad": False},
        {"lr": torch.tensor(LR)},
        {"rule": "normuon"},
        {"cautious_weight_decay": True},
        {"rounding": "stochastic", "dtype": torch.bfloat16},
        {"rounding": "stochastic", "dtype": torch.bfloat16, "use_distributed_muon": True},
    ],
    ids=str,
)
def test_skipping_under_other_options(options: dict[str, Any], path: str) -> None:
    run, expected = Run(**options), Run(**options)
    for one in (run, expected):
        one.step(0)
    run.step(1, (0, math.inf))
    for one in (run, expected):
        one.step(2)
    assert_bits(run.everything(), expected.everything())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_other_dtypes(dtype: torch.dtype, bad: float, path: str) -> None:
    run = Run(dtype=dtype)
    run.step(0)
    before = snapshot(run.everything())
    for k in (0, 3):
        run.step(1, (k, bad))
    assert_bits(run.everything(), before)
    assert run.optimizer.skipped_steps == 2
    run.step(1)
    assert not torch.equal(run.params[0], before[0])


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float32, 3e38), (torch.float64, 1e300), (torch.bfloat16, 3e38), (torch.float16, 65504.0), (torch.float32, -3e38)],
    ids=str,
)
def test_large_is_not_infinite(dtype: torch.dtype, largest: float, path: str) -> None:
    """Its sum or its square would be. Without Nesterov, which adds gradient and momentum."""
    run = Run(dtype=dtype, nesterov=False, momentum_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    run.step(0, (0, largest))
    run.step(1, (3, largest / 1e30 if dtype != torch.float16 else largest))
    assert run.optimizer.skipped_steps == 0
    assert all(bool(param.isfinite().all()) for param in run.params)
    assert float(run.optimizer.state[run.params[0]]["momentum_buffer"].abs().max()) > 0.9 * abs(largest)


def test_many_large_elements_are_finite(path: str) -> None:
    run = Run()
    set_gradients(run.params, [torch.full_like(param, 1e37) for param in run.params])
    run.optimizer.step()
    assert run.optimizer.skipped_steps == 0


def test_propagate_steps_with_it() -> None:
    run = Run("propagate")
    run.step(0)
    run.step(1, (0, math.nan))
    assert bool(run.params[0].isnan().any())
    assert run.optimizer.skipped_steps == 0


def test_propagate_is_the_default() -> None:
    (param,) = make_params((3, 3))
    optimizer = Muon([group([param])])
    param.grad = torch.full((3, 3), math.nan)
    optimizer.step()
    assert bool(param.isnan().all())


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_raise_names_the_parameter_and_writes_nothing(bad: float, path: str) -> None:
    run = Run("raise")
    run.step(0)
    before = snapshot(run.everything())
    with pytest.raises(GradientError, match=r"^norms\.1\.weight has a gradient that is not finite"):
        run.step(1, (4, bad))
    assert_bits(run.everything(), before)
    expected = Run("raise")
    for one in (run, expected):
        if one is expected:
            one.step(0)
        one.step(1)
    assert_bits(run.everything(), expected.everything())
    assert run.optimizer.skipped_steps == 0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nonfinite='ignore' is unknown; write one of .*propagate.*skip.*raise"):
        Run("ignore")


@pytest.mark.parametrize("none_grad", [True, False])
def test_gradients_are_freed_as_by_a_step(none_grad: bool, path: str) -> None:
    run = Run(none_grad=none_grad)
    run.step(0, (0, math.nan))
    assert all((param.grad is None) is none_grad for param in run.matrices)
    assert all(param.grad is not None for param in run.vectors)


def test_parameters_without_a_gradient_do_not_matter(path: str) -> None:
    run = Run()
    run.step(0)
    before = snapshot(run.everything())
    set_gradients(run.params, [None] * 5)
    run.optimizer.step()
    run.params[1].grad = torch.full((4, 9), math.nan)
    run.optimizer.step()
    assert_bits(run.everything(), before)
    assert run.optimizer.skipped_steps == 1


def test_empty_gradients_are_finite(path: str) -> None:
    empty, full = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))
    optimizer = Muon([group([empty, full], use_muon=False)], nonfinite="skip", allow_inactive=True)
    set_gradients([empty, full], [torch.zeros(0), torch.ones(3)])
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert not torch.equal(full, torch.ones(3))


def test_a_copy_keeps_the_policy() -> None:
    run = Run()
    run.step(0)
    other = copy.deepcopy(run)
    before = snapshot(other.everything())
    other.step(1, (0, math.nan))
    assert_bits(other.everything(), before)


def test_offloaded_and_skipped(path: str) -> None:
    run, expected = Run(), Run()
    run.optimizer.turn_on_cpu_offload()
    for step in range(5):
        run.step(step, (0, math.nan) if step in (0, 2) else None)
        if step not in (0, 2):
            expected.step(step)
    assert_bits(run.everything(), expected.everything())


# ---- the masked path, which a GPU takes ----------------------------------------------------------------------------------------


def test_finite_masked_steps_move_as_unmasked_ones(masked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW bit for bit. In the momentum and the update of a matrix the product is rounded before the sum, which a float's fused
    multiply-add does not: a few units in the last place."""
    run = Run()
    start = snapshot(run.params)
    for step in range(5):
        run.step(step)
    monkeypatch.undo()
    expected = Run()
    for step in range(5):
        expected.step(step)
    assert_bits(run.vectors, expected.vectors)
    states, wanted = run.everything()[5:], expected.everything()[5:]
    assert_bits(states[3:], wanted[3:])
    sizes = [
        sum(grad.abs() for grad in grads) for grads in zip(*(gradients(run.matrices, step) for step in range(5)), strict=True)
    ]
    for momentum, other, size in zip(states[:3], wanted[:3], sizes, strict=True):
        # Both sums are rounded, and one product: three roundings a step of what is no larger than all gradients together.
        assert bool(((momentum - other).abs() <= 5 * 3 * unit(torch.float32) * size).all())
    assert_moved_within_rounding(run.matrices, expected.matrices, start[:3], 5, polar_express())


def test_float64_keeps_its_precision_when_masked(masked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate or decay rounded to float32 would show at 1e-8."""
    run = Run(dtype=torch.float64)
    start = snapshot(run.params)
    for step in range(3):
        run.step(step)
    monkeypatch.undo()
    expected = Run(dtype=torch.float64)
    for step in range(3):
        expected.step(step)
    assert_bits(run.vectors, expected.vectors)
    assert_moved_within_rounding(run.matrices, expected.matrices, start[:3], 3, polar_express())


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, each of which would wait for a GPU."""

    READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.READS:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [None, math.nan])
def test_no_host_read_on_the_masked_path(bad: float | None, scaled: bool, masked: None) -> None:
    run = Run("propagate" if scaled else "skip")
    for step in range(3):
        set_gradients(run.params, gradients(run.params, step))
        if scaled:
            run.optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
            run.optimizer.found_inf = torch.tensor(0.0 if bad is None else 1.0)  # type: ignore[attr-defined]
        elif bad is not None:
            run.params[0].grad[0, 0] = bad  # type: ignore[index]
        with HostReads() as reads:
            run.optimizer.step()
        assert not reads.seen, reads.seen
    with HostReads() as reads:
        assert run.optimizer.skipped_steps == (0 if bad is None else 3)
    assert reads.seen


@pytest.mark.parametrize("scaled", [False, True])
def test_a_device_whose_values_the_host_cannot_read(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: whatever reads one raises. Muon, AdamW, mask and scale all run there."""
    monkeypatch.setattr(param_state, "_FUSED_DEVICES", ("cpu", "meta"))
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in (*MATRICES, *VECTORS)]
    optimizer = Muon([group(params[:3]), group(params[3:], use_muon=False)], nonfinite="propagate" if scaled else "skip")
    for _ in range(3):
        set_gradients(params, [torch.empty_like(param) for param in params])
        if scaled:
            optimizer.grad_scale = torch.ones((), device="meta")  # type: ignore[attr-defined]
            optimizer.found_inf = torch.ones((), device="meta")  # type: ignore[attr-defined]
        optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        _ = optimizer.skipped_steps
    assert all(value.device.type == "meta" for entry in optimizer.state.values() for value in entry.values())


def test_host_reads_are_seen() -> None:
    with HostReads() as reads:
        bool(torch.ones(()))
        float(torch.ones(()))
        torch.ones(2).tolist()
    assert len(reads.seen) >= 2


def test_adamw_that_cannot_fuse(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's plain step knows no ``found_inf``: it is made and undone."""

    def no_fusing(param: Tensor) -> bool:
        return False

    monkeypatch.setattr(adamw, "can_fuse", no_fusing)
    run, expected = Run(), Run()
    for one in (run, expected):
        one.step(0)
    before = snapshot(run.everything())
    run.step(1, (3, math.nan))
    assert_bits(run.everything(), before)
    for one in (run, expected):
        one.step(2)
    assert_bits(run.everything(), expected.everything())
    assert [float(run.optimizer.state[param]["step"]) for param in run.vectors] == [2.0, 2.0]


# ---- GradScaler ----------------------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def optimizer_of(model: nn.Module, **options: Any) -> Muon:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if (p.dim() == 2) is muon], "names": [n for n, p in named if (p.dim() == 2) is muon]}
        for muon in (True, False)
    ]
    return Muon([{**one, "use_muon": muon} for one, muon in zip(groups, (True, False), strict=True)], lr=LR, **options)


def clip_by_norm(optimizer: torch.optim.Optimizer, most: float) -> None:
    """In the order of the param groups, since the norm is rounded by the order of its summands."""
    nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], most)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    data, target = torch.randn(7, 6, generator=generator), torch.randn(7, 5, generator=generator)
    return nn.functional.mse_loss(model(data), target)


def unscaled(steps: Sequence[int], clip: float | None = None, *, moved: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Without a scaler; every parameter is first moved by up to ``moved`` of itself."""
    model = network()
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.data *= 1 + moved * (2 * torch.rand(param.shape, generator=generator) - 1)
    optimizer = optimizer_of(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if clip is not None:
            clip_by_norm(optimizer, clip)
        optimizer.step()
    return contents(model, optimizer)


def contents(model: nn.Module, optimizer: Muon) -> list[Tensor]:
    states = [optimizer.state[param] for param in model.parameters()]
    return [*model.parameters(), *(entry[key] for entry in states for key in sorted(entry))]


Scaler = torch.amp.GradScaler


def train(
    steps: int, *, clip: float | None = None, spoil: Callable[[nn.Module, int], None] | None = None, **options: Any
) -> tuple[list[Tensor], Scaler, Muon]:
    model = network()
    optimizer, scaler = optimizer_of(model, **options), Scaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if spoil is not None:
            spoil(model, step)
        if clip is not None:
            scaler.unscale_(optimizer)
            clip_by_norm(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
    return contents(model, optimizer), scaler, optimizer


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(clip: float | None) -> None:
    """With the scale growing on the way, with and without ``unscale_`` and clipping."""
    found, scaler, optimizer = train(7, clip=clip)
    assert_bits(found, unscaled(range(7), clip))
    assert scaler.get_scale() == 2.0**12
    assert optimizer.skipped_steps == 0
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_what_a_scaler_finds_is_skipped(policy: str, where: int, clip: float | None, path: str) -> None:
    """Under every policy: the step is left out, the scale halves, and later steps are those of a run without that batch."""

    def spoil(model: nn.Module, step: int) -> None:
        if step == 2:
            grad = list(model.parameters())[where].grad
            assert grad is not None
            grad.view(-1)[1] = math.inf

    found, scaler, optimizer = train(5, clip=clip, spoil=spoil, nonfinite=policy)
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == 2.0**9
    steps = [float(entry["step"]) for entry in optimizer.state.values() if "step" in entry]
    assert steps == [4.0, 4.0]
    if path == "host":
        assert_bits(found, unscaled([0, 1, 3, 4], clip))
    else:
        wanted = unscaled([0, 1, 3, 4], clip)
        # Each of the four steps rounds about ten times. So much at once, at the beginning, shows how far it may lead.
        moved = [unscaled([0, 1, 3, 4], clip, moved=4 * 10 * unit(torch.float32), seed=seed) for seed in range(4)]
        for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert (a - b).norm().item() <= max((one[k] - b).norm().item() for one in moved), k


def test_a_found_infinity_leaves_every_bit(path: str) -> None:
    run = Run("propagate")
    run.step(0)
    before = snapshot(run.everything())
    scaler = Scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    grads = gradients(run.params, 1)
    grads[0][0, 0] = math.inf
    set_gradients(run.params, grads)
    scaler.step(run.optimizer)
    scaler.update()
    assert_bits(run.everything(), before)
    assert (scaler.get_scale(), run.optimizer.skipped_steps) == (2.0, 1)


@pytest.mark.parametrize("before", [False, True])
def test_a_scaler_that_meets_no_gradient(before: bool, path: str) -> None:
    run = Run("propagate")
    scaler = Scaler("cpu")
    scaler.scale(torch.ones(()))
    start = snapshot(run.params)
    if before:
        scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)
    assert_bits(run.params, start)
    assert run.optimizer.skipped_steps == 0


def test_a_disabled_scaler_is_not_there() -> None:
    run, expected = Run(), Run()
    scaler = Scaler("cpu", enabled=False)
    for step in range(2):
        set_gradients(run.params, gradients(run.params, step))
        scaler.step(run.optimizer)
        scaler.update()
        expected.step(step)
    assert_bits(run.everything(), expected.everything())


def test_half_precision_gradients_are_unscaled(path: str) -> None:
    """float16 parameters, which ``unscale_`` refuses but a scaler's step() does not."""
    run, expected = Run("propagate", torch.float16), Run("propagate", torch.float16)
    scaler = Scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        set_gradients(run.params, [grad * 4 for grad in gradients(run.params, step)])
        scaler.step(run.optimizer)
        scaler.update()
        expected.step(step)
    assert_bits(run.vectors, expected.vectors)
    for a, b in zip(run.matrices, expected.matrices, strict=True):
        # Formed in float32 and rounded once a step, now and then to the other side: twice the unit each time.
        assert bool(((a - b).abs() <= 3 * 2 * unit(torch.float16) * (b.abs() + 0.1)).all())
