"""Runs a program on all of its ranks under recorders, and collects what they found."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshmuon import DistMuon, Muon, clip_grad_norm_
from meshmuon.execute import list_kernels
from meshmuon.layout import Mesh
from meshmuon.ortho.kernels import products, triton_normalise
from meshmuon.ortho.kernels.products import TritonProducts
from meshmuon.torch_compat import dtensor_like, local_part
from meshmuon.transport import collectives
from tests.support import layouts
from tests.support.reference import engine_muon
from tests.support.threads import run_threads

from . import fake_cuda, nccl_twin
from .clocks import Finding
from .list_kernels import TwinListKernels
from .programs import HEADS, Program, ProgramParam
from .recorder import Recorder
from .recorder import recorder as current_recorder
from .twin_tensor import DEVICE, TwinTensor, host_values


@dataclass
class Outcome:
    """What a run has found."""

    findings: list[Finding] = field(default_factory=list)
    # of the host, inside steps that only repeat what was prepared
    steady_waits: list[Finding] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)  # where ranks started different collectives
    collectives: int = 0
    operations: int = 0
    # makers of the streams whose work may overlap with the main stream's
    beside_main: set[str] = field(default_factory=set)
    # lines at which the host waits while the main stream has other work
    busy_waits: set[str] = field(default_factory=set)
    weights: list[list[Tensor]] = field(default_factory=list)  # rank by rank, at the end
    pools: list[list[object]] = field(default_factory=list)  # of each rank, those of its graphs

    def of(self, *kinds: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind in kinds]

    @property
    def errors(self) -> list[str]:
        """All that must not be."""
        return [*map(str, self.of("race", "lifetime", "misuse")), *map(str, self.steady_waits), *self.orders]


@contextmanager
def twins() -> Any:
    """A GPU and NCCL for all threads with a recorder; yields the order of collectives."""
    with ExitStack() as stack:
        stack.enter_context(fake_cuda.installed())
        # NCCL moves what is on a GPU
        stack.enter_context(patch.object(collectives, "moves", lambda group, device: True))
        stack.enter_context(patch.object(products, "_has", lambda package: True))
        stack.enter_context(patch.object(TritonProducts, "symmetric", _symmetric_product))
        stack.enter_context(patch.object(TritonProducts, "quintic_factor", _quintic_factor))
        stack.enter_context(patch.object(triton_normalise, "normalise", _normalise))
        stack.enter_context(patch.object(list_kernels, "ListKernels", TwinListKernels))
        yield stack.enter_context(nccl_twin.installed())


def _symmetric_product(
    self: TritonProducts,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    addend: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """The Triton kernel reads and writes what this product does. The kernel itself is not imported: it would be
    compiled.
    """
    self._multiply(a, b.mT, out, addend if beta else None, alpha, beta)
    return out


def _quintic_factor(
    self: TritonProducts, gram: Tensor, out: Tensor, coefficients: tuple[float, float, float]
) -> Tensor:
    """One launch, as of the kernel."""
    a, b, c = coefficients
    factor = self.symmetric(gram, gram, out, gram, alpha=c, beta=b)
    current_recorder().also(lambda: host_values(factor).diagonal(dim1=1, dim2=2).add_(a))
    return factor


def _normalise(batch: Tensor, out: Tensor, sums: Tensor) -> None:
    """Two launches, as of the kernels."""

    def divide() -> None:
        values = host_values(batch).double()
        norms = values.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        host_values(out).copy_(values / norms[:, None, None])

    current_recorder().launch([batch], [sums], "sums of squares", lambda: None)
    current_recorder().launch([batch, sums], [out], "division by norms", divide)


def run_program(program: Program, *, seed: int = 0) -> Outcome:
    """Runs a program on all of its ranks."""
    outcome, lock = Outcome(), threading.Lock()

    def main(rank: int) -> list[Tensor]:
        recorder = Recorder(f"rank {rank}", seed=1000 * seed + rank)
        with recorder.recording():
            run = _RankRun(program, rank, recorder)
            run.train()
            weights = run.weights()
        with lock:
            outcome.findings += recorder.findings
            outcome.steady_waits += run.steady_waits
            outcome.operations += recorder.operations
            outcome.busy_waits |= recorder.busy_waits
            outcome.pools.append(recorder.pools)
            outcome.beside_main |= {recorder.clocks.names[stream] for stream in recorder.beside_main}
        return weights

    with twins() as started, patch.dict(os.environ, {"MESHMUON_KERNELS": program.kernels}):
        outcome.weights = run_threads(program.world, main)
    outcome.orders, outcome.collectives = started.differences(), started.count()
    return outcome


class _RankRun:
    """A program on one rank."""

    def __init__(self, program: Program, rank: int, recorder: Recorder) -> None:
        self._program, self._rank, self._recorder = program, rank, recorder
        self._mesh = DeviceMesh(DEVICE.type, torch.arange(program.world).reshape(program.mesh))
        self.steady_waits: list[Finding] = []
        self._stream, self._gradient_stream = (
            cast("torch.cuda.Stream", fake_cuda.Stream()) if makes else None
            for makes in (program.own_stream, program.fsdp_grads)
        )
        with torch.cuda.stream(self._stream):
            generator = torch.Generator().manual_seed(1)
            self._params = [self._parameter(param, generator) for param in program.params]
            self._optimizer = self._make_optimizer()

    def _parameter(self, param: ProgramParam, generator: torch.Generator) -> nn.Parameter:
        value = torch.randn(param.shape, generator=generator).to(param.dtype)
        if param.placements is None:
            return nn.Parameter(self._recorder.on_device(value))
        mesh = Mesh(self._program.mesh, tuple(range(self._program.world)))
        local = layouts.split(layouts.Case(param.shape, mesh, param.placements), value)[self._rank]
        twin: Any = DTensor.from_local(
            self._recorder.on_device(local),
            self._mesh,
            param.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        if param.in_host:
            # as FSDP2 makes it; ``from_local`` would move it to the mesh's device
            twin = dtensor_like(twin, local.clone())
        twin._is_param = True  # as nn.Parameter would mark it, without asking torch for the layout of a copy
        return twin.requires_grad_(True)  # type: ignore[no-any-return]

    def _make_optimizer(self) -> Muon:
        program, options = self._program, dict(self._program.options)
        groups: list[dict[str, Any]] = []
        for use_muon, split in sorted({(param.use_muon, param.split or ()) for param in program.params}):
            members = [
                k for k, param in enumerate(program.params) if (param.use_muon, param.split or ()) == (use_muon, split)
            ]
            groups.append(self._group(members, use_muon, split))
        lr: Any = torch.full((), program.lr, device=DEVICE) if program.device_lr else program.lr
        optimizer: type[Any] = {"Muon": Muon, "DistMuon": DistMuon}[program.optimizer]
        if (
            program.optimizer == "Muon"
            and any(param.placements is None for param in program.params)
            and program.world > 1
        ):
            options["replica_group"] = dist.group.WORLD
        return engine_muon(groups, optimizer, lr=lr, expert_keys=["experts"], **options)

    def _group(self, members: list[int], use_muon: bool, split: tuple[int, ...]) -> dict[str, Any]:
        names = [self._program.params[k].name for k in members]
        group: dict[str, Any] = {"params": [self._params[k] for k in members], "names": names, "use_muon": use_muon}
        return {**group, "split": split} if split else group

    def train(self) -> None:
        """All steps, with a backward and a clip between them."""
        program = self._program
        with torch.cuda.stream(self._stream):
            for step in range(program.steps):
                self._events(step)
                self._backward(step)
                if program.clips:
                    clip_grad_norm_(self._params, 1.0)
                self._step(step)
            self._events(program.steps)
            if "metrics" in program.options:
                self._optimizer.metrics(wait=True)
            self._backward(program.steps)

    def _events(self, step: int) -> None:
        happens = {
            "offload": self._optimizer.turn_on_cpu_offload,
            "onload": self._optimizer.turn_off_cpu_offload,
            "grow": self._grow,
            "save": self._save,
            "copy": self._copy,
            "prepare": self._optimizer.prepare,
        }
        for at, event in self._program.events:
            if at == step:
                happens[event]()

    def _grow(self) -> None:
        name = f"layers.{90 + len(self._params)}.weight"
        self._params.append(self._parameter(ProgramParam(name, (5, 4)), torch.Generator().manual_seed(2)))
        self._optimizer.add_param_group({"params": [self._params[-1]], "names": [name], "use_muon": True})

    @torch.no_grad()
    def _backward(self, step: int) -> None:
        """Reads all weights, and makes a gradient of each in new memory."""
        added = len(self._params) - len(self._program.params)
        params = [*self._program.params, *[ProgramParam("", ())] * added]
        current = torch.cuda.current_stream()
        if self._gradient_stream is not None:
            self._gradient_stream.wait_stream(current)
        with torch.cuda.stream(self._gradient_stream):
            for param, weight in zip(params, self._params, strict=True):
                missing = {rank for at, rank in param.missing if at == step}
                weight.grad = None
                if missing & {-1, self._rank}:
                    continue
                local = local_part(weight)
                grad = torch.sin(local.detach() * (step + 2.0)).add_(0.1)
                if self._program.nonfinite_step == step:
                    grad.mul_(float("inf"))
                weight.grad = grad if local is weight else dtensor_like(weight, grad)  # type: ignore[arg-type]
        if self._gradient_stream is not None:
            current.wait_stream(self._gradient_stream)

    def _step(self, step: int) -> None:
        program, optimizer = self._program, self._optimizer
        if program.scaled:
            optimizer.grad_scale = torch.full((), 2.0, device=DEVICE)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.full((), float(step == 1), device=DEVICE)  # type: ignore[attr-defined]
        logits = None
        if program.qk_clip:
            where: dict[str, Any] = {"device": "cpu", "pin_memory": True} if program.host_logits else {"device": DEVICE}
            logits = {0: torch.zeros(HEADS, dtype=torch.float32, **where).add_(99.0)}
        before, plan = len(self._recorder.findings), optimizer._executor.plan
        optimizer.step(qk_logits=logits)
        if "metrics" in program.options and step < program.steps - 1:  # the last is waited for
            optimizer.metrics()
        if optimizer._executor.plan is plan and step >= 2 and self._is_steady(step):
            waits = (finding for finding in self._recorder.findings[before:] if finding.kind == "host wait")
            self.steady_waits += waits

    def _is_steady(self, step: int) -> bool:
        """Whether the step has nothing to prepare: no graph to capture, no new state to move."""
        return not any(param.missing for param in self._program.params) and all(
            at != step for at, _ in self._program.events
        )

    def _save(self) -> None:
        if isinstance(self._optimizer, DistMuon):
            self._optimizer.consolidate()
        _read(self._optimizer.state_dict()["state"])

    def _copy(self) -> None:
        _read(self._optimizer.__getstate__()["state"])

    def weights(self) -> list[Tensor]:
        """This rank's part of all weights."""
        locals_ = [local_part(param).detach() for param in self._params]
        return [(local.host_values if isinstance(local, TwinTensor) else local).clone() for local in locals_]


def _read(states: Any) -> None:
    """The host reads all state, as a checkpoint does."""
    for state in states.values():
        for value in state.values():
            if isinstance(value, Tensor):
                local_part(value).clone()


def check(program: Program, *, seed: int = 0) -> Outcome:
    """Runs a program and demands that it has no race, no use of freed memory, no wait of the host, and one order."""
    outcome = run_program(program, seed=seed)
    assert not outcome.errors, "\n".join([f"{len(outcome.errors)} findings in {program}", *outcome.errors[:20]])
    return outcome
