"""Everything that meshmuon uses of torch that is private, or that differs between versions of torch.

Each entry says why it is needed and in which versions it was seen; ``tests/test_torch_compat.py`` has a test for each that fails
when torch changes under it. ``torch._foreach_*`` is not here: in spite of the underscore torch documents these functions.

What is private is imported inside functions only, so that meshmuon can be imported whatever torch has renamed, and without
``torch.distributed``. Loading ``torch.distributed.tensor`` also costs a second, which single-device users need not spend.
"""

from __future__ import annotations

import copy
import math
import operator
import re
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import UnsupportedError, UntestedTorchWarning

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "NEWEST",
    "OLDEST",
    "SHARD_FACTS",
    "SHARD_GRADIENT_FACTS",
    "FSDP2Weights",
    "as_dtensor",
    "backend_of",
    "cut_in_mesh_order",
    "device_has_foreach",
    "dtensor_like",
    "flex_gives_max_scores",
    "foreach_is_faster",
    "gloo_of",
    "group_names",
    "has_compiled",
    "has_local_part",
    "local_part",
    "mark_overwritten",
    "mesh_slices",
    "new_named_group",
    "own_graph_per_shape",
    "same_layout",
    "spec_of",
    "split_factor",
    "strided_shards_nest",
    "tf32_allowed",
    "timeout_of",
    "unwrapped",
    "warn_if_untested",
    "without_modes",
    "zeros_like",
]

# ---------------------------------------------------------------------------------------------------------------- versions

OLDEST, NEWEST = "2.9.1", "2.15.0"
"""The versions between which tests are run (docs/compatibility.md says which); ``pyproject.toml`` and README name the same."""

_warned = False


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def warn_if_untested() -> None:
    """Warns once per process if this torch is outside of what is tested. Only sharded steps depend on it: they call this."""
    global _warned
    here = _release(torch.__version__)
    if _warned or (_release(OLDEST) <= here and here[:2] <= _release(NEWEST)[:2]):
        return
    _warned = True
    warnings.warn(
        f"meshmuon is tested with torch {OLDEST} to {NEWEST}, and this is torch {torch.__version__}. Sharded steps read private "
        "parts of DTensor, DeviceMesh and process groups, which this version may have changed: compare some steps with "
        "use_distributed_muon=True, which leaves layouts to torch, or use a tested version.",
        UntestedTorchWarning,
        stacklevel=2,
    )


# ---------------------------------------------------------------------------------------------------------------- DTensors

# ``DTensor._local_tensor`` and ``_spec``: ``to_local()`` makes a new view at every call where gradients are recorded, and nothing
# public names all of a layout. torch replaces a spec rather than changing it, and equal specs are the same layout. 2.9 to 2.15.
SHARD_FACTS = operator.attrgetter("shape", "dtype", "device", "_spec", "_local_tensor.shape")
SHARD_GRADIENT_FACTS = operator.attrgetter("__class__", "shape", "dtype", "_spec", "_local_tensor.shape", "_local_tensor.layout")
_PLAIN = (Tensor, nn.Parameter)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: a DTensor's local tensor, a plain tensor itself."""
    if type(tensor) in _PLAIN:  # looking for an attribute that is not there takes far longer
        return tensor
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """``tensor`` if it is a DTensor."""
    if type(tensor) in _PLAIN:
        return None
    tensors = sys.modules.get("torch.distributed.tensor")  # importing it costs a second, and without it there is no DTensor
    return tensor if tensors is not None and isinstance(tensor, tensors.DTensor) else None


def has_local_part(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one that ``SHARD_FACTS`` can look at."""
    return hasattr(tensor, "_local_tensor")


def spec_of(tensor: Any) -> Any:
    """A DTensor's mesh, placements and order of cuts as one object; None for a plain tensor."""
    return getattr(tensor, "_spec", None)


def dtensor_like(like: DTensor, local: Tensor) -> Tensor:
    """A DTensor laid out like ``like`` with ``local`` as this rank's part, whatever device that is on.

    The constructor is private; ``DTensor.from_local`` would copy ``local`` to the mesh's devices. 2.9 to 2.15.
    """
    return type(like)(local, like._spec, requires_grad=False)


def zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.zeros_like`` that does not ask DTensor how the result is laid out: exactly like ``tensor``.

    To find that out torch 2.15 (2.13 does not) goes through all combinations of placements over the mesh axes, once per shape and
    dtype: 0.1 s on a mesh of 3 axes, 1.6 s on one of 4. Seen in 2.9 to 2.15: the constructor, ``tensor_meta`` of a spec.
    """
    sharded = as_dtensor(tensor)
    if sharded is None:
        return torch.zeros_like(tensor, dtype=dtype)
    local = torch.zeros_like(sharded._local_tensor, dtype=dtype)
    spec: Any = copy.copy(sharded._spec)
    stride = torch.empty_like(torch.empty_strided(sharded.shape, sharded.stride(), device="meta")).stride()
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype, stride=stride)
    return type(sharded)(local, spec, requires_grad=False)


def split_factor(placement: Any) -> int | None:
    """The split factor of a ``_StridedShard``; None for every other placement.

    FSDP2 over tensor parallelism makes them. Up to 2.9 it is a kind of ``Shard``, later not: ask this first.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


@lru_cache(maxsize=1)
def strided_shards_nest() -> bool:
    """Whether torch cuts strided shards piece by piece, as FSDP2 does, also where sizes do not divide.

    In 2.9 ``distribute_tensor`` cuts into all parts at once instead: of 10 rows in 2 pieces over 2 ranks the first gets 0–2 and
    6–8, while FSDP2 gives it 0–2 and 5–7, under the same placements. From 2.11 on, at least, both do the latter.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    first = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(10, device="cpu"), 2, with_padding=False)[0][0]
    return first.tolist() == [0, 1, 2, 5, 6, 7]


def cut_in_mesh_order(tensor: DTensor) -> bool:
    """Whether mesh axes that share a dim cut it from the first axis to the last, as placements alone say.

    ``DTensorSpec.shard_order`` exists since 2.10; it is None where strided shards say the order.
    """
    order = getattr(tensor._spec, "shard_order", None)
    return order is None or all(list(axes) == sorted(axes) for _, axes in order)


def same_layout(one: DTensor, other: DTensor) -> bool:
    """Whether two DTensors of one shape are cut alike.

    In 2.9 a ``_StridedShard`` equals a ``Shard`` of the same dim, since torch's operations give one where the other was.
    """
    orders = [getattr(tensor._spec, "shard_order", None) for tensor in (one, other)]
    return bool(one.placements == other.placements and one.device_mesh == other.device_mesh and orders[0] == orders[1])


# ------------------------------------------------------------------------------------------------------------------ meshes

_slices: list[tuple[weakref.ref[DeviceMesh], list[tuple[int, ...]]]] = []  # a list: torch compares meshes by value


def mesh_slices(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """The ranks of ``mesh`` and of all slices like it of the mesh that it was cut from, in the same order on every rank.

    ``DeviceMesh._layout`` and ``_rank_map`` say it; seen in 2.11 to 2.15. In 2.9 only a table of the thread that cut the mesh
    knows the parent; what it says is kept, since a step may run in another thread.
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is not None and rank_map is not None:
        return [tuple(ranks) for ranks in layout.remap_to_tensor(rank_map).flatten(1).tolist()]
    known = next((slices for cut, slices in _slices if cut() is mesh), None)
    if known is None:
        known = _slices_by_name(mesh)
        _slices[:] = [*(one for one in _slices if one[0]() is not None), (weakref.ref(mesh), known)]
    return known


def _slices_by_name(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    from torch.distributed import device_mesh

    known: Any = getattr(device_mesh, "_mesh_resources", None)
    if not hasattr(known, "child_to_root_mapping") or not hasattr(known, "flatten_name_to_root_dims"):
        if mesh.size() == dist.get_world_size():
            return [tuple(mesh.mesh.flatten().tolist())]
        raise UnsupportedError(
            f"torch {torch.__version__} does not say which mesh {mesh} is a slice of, so that its ranks would plan without the "
            f"others. Use torch {OLDEST} to {NEWEST}."
        )
    parent = known.child_to_root_mapping.get(mesh, mesh)
    if parent is mesh or mesh.mesh_dim_names is None:
        return [tuple(mesh.mesh.flatten().tolist())]
    flattened = known.flatten_name_to_root_dims.get(parent, {})
    axes = [
        axis for name in mesh.mesh_dim_names for axis in flattened.get(name) or (list(parent.mesh_dim_names or ()).index(name),)
    ]
    others = [axis for axis in range(parent.ndim) if axis not in axes]
    wholes = (torch.tensor(ranks, device="cpu").view(parent.shape) for ranks in mesh_slices(parent))  # it may be a slice itself
    size = math.prod(mesh.shape)
    return sorted(tuple(ranks) for whole in wholes for ranks in whole.permute(*others, *axes).reshape(-1, size).tolist())


# ---------------------------------------------------------------------------------------------------------- process groups


def group_names() -> list[str]:
    """The names of all groups that this process has. Nothing public lists groups. 2.9 to 2.15."""
    import torch.distributed.distributed_c10d as c10d

    return list(c10d._world.pg_names.values())


def new_named_group(name: str, ranks: Sequence[int], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """A new group of ``ranks``, made by these alone, under a name that all of them find by themselves.

    ``dist.new_group(use_local_synchronization=True)`` names a group after the number of groups that the process has seen. That
    number differs between ranks as soon as they are in different meshes, and members with different names wait for each other
    forever. This is what it does after that. 2.9 to 2.15.
    """
    import torch.distributed.distributed_c10d as c10d

    default: Any = c10d._get_default_group()
    usual, store = c10d._world.pg_map[default]
    kind = c10d.Backend(backend or usual)
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        kind,
        store,
        group_name=name,  # type: ignore[arg-type]
        timeout=timeout or c10d._get_default_timeout(kind),
        device_id=default.bound_device_id,
        group_desc="meshmuon",
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What moves memory of ``device`` in ``group``; None if nothing does. ``get_backend`` only gives a name. 2.9 to 2.15."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def gloo_of(group: dist.ProcessGroup) -> Any:
    """The gloo part of ``group``, of whose methods torch declares few, or None."""
    backend = backend_of(group, torch.device("cpu")) if dist.is_gloo_available() else None
    return backend if backend is not None and isinstance(backend, dist.ProcessGroupGloo) else None


def timeout_of(backend: Any) -> timedelta | None:
    """How long a backend waits, where it says so. Nothing public tells. 2.9 to 2.15 for gloo and NCCL."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


# ---------------------------------------------------------------------------------------------------------------- autograd


def mark_overwritten(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors were written: a backward pass that has saved one of them raises.

    Needed where a DTensor is written through its local tensor, and after torch's fused optimizers, which tell nothing (seen on
    CPU in 2.9 to 2.15).
    """
    torch.autograd.graph.increment_version(tensors)


class FSDP2Weights:
    """The whole weights that FSDP2 gathers from some shards.

    A forward pass saves these, not the shards. Where they are freed after it, the backward pass gathers them again, from shards
    that a step may have changed meanwhile; FSDP2 hides that writing from autograd. Nothing leads from a shard to its whole weight
    but FSDP2's own lists: ``FSDPState._fsdp_param_group`` in 2.9, ``_fsdp_param_groups`` in 2.13 and later.
    """

    def __init__(self, shards: Iterable[Tensor]) -> None:
        self._holders: list[weakref.ref[Any]] = []
        module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
        if module is None:  # no one has sharded with FSDP2
            return
        from torch.distributed._composable_state import _module_state_mapping as states

        self._whole = module.ShardedState.UNSHARDED
        wanted = set(shards)
        for reference in list(states.values()):
            state: Any = reference() if isinstance(reference, weakref.ref) else reference
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [getattr(state, "_fsdp_param_group", None)]
            holders = [one for group in groups if group is not None for one in group.fsdp_params]
            self._holders += [weakref.ref(one) for one in holders if one.sharded_param in wanted]

    def gathered_again(self) -> list[Tensor]:
        """Those that the next backward pass will gather anew."""
        held = (holder() for holder in self._holders)
        return [
            weight
            for one in held
            if one is not None
            and one.sharded_state is not self._whole
            and (weight := getattr(one, "_unsharded_param", None)) is not None
        ]


# ------------------------------------------------------------------------------------------------- compilers, modes, kernels


def without_modes() -> AbstractContextManager[Any]:
    """No dispatch mode, such as selective activation checkpointing, sees what is done inside. Nothing public does it."""
    from torch.utils._python_dispatch import _disable_current_modes

    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def has_compiled() -> bool:
    """Whether torch.compile is loaded; asking it anything else would load it, which takes seconds."""
    return "torch._dynamo" in sys.modules


def own_graph_per_shape() -> AbstractContextManager[Any]:
    """Every shape gets a graph of its own; the default limit would silently fall back to eager at the ninth. 2.9 to 2.15."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=10_000)
    return patched


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given: the attribute by which torch's own code finds it."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def device_has_foreach(device: torch.device) -> bool:
    """Whether ``torch._foreach_*`` has batched kernels for ``device``; what ``clip_grad_norm_`` of torch asks."""
    from torch.utils._foreach_utils import _device_has_foreach_support

    return bool(_device_has_foreach_support(device))


def foreach_is_faster(tensors: list[Tensor], device: torch.device) -> bool:
    """Whether torch would use batched kernels for these tensors by itself."""
    from torch.utils._foreach_utils import _has_foreach_support

    return bool(_has_foreach_support(tensors, device))


def flex_gives_max_scores() -> bool:
    """Whether ``flex_attention`` can return the largest score of each row; not all versions can."""
    from torch.nn.attention import flex_attention

    return "max_scores" in getattr(getattr(flex_attention, "AuxRequest", None), "_fields", ())


def tf32_allowed() -> bool:
    """Whether float32 products on a GPU may be rounded to TF32.

    Not by ``allow_tf32`` where there is the newer setting (since 2.9): reading it raises once anyone has used the newer one,
    which reflects both.
    """
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)
