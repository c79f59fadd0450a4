"""Checks of the connections between ranks, and of exchanges as a step makes them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...plan import counted
from ...transport import Exchange, all_gather_objects, exchange_group
from .context import Context, Finding, ranks_text

_RAGGED_ROUNDS = 6
_LONGEST_PART = 5000  # elements that a rank sends to another in a ragged exchange


def join(context: Context) -> Finding:
    """Makes the process group, if there is none yet, and one reduction over it."""
    world, options = context.world, context.options
    if not dist.is_initialized():
        backend = options.backend or ("gloo" if context.device.type == "cpu" else None)
        # NCCL ends the process when it times out. The doctor would rather report: it watches the clock by itself.
        seconds = options.limit * (1 if backend == "gloo" else 10)
        with context.doing("making the process group"):
            # A separate store: the doctor must be able to ask while the process group waits.
            store = dist.HashStore() if world == 1 else None  # type: ignore[attr-defined]
            method, timeout = None if world == 1 else "env://", timedelta(seconds=seconds)
            dist.init_process_group(backend, method, rank=context.rank, world_size=world, store=store, timeout=timeout)
    with context.doing("loading FSDP2"):
        importlib.import_module("torch.distributed.fsdp")
    with context.doing("the first reduction"):
        total = torch.ones(1, device=context.device)
        dist.all_reduce(total)
    with context.doing("the first reduction in host memory"):
        group = dist.group.WORLD
        assert group is not None
        context.nodes = list(all_gather_objects(context.node, group).values())
    problems = [] if int(total) == world else [f"the sum of one from each of {world} ranks is {float(total):g}"]
    nodes = counted(len(set(context.nodes)), "node")
    return Finding(f"{counted(world, 'rank')} on {nodes}, {dist.get_backend_config()}", problems)


def partner(rank: int, turn: int, world: int) -> int | None:
    """The partner of ``rank`` in a turn; over all ``turns``, every pair meets once.

    Ranks sit around a table, one of them stays and the others move on by one seat in every turn; with an odd number,
    one rank pauses in each turn.
    """
    last = world + world % 2 - 1
    staying, moved = turn % last, (2 * turn - rank) % last
    other = staying if rank == last else last if rank == staying else moved
    return other if other < world else None


def turns(world: int) -> int:
    return max(0, world + world % 2 - 1)


def exchange_with(
    exchange: Exchange, sent: Mapping[int, Tensor], lengths: Mapping[int, int], like: Tensor
) -> dict[int, Tensor]:
    """One exchange of parts by rank; ``lengths`` are the elements of those that arrive, which are returned."""
    outgoing = torch.cat([like[:0], *(sent[rank] for rank in sorted(sent))])
    incoming = like.new_full((sum(lengths.values()),), -1)
    counts = {rank: part.numel() for rank, part in sent.items()}
    exchange.start(incoming, exchange.splits(lengths), outgoing, exchange.splits(counts), phase="exchange").wait()
    ranks = sorted(lengths)
    return dict(zip(ranks, torch.split(incoming, [lengths[rank] for rank in ranks]), strict=True))


def world_exchange(context: Context) -> Exchange:
    return Exchange(exchange_group(range(context.world), ()))


def check_pairs(context: Context) -> Finding:
    """Every pair of ranks exchanges a few numbers, one pair of a rank after the other."""
    rank, world, exchange, problems = context.rank, context.world, world_exchange(context), list[str]()
    numbers = torch.arange(4, device=context.device, dtype=torch.float32)
    for turn in range(turns(world)):
        other = partner(rank, turn, world)
        peers = [] if other is None else [other]
        with context.doing(
            f"the first exchange between {ranks_text((rank, *peers))}" if peers else "a turn without an exchange"
        ):
            arrived = exchange_with(
                exchange, dict.fromkeys(peers, numbers + 10 * rank), dict.fromkeys(peers, 4), numbers
            )
            for peer, part in arrived.items():
                if not torch.equal(part, numbers + 10 * peer):
                    problems.append(
                        f"from rank {peer} came {part.tolist()} instead of {(numbers + 10 * peer).tolist()}"
                    )
    count = world * (world - 1) // 2
    return Finding(f"{count} {'pair has' if count == 1 else 'pairs have'} exchanged", problems)


def _part(source: int, target: int, turn: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What ``source`` sends to ``target``: of a length that both know, often empty, and numbers that both know."""
    draw = random.Random(f"{source} {target} {turn}")
    length = 0 if draw.random() < 0.4 else draw.randrange(1, _LONGEST_PART)
    numbers = torch.arange(length, device=device) * 7 + source * 31 + target * 17 + turn
    return (numbers % 251).to(dtype)


def check_ragged(context: Context) -> Finding:
    """Exchanges of unequal parts, many of them empty, in float32 and bfloat16; in one of them some ranks send
    nothing at all.
    """
    rank, world, exchange, problems = context.rank, context.world, world_exchange(context), list[str]()
    for turn in range(_RAGGED_ROUNDS):
        dtype = torch.bfloat16 if turn % 2 else torch.float32
        with context.doing(f"ragged exchange {turn + 1} of {_RAGGED_ROUNDS} in {dtype}"):
            silent = {sender for sender in range(world) if turn == _RAGGED_ROUNDS - 1 and sender % 2}
            ranks = [peer for peer in range(world) if peer != rank]
            sent = {peer: _part(rank, peer, turn, dtype, context.device) for peer in ranks if rank not in silent}
            expected = {peer: _part(peer, rank, turn, dtype, context.device) for peer in ranks if peer not in silent}
            lengths = {peer: part.numel() for peer, part in expected.items()}
            arrived = exchange_with(exchange, sent, lengths, torch.empty(0, dtype=dtype, device=context.device))
            for peer, part in arrived.items():
                if wrong := int((part != expected[peer]).sum()):
                    problems.append(
                        f"exchange {turn + 1}: {wrong} of {lengths[peer]} elements from rank {peer} are wrong"
                    )
    return Finding(f"{_RAGGED_ROUNDS} exchanges in float32 and bfloat16, also with empty parts", problems)
