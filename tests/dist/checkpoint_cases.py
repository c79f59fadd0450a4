"""Jobs for real gloo processes: checkpoints saved on one layout, loaded on another, continued with the bits of one
device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import DistMuon, Muon, StateError
from tests.support.checkpoint_model import (
    GROUPS,
    LAYOUTS,
    S0,
    S1,
    SAVED,
    SPECS,
    STEPS,
    Model,
    agree,
    compare,
    content,
    fresh,
    keys_and_shapes,
    load_whole,
    train,
    trained,
    whole_state,
)
from tests.support.processes import Job
from tests.support.tensors import bits, local


def save(layout: str, folder: Path) -> None:
    model, optimizer = trained(layout)
    digest = optimizer.plan().digest
    state = whole_state(model, optimizer)
    compare(model, optimizer, SAVED)
    shown = keys_and_shapes(state["optimizer"])
    agree(shown)
    assert {name for name, *_ in shown} == {f"{name}.weight" for name, spec in SPECS.items() if not spec.frozen}
    for name, key, shape, _ in shown:
        whole = SPECS[name.removesuffix(".weight")].shape
        assert shape == {"step": (), "rule_memory": (*whole[:1], 1), "rounding_counter": (2,)}.get(key, whole)
    assert optimizer.plan().digest == digest
    dcp.save(state, checkpoint_id=folder / layout)
    check_continued(model, optimizer)  # saving disturbs nothing


def check_continued(model: Model, optimizer: Muon) -> None:
    """Demands the state that was saved, and goes on to the end of the run that never stopped."""
    compare(model, optimizer, SAVED)
    train(model, optimizer, range(SAVED, STEPS))
    compare(model, optimizer, STEPS)


def load(source: str, target: str, folder: Path, options: StateDictOptions | None = None) -> None:
    model, optimizer = fresh(target, momentum=0.5, nesterov=False)
    state = whole_state(model, optimizer, options)
    dcp.load(state, checkpoint_id=folder / source)
    load_whole(model, optimizer, state, options)
    assert optimizer.param_groups[0]["momentum"] == 0.95
    check_continued(model, optimizer)


def offloaded(layout: str, folder: Path) -> None:
    """Saved and loaded while the state is away."""
    model, optimizer = trained(layout)
    optimizer.turn_on_cpu_offload()
    dcp.save(whole_state(model, optimizer), checkpoint_id=folder / "offloaded")
    check_continued(model, optimizer)
    again, resumed = fresh(layout)
    resumed.turn_on_cpu_offload()
    state = whole_state(again, resumed)
    dcp.load(state, checkpoint_id=folder / "offloaded")
    load_whole(again, resumed, state)
    check_continued(again, resumed)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_full(layout: str, folder: Path) -> None:
    state = whole_state(*trained(layout), FULL)
    if dist.get_rank() == 0:
        torch.save(state, folder / "full.pt")


def load_full(layout: str, folder: Path, options: StateDictOptions) -> None:
    model, optimizer = fresh(layout)
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0 or not options.broadcast_from_rank0:
        state = torch.load(folder / "full.pt", weights_only=True)
    load_whole(model, optimizer, state, options)
    check_continued(model, optimizer)


def save_flat(layout: str, folder: Path) -> None:
    dcp.save(whole_state(*trained(layout), FLAT), checkpoint_id=folder / "flat")


def plain(layout: str, folder: Path) -> None:
    """``state_dict`` and ``load_state_dict`` on the same layout, through a file per rank."""
    model, optimizer = trained(layout)
    file = folder / f"plain {layout} {dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    again, resumed = fresh(layout)
    if dist.get_world_size() > 1:
        dist.barrier()
        neighbour = (dist.get_rank() + 1) % dist.get_world_size()
        for weights_only in (True, False):
            foreign = torch.load(folder / f"plain {layout} {neighbour}.pt", weights_only=weights_only)
            with pytest.raises(
                StateError, match=r"is the shard at .* of its mesh, .*torch\.distributed\.checkpoint, which loads on"
            ):
                resumed.load_state_dict(foreign["optimizer"])
            assert not resumed.state
    saved = torch.load(file, weights_only=False)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    check_continued(again, resumed)
    train(model, optimizer, range(SAVED, STEPS))
    assert resumed.plan().digest == optimizer.plan().digest


def fresh_with_zeros(layout: str) -> tuple[Model, Muon]:
    """Every second weight is −0."""
    model, optimizer = fresh(layout)
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).view(-1)[::2] = -0.0
    return model, optimizer


def creating_state(layout: str) -> None:
    """torch's zero-gradient step on a fresh optimizer: zeros, no step counted, weights as they were to the sign of
    a zero.
    """
    model, optimizer = fresh_with_zeros(layout)
    before = content(model, optimizer)
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    agree(keys_and_shapes(get_optimizer_state_dict(model, optimizer)))
    after = content(model, optimizer)
    check_same_bits(before, after)
    created = {name: local(value) for name, value in after.items() if name not in before}
    # not the keys
    counted = {name: value[1:] if name.endswith("rounding_counter") else value for name, value in created.items()}
    assert not any(bits(value).any() for value in counted.values())
    assert [float(group["lr"]) for group in optimizer.param_groups] == lrs
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, range(2))
    untouched, reference = fresh_with_zeros(layout)
    train(untouched, reference, range(2))
    check_same_bits(content(untouched, reference), content(model, optimizer))
    assert optimizer.plan().digest == reference.plan().digest


def check_same_bits(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(bits(local(value)), bits(local(actual[name]))), name


def expect(text: str, action: Callable[[], object]) -> None:
    try:
        action()
    except StateError as error:
        said = str(error)
    else:
        said = "nothing was refused"
    assert text in said, f"{said} does not say {text!r}"
    agree(said)


def wrong_states(layout: str) -> None:
    """Refused alike on all ranks, before parameters, state or groups change."""
    model, optimizer = trained(layout)
    other = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    groups, before = str(optimizer.state_dict()["param_groups"]), content(model, optimizer)

    def edited(change: Callable[[dict[int, Any]], object]) -> Callable[[], None]:
        def action() -> None:
            state_dict = optimizer.state_dict()
            for group in state_dict["param_groups"]:
                group["lr"] = 123.0
            state_dict["state"] = {key: dict(entry) for key, entry in state_dict["state"].items()}
            change(state_dict["state"])
            optimizer.load_state_dict(state_dict)

        return action

    order = [name for kind in GROUPS for name, spec in SPECS.items() if spec.group == kind]
    wq, few, norm = (order.index(name) for name in ("wq", "few", "norm"))
    moments = {"step": torch.ones(()), "exp_avg": torch.zeros(8, 6), "exp_avg_sq": torch.zeros(8, 6)}
    full = torch.zeros(8, 6)
    recut = distribute_tensor(full, other, [S1], src_data_rank=None)
    wider = distribute_tensor(torch.zeros(9, 6), other, [S0], src_data_rank=None)
    expect("wq.weight is optimized by Muon", edited(lambda state: state.update({wq: moments})))
    expect("norm.weight is optimized by AdamW", edited(lambda state: state.update({norm: state[wq]})))
    expect("wq.weight has shape (8, 6), but its saved", edited(lambda state: state[wq].update(momentum_buffer=wider)))
    expect("its saved momentum_buffer is a plain tensor", edited(lambda state: state[wq].update(momentum_buffer=full)))
    expect("set_optimizer_state_dict reshards it", edited(lambda state: state[wq].update(momentum_buffer=recut)))
    expect("norm.weight is optimized by AdamW and needs", edited(lambda state: state[norm].pop("exp_avg_sq")))
    expect("few.weight trains, but the state_dict has nothing", edited(lambda state: state.pop(few)))
    check_same_bits(before, content(model, optimizer))
    assert str(optimizer.state_dict()["param_groups"]) == groups
    train(model, optimizer, range(SAVED, STEPS))
    compare(model, optimizer, STEPS)


# DistMuon: plain weights, momentum on owners only.

SHAPES = ((6, 4), (4, 9), (5, 5), (3, 7))


def replicas(seed: int) -> tuple[nn.ParameterDict, DistMuon]:
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(seed + k)) for k, shape in enumerate(SHAPES)]
    model = nn.ParameterDict({f"w{k}": nn.Parameter(value) for k, value in enumerate(values)})
    model["bias"] = nn.Parameter(torch.zeros(5))
    model["late"] = nn.Parameter(torch.ones(4, 4))
    matrices = [(name, param) for name, param in model.items() if param.dim() == 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": [("bias", model["bias"])], "use_muon": False}]
    return model, DistMuon(groups, lr=0.02)


def step_replicas(model: nn.ParameterDict, optimizer: DistMuon, steps: range) -> None:
    """The same gradients everywhere: their average, and with it the run, does not depend on the number of ranks."""
    for step in steps:
        for k, (name, param) in enumerate(model.items()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + k))
            # sums of few bits are exact
            param.grad = None if name == "late" and step < 7 else param.grad.bfloat16().float()
        optimizer.step()


def save_replicas(folder: Path) -> None:
    model, optimizer = replicas(seed=1)
    step_replicas(model, optimizer, range(SAVED))
    expect("call optimizer.consolidate() on every rank", optimizer.state_dict)
    expect("call optimizer.consolidate()", lambda: get_optimizer_state_dict(model, optimizer))
    optimizer.consolidate()
    state = whole_state(model, optimizer)
    agree(keys_and_shapes(state["optimizer"]))
    assert set(state["optimizer"]["state"]) == set(model)
    dcp.save(state, checkpoint_id=folder / "replicas")
    step_replicas(model, optimizer, range(SAVED, STEPS))
    expect("call optimizer.consolidate() on every rank", optimizer.state_dict)
    optimizer.consolidate()
    if dist.get_rank() == 0:
        momentum = [optimizer.state[param] for param in model.values()]
        torch.save({"weights": model.state_dict(), "state": momentum}, folder / "replicas.pt")


def load_replicas(folder: Path, *, full: bool) -> None:
    model, optimizer = replicas(seed=2)
    state = whole_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder / "replicas")
    load_whole(model, optimizer, state, FULL if full else None)
    step_replicas(model, optimizer, range(SAVED, STEPS))
    optimizer.consolidate()
    wanted = torch.load(folder / "replicas.pt")
    for (name, param), entry in zip(model.items(), wanted["state"], strict=True):
        assert torch.equal(param.detach(), wanted["weights"][name]), name
        assert set(optimizer.state[param]) == set(entry)
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in entry.items()), name


def jobs() -> dict[str, Job]:
    listed: dict[str, Job] = {}
    hub = "FSDP2 × 2"
    for layout, (world, _) in LAYOUTS.items():
        listed[f"save on {layout}"] = Job(world, partial(save, layout))
    for layout, (world, _) in LAYOUTS.items():
        listed[f"{hub} to {layout}"] = Job(world, partial(load, hub, layout))
        if layout != hub:
            listed[f"{layout} to {hub}"] = Job(2, partial(load, layout, hub))
    for source, target in (("TP×FSDP 2×2", "EP×FSDP 2×2"), ("EP×FSDP 2×2", "HSDP 2×2"), ("FSDP2 × 3", "TP×FSDP 2×2")):
        listed[f"{source} to {target}"] = Job(4, partial(load, source, target))
    listed["full, saved on FSDP2 × 3"] = Job(3, partial(save_full, "FSDP2 × 3"))
    listed["full, loaded on HSDP 2×2"] = Job(4, partial(load_full, "HSDP 2×2", options=FROM_RANK_0))
    listed["full, loaded on TP×FSDP 2×2, from all ranks"] = Job(4, partial(load_full, "TP×FSDP 2×2", options=FULL))
    listed["full, loaded on 1 rank"] = Job(1, partial(load_full, "1 rank", options=FULL))
    listed["flattened, saved on FSDP2 × 4"] = Job(4, partial(save_flat, "FSDP2 × 4"))
    listed["flattened, loaded on FSDP2 × 2"] = Job(2, partial(load, "flat", hub, options=FLAT))
    for layout in ("1 rank", hub, "TP×FSDP 2×2", "EP×FSDP 2×2"):
        listed[f"plain state_dict on {layout}"] = Job(LAYOUTS[layout][0], partial(plain, layout))
        listed[f"creating state on {layout}"] = Job(LAYOUTS[layout][0], lambda _, layout=layout: creating_state(layout))
    listed["offloaded"] = Job(2, partial(offloaded, hub))
    listed["wrong states"] = Job(2, lambda _: wrong_states(hub))
    listed["DistMuon, saved on 3"] = Job(3, save_replicas)
    listed["DistMuon, loaded on 2"] = Job(2, partial(load_replicas, full=False))
    listed["DistMuon, loaded on 4, full"] = Job(4, partial(load_replicas, full=True))
    listed["DistMuon, loaded on 1"] = Job(1, partial(load_replicas, full=False))
    return listed
