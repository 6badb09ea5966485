"""The page at `/`: its files, which come with the package. They are read once, at the start."""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from corolla.http.endpoints import Behaviour
from corolla.http.exchange import Exchange

HEADERS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
)
"""The page loads nothing from other hosts, has no inline scripts, and never treats a model's text as markup."""

_INDEX: Final = "index.html"
_KINDS: Final = MappingProxyType({".css": "text/css", ".html": "text/html", ".js": "text/javascript"})
_PICTURE: Final = "image/svg+xml"


def pages() -> Iterator[tuple[str, Behaviour]]:
    """Yields each path with the behaviour that sends the path's file. Callers need no key: the files are not secret."""
    for file in (resources.files(__package__) / "static").iterdir():
        path = "/" if file.name == _INDEX else f"/page/{file.name}"
        kind = _KINDS.get(file.name[file.name.rindex(".") :], _PICTURE)
        yield path, partial(_show, file.read_bytes(), f"{kind}; charset=utf-8")


async def _show(content: bytes, kind: str, exchange: Exchange, call: object) -> None:
    await exchange.reply(content, kind=kind, **HEADERS)
