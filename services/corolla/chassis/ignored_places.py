"""The places of a request that have no effect, as a header or a call's trailing metadata names them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import quote, unquote

IGNORED: Final = "x-corolla-ignored"
"""The name of the header, and the key of the trailing metadata."""

_MOST: Final = 16
_MOST_CHARS: Final = 200
_SHOWN: Final = "!#$&'()*+/:;<=>?@[]^`{|}~"
"""What may stand in a header apart from letters and digits. A comma separates places."""


def ignored_text(places: Sequence[str]) -> str:
    """The value of `IGNORED`: visible ASCII, with a percent sign and two digits for each other byte of a name."""
    shown = [quote(each[:_MOST_CHARS], safe=_SHOWN) for each in places[:_MOST]]
    return ", ".join([*shown, f"and {len(places) - len(shown)} more"] if len(places) > len(shown) else shown)


def ignored_places(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, ...]:
    """The places that a call's trailing metadata names."""
    found = next((value for key, value in metadata or () if key == IGNORED), "")
    return tuple(map(unquote, found.split(", "))) if isinstance(found, str) and found else ()
