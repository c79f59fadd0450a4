"""Writes ``checkpoints``: what meshmuon has saved on many layouts, each with the weights after two further steps.

    python -m tests.spine.write_checkpoints

It was run once, by the versions in ``checkpoints/about.json``. The files are what later versions must be able to load,
so they are not written anew when these change. Each kind is a folder: "plain" has what ``torch.save`` makes of
``state_dict()``, a file for each rank where tensors are sharded; "dcp" is a checkpoint of torch.distributed.checkpoint;
"full" is its ``full_state_dict`` in one file. ``weights.pt`` has the whole weights after ``STEPS`` steps, of which
``SAVED`` were before saving.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import meshmuon

from .case import ONE_DEVICE, Case, Layout, Param
from .cases import EXPERTS, FUSED, HALF, KELLER, LARGE, LAYOUTS, in_dtype
from .ranks import Ranks
from .run import Outcome, Run, assembled

FOLDER = Path(__file__).parent / "checkpoints"
SAVED, STEPS = 3, 5
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)

MODEL = (
    Param("layers.0.wq", (12, 8)),
    Param("layers.0.odd", (7, 5)),
    Param("layers.1.few", (2, 6)),
    Param("layers.1.late", (6, 5), idle=tuple(range(SAVED + 1))),  # it has state, zeros, and no gradient yet
    Param("embed", (11, 6), "adamw"),
    Param("norm", (9,), "adamw", idle=(1,)),
)


@dataclass(frozen=True)
class Kind:
    """A checkpoint: the run that is saved, and how."""

    case: Case
    how: Literal["plain", "dcp", "full"]
    refused: str = ""  # what is said of it where the version of today does not load it any more

    @property
    def sharded(self) -> bool:
        """Whether each rank has a file of its own."""
        return self.how == "plain" and (self.case.layout.wrapped or self.case.layout.matrix is not None)


def kind(layout: str, how: Literal["plain", "dcp", "full"], params: tuple[Param, ...] = MODEL, **fields: Any) -> Kind:
    options = {**KELLER, **fields.pop("options", {})}
    lies = LAYOUTS[layout] if layout else ONE_DEVICE
    return Kind(Case(params, lies, options, steps=STEPS, **fields), how)


def given_up(chosen: Kind, text: str) -> Kind:
    """A kind that an earlier version has written with options that there are no more."""
    return replace(chosen, refused=text)


STOCHASTIC = {**LARGE, "rounding": "stochastic"}
KINDS = {
    "one-device": kind("", "plain", (*MODEL, *EXPERTS[:1])),
    "ddp": kind("DDP × 2", "plain"),
    "fsdp2": kind("fully_shard × 2", "plain"),
    "fsdp2-dcp": kind("fully_shard × 2", "dcp"),
    "fsdp2-empty-shards-dcp": kind("fully_shard × 4", "dcp"),
    "hsdp-dcp": kind("fully_shard, HSDP", "dcp"),
    "tp-fsdp2-dcp": kind("TP by rows × FSDP", "dcp"),
    "ep-fsdp2-dcp": kind("EP × FSDP", "dcp", (*EXPERTS[:4], *MODEL[:1], *MODEL[-1:])),
    "ep-full": kind("EP", "full", (*EXPERTS[:4], *MODEL[:1], *MODEL[-1:])),
    "dist-muon": kind("DistMuon", "plain", ranks=3, options={"rule": "normuon"}),
    "offloaded-dcp": kind("FSDP × 2", "dcp", offloads=(1,)),
    "normuon-dcp": kind("TP by columns × FSDP", "dcp", options={"rule": "normuon"}),
    "chained-rules": kind("FSDP × 3", "plain", options={"rule": ["muoneq", "normuon", "muon_plus"]}),
    "random-bits-dcp": kind("FSDP × 3", "dcp", in_dtype(MODEL, HALF), options=STOCHASTIC),
    "random-bits": kind(
        "FSDP × 2", "plain", in_dtype(MODEL, HALF), options={**STOCHASTIC, "momentum_dtype": torch.float32}
    ),
    "split-dcp": kind("FSDP × 3", "dcp", FUSED),
    "momentum-bfloat16-dcp": kind("FSDP × 2", "dcp", options={"momentum_dtype": HALF}),
    # Written with momentum_dtype=torch.int8 by the last version that had it.
    "momentum-int8": given_up(kind("", "plain"), "momentum_dtype=torch.int8 is gone"),
    "momentum-int8-dcp": given_up(kind("FSDP × 2", "dcp"), "momentum_dtype=torch.int8 is gone"),
}


def module_of(case: Case, params: Sequence[nn.Parameter]) -> nn.Module:
    """A model in which each parameter has its name."""
    root = nn.Module()
    for param, tensor in zip(case.params, params, strict=True):
        *path, last = param.name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, tensor)
    return root


def states_of(running: Run, options: StateDictOptions | None = None) -> dict[str, Any]:
    module = module_of(running.case, running.params)
    optimizer = get_optimizer_state_dict(module, running.optimizer, options=options)
    return {"model": get_model_state_dict(module, options=options), "optimizer": optimizer}


def save(name: str, folder: Path) -> Outcome:
    """Runs on each rank, and goes on to the end."""
    chosen = KINDS[name]
    running, rank = Run(chosen.case), dist.get_rank() if dist.is_initialized() else 0
    running.steps(range(SAVED))
    if chosen.how == "dcp":
        dcp.save(states_of(running), checkpoint_id=folder / "dcp")
    else:
        content = states_of(running, FULL) if chosen.how == "full" else _plain(running)
        if rank == 0 or chosen.sharded:
            torch.save(content, folder / f"rank{rank}.pt")
    running.steps(range(SAVED, STEPS))
    return running.outcome()


def _plain(running: Run) -> dict[str, Any]:
    """Shards without meshes, which ``torch.load`` would need a process group for."""
    state = running.state_dict()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    by_name = {param.name: tensor for param, tensor in zip(running.case.params, running.params, strict=True)}

    def local(value: Tensor, like: Tensor) -> Any:
        if not isinstance(value, DTensor):
            return value.detach().clone()
        assert isinstance(like, DTensor)
        assert value.placements == like.placements
        return value.detach().to_local().clone(), tuple(value.shape), tuple(value.stride())

    saved = {
        k: {key: local(value, by_name[names[k]]) for key, value in entry.items()} for k, entry in state["state"].items()
    }
    weights = {name: local(tensor, tensor) for name, tensor in by_name.items()}
    return {"weights": weights, "optimizer": {"state": saved, "param_groups": state["param_groups"]}}


def load(name: str, folder: Path, layout: Layout | None = None) -> Outcome:
    """Runs on each rank of a new run, whose weights are zeros before, to its end; on another layout if given."""
    chosen = KINDS[name]
    running = Run(replace(chosen.case, layout=layout or chosen.case.layout))
    with torch.no_grad():
        for tensor in running.params:
            tensor.zero_()
    if chosen.how == "plain":
        rank = dist.get_rank() if chosen.sharded else 0
        _load_plain(running, torch.load(folder / f"rank{rank}.pt", weights_only=True))
    else:
        options = FULL if chosen.how == "full" else None
        if options is None:
            state = states_of(running)
            dcp.load(state, checkpoint_id=folder / "dcp")
        else:
            state = torch.load(folder / "rank0.pt", weights_only=True)
        module = module_of(running.case, running.params)
        set_model_state_dict(module, state["model"], options=options)
        set_optimizer_state_dict(module, running.optimizer, state["optimizer"], options=options)
    running.steps(range(SAVED, STEPS))
    return running.outcome()


def _load_plain(running: Run, content: dict[str, Any]) -> None:
    names = [name for group in content["optimizer"]["param_groups"] for name in group["param_names"]]
    by_name = {param.name: tensor for param, tensor in zip(running.case.params, running.params, strict=True)}

    def placed(value: Any, like: Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value
        assert isinstance(like, DTensor)
        local, shape, stride = value
        placements = like.placements
        return DTensor.from_local(
            local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    with torch.no_grad():
        for name, value in content["weights"].items():
            by_name[name].copy_(placed(value, by_name[name]))
    state = {
        k: {key: placed(value, by_name[names[k]]) for key, value in entry.items()}
        for k, entry in content["optimizer"]["state"].items()
    }
    running.optimizer.load_state_dict({**content["optimizer"], "state": state})


def main() -> None:
    ranks = Ranks()
    for name, chosen in KINDS.items():
        if chosen.refused:
            continue
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        whole = assembled(ranks.run(chosen.case.layout.world, save, name, folder))
        torch.save({param.name: whole[param.name, "weight"] for param in chosen.case.params}, folder / "weights.pt")
        print(name, sum(file.stat().st_size for file in folder.rglob("*")), flush=True)
    about = {"meshmuon": meshmuon.__version__, "torch": torch.__version__, "saved": SAVED, "steps": STEPS}
    (FOLDER / "about.json").write_text(json.dumps(about) + "\n")
    ranks.stop()


if __name__ == "__main__":
    main()
