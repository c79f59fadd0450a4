"""The plan that a job has written, seen as a cluster: ``meshmuon plan --from-json``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ...plan import Plan
from ..predict.saved_plan import read_plan
from .cluster import StagePlan
from .description import ModelDescription, ModelParam
from .sharding import PlacedParam


@dataclass(frozen=True)
class JobSharding:
    """The layouts of a plan that exists."""

    plan: Plan
    placed: tuple[PlacedParam, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.plan.ranks)

    @property
    def text(self) -> str:
        """The meshes."""
        meshes = dict.fromkeys(item.mesh for item in self.placed)
        return f"the job's meshes {', '.join('×'.join(map(str, mesh.shape)) for mesh in meshes)}"

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        """All parameters, in one stage."""
        yield list(self.placed)


def read_job_plan(path: Path) -> Plan:
    """Reads what a job wrote with ``optimizer.plan().to_json()``."""
    try:
        plan = read_plan(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from-json {path} cannot be read: {error.strerror or error}.") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-json {path}: {error}") from None
    if not plan.tasks:
        raise ConfigError(f"--from-json {path}: the plan has no matrix.")
    return plan


def describe_job(plan: Plan, name: str) -> tuple[ModelDescription, JobSharding, StagePlan]:
    """The parameters of Muon in a plan, where they lie, and the plan as a stage. A plan does not know those of AdamW."""
    placed: dict[str, PlacedParam] = {}
    for param in plan.params:
        layout = param.layouts[0]
        described = ModelParam(param.name, layout.shape, use_muon=True, expert=bool(param.stack_dims))
        placed.setdefault(param.name, PlacedParam(described, layout.mesh, layout.placements))
    sharding = JobSharding(plan, tuple(placed.values()))
    model = ModelDescription(name, f"the matrices of {name}", name, tuple(item.param for item in placed.values()))
    positions = {name: position for position, name in enumerate(placed)}
    layouts = {param.name: param.layouts[0] for param in reversed(plan.params)}
    stage = StagePlan(
        plan=plan,
        placed=sharding.placed,
        layouts=tuple(layouts[name] for name in placed),
        planned=tuple(positions[param.name] for param in plan.params),
    )
    return model, sharding, stage


def is_on_cpu(plan: Plan) -> bool:
    """Whether the job stores and orthogonalises on CPUs."""
    lane = plan.params[0].lane
    return isinstance(lane, tuple) and lane[0] == "cpu"
