"""Where replicas are free to choose: whether they share one owner, or each computes for itself."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Mesh, ShardedMatrix
from .nodes import Crossings
from .owners import lightest_possible
from .tasks import PlannedParam, PlanOptions


def shared_params(params: Sequence[PlannedParam], options: PlanOptions, crossings: Crossings | None) -> frozenset[int]:
    """The parameters of which replicas share an owner.

    ``share`` and ``private`` of a parameter and ``options.replicas`` decide. What these leave open is decided for all
    matrices that have as many replicas on one mesh together: by the work and the bytes of the busiest rank, at least as
    many as any plan must give it. 96 matrices on a mesh of 8 replicas × 64 shards: shared, a rank owns one of them and
    sends it to 8 replicas; repeated, some rank owns two, and sends each to one.
    """
    if options.replicas != "auto":
        return frozenset(k for k, param in enumerate(params) if options.replicas == "share" and not param.private)
    chosen = {k for k, param in enumerate(params) if param.share and not param.private}
    alike: dict[tuple[Mesh, int], list[tuple[int, list[ShardedMatrix]]]] = {}
    for k, param in enumerate(params):
        matrices = [
            matrix for matrix in param.sharded_matrices(param.layouts[0]) if matrix.replicas > 1 and matrix.size
        ]
        if param.share is None and not param.private and matrices:
            alike.setdefault((param.layouts[0].mesh, matrices[0].replicas), []).append((k, matrices))
    for (mesh, replicas), members in alike.items():
        shared: list[float] = []
        repeated: list[float] = []
        costs: dict[tuple[int, ShardedMatrix, float], tuple[float, float]] = {}
        for k, matrices in members:
            for matrix in matrices:
                kind = params[k].flops, matrix, params[k].wire.itemsize
                if kind not in costs:
                    costs[kind] = (
                        options.cost.owning(*kind, crossings),
                        _cost_in_replica(params[k], matrix, options, crossings),
                    )
                shared.append(costs[kind][0])
                repeated.append(costs[kind][1])
        exchanges = 2 * options.cost.per_exchange(several_nodes=crossings is not None)
        if all(matrix.whole for _, matrix, _ in costs):  # each holder computes all of them, and nothing travels
            alone = sum(repeated)
        else:
            alone = lightest_possible(repeated, len(mesh.ranks) // replicas) + exchanges
        if lightest_possible(shared, len(mesh.ranks)) + exchanges <= alone:
            chosen.update(k for k, _ in members)
    return frozenset(chosen)


def _cost_in_replica(
    param: PlannedParam, matrix: ShardedMatrix, options: PlanOptions, crossings: Crossings | None
) -> float:
    if matrix.whole:
        return float(param.flops)
    return options.cost.owning(param.flops, matrix.separate_replicas[0], param.wire.itemsize, crossings)
