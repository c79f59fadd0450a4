"""The only room that communicates."""

from .agreement import Agreement
from .data_parallel import averaged, broadcast, everyone
from .exchange import Exchange, Pending
from .groups import exchange_group, host_group
from .reference import has_part, own_shard, whole

__all__ = [
    "Agreement",
    "Exchange",
    "Pending",
    "averaged",
    "broadcast",
    "everyone",
    "exchange_group",
    "has_part",
    "host_group",
    "own_shard",
    "whole",
]
