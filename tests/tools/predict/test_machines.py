"""Machines that are known: found by the name of a device, with rates that every rank computes alike."""

from __future__ import annotations

import math

import pytest

from meshmuon.tools.predict.calibration import rate_at
from meshmuon.tools.predict.machines import machine_like, machine_names


def test_devices_find_their_machine_by_name() -> None:
    for name in machine_names():
        machine = machine_like(f"Some {name.upper()} with 80GB")
        assert machine is not None
        assert machine.name == name
    assert machine_like("an unknown device") is None


def test_rates_do_not_depend_on_the_last_bit_of_a_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    log = math.log
    expected = [rate_at(size, [(64, 1e10), (8192, 7e14)]) for size in range(64, 8192, 97)]
    monkeypatch.setattr(math, "log", lambda value: math.nextafter(log(value), math.inf))
    assert expected == [rate_at(size, [(64, 1e10), (8192, 7e14)]) for size in range(64, 8192, 97)]
