"""Random programs: a few training steps of Muon or DistMuon on a random mesh, as a user's script would make them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

HEAD_DIM, HEADS = 2, 3


@dataclass(frozen=True)
class ProgramParam:
    """A parameter: its name, which decides about experts and QK-clip, its global shape and where it lies."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Any, ...] | None = None  # None: a plain tensor, the same on all ranks
    dtype: torch.dtype = torch.float32
    use_muon: bool = True
    split: tuple[int, ...] | None = None  # of a fused weight
    missing: tuple[tuple[int, int], ...] = ()  # (step, rank) without a gradient; a rank of -1 is every rank
    in_host: bool = False  # its shards are in host memory, as FSDP2's CPUOffloadPolicy leaves them


@dataclass(frozen=True)
class Program:
    """What all ranks do."""

    mesh: tuple[int, ...]
    params: tuple[ProgramParam, ...]
    optimizer: str = "Muon"
    options: dict[str, Any] = field(default_factory=dict)
    kernels: str = ""  # MESHMUON_KERNELS in the environment
    steps: int = 3
    lr: float = 0.01
    device_lr: bool = False  # lr is a tensor on the device
    scaled: bool = False  # by a GradScaler, which has found an infinity in the second step
    nonfinite_step: int | None = None  # in which a gradient is not finite
    clips: bool = False  # gradients are clipped before each step
    qk_clip: bool = False
    host_logits: bool = False  # the logits are in pinned host memory
    events: tuple[tuple[int, str], ...] = ()  # what happens before which step: see ``EVENTS``
    own_stream: bool = False  # the user trains on a stream of their own
    fsdp_grads: bool = False  # gradients are made on another stream, as FSDP2's reduce-scatters make them

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()


EVENTS = {
    "offload": "state is offloaded from now on",
    "onload": "state is brought back for good",
    "grow": "a param group is added",
    "save": "a state_dict is made, and read",
    "copy": "the optimizer is copied, and its state read",
    "prepare": "the optimizer prepares a step",
}
PAIRS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
MESHES = [(1,), (2,), (2,), (3,), (4,), (2, 2), (2, 2), (1, 3), (3, 2), (2, 1, 2)]
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12]


def random_program(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    program = Program(mesh=rng.choice(MESHES), params=(), optimizer=rng.choice(["Muon", "Muon", "Muon", "DistMuon"]))
    options = _options(rng, program)
    params = [_param(rng, program, k) for k in range(rng.randint(1, 6))]
    qk_clip = rng.random() < 0.3
    if qk_clip:
        params += [
            replace(
                _param(rng, program, k, dims=2),
                name=f"layers.0.self_attn.{name}_proj.weight",
                shape=(HEADS * HEAD_DIM, 5),
            )
            for k, name in enumerate("qk")
        ]
        params = [replace(param, split=None) if "_proj" in param.name else param for param in params]
        options["clip_config"] = {"head_dim": HEAD_DIM, "threshold": 10.0}
    if all(not param.use_muon for param in params):
        params[0] = replace(params[0], use_muon=True, shape=(6, 4))
    if any(param.dtype == torch.bfloat16 for param in params) and rng.random() < 0.5:
        options["rounding"] = "stochastic"
    if any(param.dtype == torch.float64 for param in params):
        options.pop("comm_dtype", None)
    drawn = replace(
        program,
        params=tuple(params),
        options=options,
        device_lr=rng.random() < 0.25,
        scaled=rng.random() < 0.25,
        nonfinite_step=rng.choice([None, None, 0, 1]),
        clips=rng.random() < 0.5,
        qk_clip=qk_clip,
        host_logits=rng.random() < 0.5,
        events=_events(rng),
        own_stream=rng.random() < 0.2,
        fsdp_grads=rng.random() < 0.3,
    )
    # Drawn last, so that the programs are otherwise those that they were before there were metrics and pairs of dtypes.
    every, kernels = rng.choice([None, 1, 2]), rng.choice(["", "", "torch"])
    measured = {} if every is None else {"metrics": every}
    prepares: tuple[tuple[int, str], ...] = ((rng.choice([0, 0, 2]), "prepare"),) if rng.random() < 0.4 else ()
    added: dict[str, Any] = {**measured}
    if program.optimizer == "Muon" and rng.random() < 0.3:
        added["comm_dtype"] = rng.choice(PAIRS)
    return replace(drawn, options={**drawn.options, **added}, kernels=kernels, events=(*drawn.events, *prepares))


def in_host_memory(program: Program, seed: int) -> Program:
    """The program with some or all of its shards in host memory, where nothing can be measured."""
    program = replace(program, options={name: value for name, value in program.options.items() if name != "metrics"})
    rng = random.Random(seed)
    share = rng.choice([1.0, 0.5])
    params = tuple(
        replace(param, in_host=param.placements is not None and rng.random() < share) for param in program.params
    )
    return replace(program, params=params)


def _options(rng: random.Random, program: Program) -> dict[str, Any]:
    options: dict[str, Any] = {
        "warmup_step": rng.randrange(6),
        "chunk_size": rng.choice([-1, 1, 1, 2]),
        "memory_budget": rng.choice([64 * 2**20, 64 * 2**20, rng.randint(1, 2000)]),
        "nesterov": rng.random() < 0.5,
        "none_grad": rng.random() < 0.6,
        "scheme": rng.choice(["keller", "polar_express", "auto"]),
        "rule": rng.choice(["plain", "plain", "normuon", "muon_plus", "muoneq"]),
        "cautious_weight_decay": rng.random() < 0.2,
        "momentum_dtype": rng.choice([None, None, torch.float32, torch.bfloat16]),
        "nonfinite": rng.choice(["propagate", "skip", "skip"]),
        "cuda_graphs": rng.random() < 0.3,
        "deterministic": rng.random() < 0.2,
        "ns_steps": 2,  # the order of work does not depend on it
        "allow_inactive": True,  # gradients may all be missing for a while
    }
    if rng.random() < 0.15:
        options |= {"scheme": "halley", "compute_dtype": torch.float32}
    if program.optimizer == "Muon":
        options["replicas"] = rng.choice(["auto", "share", "repeat"])
        if rng.random() < 0.3:
            options["comm_dtype"] = torch.float32
    return options


def _events(rng: random.Random) -> tuple[tuple[int, str], ...]:
    events: list[tuple[int, str]] = []
    if rng.random() < 0.4:
        begin = rng.randrange(3)
        events.append((begin, "offload"))
        if rng.random() < 0.4:
            events.append((begin + 1, "onload"))
    events += [(2, "grow")] if rng.random() < 0.2 else []
    events += [(rng.choice([2, 3]), name) for name in ("save", "copy") if rng.random() < 0.3]
    return tuple(events)


def _param(rng: random.Random, program: Program, k: int, dims: int | None = None) -> ProgramParam:
    use_muon = rng.random() < 0.8 or dims is not None
    dims = dims or (rng.choice([2, 2, 3]) if use_muon else rng.choice([1, 2]))
    shape = tuple(rng.choice(SIZES) for _ in range(dims))
    plain = program.optimizer == "DistMuon" or rng.random() < 0.15
    split = None
    if use_muon and dims == 2 and rng.random() < 0.4:
        parts = tuple(rng.randint(1, 5) for _ in range(rng.randint(2, 3)))
        shape, split = (sum(parts), shape[1]), parts
    placements = None if plain else tuple(_placement(rng, dims) for _ in program.mesh)
    missing: tuple[tuple[int, int], ...] = ()
    if rng.random() < 0.3:
        replicated = placements is None or any(isinstance(placement, Replicate) for placement in placements)
        ranks = [-1] if replicated else [-1, rng.randrange(program.world)]  # replicas must have equal gradients
        missing = tuple({(rng.randrange(3), rng.choice(ranks)) for _ in range(2)})
    return ProgramParam(
        name=f"layers.{k}.experts.weight" if dims == 3 else f"layers.{k}.weight",
        shape=shape,
        placements=placements,
        dtype=rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.float64]),
        use_muon=use_muon,
        split=split,
        missing=missing,
    )


def _placement(rng: random.Random, dims: int) -> Any:
    kind, dim = rng.random(), rng.randrange(dims) if rng.random() < 0.5 else 0
    if kind < 0.25:
        return Replicate()
    return Shard(dim) if kind < 0.85 else _StridedShard(dim, split_factor=2)
