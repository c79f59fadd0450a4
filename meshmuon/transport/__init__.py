"""The only part of the package that communicates."""

from .agreement import Agreement, PendingVotes, Vote
from .collectives import all_gather_objects, averaged, broadcast
from .exchange import Exchange, Pending
from .groups import exchange_group, shared_group, turn_of, turns_of
from .norms import NormWord, norm_device, reduce_norm
from .plain_data import sendable
from .probe import swap_with
from .reference import check_round_trip, has_part, own_shard, whole

__all__ = [
    "Agreement",
    "Exchange",
    "NormWord",
    "Pending",
    "PendingVotes",
    "Vote",
    "all_gather_objects",
    "averaged",
    "broadcast",
    "check_round_trip",
    "exchange_group",
    "has_part",
    "norm_device",
    "own_shard",
    "reduce_norm",
    "sendable",
    "shared_group",
    "swap_with",
    "turn_of",
    "turns_of",
    "whole",
]
