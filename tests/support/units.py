"""Whether this CPU counts as one that multiplies bfloat16. In tests it does not, whatever it can, unless one says so.

A CPU without such units computes the same as one with them, only slower: no shape of a test may be large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from meshmuon import torch_compat
from meshmuon.ortho import newton_schulz

cpu_multiplies_bfloat16 = torch_compat.cpu_multiplies_bfloat16
"""The function itself."""


def without_bfloat16_units() -> None:
    """From now on this process takes its CPU for one without units."""
    setattr(torch_compat, "cpu_multiplies_bfloat16", lambda: False)  # noqa: B010 - it is not assigned to, it is replaced


@contextmanager
def bfloat16_units(*, smallest: int | None = None) -> Iterator[None]:
    """Inside, the CPU has units; matrices are in bfloat16 from a short side of ``smallest`` on, if given."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch_compat, "cpu_multiplies_bfloat16", lambda: True))
        if smallest is not None:
            patches.enter_context(patch.object(newton_schulz, "_SMALLEST_SHORT", smallest))
        yield
