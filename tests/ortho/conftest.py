from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, or as many as the test is parametrized with: on small matrices more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield torch.get_num_threads()
    torch.set_num_threads(before)
