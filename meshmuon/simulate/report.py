"""What ``meshmuon plan`` reports, as plain data. ``Report.to_json`` is the content of ``--json``; docs/plan.md describes it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

FORMAT, VERSION = "meshmuon plan report", 1


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The model."""

    name: str
    title: str
    source: str
    parameters: int
    active_parameters: int  # that a token uses
    muon_parameters: int
    adamw_parameters: int
    matrices: int  # that Muon orthogonalises, each expert and each part of a fused weight by itself
    layers: int
    experts: int


@dataclass(frozen=True, slots=True)
class MeshFigures:
    """The mesh and the nodes."""

    text: str
    axes: dict[str, int]  # by name; empty for a layout from a file
    ranks: int
    nodes: int
    ranks_per_node: int
    relayed: bool  # exchanges between nodes go in two hops, because ranks would have more than max_peers peers


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The machine."""

    name: str
    title: str
    source: str
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class OptionFigures:
    """The options of the optimizer."""

    replicas: str
    comm_dtype: str
    compute_dtype: str
    param_dtype: str
    scheme: str
    memory_budget: int
    waves_ahead: int


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One pipeline stage; the whole model if there are no stages."""

    stage: int
    first_rank: int
    last_rank: int
    digest: str  # of its plan, as a real optimizer would have it
    waves: int
    waves_in_flight: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Seconds of an optimizer step, on its slowest rank."""

    seconds: float
    orthogonalise: float  # on the rank that orthogonalises longest
    exchange: float  # in which the links of the slowest stage are busy
    exchange_hidden: float  # of these, while the slowest rank works on something else
    exchange_waited_for: float  # of these, while it waits
    elementwise: float  # momentum and update of Muon
    adamw: float
    host: float  # in which the host prepares the step; it runs ahead of the device
    flops: float  # of all ranks
    tokens_per_step: int
    mfu: float  # the assumed use of the model's FLOPs in forward and backward
    training_seconds: float  # forward and backward of that many tokens
    share: float  # of the optimizer in forward, backward and optimizer step together


@dataclass(frozen=True, slots=True)
class BalanceFigures:
    """How evenly the work is divided."""

    heaviest_rank: int
    heaviest_over_mean: float  # cost of the heaviest rank ÷ mean
    heaviest_over_bound: float  # the same ÷ what no plan of whole matrices can avoid
    idle_ranks: int  # ranks that orthogonalise nothing
    matrix: str  # the most expensive matrix of the heaviest rank
    matrix_shape: tuple[int, int]
    matrix_share: float  # of the heaviest rank's cost


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes of one kind of memory."""

    kind: str
    most: int  # on the rank that has most of it
    mean: float
    adamw_most: int  # the same if AdamW stepped everything
    estimated: bool


@dataclass(frozen=True, slots=True)
class ExchangeFigures:
    """One exchange: the gather or the scatter of a wave."""

    stage: int
    wave: int
    kind: str  # "gather" or "scatter"
    dtypes: str
    matrices: int
    seconds: float
    bytes_inside: int  # nodes, sent by all ranks
    bytes_between: int  # nodes
    most_peers: int  # of a rank
    mean_peers: float
    messages: int
    mean_message: float  # bytes
    largest_message: int  # bytes


@dataclass(frozen=True, slots=True)
class RankColumns:
    """One entry per rank in every list."""

    rank: list[int] = field(default_factory=list)
    matrices: list[int] = field(default_factory=list)  # that it orthogonalises
    flops: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # until it has ended the step
    orthogonalise_seconds: list[float] = field(default_factory=list)
    waited_seconds: list[float] = field(default_factory=list)
    sent_inside: list[int] = field(default_factory=list)  # bytes per step, to ranks of its node
    sent_between: list[int] = field(default_factory=list)
    received_inside: list[int] = field(default_factory=list)
    received_between: list[int] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)  # ranks with which it exchanges anything
    parameters: list[int] = field(default_factory=list)  # bytes of memory, as the next ones
    gradients: list[int] = field(default_factory=list)
    momentum: list[int] = field(default_factory=list)
    adamw_state: list[int] = field(default_factory=list)
    exchange_buffers: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # their sum
    adamw_alone: list[int] = field(default_factory=list)  # what AdamW would need in the place of Muon


@dataclass(frozen=True, slots=True)
class ParamFigures:
    """Parameters that differ in the number of their layer only."""

    name: str  # with * for the number
    part: int | None  # of a fused weight, which of its parts; None if it is not fused
    shape: tuple[int, ...]
    count: int
    optimizer: str  # "muon" or "adamw"
    layout: str
    matrices: int  # in all of them
    matrix_shape: tuple[int, int] | None
    how: str  # "one owner", "shared by replicas", "local", "every holder"; empty for AdamW
    flops: float  # of all matrices
    owners: int  # ranks that own some of them
    bytes_sent: int  # per step


@dataclass(frozen=True, slots=True)
class BlockTraffic:
    """Bytes per step between blocks of consecutive ranks: nodes, several nodes where there are many, or ranks of one node."""

    ranks_per_block: int
    bytes: list[list[int]]  # [sender][receiver]


@dataclass(frozen=True, slots=True)
class SpanFigures:
    """Something that a rank does."""

    rank: int
    track: str  # "device" or "links"
    name: str
    wave: int | None
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ChoiceFigures:
    """The plan with one thing changed."""

    label: str
    chosen: bool  # whether this is what the report is about
    seconds: float
    heaviest_over_mean: float
    bytes_sent: int  # of the rank that sends most
    bytes_between: int  # of the rank that sends most between nodes
    most_peers: int
    buffers: int  # most bytes of exchange buffers
    memory: int  # most bytes of a rank
    share: float
    refused: str = ""  # why it cannot be planned


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """A prediction beside what a run has measured."""

    label: str
    predicted: float  # seconds
    measured: float  # seconds


@dataclass(frozen=True, slots=True)
class Report:
    """Everything. ``choices`` and ``meshes`` are empty unless asked for, ``measured`` unless there was a run."""

    command: str
    model: ModelFigures
    mesh: MeshFigures
    machine: MachineFigures
    options: OptionFigures
    stages: list[StageFigures]
    step: StepFigures
    balance: BalanceFigures
    memory: list[MemoryFigures]
    exchanges: list[ExchangeFigures]
    ranks: RankColumns
    params: list[ParamFigures]
    traffic: list[BlockTraffic]  # one per stage
    timeline: list[SpanFigures]  # of the slowest and of the fastest rank
    advice: list[str]
    choices: list[ChoiceFigures] = field(default_factory=list)
    meshes: list[ChoiceFigures] = field(default_factory=list)
    measured: list[MeasuredFigures] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The content of a file."""
        return {"format": FORMAT, "version": VERSION, **_content(self)}


def _content(figures: Any) -> dict[str, Any]:
    """The fields of a class of figures. ``dataclasses.asdict`` would copy every number of thousands of ranks by itself."""
    return {entry.name: _value(getattr(figures, entry.name)) for entry in fields(figures)}


def _value(value: Any) -> Any:
    if is_dataclass(value):
        return _content(value)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [_content(row) for row in value]
    return value
