"""What runs on a GPU, where the host must not wait to know what is in a tensor, forced on CPU."""

from __future__ import annotations

import pytest

from meshmuon.optim import adamw, collect, nonfinite


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows nothing of any tensor, as of those on a GPU."""
    for module in (nonfinite, collect, adamw):
        monkeypatch.setattr(module, "known_to_host", lambda tensor: False)


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "device":
        request.getfixturevalue("masked")
    return str(request.param)
