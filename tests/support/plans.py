"""Random parameters on random meshes, and the plans of them."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from meshmuon.layout import Layout, Mesh, Placement, Sharded
from meshmuon.plan import CostModel, Nodes, Plan, PlannedParam, PlanOptions, cost_model_for, make_plan
from tests.support.layouts import ours, random_mesh, random_placement, random_shape

KINDS = [(0, 2), (0, 2), (0, 3), (1, 3), (1, 3)]
COSTS = [cost_model_for("cpu"), cost_model_for("cuda"), CostModel(0.0, 1.0), CostModel(1.0, 1.0)]


def random_entries(rng: random.Random) -> list[PlannedParam]:
    entries: list[PlannedParam] = []
    mesh = random_mesh(rng)
    for k in range(rng.randint(1, 6)):
        stack_dims, dims = rng.choice(KINDS)
        if rng.random() < 0.25:
            mesh = random_mesh(rng)
        meshes = [mesh]
        if rng.random() < 0.15:
            meshes.append(Mesh(mesh.shape, tuple(100 + rank for rank in mesh.ranks)))
        placements = tuple(ours(random_placement(rng, dims)) for _ in mesh.shape)
        shape = random_shape(rng, dims)
        itemsize = rng.choice([2, 4])
        entry = PlannedParam(
            name=f"p{k}",
            layouts=tuple(Layout(shape, copy, placements) for copy in meshes),
            stack_dims=stack_dims,
            lane=("cpu", itemsize),
            itemsize=itemsize,
            flops=rng.choice([0, 1, 100, 10_000, 10**9]),
            share=rng.choice([None, None, None, True, False]),
        )
        entries += [replace(entry, name=f"p{k}.{twin}") for twin in range(rng.choice([1, 1, 2, 4]))]
    return entries


def random_options(rng: random.Random, replicas: str | None = None) -> PlanOptions:
    return PlanOptions(
        cost=rng.choice(COSTS),
        replicas=replicas or rng.choice(["auto", "share", "repeat"]),
        chunk_size=rng.choice([-1, -1, 1, 2, 5]),
        budget=rng.choice([1, 100, 1000, 2**20]),
        in_flight=rng.randint(1, 6),
    )


def ranks_of(params: list[PlannedParam]) -> list[int]:
    return sorted({rank for param in params for layout in param.layouts for rank in layout.mesh.ranks})


def random_nodes(rng: random.Random, ranks: list[int]) -> Nodes:
    """In order of ranks or in turns, of any size, or at random."""
    size, count = rng.randint(1, max(1, len(ranks))), rng.randint(1, 4)
    places = range(len(ranks))
    nodes = rng.choice(
        [[k // size for k in places], [k % count for k in places], [rng.randrange(count) for _ in places]]
    )
    return Nodes.of(dict(zip(ranks, nodes, strict=True)))


def random_plan(seed: int, replicas: str | None = None) -> Plan:
    rng = random.Random(seed)
    return make_plan(random_entries(rng), random_options(rng, replicas))


seeds = st.integers(0, 2**32)
plans = seeds.map(random_plan)


def line(ranks: int) -> Mesh:
    return Mesh((ranks,), tuple(range(ranks)))


def entry(
    name: str = "p",
    shape: tuple[int, ...] = (8, 6),
    mesh: Mesh | None = None,
    placements: tuple[Placement, ...] = (Sharded(0),),
    **options: object,
) -> PlannedParam:
    """A parameter sharded over four ranks unless told otherwise."""
    facts = {"stack_dims": 0, "lane": "lane", "itemsize": 2, "flops": 1000, **options}
    return PlannedParam(name, (Layout(shape, mesh or line(4), placements),), **facts)  # type: ignore[arg-type]


def options_for(**changes: object) -> PlanOptions:
    return PlanOptions(**{"cost": cost_model_for("cpu"), **changes})  # type: ignore[arg-type]
