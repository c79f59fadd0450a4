"""Under which addresses of this host other ranks can reach it, as numbers that need no name service."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

_ASK_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_LOOPBACK = "127.0.0.1"
# Reserved for documentation. Connecting a datagram socket sends nothing; it only asks for the route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def own_addresses() -> tuple[str, ...]:
    """Addresses of this host, the likeliest first, at least one.

    Those of the interfaces that ``GLOO_SOCKET_IFNAME`` or else ``NCCL_SOCKET_IFNAME`` chooses. Without them: the
    address on the route to ``MASTER_ADDR``, those that the host's name stands for, and that of the default route. If
    ``MASTER_ADDR`` is ``localhost`` or a number of loopback all ranks are on this host, and there is no other address.
    Otherwise loopback would lead ranks of other hosts to themselves, and is the last resort: many hosts have 127.0.1.1
    for their own name.
    """
    setting, interfaces = _chosen_interfaces()
    if setting:
        addresses = [address for name in interfaces for address in addresses_of_interface(name)]
        if not addresses:
            raise RuntimeError(f"{setting}: no such interface has an address on this host")
        return tuple(dict.fromkeys(addresses))
    master = os.environ.get("MASTER_ADDR", "")
    to_master = _routes_to(master) if master else []
    if to_master and (_is_loopback(master) or master.lower().removeprefix("ip6-").startswith("localhost")):
        return tuple(dict.fromkeys(to_master))
    found = [*to_master, *_of_name(socket.gethostname())]
    found += [address for anywhere in _ANYWHERE for address in _routes_to(anywhere)]
    # those need an interface
    usable = [address for address in dict.fromkeys(found) if not address.lower().startswith("fe80:")]
    return tuple(address for address in usable if not _is_loopback(address)) or tuple(usable) or (_LOOPBACK,)


def _chosen_interfaces() -> tuple[str, list[str]]:
    """The variable that chooses interfaces, as the user has set it, and their names; nothing if none is set.

    gloo's has exact names. NCCL's has prefixes, exact names after ``=``, and after ``^`` what must not be used.
    """
    if words := os.environ.get("GLOO_SOCKET_IFNAME"):
        return f"GLOO_SOCKET_IFNAME={words}", [name.strip() for name in words.split(",") if name.strip()]
    words = os.environ.get("NCCL_SOCKET_IFNAME", "")
    excluded, rest = words.startswith("^"), words.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    listed = [name.strip() for name in rest.split(",") if name.strip()]
    if not listed:
        return "", []
    names = [name for _, name in socket.if_nameindex()]
    matching = [name for name in names if (name in listed if exact else name.startswith(tuple(listed))) != excluded]
    if excluded and "lo" in matching and len(matching) > 1:  # as NCCL, which takes loopback if it is named or alone
        matching.remove("lo")
    return f"NCCL_SOCKET_IFNAME={words}", matching


def addresses_of_interface(name: str) -> list[str]:
    """The addresses of a network interface such as ``eth0``; none if there is no such interface."""
    addresses = _ipv6_of_interface(name)
    try:
        from fcntl import ioctl  # where there is no such module, there is no gloo either
    except ImportError:
        return addresses
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        addresses.insert(0, socket.inet_ntoa(ioctl(asking.fileno(), _ASK_IPV4_ADDRESS, request)[20:24]))
    return addresses


def _ipv6_of_interface(name: str) -> list[str]:
    """From lines such as ``20010db8…0001 02 40 00 80 eth0``; the fourth number is the scope, 20 for link-local
    addresses.
    """
    try:
        rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:
        return []
    own = [row[0] for row in rows if len(row) == 6 and row[5] == name and row[3] != "20"]
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) for digits in own]


def _of_name(host: str) -> list[str]:
    return [str(address[0]) for _, address in _looked_up(host)]


def _routes_to(host: str) -> list[str]:
    """This host's own addresses on the routes to ``host``."""
    addresses = []
    for family, address in _looked_up(host):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(address)
            addresses.append(str(asking.getsockname()[0]))
    return addresses


def _looked_up(host: str) -> list[tuple[int, Any]]:
    """Families and addresses that a host's name stands for."""
    try:
        return [(family, address) for family, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)]
    except (OSError, UnicodeError):
        return []


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
