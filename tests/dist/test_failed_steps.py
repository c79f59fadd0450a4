"""After a step that failed on one rank in the middle: QK-clip, saving, copying and loading leave no rank with other
weights.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import DistMuon, KernelWarning, MeshmuonError, Muon, StateError
from meshmuon.execute import RULE_STATE
from meshmuon.execute import settings as executor_settings
from meshmuon.ortho.kernels import products
from meshmuon.ortho.kernels.products import BlockedProducts
from meshmuon.state.param_state import MOMENTUM
from meshmuon.transport import collectives as small_collectives
from tests.support.tensors import seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1
CLIP = {"head_dim": 2, "threshold": 1.0}
SHAPES = {"layers.0.wq.weight": (6, 5), "layers.0.wk.weight": (6, 5), "layers.0.up.weight": (9, 4)}
LOGITS = torch.tensor([4.0, 0.5, 100.0])
_mood = threading.local()  # ranks are threads


def moody(batch: Tensor) -> Tensor:
    """A user's scheme that fails on one rank, once."""
    if getattr(_mood, "raises", False):
        raise ZeroDivisionError("a user's scheme")
    return batch / 2


@dataclass(frozen=True)
class MoodyRule:
    """A user's rule that counts in its memory, and fails after that."""

    memory_name = RULE_STATE

    def remembers(self) -> bool:
        return True

    def before(self, momentum: Tensor) -> None:
        momentum.mul_(2.0)

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        assert memory is not None
        update.mul_(memory.add_(1.0))
        moody(update)


class Rank:
    """A small attention layer: DTensors on a mesh, or plain replicas whose work is divided."""

    def __init__(
        self,
        placements: tuple[Any, ...] | None,
        kind: type[Muon] = Muon,
        *,
        alone: bool = False,
        first: tuple[tuple[str, nn.Parameter], ...] = (),
        **options: Any,
    ) -> None:
        shape = None if placements is None else (dist.get_world_size(),) if len(placements) == 1 else (2, 2)
        self.mesh: DeviceMesh | None = None if shape is None else init_device_mesh("cpu", shape)
        self.placements = placements
        self.params = [nn.Parameter(self.placed(seeded(shape, k))) for k, shape in enumerate(SHAPES.values())]
        named = [*first, *zip(SHAPES, self.params, strict=True)]
        where = {} if placements is not None or alone or kind is DistMuon else {"replica_group": dist.group.WORLD}
        groups = [{"params": named, "use_muon": True}]
        options = {"scheme": moody, "clip_config": CLIP, **options}
        self.optimizer = kind(groups, lr=0.01, **where, **options)

    def placed(self, value: Tensor) -> Tensor:
        return value if self.mesh is None else distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)

    def step(
        self, number: int, *, fails: bool = False, without: AbstractSet[str] = frozenset(), clips: bool = True
    ) -> str:
        """What the step raised; parameters ``without`` gradients have none."""
        for k, param in enumerate(self.params):
            param.grad = self.placed(seeded(tuple(param.shape), 100 * number + k))
            if k < len(SHAPES) and list(SHAPES)[k] in without:
                param.grad = None
        _mood.raises = fails
        try:
            self.optimizer.step(qk_logits={0: LOGITS} if clips else None)
        except (MeshmuonError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            _mood.raises = False
        return ""

    def whole(self) -> list[Tensor]:
        return [whole(param) for param in self.params]

    def everything(self) -> list[Tensor]:
        """Weights, momenta and rule state."""
        states = [self.optimizer.state[param] for param in self.params]
        keys = MOMENTUM, RULE_STATE
        return self.whole() + [whole(state[key]) for key in keys for state in states if key in state]


def whole(param: Tensor) -> Tensor:
    found = param.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


def assert_equal_on_all(found: list[list[Tensor]]) -> None:
    for rank, values in enumerate(found):
        for name, mine, first in zip(SHAPES, values, found[0], strict=True):
            assert torch.equal(mine, first), (
                f"{name} on rank {rank}: {mine.abs().sum():.4f}, on rank 0: {first.abs().sum():.4f}"
            )


LAYOUTS = {
    "replicas of DTensors": (Replicate(),),
    "plain replicas": None,
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "HSDP": (Replicate(), Shard(0)),
    "TP": (Shard(1), Shard(0)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without Nesterov": {"nesterov": False},
    "rule": {"rule": MoodyRule(), "scheme": "auto"},
    "skip": {"nonfinite": "skip"},
    "DistMuon": {"weight_decay": 0.1, "adjust_lr_fn": "original"},
}
CASES = [(layout, name) for layout in LAYOUTS for name in OPTIONS if name != "DistMuon" or layout == "plain replicas"]


def failing_run(rank: int, layout: str, options: dict[str, Any]) -> tuple[list[str], set[str], list[list[Tensor]]]:
    """What steps 0, 1 (which fails on one rank) and 2 raised, the matrices of that rank, and weights and state
    after each.
    """
    kind = DistMuon if "weight_decay" in options else Muon
    one = Rank(LAYOUTS[layout], kind, **options, **({} if kind is DistMuon else {"replicas": "share"}))
    said, seen = [], []
    for step in range(3):
        said.append(one.step(step, fails=step == 1 and rank == ODD))
        if kind is DistMuon:
            one.optimizer.consolidate()  # type: ignore[attr-defined]
        seen.append(one.everything())
        if step == 1 and kind is DistMuon:  # the others do not know yet
            said.append(one.step(2))
    plan = one.optimizer.plan()
    return said, {plan.params[task.param].name for task in plan.tasks if task.owner == ODD}, seen


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_matrices_that_fail_keep_weight_and_momentum(layout: str, name: str) -> None:
    """On all holders, and their rule state too. All else steps, as on one device that has no gradient of those
    matrices.
    """
    # the average of four equal gradients is exact
    world = 4 if layout in ("HSDP", "TP") or name == "DistMuon" else WORLD
    found = run_threads(world, lambda rank: failing_run(rank, layout, OPTIONS[name]))
    failed = found[0][1]
    assert set() < failed < set(SHAPES)
    alone, expected = Rank(None, alone=True, **OPTIONS[name]), []
    for step in range(3):
        # A step that is known to have failed on all ranks clips nothing.
        alone.step(step, without=failed if step == 1 else set(), clips=step != 1 or name == "DistMuon")
        expected.append(alone.everything())
    texts = set()
    for rank, (said, _, seen) in enumerate(found):
        text = said.pop(2 if name == "DistMuon" else 1)
        assert all(matrix in text for matrix in failed), text
        assert "ZeroDivisionError: a user's scheme" in text
        if name != "DistMuon":
            assert text.startswith(f"OrthogonalizeError: rank {ODD}: "), "all ranks raise it, in the same step"
        assert [bool(one) for one in said] == ([False, rank == ODD, False] if name == "DistMuon" else [False, False])
        for step, (values, right) in enumerate(zip(seen, expected, strict=True)):
            assert len(values) == len(right)
            assert all(map(torch.equal, values, right)), f"rank {rank}, step {step}"
        texts.add(text)
    assert len(texts) == 1, "all ranks say the same"


@pytest.mark.parametrize(
    "options", [{}, {"use_distributed_muon": True}, {"rule": MoodyRule()}], ids=["plain", "reference", "rule"]
)
def test_one_device_keeps_what_fails(options: dict[str, Any]) -> None:
    one = Rank(None, alone=True, **options)
    one.step(0)
    before = one.everything()
    said = one.step(1, fails=True)
    assert re.match(
        r"OrthogonalizeError: layers\.0\.wq\.weight.* kept weights and momentum in this step.*a user's scheme", said
    )
    assert all(map(torch.equal, one.everything(), before))
    assert one.step(2) == ""


@pytest.mark.parametrize("layout", ["rows", "one device"])
def test_the_error_names_all_that_failed(layout: str) -> None:
    """Matrices of several shapes, batches, waves and owners."""
    placements = LAYOUTS.get(layout)

    def main(rank: int) -> str:
        one = Rank(placements, alone=placements is None, chunk_size=1)
        one.step(0)
        return one.step(1, fails=True)

    said = run_threads(WORLD if placements else 1, main)
    assert len(set(said)) == 1
    assert all(name in said[0] for name in SHAPES), said[0]


def test_what_one_rank_alone_knows_does_not_change_what_is_clipped() -> None:
    """A matrix that only this rank holds fails with one that all share: all know of the latter, and no rank clips."""

    def main(rank: int) -> list[list[Tensor]]:
        found = []
        for clips in (False, True):
            one = Rank((Shard(1),))  # each rank has elements of the heads that are clipped
            own = nn.Parameter(seeded((5, 4), 9))
            one.optimizer.add_param_group({"params": [("own", own)], "use_muon": True})
            for step in range(2):
                own.grad = seeded((5, 4), step)
                said = one.step(step, fails=step == 1 and rank == ODD, clips=clips and step == 1)
                assert bool(said) == (step == 1)
            found.append(one.everything())
        return found

    for without, clipped in run_threads(WORLD, main):
        assert all(map(torch.equal, without, clipped))


def test_ranks_that_hold_other_matrices_beside_the_shared_ones_skip_the_same_one() -> None:
    """Each rank has as many matrices of its own, ahead of the shared ones, as its number says: indices differ
    between ranks.
    """

    def main(rank: int) -> tuple[list[Tensor], list[Tensor], str]:
        own = tuple((f"own.{k}", nn.Parameter(seeded((5, 4), k))) for k in range(rank))
        one = Rank((Shard(0),), first=own, chunk_size=1, none_grad=False)
        for _, param in own:
            param.grad = seeded((5, 4), 7)
        one.step(0)
        before = one.whole()
        said = one.step(1, fails=rank == ODD)
        return before, one.whole(), said

    found = run_threads(WORLD, main)
    texts = [said for *_, said in found]
    failed = [name for name in SHAPES if name in texts[0]]
    assert failed
    assert len(failed) < len(SHAPES)
    for before, after, _ in found:
        kept = [name for name, old, new in zip(SHAPES, before, after, strict=True) if torch.equal(old, new)]
        assert kept == failed


def test_a_part_of_a_fused_weight_that_fails() -> None:
    """Its rows keep weight and momentum; those of the parts that other ranks compute step."""

    def main(rank: int) -> tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]:
        found = []
        for fails in (False, True):
            one = Rank((Shard(0),), split=lambda name, shape: (shape[0] - 2, 2))
            one.step(0)
            before = one.everything()
            one.step(1, fails=fails and rank == ODD, clips=False)
            found.append(one.everything())
        plan = one.optimizer.plan()
        return [task.param for task in plan.tasks if task.owner == ODD], before, *found

    for parts, before, stepped, kept in run_threads(WORLD, main):
        assert 0 < len(parts) < 2 * len(SHAPES)
        for k, (old, new, one) in enumerate(zip(before, stepped, kept, strict=True)):
            for part, rows in enumerate((slice(0, -2), slice(-2, None))):
                failed = 2 * (k % len(SHAPES)) + part in parts
                assert torch.equal(one[rows], (old if failed else new)[rows]), (k, part)


def test_the_rank_that_failed_may_save_what_all_ranks_have() -> None:
    """Matrices computed once for all: the ranks are still equal, and so is what they save and load."""

    def main(rank: int) -> tuple[list[Tensor], list[str]]:
        one = Rank((Replicate(),), replicas="share")
        one.step(0)
        one.step(1, fails=rank == ODD)
        one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        return one.whole(), [one.step(2), one.step(3)]

    found = run_threads(WORLD, main)
    assert_equal_on_all([values for values, _ in found])
    assert [said for _, said in found] == [["", ""]] * WORLD, "all ranks have loaded: there is nothing left to tell"


@pytest.mark.parametrize("options", [{}, {"rule": MoodyRule(), "scheme": "auto"}], ids=["scheme", "rule"])
def test_replicas_share_what_code_of_the_user_computes(options: dict[str, Any]) -> None:
    """Repeating matrices of this size is cheaper, but a failure on one rank would make replicas diverge."""

    def main(rank: int) -> tuple[list[str], list[Tensor]]:
        one = Rank((Replicate(),), **options)
        return [one.step(step, fails=step == 1 and rank == ODD) for step in range(3)], one.everything()

    found = run_threads(WORLD, main)
    assert [said for said, _ in found] == [["", found[0][0][1], ""]] * WORLD
    assert found[0][0][1].startswith(f"OrthogonalizeError: rank {ODD}: ")
    for _, values in found:
        assert all(map(torch.equal, values, found[0][1]))


@pytest.mark.parametrize("how", ["step", "deepcopy", "group set anew"])
def test_a_rank_that_has_diverged_neither_steps_nor_saves(how: str) -> None:
    """Each rank computes its replica: the one that failed has other weights. A copy knows it too."""

    def main(rank: int) -> tuple[str, str]:
        one = Rank((Replicate(),), replicas="repeat")
        one.step(0)
        one.step(1, fails=rank == ODD)
        if how == "deepcopy":
            one.optimizer = copy.deepcopy(one.optimizer)
            one.params = one.optimizer.param_groups[0]["params"]
        elif how == "group set anew":
            one.optimizer.replica_group = None
        saved = ""
        try:
            one.optimizer.state_dict()
        except StateError as error:
            saved = str(error)
        return one.step(2), saved

    found = run_threads(WORLD, main)
    text = f"an earlier step failed on this rank alone (OrthogonalizeError: {', '.join(SHAPES)} kept weights"
    assert len({said for said, _ in found}) == 1
    assert found[0][0].startswith(f"StateError: rank {ODD}: {text}")
    assert [saved.startswith(text) for _, saved in found] == [rank == ODD for rank in range(WORLD)]


# Memory runs out while buffers are made.


class _OutOfMemory(TorchDispatchMode):
    """Raises at the n-th tensor that is made, and counts them; those that are made in a collective do not count."""

    MAKERS = ("aten::empty", "aten::empty_strided", "aten::zeros", "aten::full", "aten::ones", "aten::arange")

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        collectives = c10d.__file__, small_collectives.__file__
        if func._schema.name in self.MAKERS and all(
            frame.f_code.co_filename not in collectives for frame, _ in walk_stack(None)
        ):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("no 3 GiB left")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("later", [False, True], ids=["first plan", "second plan"])
@pytest.mark.parametrize("kind", [Muon, DistMuon])
@pytest.mark.parametrize("metrics", [None, 1], ids=["plain", "metrics"])
def test_all_that_belongs_to_a_plan_is_prepared_or_none_of_it(
    metrics: int | None, kind: type[Muon], later: bool
) -> None:
    """Memory runs out on one rank, at each of the tensors in turn. All ranks say so, none keeps anything, and all
    go on.
    """
    counted = [0]  # tensors that preparing makes on the odd rank

    def main(rank: int, n: int) -> tuple[list[str], list[Tensor]]:
        one = Rank((Shard(0),) if kind is Muon else None, kind, metrics=metrics)
        said = [one.step(0)] if later else []
        if later:
            added = nn.Parameter(one.placed(seeded((6, 4), 7)))
            one.params.append(added)
            one.optimizer.add_param_group({"params": [("layers.0.late.weight", added)], "use_muon": True})
        prepare, memory = one.optimizer._prepare, _OutOfMemory(n)

        def short_of_memory(step: Any) -> None:
            with memory if rank == ODD else nullcontext():
                prepare(step)

        one.optimizer._prepare = short_of_memory  # type: ignore[method-assign]
        said.append(one.step(1))
        del one.optimizer._prepare
        if rank == ODD:
            counted[0] = n - memory.left
        if said[-1]:
            assert (one.optimizer._executor.plan, one.optimizer.workspace_bytes()) == (None, 0)
            said.append(one.step(1))
        said.append(one.step(2))
        return said, one.whole()

    undisturbed = run_threads(WORLD, lambda rank: main(rank, 0))
    most = counted[0]
    assert most > 3
    for n in range(1, most + 1):
        found = run_threads(WORLD, lambda rank, n=n: main(rank, n))
        for said, values in found:
            assert said[later].endswith(f"rank {ODD}: OutOfMemoryError: no 3 GiB left"), f"tensor {n} of {most}: {said}"
            assert set(said) - {said[later]} == {""}
            assert all(torch.equal(*pair) for pair in zip(values, undisturbed[0][1], strict=True)), (
                f"tensor {n} of {most}"
            )


# Kernels that do not run on one rank.


class KernelStandIn(BlockedProducts):
    """Stands in for the Triton kernel: it has bits of its own, and on one rank it cannot be launched."""

    def symmetric(self, *args: Any, **options: Any) -> Tensor:
        if getattr(_mood, "no_compiler", False):
            raise RuntimeError("Failed to find C compiler")
        return super().symmetric(*args, **options).mul_(0.99)


def kernels_run(rank: int, broken: int | None, **options: Any) -> tuple[list[str], list[Tensor]]:
    _mood.no_compiler = rank == broken
    one = Rank((Shard(0),), scheme="keller", **options)
    before = one.whole()
    said = [one.step(0)]
    if said[0]:
        assert all(map(torch.equal, one.whole(), before)), "nothing is written"
    return [*said, one.step(1)], one.whole()


@pytest.mark.parametrize("options", [{}, {"use_distributed_muon": True}], ids=["waves", "reference path"])
def test_all_ranks_fall_back_to_the_same_kernels(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot launch, so none uses the kernel, and one warning says why. If ``triton`` was asked for, all ranks
    raise.
    """
    monkeypatch.setattr(products, "_has", lambda package: True)
    monkeypatch.setattr(
        executor_settings,
        "products_for",
        lambda *_, kernels, **__: BlockedProducts() if kernels == "torch" else KernelStandIn(),
    )

    def run(kernels: str, broken: int | None) -> list[tuple[list[str], list[Tensor]]]:
        monkeypatch.setenv("MESHMUON_KERNELS", kernels)
        return run_threads(WORLD, partial(kernels_run, broken=broken, **options))

    plain, launched = run("torch", None), run("", None)
    assert not torch.equal(plain[0][1][0], launched[0][1][0])
    reason = rf"rank {ODD}: kernels do not run on cpu for a batch of .*: RuntimeError: Failed to find C compiler"
    with pytest.warns(KernelWarning, match=f"all ranks use torch's own products instead .{reason}") as caught:
        fell_back = run("", ODD)
    assert len(caught) == 1
    for said, values in fell_back:
        assert said == ["", ""]
        assert all(map(torch.equal, values, plain[0][1]))
    refused = run("triton", ODD)
    assert len({text for said, _ in refused for text in said}) == 1
    assert re.match(f"KernelError: {reason}.*MESHMUON_KERNELS=torch.", refused[0][0][0])
