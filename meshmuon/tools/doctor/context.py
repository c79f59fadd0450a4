"""What a check is, what it is given (this rank, its device, meshes, a place to say what it is doing), and how it
ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from ...agree.node_view import node_name
from ...device import hardware_of
from ...errors import ConfigError
from ...torch_compat import available_backends

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Skipped if it does not apply here; not run if an earlier check broke the connection between ranks.
Status = Literal["passed", "failed", "skipped", "not run"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank found. It must survive JSON, since ranks tell each other."""

    detail: str  # what was checked or measured, in one sentence
    problems: Sequence[str] = ()  # what is wrong on this rank; the check fails if any rank has a problem
    figures: Mapping[str, Any] = field(default_factory=dict)  # of a measurement, the same on all ranks
    skipped: bool = False
    raised: bool = False  # an exception ended it on this rank, so that ranks may be out of step


@dataclass(frozen=True, slots=True)
class Check:
    """Something that all ranks do at the same time."""

    name: str  # for ``--only`` and ``--skip``
    title: str  # what it shows
    advice: str  # what to do if it fails; ``{name}`` in it stands for the name
    run: Callable[[Context], Finding]  # on every rank
    section: str = "checks"  # of the report
    fewest_ranks: int = 1  # with fewer, it is skipped
    advice_if_stuck: str = (  # if it does not come to its end on some rank
        "Look at the ranks that are named: their logs, their devices (nvidia-smi, dmesg) and their links. Then run it "
        "again with --only {name}, and with a larger --limit if it was only slow."
    )

    def advice_for(self, *, stuck: bool) -> str:
        """The advice as users read it; ``stuck`` if it has not come to its end on some rank."""
        return (self.advice_if_stuck if stuck else self.advice).replace("{name}", self.name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended on all ranks together."""

    check: Check
    status: Status
    seconds: float
    detail: str
    advice: str = ""  # empty unless it failed
    figures: Mapping[str, Any] = field(default_factory=dict)


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0-2 and 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    numbers = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def by_text(texts: Mapping[int, Sequence[str]]) -> str:
    """What ranks say, equal sentences once: "rank 0: a; ranks 1-3: b"."""
    ranks: dict[str, list[int]] = {}
    for rank, sentences in sorted(texts.items()):
        for sentence in sentences:
            ranks.setdefault(sentence, []).append(rank)
    return "; ".join(f"{ranks_text(saying)}: {sentence}" for sentence, saying in ranks.items())


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What the user asked for."""

    only: tuple[str, ...] = ()  # names of checks; empty for all
    skip: tuple[str, ...] = ()
    quick: bool = False  # fewer steps and shorter measurements
    shapes: tuple[tuple[int, int], ...] = ()  # of matrices whose rates are measured beside those of square ones
    limit: float = 60.0  # seconds that a check may take
    folder: Path | None = None  # which all ranks see, for checkpoints
    device: str | None = None  # type of device; by default the accelerator, if there is one
    backend: str | None = None  # of the process group; by default torch's choice for the device
    json_file: Path | None = None
    save_file: Path | None = None


def _number(name: str, default: int, *, at_least: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ConfigError(
            f"{name}={text!r} in the environment must be a whole number of at least {at_least}. Use torchrun, or "
            "unset it."
        )
    return int(text)


def own_device(kind: str | None, local_rank: int) -> torch.device:
    """This rank's device of a type; of the accelerator unless told otherwise."""
    count = 0
    with suppress(RuntimeError):  # torch knows no such device, or not how to count such devices
        device = torch.accelerator.current_accelerator(check_available=True) if kind is None else torch.device(kind)
        if device is None or device == torch.device("cpu"):
            return torch.device("cpu")
        kind = kind or device.type
        count = 0 if ":" in kind or kind == "meta" else hardware_of(device).count()
    if not count:
        raise ConfigError(
            f"--device {kind}: torch sees no such device here. Write a type alone, such as cpu or cuda: LOCAL_RANK "
            "says which of them a rank takes."
        )
    return torch.device(str(kind), local_rank % count)


def check_backend(backend: str, device_type: str) -> None:
    """Refuses a backend that is not there, or that does not move the memory of the devices; "cpu:gloo,cuda:nccl" is
    allowed.
    """
    known, pairs = available_backends(), [part.split(":") for part in backend.lower().split(",")]
    if ":" in backend:
        is_whole = all(len(pair) == 2 and pair[1] in known for pair in pairs)
        moved = [pair[0] for pair in pairs] if is_whole else []
    else:
        moved = list(known.get(backend.lower(), ()))
    if moved.count(device_type) != 1 or len(set(moved)) != len(moved):
        raise ConfigError(
            f"--backend {backend} does not move the memory of {device_type}, and the ranks are there. Leave it out, "
            f"or write one of those that this torch has ({', '.join(known) or 'none'}), or one DEVICE:BACKEND for "
            "each type of device, such as cpu:gloo,cuda:nccl; --device chooses other devices."
        )


@dataclass(eq=False)
class Context:
    """One rank's surroundings during the checks."""

    options: DoctorOptions
    rank: int
    world: int
    store: Any  # through which ranks talk: one of torch's stores, whose class only a private module declares
    device: torch.device
    node: str  # equal for ranks that share a machine
    phase: str = ""  # what the rank is doing, for reports of hangs; another thread reads it
    figures: dict[str, Any] = field(default_factory=dict)  # what the measurements so far have found, by name

    def __post_init__(self) -> None:
        self.nodes = [self.node] * self.world  # of each rank; known once the ranks have met
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    @classmethod
    def from_environment(cls, options: DoctorOptions) -> Context:
        """What a launcher's environment describes; one rank alone without a launcher."""
        world = _number("WORLD_SIZE", 1, at_least=1)
        rank = _number("RANK", 0, at_least=0)
        if rank >= world:
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world}. Launch with torchrun, which sets both.")
        node = node_name(rank, world)
        device = own_device(options.device, _number("LOCAL_RANK", 0, at_least=0))
        if options.backend is not None:
            check_backend(options.backend, device.type)
        if world == 1 and "MASTER_ADDR" not in os.environ:
            return cls(options, 0, 1, dist.HashStore(), device, node)  # type: ignore[attr-defined]
        met = dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=options.limit))  # type: ignore[attr-defined]
        try:
            store, rank, world = next(met)
        except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing, or no port
            raise ConfigError(
                f"{error}. Launch with torchrun, or set MASTER_ADDR and MASTER_PORT on all ranks."
            ) from None
        return cls(options, rank, world, store, device, node)

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Names what happens inside; the name stays if it fails."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def mesh(self, *shape: int) -> DeviceMesh:
        """A mesh over all ranks, made once for each shape; its axes are called a, b, c."""
        from torch.distributed.device_mesh import init_device_mesh

        if shape not in self._meshes:
            with self.doing(f"making a mesh of {'×'.join(map(str, shape))} ranks"):
                names = ("a", "b", "c")[: len(shape)]
                self._meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape]

    def two_axes(self) -> tuple[int, int]:
        """All ranks as two axes, the first as short as possible but not of one rank, if there are more."""
        first = next((count for count in range(2, self.world + 1) if self.world % count == 0), 1)
        return first, self.world // first

    @property
    def exact(self) -> bool:
        """Whether a layout must give one device's bits. Elsewhere products may depend on what shares a batch."""
        return self.device.type == "cpu"
