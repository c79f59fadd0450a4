"""A plain FSDP2 training script with meshmuon, to copy and change. It runs on CPU with gloo and on GPUs with nccl.

Start it with: torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --checkpoint runs/fsdp2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

VOCABULARY, LENGTH, HEADS = 64, 32, 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens) + self.positions.weight[: tokens.size(1)]))


def main(steps: int, checkpoint: str | None) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = Transformer().to(device)
    for module in (*model.layers, model):
        fully_shard(module)
    # Built after sharding: Muon for the matrices of the layers, AdamW for embeddings, head, norms and biases.
    optimizer = Muon(get_default_muon_param_groups(model), lr=3e-3, weight_decay=0.1)
    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    for step in range(1, steps + 1):
        tokens = torch.randint(VOCABULARY, (16, LENGTH // 2), device=device).repeat(1, 2)
        logits = model(tokens[:, :-1])[:, -LENGTH // 2 :]  # of the second half, which repeats the first
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH // 2 :].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:4d}  loss {mean.item():.4f}", flush=True)
    if checkpoint is not None:
        weights, state = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", help="folder to save model and optimizer to at the end")
    main(**vars(parser.parse_args()))
