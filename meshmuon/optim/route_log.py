"""What ``debug=True`` logs: the route of every parameter, whenever the set of parameters with a gradient changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..params.named_params import NamedParam
from ..routing.table import RoutingTable

_logger = logging.getLogger("meshmuon")


class RouteLog:
    """Logs routes when they change; does nothing unless it is on."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._logged: tuple[str, ...] | None = None  # parameters that had a gradient at the last logging

    def tell(self, params: Sequence[NamedParam], table: Callable[[], RoutingTable]) -> None:
        """Logs the rows of ``table`` unless the same parameters had gradients at the last logging."""
        if not self._on:
            return
        names = tuple(named.name for named in params if named.param.grad is not None)
        if names == self._logged:
            return
        self._logged = names
        if not _logger.hasHandlers():  # debug=True must show its lines even if logging was never configured
            _logger.addHandler(logging.StreamHandler())
        _logger.setLevel(logging.DEBUG)
        for row in table().rows:
            _logger.debug("%s%s", row, "" if row.name in names else " (no gradient)")
