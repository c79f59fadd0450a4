"""Under which addresses of this host other ranks can reach it, as numbers that need no name service."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_ASK_IPV4_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_LOOPBACK = "127.0.0.1"
# Reserved for documentation. Connecting a datagram socket sends nothing; it only asks for the route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def own_addresses() -> tuple[str, ...]:
    """Addresses of this host, the likeliest first, at least one.

    ``GLOO_SOCKET_IFNAME`` names the interfaces to use, as for torch's gloo groups. Without it: the address on the route to
    ``MASTER_ADDR``, those that the host's name stands for, and that of the default route. Loopback is last unless all ranks reach
    ``MASTER_ADDR`` over it, since it leads ranks of other hosts to themselves.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        addresses = [address for name in interfaces for address in addresses_of_interface(name)]
        if not addresses:
            raise RuntimeError(f"GLOO_SOCKET_IFNAME={','.join(interfaces)}: no such interface has an address on this host")
        return tuple(dict.fromkeys(addresses))
    master = os.environ.get("MASTER_ADDR")
    found = [*(_routes_to(master) if master else ()), *_of_name(socket.gethostname())]
    found += [address for anywhere in _ANYWHERE for address in _routes_to(anywhere)]
    usable = [address for address in dict.fromkeys(found) if not address.lower().startswith("fe80:")]  # those need an interface
    return tuple(sorted(usable, key=_is_loopback)) or (_LOOPBACK,)


def addresses_of_interface(name: str) -> list[str]:
    """The addresses of a network interface such as ``eth0``; none if there is no such interface."""
    return [*_ipv4_of_interface(name), *_ipv6_of_interface(name)]


def _ipv4_of_interface(name: str) -> list[str]:
    try:
        from fcntl import ioctl  # where there is no such module, there is no gloo either
    except ImportError:
        return []
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return [socket.inet_ntoa(ioctl(asking.fileno(), _ASK_IPV4_ADDRESS, request)[20:24])]
        except OSError:
            return []


def _ipv6_of_interface(name: str) -> list[str]:
    """From lines such as ``20010db8…0001 02 40 00 80 eth0``; the fourth number is the scope, 20 for link-local addresses."""
    try:
        rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:
        return []
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))
        for row in rows
        if len(row) == 6 and row[5] == name and row[3] != "20"
    ]


def _of_name(host: str) -> Iterator[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for _, _, _, _, address in found:
        yield str(address[0])


def _routes_to(host: str) -> Iterator[str]:
    """This host's own addresses on the routes to ``host``."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as asking:
                asking.connect(address)
                yield str(asking.getsockname()[0])
        except OSError:
            continue


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
