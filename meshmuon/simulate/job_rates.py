"""A machine as a prediction sees it, and how many elements every rank has for AdamW and for Muon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout, coordinates, length
from ..plan import Elementwise, Link, Prediction, predict
from .cluster import MuonOptions, StagePlan
from .machines import Machine, elementwise_seconds
from .rank_index import RankIndex


@dataclass(frozen=True)
class JobRates:
    """The rates of a machine for the dtypes of a job: what ``meshmuon.plan``'s predictions ask for.

    The latency of an exchange is that of the slowest link in it.
    """

    machine: Machine
    compute_dtype: str
    elementwise: Elementwise
    exchange: Link  # between nodes, if the job has several

    @classmethod
    def of(cls, stage: StagePlan, machine: Machine, options: MuonOptions) -> JobRates:
        """The rates for one stage."""
        wire = max((param.itemsize for param in stage.plan.params), default=4)
        exchange = machine.inside if stage.plan.options.nodes is None else machine.between
        compute_dtype = str(stage.compute_dtype).removeprefix("torch.")
        weight, momentum = options.param_dtype.itemsize, (options.momentum_dtype or torch.float32).itemsize
        elementwise = elementwise_seconds(machine.memory_bytes_per_second, weight=weight, momentum=momentum, wire=wire)
        return cls(machine, compute_dtype, elementwise, exchange)

    @property
    def device(self) -> str:
        """Type of the device."""
        return self.machine.device

    @property
    def inside(self) -> Link:
        """The link between two ranks of a node."""
        return self.machine.inside

    @property
    def between(self) -> Link:
        """The link between ranks of different nodes."""
        return self.machine.between

    @property
    def exchange_busy(self) -> float:
        """1 where cores send, 0 where links do."""
        return float(self.machine.device == "cpu")

    @property
    def seconds_per_peer(self) -> float:
        """What each further rank adds to an exchange."""
        return self.machine.seconds_per_peer

    @property
    def copies(self) -> Link | None:
        """Weights are on the device."""
        return None

    @property
    def host_seconds_per_matrix(self) -> float:
        """What each matrix takes the host."""
        return self.machine.host_seconds_per_matrix

    @property
    def host_seconds_per_step(self) -> float:
        """What a step takes the host beside its matrices."""
        return self.machine.host_seconds_per_step

    def orthogonalisation_rate(self, size: int) -> float:
        """FLOPs per second on matrices whose shorter side is ``size``."""
        return self.machine.orthogonalise_rate(size, self.compute_dtype)

    def seconds_per_element(self, kind: str) -> float:
        """Of a kind of elementwise work, by its name in ``Elementwise``."""
        return float(getattr(self.elementwise, kind))


def predict_stage(stage: StagePlan, machine: Machine, options: MuonOptions) -> Prediction:
    """A step of one stage. What ``meshmuon doctor`` measured counts as in its own predictions."""
    assumed = JobRates.of(stage, machine, options)
    figures = (assumed.exchange, assumed.seconds_per_peer, assumed.elementwise)
    measured = machine.calibration and machine.calibration.completed(*figures)
    elements = local_sizes(stage, muon=False).tolist()
    return predict(stage.plan, measured or assumed, adamw_elements=dict(zip(stage.plan.ranks, elements, strict=True)))


def local_sizes(stage: StagePlan, *, muon: bool) -> Tensor:
    """(ranks,): elements that each rank holds of the parameters of Muon, or of those of AdamW."""
    index = RankIndex(stage.plan.ranks)
    total, repeats = torch.zeros(len(index), dtype=torch.int64), dict[Layout, int]()
    for item, layout in zip(stage.placed, stage.layouts, strict=True):
        if item.param.use_muon == muon:
            repeats[layout] = repeats.get(layout, 0) + 1
    for layout, times in repeats.items():
        sizes = _held_elements(layout)
        total.index_add_(0, index.tensor(layout.mesh.ranks), sizes * times)
    return total


def _held_elements(layout: Layout) -> Tensor:
    lengths = [torch.tensor([length(ranges) for ranges in layout.cuts(dim)]) for dim in range(len(layout.shape))]
    places = torch.tensor(list(coordinates(layout.mesh).values()))
    elements = torch.ones(len(layout.mesh.ranks), dtype=torch.int64)
    for dim, sizes in enumerate(lengths):
        part = torch.zeros(len(layout.mesh.ranks), dtype=torch.int64)
        for axis in layout.axes(dim):
            part = part * layout.mesh.shape[axis] + places[:, axis]
        elements *= sizes[part]
    return elements
