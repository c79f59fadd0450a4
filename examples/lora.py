"""Fine-tuning with LoRA (PEFT): Muon on both factors, on B alone, or AdamW, and what each makes of the adapter B·A.

Start it with: python examples/lora.py
"""

import argparse
import copy
import os
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

CLASSES, WIDTH, RANK = 10, 64, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUTES: dict[str, Callable[[str, Tensor], bool] | None] = {
    "Muon on A and B": None,  # the default
    "Muon on B, AdamW on A": lambda name, param: "lora_B" in name,
    "AdamW on A and B": lambda name, param: False,
}


def batch(step: int, shift: int) -> tuple[Tensor, Tensor]:
    """Points around four centres per class. Fine-tuning names half of the clusters anew."""
    centres = torch.randn(4 * CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(step)
    cluster = torch.randint(4 * CLASSES, (256,), generator=generator)
    labels = (cluster + shift * (cluster % 2)) % CLASSES
    return (centres[cluster] + torch.randn(256, WIDTH, generator=generator)).to(DEVICE), labels.to(DEVICE)


def train(model: nn.Module, optimizer: Muon, steps: int, shift: int) -> list[float]:
    losses = []
    for step in range(1, steps + 1):
        inputs, labels = batch(step, shift)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stable_rank(matrix: Tensor) -> float:
    """Squared Frobenius norm over squared spectral norm: how many directions matter."""
    return float(matrix.square().sum() / torch.linalg.matrix_norm(matrix, 2).square())


def main(steps: int, lr: float) -> None:
    torch.manual_seed(0)
    blocks = [module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.GELU())]
    base = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES, bias=False)).to(DEVICE)
    train(base, Muon(get_default_muon_param_groups(base), lr=3e-3), 2 * steps, shift=0)

    for title, is_muon in ROUTES.items():
        torch.manual_seed(0)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0", "3", "6"])
        model = get_peft_model(copy.deepcopy(base), config)
        # No weight decay: it would pull the adapter, not the model, towards zero. Frozen weights are left out.
        groups = get_default_muon_param_groups(model, is_muon)
        optimizer = Muon(groups, lr=lr, weight_decay=0.0, allow_inactive=True)  # AdamW alone is meant here
        if is_muon is None:
            print(optimizer.routing_table())
        losses = train(model, optimizer, steps, shift=1)
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        ranks = [stable_rank(layer.get_delta_weight("default").detach()) for layer in layers]
        shown = " ".join(f"{loss:.3f}" for loss in [*losses[:: max(1, steps // 5)], losses[-1]])
        print(f"{title:22s} loss {shown}  stable rank of B·A {min(ranks):.1f} to {max(ranks):.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
