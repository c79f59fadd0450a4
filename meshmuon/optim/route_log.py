"""What ``debug=True`` shows: the route of every parameter, whenever the set of those with a gradient changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..params.named_params import NamedParam
from ..routing.table import RoutingTable

__all__ = ["RouteLog"]

_logger = logging.getLogger("meshmuon")


class RouteLog:
    """Logs routes when they are news; nothing unless it is on."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._told: tuple[str, ...] | None = None

    def tell(self, parameters: Sequence[NamedParam], table: Callable[[], RoutingTable]) -> None:
        """Logs the rows of ``table`` unless the same parameters had gradients the last time."""
        if not self._on:
            return
        names = tuple(one.name for one in parameters if one.param.grad is not None)
        if names == self._told:
            return
        self._told = names
        if not _logger.hasHandlers():  # debug=True shows its lines even where logging was never configured
            _logger.addHandler(logging.StreamHandler())
        _logger.setLevel(logging.DEBUG)
        for row in table().rows:
            _logger.debug("%s%s", row, "" if row.name in names else " (no gradient)")
