"""Checks that a service without authentication listens on this machine only, or is exposed on purpose."""

import asyncio
import ipaddress
import logging
from collections.abc import Mapping
from typing import Final

from corolla.chassis.addresses import addresses_of
from corolla.chassis.errors import StartupError
from corolla.chassis.settings import ServiceSettings

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 60.0


def is_loopback(host: str) -> bool:
    """An address, or every address of a name, is reachable from this machine only.

    An empty name means all interfaces, which other machines reach.
    """
    if not host:
        return False
    try:
        found = addresses_of(host)
    except OSError:
        return False
    return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


def exposed(settings: ServiceSettings) -> Mapping[str, str]:
    """Returns the hosts at which other machines reach an unguarded service, keyed by environment variable."""
    if not settings.missing_guards:
        return {}
    return {name: host for name, host in settings.listening_hosts.items() if not is_loopback(host)}


def check(settings: ServiceSettings) -> None:
    """Raises StartupError unless the service is guarded, listens on this machine only, or may be exposed."""
    if settings.insecure:
        return
    for name, host in exposed(settings).items():
        raise StartupError(
            f"other machines can reach {name}={host} without authentication; "
            f"set {' and '.join(settings.missing_guards)}, or {name}=127.0.0.1, or, if your network keeps strangers "
            "out, COROLLA_INSECURE=true"
        )


async def remind(settings: ServiceSettings, interval_s: float = _INTERVAL_S) -> None:
    """Logs at once and every `interval_s` seconds that the service is exposed; returns if it is not."""
    facts = {name.removeprefix("COROLLA_").lower(): host for name, host in exposed(settings).items()}
    while facts:
        missing = " and ".join(settings.missing_guards)
        log.warning(
            "COROLLA_INSECURE is set: this service accepts calls from everyone who can reach it",
            extra={**facts, "missing": missing},
        )
        await asyncio.sleep(interval_s)
