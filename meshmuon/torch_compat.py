"""Everything that meshmuon uses of torch that is private, or that differs between versions of torch.

Each function says why it is needed. It works with all versions from ``OLDEST`` to ``NEWEST``, and says so where these
differ. ``tests/test_torch_compat.py`` has a test for each, which fails when torch changes. ``torch._foreach_*`` is not
here: torch documents these functions despite the underscore.

Private names are imported inside functions only. meshmuon can then be imported even if torch has renamed them, and
without ``torch.distributed``. Importing ``torch.distributed.tensor`` also takes a second, which single-device users
need not spend.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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

# ----------------------------------------------------------------------------------------------------------------
# versions

OLDEST, NEWEST = "2.13.0", "2.15.0"
"""The oldest and newest tested versions, as in README (docs/proofs.md has the list). ``pyproject.toml`` has the
oldest.
"""

_warned = False


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def warn_if_untested() -> None:
    """Warns once per process if this version of torch is not tested. Only sharded steps depend on it, so only they
    call this.
    """
    global _warned
    version = _release(torch.__version__)
    if _warned or (_release(OLDEST) <= version and version[:2] <= _release(NEWEST)[:2]):
        return
    _warned = True
    warnings.warn(
        f"meshmuon is tested with torch {OLDEST} to {NEWEST}, and this is torch {torch.__version__}. Sharded steps "
        "read private parts of DTensor, DeviceMesh and process groups, which this version may have changed: compare a "
        "few steps with use_distributed_muon=True, which leaves layouts to torch, or use a tested version.",
        UntestedTorchWarning,
        stacklevel=2,
    )


# ----------------------------------------------------------------------------------------------------------------
# DTensors

# ``DTensor._local_tensor``: ``to_local()`` creates a new view at every call if gradients are recorded.
# ``DTensor._spec``: no public object describes a whole layout. torch replaces a spec instead of changing it, and equal
# specs are equal layouts.
SHARD_METADATA = attrgetter("shape", "dtype", "device", "_spec", "_local_tensor.shape")
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
    if type(tensor) in _PLAIN:
        return None
    # not imported: that takes a second, and without it no DTensor exists
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensor if tensors is not None and isinstance(tensor, tensors.DTensor) else None


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """The device on which this process works for a mesh: the current one of the mesh's kind, as FSDP2 takes it."""
    kind: str = mesh.device_type
    try:
        return torch.device(kind, torch.get_device_module(kind).current_device())
    except (RuntimeError, AssertionError) as error:  # torch raises the latter where it was built without the device
        raise UnsupportedError(
            f"the parameters' mesh is of {kind} devices, and this process has none ({error}), so their matrices "
            "cannot be "
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

    Uses the private constructor, since ``DTensor.from_local`` would copy ``local`` to the mesh's devices.
    """
    return type(like)(local, like._spec, requires_grad=False)


def zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.zeros_like`` that does not ask DTensor how the result is laid out: exactly like ``tensor``.

    To find that out torch 2.15 (2.13 does not) goes through all combinations of placements over the mesh axes, once per
    shape and dtype: 0.1 s on a mesh of 3 axes, 1.6 s on one of 4.
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

    FSDP2 over tensor parallelism creates them. It is not a subclass of ``Shard``.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def cut_in_mesh_order(tensor: DTensor) -> bool:
    """Whether mesh axes that shard the same dim cut it in the order of the axes, as placements alone say."""
    order = tensor._spec.shard_order  # None if strided shards express the order
    return order is None or all(list(axes) == sorted(axes) for _, axes in order)


def same_layout(tensor: DTensor, other: DTensor) -> bool:
    """Whether two DTensors of one shape are sharded in the same way."""
    return all(getattr(tensor._spec, key) == getattr(other._spec, key) for key in ("placements", "mesh", "shard_order"))


# ------------------------------------------------------------------------------------------------------------------
# meshes


def mesh_slices(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """The ranks of ``mesh`` and of all slices like it of its parent mesh, in the same order on every rank.

    For ``mesh["tp"]`` of a 2×2 mesh over ranks 0–3 these are (0, 1) and (2, 3).
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or rank_map is None:
        raise UnsupportedError(
            f"torch {torch.__version__} does not say which mesh {mesh} is a slice of, so its ranks would plan without "
            f"the others. Use torch {OLDEST} to {NEWEST}."
        )
    return [tuple(ranks) for ranks in layout.remap_to_tensor(rank_map).flatten(1).tolist()]


# ---------------------------------------------------------------------------------------------------------- process
# groups


_unbinding = threading.Lock()
_bound_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()


@contextmanager
def _without_bound_device(default: Any) -> Iterator[None]:
    """Inside, ``default`` has no bound device. Threads that are inside at the same time are counted."""
    with _unbinding:
        hidden = _bound_devices.setdefault(default, [default.bound_device_id, 0])
        hidden[1] += 1
        default.bound_device_id = None
    try:
        yield
    finally:
        with _unbinding:
            hidden[1] -= 1
            if not hidden[1]:
                default.bound_device_id = _bound_devices.pop(default)[0]


def new_named_group(name: str, ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Creates a process group of ``ranks``, on these ranks only, under a name that all of them derive by themselves.

    ``dist.new_group(use_local_synchronization=True)`` does not fit: it names a process group after the number of
    process groups that the process has registered, which differs between ranks in different meshes, and members with
    different names wait for each other forever. This does the rest of ``new_group`` under the given name. Two things
    differ from it:

    - If ``init_process_group`` was given a ``device_id``, torch splits the default group's communicator, for which all
      ranks of the default group must call. Without that device, NCCL connects the members at their first collective.
    - torch forgets the group, except for its ranks. Otherwise the next group that torch names would have different
      names on members and on other ranks. The caller must keep the group, and shut it down: ``destroy_process_group``
      does not.
    """
    import torch.distributed.distributed_c10d as c10d

    default: Any = c10d._get_default_group()
    world = c10d._world
    backend, store = world.pg_map[default]
    kind = c10d.Backend(backend)
    with _without_bound_device(default):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            kind,
            store,
            group_name=name,  # type: ignore[arg-type]
            timeout=timeout or c10d._get_default_timeout(kind),
            group_desc="meshmuon",
        )
    for registered in (world.pg_map, world.pg_names, world.pg_backend_config):
        del registered[group]
    for tag in ("", world.pg_to_tag.pop(group)):
        world.tags_to_pg[tag].remove(group)
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


def cause_of(error: Exception) -> BaseException:
    """What made a collective fail.

    torch then looks up the name of the group's backend for its log, and raises a ``ValueError`` if it does not know the
    group, as those of ``new_named_group``.
    """
    context = error.__context__
    return context if isinstance(error, ValueError) and isinstance(context, RuntimeError) else error


def first_told(key: str, text: str) -> str:
    """The text of the rank that was the first to call with this ``key``, on all ranks; this rank's own if the store
    is gone.
    """
    import torch.distributed.distributed_c10d as c10d

    try:
        told: bytes = c10d._get_default_store().compare_set(key, "", text)
        return told.decode(errors="replace")
    except Exception:  # the rank that keeps the store is lost, or there is no such operation
        return text


def object_device(process_group: dist.ProcessGroup) -> torch.device:
    """Where small messages must be for collectives of a process group: in host memory if it takes that."""
    import torch.distributed.distributed_c10d as c10d

    kind = c10d._get_object_coll_device(process_group)
    host = kind == "cpu" or not torch.accelerator.is_available()
    return torch.device("cpu") if host else torch.device(kind, torch.accelerator.current_device_index())


def abort(process_group: dist.ProcessGroup) -> None:
    """Aborts the running collectives of a process group, on backends that can, such as NCCL. gloo's abort does
    nothing.
    """
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        process_group.abort()


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a process group for ``device``, or None. The public ``get_backend`` only returns its name."""
    try:
        return process_group._get_backend(device)
    except RuntimeError:
        return None


def gloo_of(process_group: dist.ProcessGroup) -> Any:
    """The gloo backend of a process group, or None. It is typed ``Any``, since torch declares few of its methods."""
    backend = backend_of(process_group, torch.device("cpu")) if dist.is_gloo_available() else None
    return backend if backend is not None and isinstance(backend, dist.ProcessGroupGloo) else None


def timeout_of(backend: Any) -> timedelta | None:
    """The timeout of a backend, or None if it does not tell. Nothing public does, for gloo and NCCL."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def available_backends() -> dict[str, list[str]]:
    """The backends that this torch can use, each with the types of devices whose memory it moves.

    torch documents neither list. ``fake``, which moves nothing, is in the list of newer versions.
    """
    names = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return {
        name: list(dist.Backend.backend_capability.get(name, ())) for name in names if dist.is_backend_available(name)
    }


# ----------------------------------------------------------------------------------------------------------------
# autograd


def mark_overwritten(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that the tensors were written: a backward pass that has saved one of them then raises.

    Needed if a DTensor is written through its local tensor, and after torch's fused optimizers, which do not tell
    autograd.
    """
    torch.autograd.graph.increment_version(tensors)


class FSDP2Weights:
    """The unsharded weights that FSDP2 gathers from given shards.

    A forward pass saves these, not the shards. If FSDP2 frees them afterwards, the backward pass gathers them again,
    from shards that a step may have changed meanwhile. FSDP2 hides that change from autograd. Only FSDP2's own lists
    lead from a shard to its unsharded weight: ``FSDPState._fsdp_param_groups``.
    """

    def __init__(self, shards: Iterable[Tensor]) -> None:
        self._fsdp_params: list[tuple[Tensor, weakref.ref[Any]]] = []  # with their shards
        module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
        if module is None:  # nothing was sharded with FSDP2
            return
        from torch.distributed._composable_state import _module_state_mapping as states

        self._unsharded = module.ShardedState.UNSHARDED
        shard_set = set(shards)
        # other threads may add modules; this list is atomic
        for reference in list(getattr(states, "data", states).values()):
            state: Any = reference() if isinstance(reference, weakref.ref) else reference
            for fsdp_group in getattr(state, "_fsdp_param_groups", ()):  # other composable modules have none
                pairs = [(param.sharded_param, weakref.ref(param)) for param in fsdp_group.fsdp_params]
                self._fsdp_params += [(shard, reference) for shard, reference in pairs if shard in shard_set]

    def gathered_again(self, shards: Iterable[Tensor]) -> list[Tensor]:
        """The weights of those of ``shards`` that the next backward pass will gather again."""
        shard_set = set(shards)
        living = (reference() for shard, reference in self._fsdp_params if shard in shard_set)
        return [
            weight
            for param in living
            if param is not None
            and param.sharded_state is not self._unsharded
            and (weight := getattr(param, "_unsharded_param", None)) is not None
        ]


# ------------------------------------------------------------------------------------------------- compilers, modes,
# kernels


def without_modes() -> AbstractContextManager[Any]:
    """Disables dispatch modes, such as selective activation checkpointing, inside the ``with``. Nothing public does
    it.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A range of that name in profiles, cheap where nothing is profiled.

    ``record_function`` takes 10 to 18 µs even then, and a step has three ranges per batch. torch's compiler has another
    range that takes less than 1 µs, but profiles show it as an operation, not as an annotation that is also drawn
    beside the kernels of a GPU.
    """
    private: Any = torch._C
    if private._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    cheap: AbstractContextManager[Any] = private._profiler._RecordFunctionFast(name)
    return cheap


def has_compiled() -> bool:
    """Whether torch.compile is loaded. Asking torch.compile itself would load it, which takes seconds."""
    return "torch._dynamo" in sys.modules


def never_traced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: torch.compile does not trace the function or what it calls. A compiled caller calls it between its
    graphs.

    ``torch.compiler.disable`` loads all of torch.compile, so it is applied at the first call after that was loaded. The
    disabled function is called by an ordinary one, since ``torch.compile(disabled)`` unwraps and traces it.
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


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, from the attribute that torch's own code reads."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def module_behind(parameters: Any) -> nn.Module | None:
    """The module all of whose parameters this is: a module, or what torch's own ``parameters()`` returned, not yet read
    from.

    None for anything else, such as a ``parameters()`` that a class defines itself, which may leave some out. torch's is
    a generator function with the arguments ``self`` and ``recurse``.
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


def is_unflattened(module: nn.Module) -> bool:
    """Whether ``torch.export.unflatten`` has made the module, which pipelining by tracing calls: its class is not
    kept.
    """
    return type(module).__name__ in ("InterpreterModule", "UnflattenedModule", "InterpreterModuleDispatcher")


def device_has_foreach(device: torch.device) -> bool:
    """Whether ``torch._foreach_*`` has batched kernels for ``device``, as torch's ``clip_grad_norm_`` checks it."""
    from torch.utils._foreach_utils import _device_has_foreach_support

    return bool(_device_has_foreach_support(device))


def foreach_is_faster(tensors: list[Tensor], device: torch.device) -> bool:
    """Whether torch would choose batched kernels for these tensors by default."""
    from torch.utils._foreach_utils import _has_foreach_support

    return bool(_has_foreach_support(tensors, device))


@lru_cache(maxsize=1)
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has units for bfloat16 that torch uses: AVX512_BF16. Asked once, so that a process never changes
    its mind.

    The CPU keeps saying so where oneDNN is limited (``ONEDNN_MAX_CPU_ISA``) or switched off; products in bfloat16 are
    then slower than in float32 by up to a factor of 40, so oneDNN is asked as well. Limited to AVX-512 without these
    units it still says that it supports bfloat16. CPUs that advertise AMX are left out: some virtual machines advertise
    it and trap its instructions, and the first product kills the process.
    """
    units = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in ("AVX512_CORE", "AVX512_CORE_VNNI")
    supported = torch.backends.mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(units and supported and not limited)


def tf32_allowed() -> bool:
    """Whether float32 products on a GPU may be rounded to TF32.

    ``fp32_precision`` reflects ``allow_tf32`` as well, and reading the latter raises once anyone has set the former.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
