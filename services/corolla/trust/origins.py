"""Decides which web pages may use the service: send requests to one without keys, and read its replies. Pure.

A page of any host can make the browser send requests to the user's own machine. Browsers name the page's host in
`origin`. But an attacker's host name may resolve to this machine (DNS rebinding); then page and request have the same
host, and a reading request has no `origin`. So a service without keys on a loopback address answers only requests to a
loopback name, on every route. There, pages of the same machine may use it.
"""

import ipaddress
from collections.abc import Mapping
from typing import Final

from corolla.chassis.errors import InvalidRequest

ALL_ORIGINS: Final = "*"

_SEEN_HEADERS: Final = "x-request-id, retry-after, x-corolla-ignored"
_PREFLIGHT_SECONDS: Final = "600"
_USUAL_HEADERS: Final = "authorization, content-type, x-request-id"


class AllowedOrigins:
    """The origins whose pages may read replies, by the protocol that browsers call CORS.

    Args:
        origins: the origins, such as `https://chat.example.org`; or `*`: all.
        with_loopback: whether pages of this machine may, too, if their request goes to a loopback name.
    """

    def __init__(self, origins: frozenset[str], *, with_loopback: bool = False) -> None:
        self._origins = origins
        self._hosts = frozenset(each.partition("://")[2] for each in origins)
        self._with_loopback = with_loopback

    @classmethod
    def parse(cls, text: str) -> "AllowedOrigins":
        """Reads a list with commas. Raises ValueError if an entry does not look like an origin."""
        given = [each.strip().rstrip("/").lower() for each in text.split(",") if each.strip()]
        for each in given:
            scheme, _, rest = each.partition("://")
            if each != ALL_ORIGINS and (not scheme.isalpha() or not rest or "/" in rest or "*" in rest):
                raise ValueError(f"{each!r} is not an origin such as https://chat.example.org")
        return cls(frozenset(given))

    def and_loopback(self) -> "AllowedOrigins":
        """Returns these origins together with this machine's."""
        return AllowedOrigins(self._origins, with_loopback=True)

    def allow(self, request: Mapping[str, str]) -> bool:
        """The request's page may send it, and read the reply."""
        origin = request.get("origin", "").lower()
        if ALL_ORIGINS in self._origins or origin in self._origins:
            return True
        return self._with_loopback and _is_loopback(_name(origin.partition("://")[2])) and is_to_loopback(request)

    def have_host(self, request: Mapping[str, str]) -> bool:
        """The request goes to the host of one of the origins."""
        return ALL_ORIGINS in self._origins or request.get("host", "").lower() in self._hosts

    def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """Headers of a reply that tell a browser to let the request's page read it."""
        origin = request.get("origin")
        if origin is None or not (self._origins or self._with_loopback):
            return {}
        vary = {"vary": "origin"}
        if not self.allow(request):
            return vary
        return {**vary, "access-control-allow-origin": origin, "access-control-expose-headers": _SEEN_HEADERS}

    def preflight_headers(self, request: Mapping[str, str], methods: str) -> dict[str, str]:
        """Headers that tell a browser that a page may send requests with `methods`."""
        headers = {
            "access-control-allow-methods": methods,
            "access-control-allow-headers": request.get("access-control-request-headers", _USUAL_HEADERS),
            "access-control-max-age": _PREFLIGHT_SECONDS,
        }
        if request.get("access-control-request-private-network") == "true":
            headers["access-control-allow-private-network"] = "true"
        return headers


NO_ORIGINS: Final = AllowedOrigins(frozenset())


class OwnPages:
    """Accepts requests that come from no page, from pages of the service's own host, or of allowed origins.

    Args:
        host: the address that the service listens on; empty: all.

    Attributes:
        origins: the origins whose pages are accepted.
    """

    def __init__(self, host: str, origins: AllowedOrigins = NO_ORIGINS) -> None:
        self._is_loopback = _is_loopback(host)
        self.origins = origins.and_loopback() if self._is_loopback else origins

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Checks where a request goes, for a service on a loopback address. Raises InvalidRequest."""
        # Browsers always send a host.
        if not self._is_loopback or "host" not in headers:
            return
        if not is_to_loopback(headers) and not self.origins.have_host(headers):
            raise InvalidRequest("host", "must be a name of this machine, such as localhost: there are no keys")

    def check(self, headers: Mapping[str, str]) -> None:
        """Checks a request's headers. Raises InvalidRequest."""
        self.check_host(headers)
        if "origin" in headers and not self.origins.allow(headers):
            _check_own(headers)

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Checks a request that only the service's own page may send. Raises InvalidRequest."""
        self.check_host(headers)
        if "origin" in headers:
            _check_own(headers)


def is_to_loopback(request: Mapping[str, str]) -> bool:
    """The request goes to a name that only this machine has."""
    return _is_loopback(_name(request.get("host", "").lower()))


def _check_own(headers: Mapping[str, str]) -> None:
    if headers["origin"].lower().partition("://")[2] != headers.get("host", "").lower():
        raise InvalidRequest("origin", "pages of other hosts are refused by a service without keys")


def _name(host: str) -> str:
    """The host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
