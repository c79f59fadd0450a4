"""Everything that meshmuon uses of torch that is private, or that differs between versions of torch.

Each function says why it is needed and in which versions of torch it was tested. ``tests/test_torch_compat.py`` has a test for
each, which fails when torch changes. ``torch._foreach_*`` is not here: torch documents these functions despite the underscore.

Private names are imported inside functions only. meshmuon can then be imported even if torch has renamed them, and without
``torch.distributed``. Importing ``torch.distributed.tensor`` also takes a second, which single-device users need not spend.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import lru_cache, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import UnsupportedError, UntestedTorchWarning

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

# ---------------------------------------------------------------------------------------------------------------- versions

OLDEST, NEWEST = "2.9.1", "2.15.0"
"""The oldest and newest tested versions, as in README (docs/compatibility.md has the list). ``pyproject.toml`` has the oldest."""

_warned = False


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def warn_if_untested() -> None:
    """Warns once per process if this version of torch is not tested. Only sharded steps depend on it, so only they call this."""
    global _warned
    version = _release(torch.__version__)
    if _warned or (_release(OLDEST) <= version and version[:2] <= _release(NEWEST)[:2]):
        return
    _warned = True
    warnings.warn(
        f"meshmuon is tested with torch {OLDEST} to {NEWEST}, and this is torch {torch.__version__}. Sharded steps read private "
        "parts of DTensor, DeviceMesh and process groups, which this version may have changed: compare a few steps with "
        "reference_path=True, which leaves layouts to torch, or use a tested version.",
        UntestedTorchWarning,
        stacklevel=2,
    )


# ---------------------------------------------------------------------------------------------------------------- DTensors

# ``DTensor._local_tensor``: ``to_local()`` creates a new view at every call if gradients are recorded. ``DTensor._spec``: no
# public object describes a whole layout. torch replaces a spec instead of changing it, and equal specs are equal layouts. 2.9 to
# 2.15.
SHARD_METADATA = attrgetter("shape", "dtype", "device", "_spec", "_local_tensor.shape")
SHARD_GRADIENT_METADATA = attrgetter("__class__", "shape", "dtype", "_spec", "_local_tensor.shape", "_local_tensor.layout")
_PLAIN = (Tensor, nn.Parameter)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: a DTensor's local tensor, a plain tensor itself."""
    if type(tensor) in _PLAIN:  # faster than getattr with a default on a missing attribute
        return tensor
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``local_part`` of each, without a call for each."""
    return [tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """``tensor`` if it is a DTensor."""
    if type(tensor) in _PLAIN:
        return None
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: that takes a second, and without it no DTensor exists
    return tensor if tensors is not None and isinstance(tensor, tensors.DTensor) else None


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """The device on which this process works for a mesh: the current one of the mesh's kind, as FSDP2 takes it."""
    kind: str = mesh.device_type
    try:
        return torch.device(kind, torch.get_device_module(kind).current_device())
    except (RuntimeError, AssertionError) as error:  # torch raises the latter where it was built without the device
        raise UnsupportedError(
            f"the parameters' mesh is of {kind} devices, and this process has none ({error}), so their matrices cannot be "
            f'orthogonalised there: run where {kind} is available, or build the mesh with device_type="cpu".'
        ) from error


def has_local_part(tensor: Tensor) -> bool:
    """Whether ``SHARD_METADATA`` can read ``tensor``."""
    return hasattr(tensor, "_local_tensor")


def spec_of(tensor: Any) -> Any:
    """A DTensor's mesh, placements and shard order as one object; None for a plain tensor."""
    return getattr(tensor, "_spec", None)


def dtensor_like(like: DTensor, local: Tensor) -> Tensor:
    """A DTensor laid out like ``like`` with ``local`` as this rank's part, on any device.

    Uses the private constructor, since ``DTensor.from_local`` would copy ``local`` to the mesh's devices. 2.9 to 2.15.
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

    FSDP2 over tensor parallelism creates them. Up to 2.9 it is a subclass of ``Shard``, later it is not: check for it first.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


@lru_cache(maxsize=1)
def strided_shards_nest() -> bool:
    """Whether ``distribute_tensor`` cuts strided shards as FSDP2 does, even if sizes do not divide.

    FSDP2 cuts first into ``split_factor`` chunks, then each chunk over the ranks. torch 2.9 cuts into split_factor · ranks chunks
    at once. Of 10 rows with split factor 2 over 2 ranks, rank 0 then gets rows 0–2 and 6–8; FSDP2 gives it 0–2 and 5–7 under the
    same placements. From 2.11 on, at least, both give 5–7.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    first = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(10, device="cpu"), 2, with_padding=False)[0][0]
    return first.tolist() == [0, 1, 2, 5, 6, 7]


def cut_in_mesh_order(tensor: DTensor) -> bool:
    """Whether mesh axes that shard the same dim cut it in the order of the axes, as placements alone say.

    ``DTensorSpec.shard_order`` exists since 2.10; it is None if strided shards express the order.
    """
    order = getattr(tensor._spec, "shard_order", None)
    return order is None or all(list(axes) == sorted(axes) for _, axes in order)


def same_layout(tensor: DTensor, other: DTensor) -> bool:
    """Whether two DTensors of one shape are sharded in the same way.

    In 2.9 a ``_StridedShard`` equals a ``Shard`` of the same dim, since torch's operations return one for the other.
    """
    orders = [getattr(dtensor._spec, "shard_order", None) for dtensor in (tensor, other)]
    return bool(tensor.placements == other.placements and tensor.device_mesh == other.device_mesh and orders[0] == orders[1])


# ------------------------------------------------------------------------------------------------------------------ meshes

_slices: list[tuple[weakref.ref[DeviceMesh], list[tuple[int, ...]]]] = []  # a list, since torch compares meshes by value


def mesh_slices(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """The ranks of ``mesh`` and of all slices like it of its parent mesh, in the same order on every rank.

    For ``mesh["tp"]`` of a 2×2 mesh over ranks 0–3 these are (0, 1) and (2, 3).

    ``DeviceMesh._layout`` and ``_rank_map`` tell it in 2.11 to 2.15. In 2.9 only a table of the thread that created the slice
    knows the parent. The result is cached, since a step may run in another thread.
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is not None and rank_map is not None:
        return [tuple(ranks) for ranks in layout.remap_to_tensor(rank_map).flatten(1).tolist()]
    known = next((slices for reference, slices in _slices if reference() is mesh), None)
    if known is None:
        known = _slices_by_name(mesh)
        _slices[:] = [*(cached for cached in _slices if cached[0]() is not None), (weakref.ref(mesh), known)]
    return known


def _slices_by_name(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    from torch.distributed import device_mesh

    resources: Any = getattr(device_mesh, "_mesh_resources", None)
    if not hasattr(resources, "child_to_root_mapping") or not hasattr(resources, "flatten_name_to_root_dims"):
        if mesh.size() == dist.get_world_size():
            return [tuple(mesh.mesh.flatten().tolist())]
        raise UnsupportedError(
            f"torch {torch.__version__} does not say which mesh {mesh} is a slice of, so its ranks would plan without the "
            f"others. Use torch {OLDEST} to {NEWEST}."
        )
    parent = resources.child_to_root_mapping.get(mesh, mesh)
    if parent is mesh or mesh.mesh_dim_names is None:
        return [tuple(mesh.mesh.flatten().tolist())]
    flattened = resources.flatten_name_to_root_dims.get(parent, {})
    axes = [
        axis for name in mesh.mesh_dim_names for axis in flattened.get(name) or (list(parent.mesh_dim_names or ()).index(name),)
    ]
    others = [axis for axis in range(parent.ndim) if axis not in axes]
    # The parent may be a slice itself.
    wholes = (torch.tensor(ranks, device="cpu").view(parent.shape) for ranks in mesh_slices(parent))
    size = math.prod(mesh.shape)
    return sorted(tuple(ranks) for whole in wholes for ranks in whole.permute(*others, *axes).reshape(-1, size).tolist())


# ---------------------------------------------------------------------------------------------------------- process groups


def group_names() -> list[str]:
    """The names of all process groups of this process. No public function lists them. 2.9 to 2.15."""
    import torch.distributed.distributed_c10d as c10d

    return list(c10d._world.pg_names.values())


def new_named_group(name: str, ranks: Sequence[int], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Creates a process group of ``ranks``, on these ranks only, under a name that all of them derive by themselves.

    ``dist.new_group(use_local_synchronization=True)`` names a process group after the number of process groups that the process
    has created. That number differs between ranks in different meshes, and members with different names wait for each other
    forever. This does the rest of ``new_group`` under the given name. 2.9 to 2.15.
    """
    import torch.distributed.distributed_c10d as c10d

    default: Any = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[default]
    kind = c10d.Backend(backend or default_backend)
    process_group: dist.ProcessGroup
    process_group, _ = c10d._new_process_group_helper(
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
    c10d._world.pg_group_ranks[process_group] = {rank: position for position, rank in enumerate(ranks)}
    return process_group


def default_store() -> Any:
    """The store through which the ranks of the default process group have found each other.

    ``torch.distributed`` has no public function that returns it. 2.9 to 2.15.
    """
    import torch.distributed.distributed_c10d as c10d

    return c10d._world.pg_map[c10d._get_default_group()][1]


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a process group for ``device``, or None. The public ``get_backend`` only returns its name. 2.9 to 2.15."""
    try:
        return process_group._get_backend(device)
    except RuntimeError:
        return None


def gloo_of(process_group: dist.ProcessGroup) -> Any:
    """The gloo backend of a process group, or None. It is typed ``Any``, since torch declares few of its methods."""
    backend = backend_of(process_group, torch.device("cpu")) if dist.is_gloo_available() else None
    return backend if backend is not None and isinstance(backend, dist.ProcessGroupGloo) else None


def timeout_of(backend: Any) -> timedelta | None:
    """The timeout of a backend, or None if it does not tell. Nothing public does. 2.9 to 2.15 for gloo and NCCL."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def available_backends() -> dict[str, list[str]]:
    """The backends that this torch can use, each with the types of devices whose memory it moves.

    torch documents neither list. ``fake``, which moves nothing, is in the list of newer versions. 2.13.
    """
    names = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return {name: list(dist.Backend.backend_capability.get(name, ())) for name in names if dist.is_backend_available(name)}


# ---------------------------------------------------------------------------------------------------------------- autograd


def mark_overwritten(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors were written: a backward pass that has saved one of them then raises.

    Needed if a DTensor is written through its local tensor, and after torch's fused optimizers, which do not tell autograd (on
    CPU in 2.9 to 2.15).
    """
    torch.autograd.graph.increment_version(tensors)


class FSDP2Weights:
    """The unsharded weights that FSDP2 gathers from given shards.

    A forward pass saves these, not the shards. If FSDP2 frees them afterwards, the backward pass gathers them again, from shards
    that a step may have changed meanwhile. FSDP2 hides that change from autograd. Only FSDP2's own lists lead from a shard to its
    unsharded weight: ``FSDPState._fsdp_param_group`` in 2.9, ``_fsdp_param_groups`` in 2.13 and later.
    """

    def __init__(self, shards: Iterable[Tensor]) -> None:
        self._fsdp_params: list[tuple[Tensor, weakref.ref[Any]]] = []  # with their shards
        module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
        if module is None:  # nothing was sharded with FSDP2
            return
        from torch.distributed._composable_state import _module_state_mapping as states

        self._unsharded = module.ShardedState.UNSHARDED
        shard_set = set(shards)
        for reference in list(states.values()):
            state: Any = reference() if isinstance(reference, weakref.ref) else reference
            fsdp_groups = getattr(state, "_fsdp_param_groups", None)
            if fsdp_groups is None:
                fsdp_groups = [getattr(state, "_fsdp_param_group", None)]
            for fsdp_group in fsdp_groups:
                fsdp_params = [] if fsdp_group is None else fsdp_group.fsdp_params
                pairs = [(param.sharded_param, weakref.ref(param)) for param in fsdp_params]
                self._fsdp_params += [(shard, reference) for shard, reference in pairs if shard in shard_set]

    def only(self, shards: Iterable[Tensor]) -> FSDP2Weights:
        """Those of the weights that belong to ``shards``, found without looking through FSDP2's lists again."""
        weights, shard_set = copy.copy(self), set(shards)
        weights._fsdp_params = [(shard, reference) for shard, reference in self._fsdp_params if shard in shard_set]
        return weights

    def gathered_again(self) -> list[Tensor]:
        """The weights that the next backward pass will gather again."""
        living = (reference() for _, reference in self._fsdp_params)
        return [
            weight
            for param in living
            if param is not None
            and param.sharded_state is not self._unsharded
            and (weight := getattr(param, "_unsharded_param", None)) is not None
        ]


# ------------------------------------------------------------------------------------------------- compilers, modes, kernels


def without_modes() -> AbstractContextManager[Any]:
    """Disables dispatch modes, such as selective activation checkpointing, inside the ``with``. Nothing public does it."""
    from torch.utils._python_dispatch import _disable_current_modes

    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A range of that name in profiles, cheap where nothing is profiled.

    ``record_function`` takes 10 to 18 µs even then, and a step has three ranges per batch. torch's compiler has a range of its
    own that takes less than 1 µs, but profiles show it as an operation, not as an annotation that is also drawn beside the
    kernels of a GPU. 2.13.
    """
    private: Any = torch._C
    if private._autograd._profiler_enabled() or not hasattr(private._profiler, "_RecordFunctionFast"):
        return torch.profiler.record_function(name)
    cheap: AbstractContextManager[Any] = private._profiler._RecordFunctionFast(name)
    return cheap


def has_compiled() -> bool:
    """Whether torch.compile is loaded. Asking torch.compile itself would load it, which takes seconds."""
    return "torch._dynamo" in sys.modules


def fused_momentum(
    views: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, *, nesterov: bool
) -> bool:
    """M ← momentum·M + G and V ← V + G + momentum·M, or V + M without ``nesterov``; False if this torch cannot.

    It is the kernel of ``torch.optim.SGD(fused=True)``, which no public function offers without an optimizer. It only reads the
    gradients, but its schema says that it writes them: without ``data``, autograd would take them for overwritten. 2.9 to 2.15.
    """
    sgd: Any = getattr(torch, "_fused_sgd_", None)
    if sgd is None:
        return False
    options = {"weight_decay": 0.0, "lr": -1.0, "dampening": 0.0, "maximize": False, "is_first_step": False}
    sgd(views, [grad.data for grad in grads], momenta, momentum=momentum, nesterov=nesterov, **options)
    return True


def is_lazy(tensor: Tensor) -> bool:
    """Whether torch has yet to negate its elements, or keeps a zero instead of them: fused operations refuse it. 2.9 to 2.15."""
    return tensor.is_neg() or tensor._is_zerotensor()


def never_traced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: torch.compile does not trace the function or what it calls. A compiled caller calls it between its graphs.

    ``torch.compiler.disable`` loads all of torch.compile, so it is applied at the first call after that was loaded. The disabled
    function is called by an ordinary one, since ``torch.compile(disabled)`` unwraps and traces it. 2.9 to 2.15.
    """
    disabled: list[Callable[_P, _R]] = []

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not has_compiled():
            return function(*args, **kwargs)
        if not disabled:
            disable: Any = torch.compiler.disable
            disabled.append(disable(function, reason="meshmuon does not trace it"))
        return disabled[0](*args, **kwargs)

    return call


def own_graph_per_shape() -> AbstractContextManager[Any]:
    """Compiles a graph per shape. With the default limit, the ninth shape would silently fall back to eager. 2.9 to 2.15."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(recompile_limit=10_000)
    return patched


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, from the attribute that torch's own code reads."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def module_behind(parameters: Any) -> nn.Module | None:
    """The module all of whose parameters this is: a module, or what torch's own ``parameters()`` returned, not yet read from.

    None for anything else, such as a ``parameters()`` that a class defines itself, which may leave some out. torch's is a
    generator function with the arguments ``self`` and ``recurse``. 2.9 to 2.15.
    """
    if isinstance(parameters, nn.Module):
        return parameters
    if not (inspect.isgenerator(parameters) and parameters.gi_code is nn.Module.parameters.__code__):
        return None
    if inspect.getgeneratorstate(parameters) != inspect.GEN_CREATED:
        return None
    given = inspect.getgeneratorlocals(parameters)
    whose: nn.Module = given["self"]
    return whose if given["recurse"] else None


def traced_class(module: nn.Module) -> str | None:
    """The qualified name of the class that a module of ``torch.export.unflatten`` was traced from; None for other modules.

    Pipelining makes such modules. Where a version does not tell, they still have their graphs.
    """
    if type(module).__name__ not in ("InterpreterModule", "UnflattenedModule", "InterpreterModuleDispatcher"):
        return None
    type_name: Any = getattr(module, "type_name", None)
    name = type_name() if callable(type_name) else None
    return name if isinstance(name, str) else None


def device_has_foreach(device: torch.device) -> bool:
    """Whether ``torch._foreach_*`` has batched kernels for ``device``, as torch's ``clip_grad_norm_`` checks it."""
    from torch.utils._foreach_utils import _device_has_foreach_support

    return bool(_device_has_foreach_support(device))


def foreach_is_faster(tensors: list[Tensor], device: torch.device) -> bool:
    """Whether torch would choose batched kernels for these tensors by default."""
    from torch.utils._foreach_utils import _has_foreach_support

    return bool(_has_foreach_support(tensors, device))


def flex_gives_max_scores() -> bool:
    """Whether ``flex_attention`` can return the largest score of each row; not all versions can."""
    from torch.nn.attention import flex_attention

    return "max_scores" in getattr(getattr(flex_attention, "AuxRequest", None), "_fields", ())


def tf32_allowed() -> bool:
    """Whether float32 products on a GPU may be rounded to TF32.

    Reads the newer setting where it exists (since 2.9), which reflects both. Reading ``allow_tf32`` raises once anyone has used
    the newer one.
    """
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)
