"""Paths of fields: how those of gRPC's protocol become those of a caller's body. Pure."""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from corolla.chassis.errors import CorollaError, InvalidRequest, ResourceNotFound

_MOST_CHARS: Final = 64
_PARTS: Final = re.compile(r"[.\[]")

Paths = Mapping[str, str]
"""Paths in a caller's body by the paths in the protocol. Each stands for all that lies below it, too."""


def shown(name: str) -> str:
    """A name that a caller chose, as a header can carry it: characters outside of ASCII are percent-encoded."""
    return quote(name[:_MOST_CHARS], safe="!#$&'*+/:<=>?@^_`|~()")


def joined(place: str, name: str) -> str:
    """The path of a field below another path."""
    name = shown(name)
    return f"{place}.{name}" if place else name


def callers_path(path: str, paths: Paths) -> str:
    """The caller's path for a path of the protocol: by the longest beginning that `paths` has."""
    ends = [len(path), *(found.start() for found in reversed(list(_PARTS.finditer(path))))]
    for end in ends:
        if (known := paths.get(path[:end])) is not None:
            return known + path[end:]
    return path


def in_callers_words(error: CorollaError, paths: Paths) -> CorollaError:
    """The error with the fields by their paths in the caller's body."""
    if isinstance(error, InvalidRequest):
        violations = [(callers_path(field, paths), text) for field, text in error.violations]
        if not violations:
            return error
        renamed = type(error)(*violations[0], *violations[1:])
        renamed.metadata = error.metadata
        return renamed
    if isinstance(error, ResourceNotFound) and error.field:
        error.field = callers_path(error.field, paths)
    return error
