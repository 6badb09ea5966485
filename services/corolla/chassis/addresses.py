"""Addresses of processes as `host:port`; a host that is an address of IPv6 stands in brackets.

Only `addresses_of` asks the system.
"""

import socket


def host_port(host: str, port: int) -> str:
    """Returns `host:port`; the host may stand in brackets already."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int] | None:
    """Returns host, without brackets, and port of `host:port`; None for any other text."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    has_brackets = host == f"[{bare}]"
    if not bare or "://" in address or (":" in bare) != has_brackets:
        return None
    return (bare, int(port)) if port.isascii() and port.isdecimal() and 0 < int(port) < 2**16 else None


def addresses_of(host: str) -> list[str]:
    """Returns the addresses of a host, the one to prefer first; the host may stand in brackets.

    Raises:
        OSError: no host has this name.
    """
    return list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host.strip("[]"), None)))
