"""Keeps which tile won on a device, next to the compiled kernels, so that no further start times it."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

AnyTile = TypeVar("AnyTile")


def kept_tile(facts: str, tiles: Sequence[AnyTile]) -> AnyTile | None:
    """The tile that won under the same facts; None: none is kept."""
    try:
        path = _manager(facts).get_file("tile")
        number = Path(path).read_text() if path is not None else ""
    except (OSError, RuntimeError):
        return None  # the folder of kernels is read only
    return tiles[int(number)] if number.isdecimal() and int(number) < len(tiles) else None


def keep_tile(facts: str, number: int) -> None:
    """Keeps the number of the tile that won.

    Args:
        facts: what decides which tile wins; the version of Triton is added.
        number: the tile's index among the candidates.
    """
    try:
        _manager(facts).put(str(number), "tile", binary=False)
    except (OSError, RuntimeError) as error:
        log.warning("the tile is not kept", extra={"reason": str(error)})


def _manager(facts: str) -> Any:
    import triton
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256(f"{triton.__version__} {facts}".encode()).hexdigest())
