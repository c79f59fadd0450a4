"""Which addresses of this host other ranks are told."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from meshmuon.transport import addresses
from meshmuon.transport.addresses import addresses_of_interface, own_addresses


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def test_there_is_always_one_and_all_are_numbers_of_this_host() -> None:
    found = own_addresses()
    assert found
    assert len(set(found)) == len(found)
    for address in found:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family) as own:
            own.bind((address, 0))  # raises for an address of another host


def test_loopback_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lead ranks of other hosts to themselves; many hosts have 127.0.1.1 for their own name."""
    names = {"here": ["127.0.1.1", "10.1.2.3"], "alone": ["127.0.1.1"]}
    monkeypatch.setattr(addresses, "_of_name", lambda host: iter(names[host]))
    monkeypatch.setattr(addresses, "_routes_to", lambda host: iter(["127.0.1.1"] if host in names else ()))
    for name, told in {"here": ("10.1.2.3",), "alone": ("127.0.1.1",)}.items():
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert own_addresses() == told
        monkeypatch.setenv("MASTER_ADDR", name)  # as torchrun sets it for the ranks of several hosts
        assert own_addresses() == told
        monkeypatch.delenv("MASTER_ADDR")


def test_the_route_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert {"127.0.0.1", "::1"}.issuperset(own_addresses())
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert own_addresses()


def test_without_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise socket.gaierror("no name service")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert own_addresses() == ("127.0.0.1",)


def test_the_interface_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1" in addresses_of_interface("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert set(own_addresses()) == set(addresses_of_interface("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0,lo")
    assert set(own_addresses()) == set(addresses_of_interface("lo"))


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=eth1,ib", ["eth1"]),
        ("^eth", ["docker0", "ib0"]),
        ("^=eth0,docker0", ["eth1", "ib0"]),
        ("lo", ["lo"]),
        ("^eth,docker,ib", ["lo"]),
    ],
)
def test_the_interfaces_that_nccl_uses(setting: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes, ``=`` for whole names, ``^`` for those not to use; loopback only by name or if nothing else is left."""
    names = ["lo", "eth0", "eth1", "docker0", "ib0"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    monkeypatch.setattr(addresses, "addresses_of_interface", lambda name: [f"address of {name}"])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", setting)
    assert sorted(own_addresses()) == sorted(f"address of {name}" for name in chosen)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert own_addresses() == ("address of eth0",)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError, match="GLOO_SOCKET_IFNAME=none0: no such interface has an address on this host"):
        own_addresses()


def test_ipv6_addresses_of_an_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Link-local ones need the name of an interface on the other host as well: they are left out."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "20010db8000000000000000000000001 02 40 00 80     eth7\n"
        "fe800000000000000000000000000001 02 40 20 80     eth7\n"
        "20010db8000000000000000000000002 03 40 00 80     eth8\n"
    )
    monkeypatch.setattr(addresses, "_IPV6_ADDRESSES", table)
    assert addresses_of_interface("eth7") == ["2001:db8::1"]
    monkeypatch.setattr(addresses, "_IPV6_ADDRESSES", tmp_path / "missing")
    assert addresses_of_interface("eth7") == []
