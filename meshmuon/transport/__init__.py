"""The only room that communicates."""

from .agreement import Agreement
from .exchange import Exchange, Pending
from .groups import exchange_group, host_group
from .reference import own_shard, whole

__all__ = ["Agreement", "Exchange", "Pending", "exchange_group", "host_group", "own_shard", "whole"]
