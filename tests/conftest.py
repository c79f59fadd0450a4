"""Settings that must be in place before torch is imported, hypothesis profiles, and the fixtures of all tests."""

from __future__ import annotations

import gc
import os
import random
import sys
import zlib
from collections.abc import Iterator, Sequence

# Some virtual machines advertise AMX but trap its instructions, which kills bfloat16 products on CPU. No test needs
# AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.reference import newton_schulz
from tests.support.units import without_bfloat16_units

# Machines are busy: a slow example is no failure, the timeout of each test is.
settings.register_profile(
    "meshmuon", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("meshmuon")

# CPUs differ in it. Tests of what those with units for bfloat16 do say so.
without_bfloat16_units()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """In CI each test draws the same numbers every time, whichever tests the process has run before it."""
    if "CI" in os.environ:
        seed = zlib.crc32(item.nodeid.encode())
        torch.default_generator.manual_seed(seed)
        random.seed(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from threads, and bits must not depend on how busy the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_stance() -> Iterator[None]:
    """A test that leaves the compiler's stance changed makes later ones compile nothing."""
    yield
    if "torch._dynamo" in sys.modules:
        from torch._dynamo import eval_frame

        assert eval_frame._stance.stance == "default"


@pytest.fixture
def precise_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon without its cast to bfloat16."""

    def in_own_dtype(grad: torch.Tensor, ns_coefficients: Sequence[float], ns_steps: int, eps: float) -> torch.Tensor:
        return newton_schulz(grad, [ns_coefficients] * ns_steps, eps)

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_own_dtype)


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Objects of earlier tests are not looked at again: with them, a garbage collection takes a second."""
    torch.optim.SGD([torch.ones(2)])  # the first optimizer of a process imports what keeps frames alive
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
