"""What meshmuon believes of torch's private parts, one test for each: they fail when torch changes under it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import ConfigError, GradientError, Muon, UnsupportedError, UntestedTorchWarning, torch_compat
from meshmuon.params.dtensors import check_gradient_placement, check_placement, layouts_of, same_placement, siblings
from meshmuon.params.lr import lr_factor
from meshmuon.transport import exchange_group, groups
from tests.support.threads import run_threads
from tests.support.units import cpu_multiplies_bfloat16

ROOT = Path(__file__).parent.parent


def tensors(
    *, world: int = 4, shape: tuple[int, ...] = (8, 6), grid: tuple[int, ...] = (2, 2), cut: Any = None
) -> list[Any]:
    """One DTensor per rank, and whatever ``cut`` makes of it."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)

    def main(rank: int) -> Any:
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("a", "b", "c")[: len(grid)])
        return cut(distribute_tensor(whole.clone(), mesh, [Shard(0)] * len(grid)), rank)

    return run_threads(world, main)


# Versions.


def test_the_range_is_the_same_everywhere() -> None:
    asked = re.search(r'dependencies = \["torch>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text())
    assert asked is not None
    assert asked[1] == torch_compat.OLDEST
    for page in ("README.md", "docs/proofs.md"):
        assert f"torch {torch_compat.OLDEST} to {torch_compat.NEWEST}" in (ROOT / page).read_text(), page


def test_this_version_is_in_the_range(recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "_warned", False)
    torch_compat.warn_if_untested()
    assert not recwarn.list, "NEWEST or OLDEST must follow the versions that the suite is run with"


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.12.1", False),
        ("2.9.1+cu128", False),
        ("2.13.0", True),
        ("2.15.3", True),
        ("2.16.0.dev2027", False),
        ("3.0.0", False),
    ],
)
def test_outside_of_the_range_the_first_sharded_step_warns_once(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compat, "_warned", False)
    monkeypatch.setattr(torch, "__version__", version)

    def step(param: nn.Parameter) -> list[str]:
        param.grad = torch.ones_like(param)
        optimizer = Muon([{"params": [param], "names": ["w"], "use_muon": True}])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(one.message) for one in caught if issubclass(one.category, UntestedTorchWarning)]

    assert step(nn.Parameter(torch.ones(4, 4))) == []  # needs nothing private
    (messages,) = tensors(world=1, grid=(1,), cut=lambda tensor, rank: step(nn.Parameter(tensor)))
    assert len(messages) == (0 if tested else 1)
    assert all(version in message and "use_distributed_muon=True" in message for message in messages)
    assert tensors(world=1, grid=(1,), cut=lambda tensor, rank: step(nn.Parameter(tensor))) == [[]]


WITHOUT_DISTRIBUTED = """
import sys, torch
real = sys.modules["torch.distributed"]
for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
    del sys.modules[name]
del torch._C._c10d_init
sys.modules["torch._C._distributed_c10d"] = None
import torch.distributed
torch.distributed = sys.modules["torch.distributed"]
assert not torch.distributed.is_available()
import meshmuon
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
optimizers = [
    meshmuon.Muon(meshmuon.get_default_muon_param_groups(model)),
    meshmuon.Muon(meshmuon.get_default_muon_param_groups(model), use_distributed_muon=True),
    meshmuon.DistMuon([model[0].weight]),
]
for optimizer in optimizers:
    for _ in range(2):
        before = model[0].weight.detach().clone()
        model(torch.randn(3, 8)).square().sum().backward()
        meshmuon.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert not torch.equal(before, model[0].weight)
print("stepped")
"""


def test_without_distributed() -> None:
    """A torch that was built without torch.distributed: import and steps on one device work."""
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_DISTRIBUTED], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.stdout.strip().endswith("stepped"), found.stderr


# DTensors.


def test_local_parts_and_specs() -> None:
    def look(tensor: DTensor, rank: int) -> None:
        assert torch_compat.local_part(tensor) is tensor._local_tensor
        assert torch_compat.has_local_part(tensor)
        assert torch.equal(torch_compat.local_part(tensor), tensor.to_local())
        spec = torch_compat.spec_of(tensor)
        assert (spec.mesh, tuple(spec.placements)) == (tensor.device_mesh, tuple(tensor.placements))
        assert torch_compat.spec_of(torch.zeros_like(tensor)) == spec
        assert torch_compat.spec_of(tensor.redistribute(placements=[Shard(0), Replicate()])) != spec
        facts = torch_compat.SHARD_METADATA(tensor)
        assert facts == (torch.Size((8, 6)), torch.float32, tensor.device, spec, torch.Size((2, 6)))

    tensors(cut=look)
    plain = torch.zeros(3)
    assert torch_compat.local_part(plain) is plain
    assert not torch_compat.has_local_part(plain)
    assert torch_compat.spec_of(plain) is None


def test_a_dtensor_around_a_given_local_tensor() -> None:
    def make(tensor: DTensor, rank: int) -> None:
        local = torch.full((2, 6), 7.0, device="meta")  # not on the mesh's device, as offloaded state is not
        made = torch_compat.dtensor_like(tensor, local)
        assert isinstance(made, DTensor)
        assert torch_compat.local_part(made) is local
        assert torch_compat.spec_of(made) is torch_compat.spec_of(tensor)
        assert not made.requires_grad

    tensors(cut=make)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
def test_zeros_are_laid_out_as_torch_lays_them_out(dtype: torch.dtype | None) -> None:
    """Also uneven and empty shards, strided ones, column-major and overlapping strides of the whole."""
    cuts = ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)])
    strides = ((6, 1), (1, 3), (12, 2), (0, 1))

    def make(_: DTensor, rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in cuts:
            cut = distribute_tensor(torch.ones(3, 6), mesh, placements, src_data_rank=None)
            for stride in strides:
                whole = {"shape": cut.shape, "stride": stride}
                given = nn.Parameter(DTensor.from_local(cut.to_local(), mesh, placements, run_check=False, **whole))
                made, expected = torch_compat.zeros_like(given, dtype), torch.zeros_like(given, dtype=dtype)
                assert type(made) is type(expected) is DTensor
                assert torch_compat.spec_of(made) == torch_compat.spec_of(expected)
                assert torch_compat.spec_of(made).tensor_meta == torch_compat.spec_of(expected).tensor_meta
                assert (made.dtype, made.stride(), made.requires_grad) == (expected.dtype, expected.stride(), False)
                ours, theirs = made.to_local(), expected.to_local()
                assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
                assert torch.equal(ours, theirs)
                assert torch_compat.spec_of(given).tensor_meta.dtype == torch.float32, (
                    "the parameter's own spec is left alone"
                )

    tensors(cut=make)
    plain = nn.Parameter(torch.ones(3, 4).t())
    made = torch_compat.zeros_like(plain, dtype)
    assert (made.dtype, made.stride(), made.any().item()) == (dtype or torch.float32, plain.stride(), False)


class Operations(TorchDispatchMode):
    """Lists the operations, all or those that are given a tensor of ``kind``."""

    def __init__(self, kind: type | None = None) -> None:
        super().__init__()
        self.kind, self.names = kind, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kind is None or any(issubclass(one, self.kind) for one in types):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_steps_ask_dtensor_nothing() -> None:
    """For each new shape torch works out how an operation's result is laid out; in 2.15 that takes seconds on large
    meshes.
    """

    def step(weight: DTensor, rank: int) -> list[str]:
        mesh = weight.device_mesh
        bias, unused = (distribute_tensor(torch.ones(shape), mesh, [Shard(0), Shard(0)]) for shape in ((8,), (8, 6)))
        params = [nn.Parameter(one) for one in (weight, bias, unused)]
        groups = [{"params": [params[0], params[2]], "use_muon": True}, {"params": [params[1]], "use_muon": False}]
        optimizer = Muon(groups, momentum_dtype=torch.float64)
        seen = Operations(DTensor)
        for _ in range(2):
            for param in params[: 3 if rank == 0 else 2]:  # where other ranks have a gradient, zeros stand for it
                param.grad = DTensor.from_local(
                    torch.ones_like(param.to_local()), mesh, param.placements, run_check=False
                )
            with seen:
                optimizer.step()
        with seen:
            torch.zeros_like(params[0])
        return seen.names

    assert tensors(cut=step) == [["aten.zeros_like.default"]] * 4


def test_strided_shards_are_told_from_others() -> None:
    assert torch_compat.split_factor(_StridedShard(1, split_factor=4)) == 4
    for other in (Shard(1), Replicate(), Partial()):
        assert torch_compat.split_factor(other) is None


def test_partial_placements_of_embeddings_are_refused() -> None:
    from torch.distributed.tensor.placement_types import _MaskPartial

    def refuse(tensor: DTensor, rank: int) -> None:
        placements = _MaskPartial(offset_shape=torch.Size((8, 6))), Shard(0)
        with pytest.raises(ConfigError, match=r"w has placements .*a Partial parameter is a sum that was never taken"):
            layouts_of("w", (8, 6), placements, siblings(tensor.device_mesh), frozenset({rank}))

    tensors(cut=refuse)


def test_fsdp2_cuts_strided_shards_piece_by_piece() -> None:
    """As meshmuon and ``distribute_tensor`` cut them, also where sizes do not divide."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def main(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(1, 10, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(10.0).view(10, 1))
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp"])
        return [int(value) for value in torch_compat.local_part(layer.weight).flatten().tolist()]

    assert run_threads(4, main) == [[0, 1, 2], [5, 6, 7], [3, 4], [8, 9]]


def test_cuts_in_another_order_are_refused() -> None:
    """On every rank, at construction and when a parameter changes; and what the error advises helps."""

    def look(tensor: DTensor, rank: int) -> str:
        turned = in_another_order(tensor)
        assert torch_compat.cut_in_mesh_order(tensor)
        assert not torch_compat.cut_in_mesh_order(turned)
        strided = distribute_tensor(
            tensor.full_tensor(), tensor.device_mesh, [_StridedShard(0, split_factor=2), Shard(0)]
        )
        assert torch_compat.cut_in_mesh_order(strided)
        assert torch_compat.same_layout(strided, strided.clone())
        assert not any(torch_compat.same_layout(tensor, other) for other in (turned, strided))
        assert not same_placement(tensor, turned)
        assert not torch.equal(turned.to_local(), tensor.to_local()) or rank in (0, 3)
        with pytest.raises(
            UnsupportedError, match=r"w has placements .*another order.*distribute_tensor\(p\.full_tensor"
        ):
            check_placement("w", turned)
        with pytest.raises(GradientError, match="laid out differently"):
            check_gradient_placement("w", tensor, turned)
        param = nn.Parameter(tensor.clone())
        optimizer = Muon([{"params": [param], "names": ["w"], "use_muon": True}])
        param.grad = torch.ones_like(param)
        optimizer.step()
        param._spec, param._local_tensor = turned._spec, turned._local_tensor  # as swap_tensors would leave it
        param.grad = torch.ones_like(turned)
        with pytest.raises(UnsupportedError) as caught:
            optimizer.step()
        usual = distribute_tensor(turned.full_tensor(), turned.device_mesh, turned.placements)
        check_placement("w", usual)
        assert torch.equal(usual.to_local(), tensor.to_local())
        return str(caught.value)

    assert len(set(tensors(cut=look))) == 1


def in_another_order(tensor: DTensor) -> DTensor:
    """The same values, dim 0 cut by the second axis first."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    mesh = tensor.device_mesh
    first, second = mesh.get_coordinate() or (0, 0)
    local = tensor.full_tensor().chunk(2)[second].chunk(2)[first].clone()
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, tensor.placements, tensor._spec.tensor_meta, shard_order=order)
    return DTensor(local, spec, requires_grad=False)


# Meshes.


@pytest.mark.parametrize(
    ("cut", "slices"),
    [
        (lambda mesh: mesh, [tuple(range(8))]),
        (lambda mesh: mesh["a"], [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (lambda mesh: mesh["b"], [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (lambda mesh: mesh["c"], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (lambda mesh: mesh["a", "b"]["a"], [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (lambda mesh: mesh["b", "c"]["c"], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (lambda mesh: mesh["a", "c"], [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (lambda mesh: mesh["b", "c"]._flatten("bc"), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (lambda mesh: mesh["a", "b"]._flatten("ab"), [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (lambda mesh: mesh._flatten("abc"), [tuple(range(8))]),
        (lambda mesh: (mesh["a", "b"]._flatten("ab"), mesh["ab", "c"])[1], [tuple(range(8))]),
        (lambda mesh: (mesh["b", "c"]._flatten("bc"), mesh["a", "bc"])[1], [tuple(range(8))]),
    ],
)
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim", "ignore:You are attempting to slice a submesh")
def test_a_mesh_and_the_slices_like_it(cut: Any, slices: list[tuple[int, ...]]) -> None:
    """The same on every rank, in the same order; also asked by another thread than the one that cut the mesh."""

    def main(rank: int) -> list[tuple[int, ...]]:
        mesh = cut(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")))
        found = torch_compat.mesh_slices(mesh)
        assert any(rank in ranks for ranks in found)
        elsewhere: list[Any] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch_compat.mesh_slices(mesh)))
        thread.start()
        thread.join()
        assert elsewhere == [found]
        return found

    found = run_threads(8, main)
    assert found == [found[0]] * 8
    assert sorted(found[0]) == slices


def test_equal_meshes_have_their_own_slices() -> None:
    """A mesh that was made as it is has none, although torch may find it equal to a slice of another."""

    def main(rank: int) -> None:
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert torch_compat.mesh_slices(whole["b"]) == [(0, 1), (2, 3)]
        first = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("x", "b"))
        assert torch_compat.mesh_slices(first) == [(0, 1, 2, 3)]

    run_threads(4, main)


def test_a_torch_whose_meshes_say_nothing() -> None:
    """Slices must not silently plan alone."""

    class Silent:
        pass

    with pytest.raises(UnsupportedError, match=r"does not say which mesh .* is a slice of"):
        torch_compat.mesh_slices(Silent())  # type: ignore[arg-type]


# Process groups.


def test_where_small_messages_must_be_and_abort() -> None:
    """A group of gloo takes host memory, and can be told to abort, which does nothing; one of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert dist.group.WORLD is not None
        assert torch_compat.object_device(dist.group.WORLD) == torch.device("cpu")
        torch_compat.abort(dist.group.WORLD)
    finally:
        dist.destroy_process_group()

    class Group:
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1
            raise RuntimeError("aborted twice")

    group: Any = Group()
    torch_compat.abort(group)
    assert group.aborted == 1
    torch_compat.abort(object())  # type: ignore[arg-type]


def test_backends_and_the_devices_that_they_serve() -> None:
    found = torch_compat.available_backends()
    assert "cpu" in found["gloo"]
    assert ("nccl" in found) is dist.is_nccl_available()
    assert not {"undefined", "fake"} & set(found)


def test_members_that_have_seen_different_numbers_of_groups_meet() -> None:
    """torch's own name for a group made by its members alone holds that number. Nothing of torch is replaced to
    name a group.
    """
    before = {name: value for name, value in vars(c10d).items() if callable(value) and "world" not in name}

    def main(rank: int) -> str:
        if rank in (1, 2):
            dist.new_group([1, 2], use_local_synchronization=True)
        members = (0, 1, 2) if rank < 3 else (3, 4)
        group = exchange_group(members, [])
        assert all(vars(c10d)[name] is value for name, value in before.items())
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(members)
        assert dist.get_process_group_ranks(group) == list(members)
        return group.group_name

    first, second, third, *others = run_threads(5, main)
    assert first == second == third not in others
    assert others[0] == others[1]


def test_real_groups(tmp_path: Path) -> None:
    """gloo: name, ranks, timeout and backend of a new group."""
    dist.init_process_group(
        "gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1), timeout=timedelta(seconds=77)
    )
    try:
        default = dist.group.WORLD
        assert default is not None
        assert torch_compat.timeout_of(torch_compat.backend_of(default, torch.device("cpu"))) == timedelta(seconds=77)
        assert groups.timeout_of_group(default) == timedelta(seconds=77)
        assert torch_compat.backend_of(default, torch.device("xpu")) is None
        assert torch_compat.timeout_of(None) is None
        default.bound_device_id = torch.device("cuda", 0)
        group = torch_compat.new_named_group("a name", (0,), timedelta(seconds=33))
        assert default.bound_device_id == torch.device("cuda", 0)
        assert group.group_name == "a name"
        assert len(c10d._world.pg_config_info) == 1  # the profiler reads the names of all groups that torch knows
        assert dist.get_process_group_ranks(group) == [0]
        assert dist.get_world_size(group) == 1
        assert torch_compat.timeout_of(torch_compat.backend_of(group, torch.device("cpu"))) == timedelta(seconds=33)
        gloo = torch_compat.gloo_of(group)
        assert isinstance(gloo, dist.ProcessGroupGloo)
        assert (gloo.rank(), gloo.size()) == (0, 1)
        assert callable(gloo.recv)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        with pytest.raises(ValueError, match="not initialized in the world group map") as caught:
            dist.all_to_all_single(torch.zeros(2), torch.zeros(2), [3], [2], group=group)
        assert isinstance(torch_compat.cause_of(caught.value), RuntimeError)
        assert torch_compat.cause_of(ValueError("another")).args == ("another",)
    finally:
        dist.destroy_process_group()


# Autograd.


def test_marked_tensors_have_another_version() -> None:
    def mark(tensor: DTensor, rank: int) -> None:
        before = tensor._version, torch_compat.local_part(tensor)._version
        torch_compat.local_part(tensor).mul_(2)
        assert tensor._version == before[0], "torch tells the DTensor now: the mark is not needed any more"
        torch_compat.mark_overwritten([tensor])
        assert tensor._version > before[0]

    tensors(cut=mark)


def test_fsdp2_weights_are_found() -> None:
    """Those of the given shards only, and only while they are not whole."""

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(layers, mesh=mesh)
        first, second = layers.parameters()
        found = torch_compat.FSDP2Weights([first, second])
        assert found.gathered_again([first, second]) == []  # there was no forward pass
        layers(torch.ones(1, 4))
        (weight,) = found.gathered_again([first])
        assert weight.shape == (4, 4)
        assert len(found.gathered_again([first, second])) == 2
        assert torch_compat.FSDP2Weights([second]).gathered_again([first]) == []
        layers[0].unshard()
        assert found.gathered_again([first]) == []

    run_threads(2, main)


# Compilers, modes, kernels.


def test_modes_see_nothing() -> None:
    with Operations() as seen:
        torch.ones(1).add_(1)
        with torch_compat.without_modes():
            torch.ones(1).add_(1)
    assert seen.names == ["aten.ones.default", "aten.add_.Tensor"]


def test_ranges_are_annotations_in_profiles() -> None:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, torch_compat.profiler_range("ours"), torch.profiler.record_function("theirs"):
        torch.zeros(1)
    annotations = {event.name for event in profile.events() if event.is_user_annotation}
    assert {"ours", "theirs"} <= annotations


def test_ranges_are_cheap_where_nothing_is_profiled() -> None:
    assert not isinstance(torch_compat.profiler_range("meshmuon::here"), torch.profiler.record_function)
    with torch_compat.profiler_range("meshmuon::here"):
        pass


def test_compiled_modules_are_unwrapped() -> None:
    layer = nn.Linear(2, 2)
    assert torch_compat.unwrapped(torch.compile(layer)) is layer  # type: ignore[arg-type]
    assert torch_compat.unwrapped(layer) is layer
    assert torch_compat.has_compiled() == ("torch._dynamo" in sys.modules)


def test_the_module_behind_its_parameters() -> None:
    class Own(nn.Linear):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            yield from super().parameters(recurse)

    for module in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        for parameters in (module, module.parameters(), module.parameters(recurse=True)):
            assert torch_compat.module_behind(parameters) is module
        started, read, whole = module.parameters(), module.parameters(), list(module.parameters())
        next(started)
        list(read)
        for other in (started, read, module.parameters(recurse=False), module.parameters(False)):
            assert torch_compat.module_behind(other) is None
        for other in (whole, module.named_parameters(), iter(whole), (param for param in whole), None):
            assert torch_compat.module_behind(other) is None
    own = Own(2, 2)
    assert torch_compat.module_behind(own) is own
    assert torch_compat.module_behind(own.parameters()) is None


def test_what_is_never_traced() -> None:
    """Called from compiled code, compiled itself, or called as it is."""
    from torch._dynamo.testing import CompileCounter

    graphs = CompileCounter()

    @torch_compat.never_traced
    def doubled(value: torch.Tensor) -> torch.Tensor:
        assert not torch.compiler.is_compiling()
        return value * 2 if bool(value.sum() > 0) else value  # two graphs if it were traced

    for run in (
        doubled,
        torch.compile(doubled, backend=graphs),
        torch.compile(lambda value: doubled(value), backend=graphs),
    ):
        assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
    assert graphs.frame_count == 0
    assert doubled.__name__ == "doubled"


def test_batched_kernels() -> None:
    here, there = torch.device("cpu"), torch.device("cuda")
    assert torch_compat.device_has_foreach(here)
    assert torch_compat.device_has_foreach(there)
    assert isinstance(torch_compat.foreach_is_faster([torch.ones(1)], here), bool)
    names = ("add_", "copy_", "div_", "mul_", "norm", "sub_")
    # documented by torch; used where they are needed
    assert all(callable(getattr(torch, f"_foreach_{name}")) for name in names)
    values = [torch.ones(2), torch.ones(3)]
    torch._foreach_copy_(values, [torch.zeros(2), torch.full((3,), 2.0)])
    torch._foreach_add_(values, values, alpha=2.0)
    assert [one.tolist() for one in values] == [[0, 0], [6, 6, 6]]


def test_fused_adamw_tells_autograd_nothing() -> None:
    """When it does, the mark after it can go."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([param], fused=True)
    before = param._version
    optimizer.step()
    assert param._version == before


def test_tf32_is_read_from_either_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for allowed in (True, False):
            matmul.allow_tf32 = allowed
            assert torch_compat.tf32_allowed() == allowed
            matmul.fp32_precision = "ieee" if allowed else "tf32"
            assert torch_compat.tf32_allowed() != allowed
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("lacking", ["", "avx512_bf16", "mkldnn", "limited", "limited to AVX-512", "amx"])
def test_units_for_bfloat16_are_asked_of_the_cpu_and_of_onednn(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: lacking != "avx512_bf16")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: lacking == "amx")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: lacking != "limited")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE" if lacking == "limited to AVX-512" else "AVX10_1_512")
    with torch.backends.mkldnn.flags(enabled=lacking != "mkldnn"):
        assert cpu_multiplies_bfloat16.__wrapped__() == (not lacking)  # without its memory


def test_batched_products_of_half_precision_may_be_full_precision() -> None:
    a = torch.empty(2, 3, 4, dtype=torch.bfloat16, device="meta")
    assert torch.bmm(a, a.mT, out_dtype=torch.float32).dtype == torch.float32


# torch's Muon.


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5)])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("original", None), *((rule, rule) for rule in ("original", "match_rms_adamw", "spectral_unclamped"))],
)
def test_learning_rate_rules_are_those_of_torch(ours: str, theirs: str | None, shape: tuple[int, int]) -> None:
    from torch.optim._muon import _adjust_lr

    assert lr_factor("spectral_unclamped", *shape) == lr_factor("spectral", *shape)
    if theirs == "spectral_unclamped" and torch_compat._release(torch.__version__) < (2, 14):
        pytest.skip("torch ≤ 2.13 has no such rule")
    assert lr_factor(ours, *shape) == pytest.approx(_adjust_lr(1.0, theirs, torch.Size(shape)), rel=1e-12)


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "HashStore", "PrefixStore"])
def test_the_first_to_tell_is_heard_by_all(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: dict[str, Any] = {
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "HashStore": dist.HashStore,
        "PrefixStore": lambda: dist.PrefixStore("a", dist.HashStore()),
    }
    store = stores[kind]()
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    assert [torch_compat.first_told(key, text) for key, text in (("a", "1 é"), ("a", "2"), ("b", "3"))] == [
        "1 é",
        "1 é",
        "3",
    ]


def test_without_a_store_a_rank_hears_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    assert torch_compat.first_told("a", "own") == "own"
