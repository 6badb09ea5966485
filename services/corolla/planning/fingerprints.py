"""Says what differs between the model of a caller and that of block servers with another fingerprint. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from corolla.v1 import router_pb2 as pb

_SETTINGS: Final = {
    "dtype": "COROLLA_DTYPE, or `dtype=` of the library",
    "quantization": "COROLLA_QUANTIZATION, or `quantization=`",
    "kv_cache_dtype": "COROLLA_KV_CACHE_DTYPE, or `kv_cache_dtype=`",
}
"""The parts of a fingerprint that are settings, with what sets them. The others are digests."""


def what_differs(own: Mapping[str, str], servers: Sequence[pb.PlacedServer]) -> str:
    """Returns a sentence for a caller whose fingerprint no server has.

    Args:
        own: The parts of the caller's fingerprint.
        servers: The servers of the model, at least one; the sentence is about the one that differs least.
    """
    theirs = [dict(each.server.fingerprint_parts) for each in servers if each.server.fingerprint_parts]
    if not own or not theirs:
        return (
            f"the block servers have another fingerprint (their dtype is {servers[0].server.dtype}): other weights or "
            "files, another COROLLA_DTYPE, COROLLA_QUANTIZATION or COROLLA_KV_CACHE_DTYPE, or another release"
        )
    nearest = min(theirs, key=lambda parts: len(_different(own, parts)))
    different = _different(own, nearest)
    said = [f"{name} ({nearest.get(name)} there, {own.get(name)} here)" for name in different if name in _SETTINGS]
    said += [name.replace("_", " ") for name in different if name not in _SETTINGS]
    advice = "; ".join(_SETTINGS[name] for name in different if name in _SETTINGS)
    sentence = f"the block servers differ in {', '.join(said) or 'their release'}"
    return f"{sentence}: see {advice}" if advice else sentence


def _different(own: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
