"""Checks the address at which a block server registers against its certificate or the address that it calls from."""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote

from corolla.chassis.errors import AddressNotYours
from corolla.trust.credentials import names_of_call

_WILDCARD: Final = "*."


@dataclass(frozen=True, slots=True)
class CallerAddress:
    """The addresses that a caller may register.

    A pod often gets its certificate before its address. So the owner of a certificate without addresses may register
    the address that the call comes from.

    Attributes:
        names: The DNS names and IP addresses in the caller's certificate.
        host: The IP address that the call came from; empty: unknown.
    """

    names: tuple[str, ...]
    host: str

    @classmethod
    def from_call(cls, auth_context: Mapping[str, Iterable[bytes]], peer: str) -> Self:
        """Reads gRPC's facts about a call, where `peer` is like `ipv4:10.0.0.7:4711` or `ipv6:%5B::1%5D:4711`."""
        kind, _, place = unquote(peer).partition(":")
        host = place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
        # A port of both families shows callers of IPv4 in the form of IPv6.
        host = host.removeprefix("::ffff:") if "." in host else host
        return cls(tuple(name for name in names_of_call(auth_context) if "://" not in name), host)

    def check(self, address: str) -> None:
        """Checks that the host of `host:port` is the caller's. Raises AddressNotYours if not."""
        host = address.rpartition(":")[0].strip("[]").lower()
        if not any(is_same_host(host, name.lower()) for name in self.names or (self.host,)):
            raise AddressNotYours(
                "the server's address must be in its certificate; if that names none, it must be the one it calls from"
            )


def is_same_host(host: str, name: str) -> bool:
    """Two addresses are the same, or a DNS name is that of a certificate."""
    try:
        ip_address = ipaddress.ip_address(host)
    except ValueError:
        if name.startswith(_WILDCARD):
            return host.partition(".")[2] == name.removeprefix(_WILDCARD)
        return host == name
    try:
        return _plain(ip_address) == _plain(ipaddress.ip_address(name))
    except ValueError:
        return False


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns the IPv4 address of an IPv4-mapped IPv6 address, and any other address unchanged."""
    return getattr(address, "ipv4_mapped", None) or address
