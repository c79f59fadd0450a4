"""The only room that communicates."""

from .agreement import Agreement
from .exchange import Exchange, Pending
from .groups import exchange_group, host_group
from .reference import has_part, own_shard, whole

__all__ = ["Agreement", "Exchange", "Pending", "exchange_group", "has_part", "host_group", "own_shard", "whole"]
