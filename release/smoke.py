"""Tries an installed meshmuon in an environment that has torch and nothing else; ``make package`` runs it outside the
clone.

Every module is imported, which shows that torch is the only dependency.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import pkgutil
import subprocess
import sys
from pathlib import Path

import torch

import meshmuon

NEEDS = {  # modules that need more than torch, each with what it needs; nothing imports them unless that is there
    "meshmuon.integrations.hf": "transformers",
    "meshmuon.integrations.lightning": "lightning",
    "meshmuon.integrations.torchtitan": "torchtitan",
    "meshmuon.ortho.kernels.triton_symmetric": "triton",
}


def check_place() -> None:
    """The package is the installed one, whole and of one version."""
    place = Path(meshmuon.__file__).resolve()
    assert Path(sys.prefix).resolve() in place.parents, f"{place} is not in {sys.prefix}"
    assert importlib.metadata.version("meshmuon") == meshmuon.__version__
    assert (importlib.resources.files("meshmuon") / "py.typed").is_file()
    for name in meshmuon.__all__:
        getattr(meshmuon, name)


def check_imports() -> int:
    """Imports every module. Returns how many there are."""
    names = [module.name for module in pkgutil.walk_packages(meshmuon.__path__, "meshmuon.", onerror=lambda name: None)]
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != NEEDS.get(name):
                raise
    return len(names)


def check_step() -> None:
    """One step moves every parameter, along an orthogonal matrix where Muon is responsible."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 24, bias=False), torch.nn.Linear(24, 8))
    groups = meshmuon.get_default_muon_param_groups(model)
    optimizer = meshmuon.Muon(groups, lr=0.1, weight_decay=0.0, adjust_lr_fn="original", ns_steps=10)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    moved = {name: before[name] - param.detach() for name, param in model.named_parameters()}
    assert all(bool(step.abs().sum() > 0) for step in moved.values())
    values = torch.linalg.svdvals(moved["1.weight"] / 0.1 / (24 / 16) ** 0.5)
    assert bool((values - 1).abs().max() < 1e-3), values
    assert "1.weight" in str(optimizer.routing_table())
    assert "rank" in optimizer.plan().describe()


def check_commands() -> None:
    """The command is installed, lists the checks of the doctor and plans a model that comes with the package."""
    command = Path(sys.executable).with_name("meshmuon")
    for start in ([str(command)], [sys.executable, "-m", "meshmuon"]):
        shown = subprocess.run([*start, "--version"], check=True, capture_output=True, text=True).stdout
        assert shown.strip() == f"meshmuon {meshmuon.__version__}", shown
    listed = subprocess.run([str(command), "doctor", "--list"], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) > 10, listed
    planned = [str(command), "plan", "--model", "gpt2", "--mesh", "dp_shard=4"]  # reads data files of the package
    assert "gpt2" in subprocess.run(planned, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    check_place()
    modules = check_imports()
    check_step()
    check_commands()
    print(
        f"meshmuon {meshmuon.__version__} with torch {torch.__version__}: {modules} modules, one step and the "
        "commands work"
    )
