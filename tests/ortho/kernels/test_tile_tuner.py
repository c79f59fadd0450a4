"""How tiles are chosen: the fastest candidate, once for each kind of product. A stand-in for a device keeps the
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from meshmuon.device import Hardware
from meshmuon.ortho.kernels.tilings import CANDIDATES, ProductKind, TileTuner, Tiling, default_tiling

CPU = torch.device("cpu")
SLOW, FAST, BROKEN, MIDDLE = (Tiling(tile, 64, 8, 4, 3) for tile in (16, 32, 64, 128))
COST = {SLOW: 3e-3, FAST: 1e-3, MIDDLE: 2e-3}
KIND = ProductKind("stand-in", torch.float16, "ieee", 1024, 4096, False, False)


@dataclass
class Device(Hardware):
    """Time passes only in launches; while it captures, nothing runs."""

    costs: Mapping[Tiling, float] = field(default_factory=lambda: COST)
    clock: float = 0.0
    capturing: bool = False
    launches: list[Tiling] = field(default_factory=list)
    torch_cost: float = 1.5e-3
    products: int = 0

    def launch(self, tiling: Tiling) -> None:
        if tiling not in self.costs:
            raise RuntimeError("out of resource: shared memory")
        assert not self.capturing, "a candidate was launched while a graph was captured"
        self.launches.append(tiling)
        self.clock += self.costs[tiling] * (2 if len(self.launches) % 7 == 1 else 1)  # now and then something disturbs

    def multiply(self) -> None:
        """Torch's own product."""
        assert not self.capturing, "a product was measured while a graph was captured"
        self.products += 1
        self.clock += self.torch_cost

    def runs_now(self, device: torch.device) -> bool:
        return not self.capturing

    def seconds(self, device: torch.device, work: Callable[[], None]) -> float:
        began = self.clock
        work()
        return self.clock - began


@pytest.fixture(autouse=True)
def tuning_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHMUON_AUTOTUNE", raising=False)


def tuner_of(device: Device) -> TileTuner:
    candidates = (SLOW, FAST, BROKEN, MIDDLE)
    return TileTuner(device, dict.fromkeys((torch.float16, torch.float32), candidates))


def choose(tuner: TileTuner, device: Device, kind: ProductKind = KIND) -> Tiling:
    return tuner.choose(kind, SLOW, device.launch, CPU)


def test_the_fastest_that_works_is_chosen_once() -> None:
    device = Device()
    tuner = tuner_of(device)
    assert choose(tuner, device) == FAST
    assert set(device.launches) == {SLOW, FAST, MIDDLE}
    device.launches.clear()
    assert choose(tuner, device) == FAST
    assert not device.launches


@pytest.mark.parametrize(
    "other",
    [
        {"device": "another"},
        {"dtype": torch.float32},
        {"precision": "tf32"},
        {"n": 2048},
        {"k": 8192},
        {"transposed": True},
        {"addend": True},
    ],
)
def test_another_kind_of_product_is_measured_again(other: dict[str, object]) -> None:
    device = Device()
    tuner = tuner_of(device)
    choose(tuner, device)
    device.costs = COST | {MIDDLE: 1e-4}
    assert choose(tuner, device, replace(KIND, **other)) == MIDDLE  # type: ignore[arg-type]
    assert choose(tuner, device) == FAST


@pytest.mark.parametrize("contends_at_first", [True, False])
@pytest.mark.parametrize(("torch_cost", "faster"), [(1.5e-3, False), (0.9e-3, True)])
def test_torchs_product_contends_and_tiles_are_chosen_all_the_same(
    torch_cost: float, faster: bool, contends_at_first: bool
) -> None:
    """Its bits are others: a rank that finds it faster only says so."""
    device = Device(torch_cost=torch_cost)
    tuner = tuner_of(device)
    if not contends_at_first:
        assert choose(tuner, device) == FAST
        device.launches.clear()
        device.capturing = True
        assert tuner.choose(KIND, SLOW, device.launch, CPU, device.multiply) == FAST
        assert not tuner.torch_is_faster
        device.capturing = False
    products = set()
    for _ in range(3):
        assert tuner.choose(KIND, SLOW, device.launch, CPU, device.multiply) == FAST
        products.add(device.products)
    assert tuner.torch_is_faster == {KIND: faster}
    assert len(products) == 1, "measured once"
    assert bool(device.launches) is contends_at_first


def test_nothing_is_launched_while_a_graph_is_captured() -> None:
    device = Device(capturing=True)
    tuner = tuner_of(device)
    assert choose(tuner, device) == SLOW
    device.capturing = False
    assert choose(tuner, device) == FAST, "the default of a capture is not a choice"
    device.capturing = True
    assert choose(tuner, device) == FAST


def test_without_a_candidate_that_works_the_default_is_taken() -> None:
    device = Device(costs={})
    assert choose(tuner_of(device), device) == SLOW


def test_tuning_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHMUON_AUTOTUNE", "0")
    device = Device()
    assert choose(tuner_of(device), device) == SLOW
    assert not device.launches


def test_kinds_are_powers_of_two() -> None:
    def kind(n: int, k: int) -> ProductKind:
        return ProductKind.of(torch.empty(2, n, k, dtype=torch.float16), None)

    assert kind(513, 4096) == kind(1024, 2049) == replace(KIND, device=kind(1, 1).device)
    assert kind(1025, 4096) != kind(1024, 4096)
    assert kind(0, 0).n == 1
    assert ProductKind.of(torch.empty(2, 1024, 4096).mT.half().mT, None).transposed is False
    assert ProductKind.of(torch.empty(2, 64, 32).mT, None).transposed is True
    assert ProductKind.of(torch.empty(2, 64, 32), torch.empty(2, 64, 64)).addend is True


@pytest.mark.parametrize("dtype", CANDIDATES)
def test_candidates_sum_the_same_slices(dtype: torch.dtype) -> None:
    """Bits depend on the depth alone; the default is a candidate."""
    assert len({tiling.depth for tiling in CANDIDATES[dtype]}) == 1
    assert {default_tiling(dtype, n) for n in (1, 512, 513, 8192)} <= set(CANDIDATES[dtype])
    assert len(set(CANDIDATES[dtype])) == len(CANDIDATES[dtype])
