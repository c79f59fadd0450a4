"""The only part of the package that communicates."""

from .agreement import Agreement, Vote
from .collectives import (
    all_gather_objects,
    averaged,
    broadcast,
    norm_device,
    reduce_largest,
    reduce_sum,
    swap_with,
)
from .exchange import Exchange, Pending
from .groups import exchange_group, shared_group, turn_of, turns_of
from .plain_data import sendable
from .reference import check_round_trip, has_part, own_shard, whole
