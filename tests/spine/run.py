"""Runs a case on this rank through public names alone: constructor, ``prepare``, ``step``, ``state_dict``, ``plan``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import DistMuon, Muon

from .case import Case, Param, initial, of_rank
from .case import gradient as whole_gradient

DEFAULTS = {"lr": 0.015, "weight_decay": 0.1, "expert_keys": ["experts"], "conv": "flatten", "allow_inactive": True}


@dataclass
class Shards:
    """What a rank holds of a tensor: the flat indices of its elements in the whole, and their values."""

    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor


@dataclass
class Outcome:
    """What a run leaves on a rank, by (parameter, key of its state); the weight has the key "weight"."""

    tensors: dict[tuple[str, str], Shards] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # equal on all ranks


def build_optimizer(case: Case, params: Sequence[nn.Parameter]) -> Muon:
    """The only place where the spine makes an optimizer."""
    groups: dict[tuple[bool, str], dict[str, Any]] = {}
    for param, tensor in zip(case.params, params, strict=True):
        muon = param.kind != "adamw"
        fresh = {"params": [], "names": [], "use_muon": muon, **case.groups.get(param.group, {})}
        group = groups.setdefault((muon, param.group), fresh)
        group["params"].append(tensor)
        group["names"].append(param.name)
    options = {**DEFAULTS, **case.options}
    if entries := {param.name: dict(param.entry) for param in case.params if param.entry}:
        options["matrices"] = entries
    if case.layout.averages:
        return DistMuon(list(groups.values()), **{"adjust_lr_fn": "match_rms_adamw", **options})
    if case.layout.divided:
        options["replica_group"] = dist.group.WORLD
    return Muon(list(groups.values()), **options)


class Run:
    """A case on this rank: the parameters, the optimizer, and what happens to them step by step."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(case.threads)
        self.case, self.params = case, _parameters(case)
        self.optimizer = build_optimizer(case, self.params)
        self._scaler = None if case.loss_scale is None else torch.amp.GradScaler("cpu", init_scale=case.loss_scale)
        self._offloaded = False

    def steps(self, numbers: range) -> None:
        for step in numbers:
            self._before(step)
            logits: dict[str, Any] = {}
            if step in self.case.logits:
                logits["qk_logits"] = {0: torch.tensor(self.case.logits[step])}
            scaler = self._scaler
            _give_gradients(
                self.case, self.params, step, 1.0 if scaler is None else scaler.scale(torch.ones(())).item()
            )
            if scaler is None:
                self.optimizer.step(**logits)
                continue
            scaler.step(self.optimizer, **logits)
            spoilt = any(at == step for at, *_ in self.case.spoilt)
            scaler.update(scaler.get_scale() / 2 if spoilt else scaler.get_scale())

    def _before(self, step: int) -> None:
        if step == self.case.reloads:
            self._reload()
        if step in self.case.offloads:
            self._offloaded = not self._offloaded
            (self.optimizer.turn_on_cpu_offload if self._offloaded else self.optimizer.turn_off_cpu_offload)()
        if self.case.lrs:
            for group in self.optimizer.param_groups:
                group["lr"] = self.case.lrs[step]

    def _reload(self) -> None:
        state = self.state_dict()
        self.optimizer = build_optimizer(self.case, self.params)
        self.optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.optimizer, DistMuon):
            self.optimizer.consolidate()
        return self.optimizer.state_dict()

    def outcome(self) -> Outcome:
        outcome = Outcome(facts={"skipped steps": self.optimizer.skipped_steps, "digest": self.optimizer.plan().digest})
        saved = self.state_dict()
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        for param, tensor in zip(self.case.params, self.params, strict=True):
            outcome.tensors[param.name, "weight"] = shards_of(tensor.detach())
            for key, value in saved["state"].get(names.index(param.name), {}).items():
                outcome.tensors[param.name, key] = shards_of(value)
        return outcome


def run(case: Case) -> Outcome:
    """All steps of a case on this rank."""
    running = Run(case)
    if case.prepares:
        running.optimizer.prepare()
    running.steps(range(case.steps))
    return running.outcome()


def _parameters(case: Case) -> list[nn.Parameter]:
    if case.layout.wrapped:
        return list(_wrapped(case))
    meshes = case.layout.build_meshes()
    return [nn.Parameter(_placed(case, meshes, param, initial(case, k))) for k, param in enumerate(case.params)]


def _wrapped(case: Case) -> Iterator[nn.Parameter]:
    """As torch's FSDP2 makes them, each in a module of its own, since a module has one dtype."""
    mesh = next(iter(case.layout.build_meshes().values()))
    for k in range(len(case.params)):
        module = nn.ParameterList([nn.Parameter(initial(case, k))])
        fully_shard(module, mesh=mesh)
        yield module[0]


def _placed(case: Case, meshes: Mapping[str, DeviceMesh], param: Param, whole: Tensor) -> Tensor:
    """Torch itself cuts a whole tensor."""
    place = case.layout.place(param)
    return whole if place is None else distribute_tensor(whole, meshes[place[0]], place[1], src_data_rank=None)


def _give_gradients(case: Case, params: Sequence[nn.Parameter], step: int, loss_scale: float) -> None:
    rank = dist.get_rank() if dist.is_initialized() else None
    for k, (param, tensor) in enumerate(zip(case.params, params, strict=True)):
        tensor.requires_grad_(step not in param.frozen)
        whole = whole_gradient(case, step, k) if rank is None else of_rank(case, step, k, rank)
        if whole is None or (step, rank) in param.lacking:
            tensor.grad = None
        elif isinstance(tensor, DTensor):
            tensor.grad = distribute_tensor(
                whole * loss_scale, tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        else:
            tensor.grad = whole * loss_scale


def shards_of(tensor: Tensor) -> Shards:
    indices = torch.arange(tensor.numel()).view(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        indices = distribute_tensor(indices, mesh, placements, src_data_rank=None).to_local()
        values = tensor.to_local()
    else:
        values = tensor
    return Shards(tuple(tensor.shape), indices.flatten(), values.detach().clone().flatten())


def assembled(ranks: Sequence[Outcome]) -> dict[tuple[str, str], Tensor]:
    """Whole tensors from the shards of all ranks, which must cover them, and agree wherever several hold an element."""
    whole: dict[tuple[str, str], Tensor] = {}
    for name in ranks[0].tensors:
        parts = [outcome.tensors[name] for outcome in ranks]
        assert all(part.shape == parts[0].shape for part in parts), f"{name}: ranks have other shapes"
        size = math.prod(parts[0].shape)
        value, seen = parts[0].values.new_zeros(size), torch.zeros(size, dtype=torch.bool)
        for rank, part in enumerate(parts):
            again = seen[part.indices]
            same = same_bits(value[part.indices][again], part.values[again])
            assert same, f"{' '.join(name)}: rank {rank} differs from the other holders of its elements"
            value[part.indices], seen[part.indices] = part.values, True
        assert bool(seen.all()), f"{name}: no rank holds some elements"
        whole[name] = value.view(parts[0].shape)
    return whole


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The same dtype, shape and bytes: also the signs of zeros."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
