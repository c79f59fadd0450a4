"""The mixture-of-experts example: four processes, expert parallel × FSDP2, train as one process does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import train_moe
from demo.data import TrainBatches
from demo.model import ModelConfig
from demo.processes import Runtime
from tests.support.processes import results_of, run_ranks
from tests.support.scripts import run_script

REPOSITORY = Path(__file__).resolve().parents[2]
WORLD, STEPS, LR, DECAY = 4, 8, 0.01, 0.1
CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=32, seq_len=16)

FLAGS = "--d-model 16 --d-ff 32 --layers 1 --heads 2 --seq-len 16 --batch-size 4 --steps 3 --valid-fraction 0.3 --device cpu"


@dataclass(frozen=True)
class Case:
    experts: int = 8
    ep: int = 2
    closed: tuple[int, ...] = ()
    """Experts to which no token is sent in the first step."""


CASES = {
    "whole experts": Case(),
    "one idle expert, cut": Case(experts=6, closed=(3,)),
    "an idle rank": Case(closed=(4, 5, 6, 7)),
    "experts over all ranks": Case(ep=4),
}


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    placements: str = ""
    plan: str = ""


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(case: Case, runtime: Runtime) -> Outcome:
    """In float64: once rounding has sent a token to another expert losses differ by 1e-3."""
    outcome = Outcome()
    model = train_moe.build_model(CONFIG, case.experts, seed=0).double()
    # The model's own loss rounds the logits to float32.
    model.loss = lambda tokens, targets: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    train_moe.shard(model, case.experts, runtime, case.ep)
    outcome.placements = str(getattr(next(train_moe.expert_modules(model)).w1, "placements", ""))
    optimizer = train_moe.build_optimizer(model, LR)

    def keep_gradients(*_: object) -> None:
        if not outcome.gradients:
            outcome.gradients = {name: whole(param.grad) for name, param in model.named_parameters()}

    def close(_module: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor(case.closed, dtype=torch.long), -torch.inf)

    optimizer.register_step_pre_hook(keep_gradients)
    hooks = [layer.mlp.router.register_forward_hook(close) for layer in model.layers]

    def report(step: int, loss: float) -> None:
        if step == 1:
            outcome.first = {name: whole(param) for name, param in model.named_parameters()}
            for hook in hooks:
                hook.remove()

    text = torch.arange(20_000) ** 2 % 251 % 60 + 40
    batches = TrainBatches(text.to(torch.uint8), CONFIG.seq_len, batch_size=8, seed=0)
    outcome.losses = train_moe.train(model, optimizer, batches, STEPS, runtime, report)
    outcome.last = {name: whole(param) for name, param in model.named_parameters()}
    outcome.plan = optimizer.plan().describe()
    return outcome


def run_cases(rank: int, folder: Path) -> dict[str, Outcome] | None:
    """All cases in turn; what the first rank found."""
    outcomes = {name: run(case, Runtime(torch.device("cpu"), rank, WORLD)) for name, case in CASES.items()}
    return outcomes if rank == 0 else None


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All cases on four gloo processes."""
    outcomes: dict[str, Outcome] = results_of(run_ranks(WORLD, run_cases, tmp_path_factory.mktemp("moe")))[0]
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_four_processes_learn_what_one_does(name: str, together: dict[str, Outcome]) -> None:
    found, expected = together[name], run(CASES[name], Runtime(torch.device("cpu")))
    assert expected.losses[-1] < expected.losses[0] - 0.5
    assert found.losses == pytest.approx(expected.losses, abs=1e-9)
    for kind in ("gradients", "first", "last"):
        for key, value in getattr(expected, kind).items():
            torch.testing.assert_close(getattr(found, kind)[key], value, rtol=0, atol=1e-7, msg=f"{kind} of {key}")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.closed])
def test_an_idle_expert_only_decays(name: str, together: dict[str, Outcome]) -> None:
    case, found = CASES[name], together[name]
    start = dict(train_moe.build_model(CONFIG, case.experts, seed=0).double().named_parameters())
    names = [key for key in start if ".experts." in key]
    assert len(names) == 2 * CONFIG.n_layers
    for key in names:
        for expert in range(case.experts):
            idle = expert in case.closed
            assert (found.gradients[key][expert].count_nonzero() == 0) == idle
            decayed = start[key][expert] * (1 - LR * DECAY)
            assert torch.allclose(found.first[key][expert], decayed, rtol=1e-15, atol=0) == idle
            assert not torch.allclose(found.last[key][expert], decayed * (1 - LR * DECAY) ** (STEPS - 1), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "layout", "how"),
    [
        ("whole experts", "[S(0, stride 2), S(0)] on 2×2", "local"),
        ("one idle expert, cut", "[S(1), S(0)] on 2×2", "one owner"),
    ],
)
def test_the_plan_shows_the_experts(name: str, layout: str, how: str, together: dict[str, Outcome]) -> None:
    count = CASES[name].experts * CONFIG.n_layers
    rows = [line for line in together[name].plan.splitlines() if layout in line]
    assert [line.split()[:2] for line in rows] == [[str(count), "32×16"], [str(count), "16×32"]]
    assert all(how in line for line in rows)
    assert "Shard(dim=0)" in together[name].placements


# The command line


def test_entry_point(source_folder: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    flags = [*FLAGS.split(), "--data", str(source_folder), "--nproc", "2"]
    done = run_script(REPOSITORY / "examples" / "train_moe.py", *flags, environment=variables)
    assert done.returncode == 0, done.stderr
    assert "8 experts, top 2, 3 steps of 4 × 16 bytes, 2 processes, efsdp 1 × ep 2" in done.stdout
    assert done.stdout.count("step 3/3") == 1
    assert "over 2 ranks" in done.stdout


def test_entry_point_in_one_process(source_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_moe.main([*FLAGS.split(), "--data", str(source_folder), "--nproc", "1"]) == 0
    text = capsys.readouterr().out
    assert "one process" in text
    assert "step 3/3" in text
    assert "21 computed where they are" in text  # 8 experts of two matrices, the router, four of attention


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-size 6", "--batch-size 6 does not divide over 4 processes"),
        ("--ep 3", "4 processes do not divide into expert-parallel groups of 3"),
        ("--experts 7", "--experts 7 do not divide over --ep 2 processes"),
        ("--experts 6 --d-ff 33", "nor do their 33 and 16 rows over 2"),
    ],
)
def test_bad_flags_are_refused(flags: str, message: str, source_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_moe.main([*FLAGS.split(), "--data", str(source_folder), *flags.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
