"""Train a small mixture-of-experts GPT with meshmuon, expert parallel × FSDP2.

Every layer routes each token to two of its experts. With the defaults, four processes share the work:

  everything but the experts   FSDP2 over all 4 processes
  the experts' stacked weights a 2 × 2 mesh (efsdp, ep): half of the experts belong to each side of "ep", and FSDP2 cuts
                               that half again over "efsdp"; tokens travel to their experts inside "ep" and back

Whole experts are dealt to the processes where their number allows it (8 over 4: Muon then sends nothing for them).
Where it does not (--experts 6), the rows of every expert are cut over "efsdp" and Muon gathers each expert at its
owner. The optimizer is not told any of this: it reads the layouts from the parameters. No token is ever dropped, so
--nproc 1 trains the same model: in float64 to the same losses, in float32 until rounding, which Muon enlarges in
directions without a gradient, sends the first token elsewhere. The text is Python's own standard library.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from demo import options
from demo.data import TrainBatches
from demo.model import GPT, ModelConfig, init_weights
from demo.processes import Runtime, joined, mean
from demo.train import SCHEDULES, NonFiniteLossError, lr_scale, validation_loss
from meshmuon import Muon, get_default_muon_param_groups

INTERRUPTED = 130
TOP_K = 2
VALID_WINDOWS = 64


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group: `sent[i]` of them to rank i, `received[i]` from it. Backward sends them back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.route = (received, sent, group)
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.forward(ctx, grads[0], *ctx.route), None, None, None


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, Exchange.apply(x, sent, received, group))  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """The MLPs of all experts as two stacks, (E, d_ff, d_model) and (E, d_model, d_ff), around relu(x)²."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, config.d_ff, config.d_model))
        self.w2 = nn.Parameter(torch.empty(count, config.d_model, config.d_ff))
        self.group: dist.ProcessGroup | None = None  # over which the experts are dealt out

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, `counts[e]` of them for expert e; the results in the same order."""
        if self.group is None:
            return self._compute(x, counts)
        ranks = self.group.size()
        theirs = torch.empty_like(counts)  # how many rows each rank has for each of this rank's experts
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, theirs))
        x = exchange_rows(x, sent, received, self.group)
        # They arrive sorted by sender and then by expert.
        expert = torch.arange(theirs.numel(), device=x.device) % (theirs.numel() // ranks)
        order = expert.repeat_interleave(theirs).argsort(stable=True)
        y = self._compute(x[order], theirs.view(ranks, -1).sum(0))[order.argsort()]
        return exchange_rows(y, received, sent, self.group)

    def _compute(self, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = self._local(self.w1), self._local(self.w2)
        parts = zip(torch.split(x, counts.tolist()), w1, w2, strict=True)
        # An expert without a token takes part with no rows: its gradient is zeros, and no rank leaves the others
        # waiting.
        return torch.cat([F.relu(rows @ up.T).square() @ down.T for rows, up, down in parts])

    def _local(self, weight: Tensor) -> Tensor:
        """This rank's share of the experts: in forward FSDP2 has gathered them over "efsdp"."""
        if not isinstance(weight, DTensor) or self.group is None:
            return weight
        local, ranks = weight.to_local(), self.group.size()
        if local.requires_grad:
            # The loss is the mean over all ranks. FSDP2 averages gradients over "efsdp"; over "ep" the tokens have come
            # here and their gradients are already added up. (FSDP2's set_gradient_divide_factor does not work with
            # gloo.)
            local.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
        return local


class MoE(nn.Module):
    """Each token goes to the TOP_K experts that the router likes best, weighted by its softmax over these."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(config.d_model, count, bias=False)
        self.experts = Experts(config, count)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        weight, chosen = logits.softmax(-1).topk(TOP_K, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        source = order // TOP_K
        counts = chosen.flatten().bincount(minlength=logits.shape[-1])
        y = self.experts(tokens[source], counts) * weight.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, source, y).view_as(x)


def build_model(config: ModelConfig, experts: int, seed: int) -> GPT:
    """The demo's GPT with a mixture of experts in every layer; the weights depend on the arguments only."""
    model = GPT(config)
    for layer in model.layers:
        layer.mlp = MoE(config, experts)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for module in expert_modules(model):
        nn.init.normal_(module.w1, std=config.d_model**-0.5, generator=generator)
        nn.init.normal_(module.w2, std=0.5 * config.d_ff**-0.5, generator=generator)
    return model


def expert_modules(model: nn.Module) -> Iterator[Experts]:
    """The stacks of experts, one per layer."""
    return (module for module in model.modules() if isinstance(module, Experts))


def expert_shard_dim(config: ModelConfig, experts: int, nproc: int, ep: int) -> int:
    """The dim that "efsdp" cuts: 0, whole experts, if they divide over all processes; else 1, the rows of each."""
    if nproc % ep:
        raise ValueError(f"{nproc} processes do not divide into expert-parallel groups of {ep}: change --nproc or --ep")
    if experts % ep:
        raise ValueError(f"--experts {experts} do not divide over --ep {ep} processes")
    if experts % nproc == 0:
        return 0
    if config.d_model % (nproc // ep) or config.d_ff % (nproc // ep):
        raise ValueError(
            f"--experts {experts} do not divide over {nproc} processes, nor do their {config.d_ff} and "
            f"{config.d_model} rows over {nproc // ep}: change --experts, --d-ff and --d-model, or --nproc and --ep"
        )
    return 1


def shard(model: GPT, experts: int, runtime: Runtime, ep: int) -> None:
    """Expert parallelism × FSDP2 in place; nothing to do for a single process."""
    world = runtime.world_size
    if world == 1:
        return
    dim = expert_shard_dim(model.config, experts, world, ep)
    everyone = init_device_mesh(runtime.device.type, (world,))
    mesh = init_device_mesh(runtime.device.type, (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    for module in expert_modules(model):
        _shard_experts(module, mesh, dim)
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)


def _shard_experts(module: Experts, mesh: DeviceMesh, dim: int) -> None:
    module.group = mesh.get_group("ep")
    for name, weight in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])))
    fully_shard(module, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(dim))


def build_optimizer(model: nn.Module, lr: float) -> Muon:
    """Muon for every matrix, each expert's own included; AdamW for the rest."""
    return Muon(get_default_muon_param_groups(model, expert_keys=("experts",)), lr=lr)


def train(
    model: GPT,
    optimizer: Muon,
    batches: TrainBatches,
    lrs: Sequence[float],
    runtime: Runtime,
    report: Callable[[int, float], None],
) -> list[float]:
    """The loss of every step, over the global batch, with one of `lrs` each; `report` hears of each."""
    losses: list[float] = []
    for step, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens, targets = batches.batch(step, runtime.rank, runtime.world_size)
        loss = model.loss(tokens.to(runtime.device), targets.to(runtime.device))
        torch.autograd.backward(loss)
        losses += mean([loss.item()], runtime)
        if not abs(losses[-1]) < float("inf"):
            raise NonFiniteLossError(f"training loss at step {step + 1} is {losses[-1]}: training diverged, lower --lr")
        optimizer.step()
        optimizer.zero_grad()
        report(step + 1, losses[-1])
    return losses


def parser() -> argparse.ArgumentParser:
    """The command line."""

    class Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    whole, number = options.whole, options.number
    result = argparse.ArgumentParser(description=__doc__, formatter_class=Format, allow_abbrev=False)
    result.add_argument(
        "--nproc", type=whole(1), default=4, help="processes; 1 trains in this one, without any sharding"
    )
    result.add_argument(
        "--ep", type=whole(1), default=2, help="processes over which the experts are dealt out; divides --nproc"
    )
    result.add_argument("--experts", type=whole(TOP_K), default=8, help="experts per layer")
    result.add_argument("--d-model", type=whole(1), default=96, help="width of the residual stream")
    result.add_argument("--d-ff", type=whole(1), default=192, help="inner width of each expert")
    result.add_argument("--layers", type=whole(1), default=3, help="number of transformer layers")
    result.add_argument("--heads", type=whole(1), default=3, help="attention heads; must divide --d-model")
    result.add_argument("--seq-len", type=whole(1), default=128, help="bytes per sequence")
    result.add_argument("--batch-size", type=whole(1), default=16, help="sequences per step, over all processes")
    result.add_argument("--steps", type=whole(1), default=60, help="steps to train")
    result.add_argument("--lr", type=number(0), default=1e-2, help="peak learning rate")
    result.add_argument("--schedule", choices=SCHEDULES, default="constant", help="lr decay")
    result.add_argument("--warmup-steps", type=whole(0), default=0, help="steps of lr warm-up")
    result.add_argument("--seed", type=whole(0), default=0, help="seed of the weights and the data order")
    result.add_argument("--data", type=Path, help="folder of .py files (default: Python's standard library)")
    result.add_argument(
        "--valid-fraction", type=number(0, 1), default=0.1, help="share of the files kept for validation"
    )
    result.add_argument("--device", default="cpu", help="torch device")
    result.add_argument(
        "--threads", type=whole(1), help="CPU threads per process (default: the cores divided over them)"
    )
    return result


class Trained(NamedTuple):
    """What a run leaves: the loss of every step, the validation loss after the last one, and the optimizer."""

    losses: list[float]
    valid_loss: float
    optimizer: Muon


class Job:
    """What the command line asks for, checked before any process starts; `ValueError` says what to change."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.runtime = args, options.runtime(args)
        self.config = ModelConfig(
            d_model=args.d_model, n_layers=args.layers, n_heads=args.heads, d_ff=args.d_ff, seq_len=args.seq_len
        )
        if self.runtime.world_size > 1:
            expert_shard_dim(self.config, args.experts, self.runtime.world_size, args.ep)
        self.corpus = options.corpus(args)
        self.batches = TrainBatches(self.corpus.train, args.seq_len, args.batch_size, args.seed)

    def run(self, report: Callable[[int, float], None]) -> Trained:
        args, runtime = self.args, self.runtime
        model = build_model(self.config, args.experts, args.seed).to(runtime.device)
        shard(model, args.experts, runtime, args.ep)
        optimizer = build_optimizer(model, args.lr)
        lrs = [args.lr * lr_scale(step, args.steps, args.warmup_steps, args.schedule) for step in range(args.steps)]
        losses = train(model, optimizer, self.batches, lrs, runtime, report)
        return Trained(
            losses, validation_loss(model, self.corpus.valid, args.batch_size, VALID_WINDOWS, runtime), optimizer
        )


def follow(arguments: Sequence[str] | None) -> int:
    """What every process but the first does: the same steps, without a word."""
    job = Job(parser().parse_args(arguments))
    with joined(job.runtime, follow, arguments):
        try:
            job.run(lambda step, loss: None)
        except NonFiniteLossError:
            return 1  # rank 0 says so
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if int(os.environ.get("RANK", "0")):
        return follow(arguments)
    command_line = parser()
    args = command_line.parse_args(arguments)
    try:
        job = Job(args)
    except ValueError as error:
        command_line.error(str(error))
    world, start = job.runtime.world_size, time.perf_counter()
    sharing = f"{world} processes, efsdp {world // args.ep} × ep {args.ep}" if world > 1 else "one process"
    batch = f"{args.batch_size} × {args.seq_len} bytes"
    print(f"{args.experts} experts, top {TOP_K}, {args.steps} steps of {batch}, {sharing}", flush=True)

    def report(step: int, loss: float) -> None:
        if step == 1 or step == args.steps or step % max(1, args.steps // 12) == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  {time.perf_counter() - start:.1f} s", flush=True)

    try:
        with joined(job.runtime, follow, arguments):
            losses, valid_loss, optimizer = job.run(report)
            print(
                f"\n{optimizer.plan().describe()}\n\nloss {losses[0]:.4f} → {losses[-1]:.4f}, validation "
                f"{valid_loss:.4f}"
            )
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C.")
        return INTERRUPTED
    except (NonFiniteLossError, ChildProcessError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
