"""NeMo Automodel's parts around the optimizer, in two gloo processes with FSDP2.

Its recipes need a GPU. Real are: its YAML loader and typed config, ``build_optimizer``, its scheduler, its clipping,
and its state for ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from meshmuon import Muon, UnsupportedError, get_default_muon_param_groups

from ...support.processes import results_of, run_ranks
from ..hf_reference import VOCABULARY, small_llama
from ..plain_loop import same_weights
from ..test_recipes import recipe

STEPS, SAVED = 10, 5
OVERRIDES = [{"pattern": "norm", "wd_mult": 0.0}, {"pattern": "down_proj", "lr_mult": 0.5}]


def config_of(folder: Path, **changes: Any) -> Any:
    """The optimizer of a YAML file, as a recipe reads it."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._typed_config import RecipeConfig

    path = folder / f"config-{dist.get_rank() if dist.is_initialized() else 0}.yaml"
    path.write_text(yaml.safe_dump({"optimizer": recipe("automodel")["optimizer"] | changes}))
    return RecipeConfig(load_yaml_config(path)).optimizer


def scheduler_of(optimizers: list[Any]) -> Any:
    from nemo_automodel.components.optim.optimizer import LRSchedulerConfig

    steps = SimpleNamespace(num_epochs=1, epoch_len=STEPS, max_steps=STEPS, grad_acc_steps=1, dataloader=range(STEPS))
    (scheduler,) = LRSchedulerConfig(lr_decay_style="cosine", lr_warmup_steps=2, min_lr=1e-5).build(optimizers, steps)
    return scheduler


def build(folder: Path) -> tuple[Any, Any, Any]:
    model = sharded()
    (optimizer,) = config_of(folder, param_group_overrides=OVERRIDES).build(model, device_mesh=None, is_peft=False)
    return model, optimizer, scheduler_of([optimizer])


def sharded() -> Any:
    model = small_llama()
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    from nemo_automodel.components.training.utils import clip_grad_norm

    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        clip_grad_norm(0.5, [model])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1)


def plain_loop() -> Any:
    """Groups by hand, with the lr and weight decay that Automodel's scheduler writes into each group."""
    model = sharded()
    groups = []
    for group in get_default_muon_param_groups(model):
        for kind in ("rest", "norm", "down_proj"):
            pairs = [
                (name, param)
                for name, param in zip(group["names"], group["params"], strict=True)
                if kind == next((word for word in ("norm", "down_proj") if word in name), "rest")
            ]
            if pairs:
                names, params = zip(*pairs, strict=True)
                keys = {"norm": {"lr_mult": 1.0, "wd_mult": 0.0}, "down_proj": {"lr_mult": 0.5, "wd_mult": 1.0}}.get(
                    kind, {}
                )
                groups.append({**group, "names": list(names), "params": list(params), **keys})
    optimizer = Muon(groups, lr=1e-3, weight_decay=0.1)
    train(model, optimizer, scheduler_of([optimizer]), range(STEPS))
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name in decays if decays[name] == 0.0} == {name for name in decays if "norm" in name}
    assert len({group["lr"] for group in optimizer.param_groups}) == 2
    return model


def rank_main(rank: int, folder: Path) -> None:
    from nemo_automodel.components.checkpoint.stateful_wrappers import OptimizerState

    model, optimizer, scheduler = build(folder)
    assert isinstance(optimizer, Muon)
    train(model, optimizer, scheduler, range(SAVED))
    save(
        {"optim": OptimizerState(model, optimizer, [scheduler]), "model": model.state_dict()},
        checkpoint_id=folder / "saved",
    )
    train(model, optimizer, scheduler, range(SAVED, STEPS))
    expected = plain_loop()
    same_weights(model, expected)

    model, optimizer, scheduler = build(folder)
    weights = model.state_dict()
    load({"optim": OptimizerState(model, optimizer, [scheduler]), "model": weights}, checkpoint_id=folder / "saved")
    model.load_state_dict(weights)
    train(model, optimizer, scheduler, range(SAVED, STEPS))
    same_weights(model, expected)


def test_equal_to_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    results_of(run_ranks(2, rank_main, tmp_path, seconds=900))


def test_its_builder_takes_the_path(tmp_path: Path) -> None:
    from nemo_automodel.components.optim.optimizer import build_optimizer

    options = recipe("automodel")["optimizer"]
    (optimizer,) = build_optimizer(small_llama(), (options.pop("_target_"), {**options, "lr": 1e-3}))
    assert isinstance(optimizer, Muon)
    assert not type(config_of(tmp_path)).supports_megatron_fsdp_sharding
    with pytest.raises(UnsupportedError, match="makes param groups without names"):
        config_of(tmp_path).build_from_param_groups([{"params": list(small_llama().parameters())}])
