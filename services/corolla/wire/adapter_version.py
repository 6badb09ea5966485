"""The name of an adapter and the digest of its files, which a session keeps for its whole life."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from corolla.v1 import common_pb2, router_pb2

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """An adapter as it was registered.

    Attributes:
        digest: SHA-256 of the adapter's files, in hexadecimal, so other files with the same name are another version.
    """

    name: str
    digest: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError("an adapter's name is 1 to 64 letters, digits, dots, dashes or underscores, no sign first")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError("an adapter's digest is 64 lower-case hexadecimal digits")

    @classmethod
    def from_proto(cls, message: common_pb2.AdapterVersion) -> Self:
        """Reads a version from its message. Raises ValueError if name or digest is not valid."""
        return cls(message.name, message.digest)

    def to_message(self) -> common_pb2.AdapterVersion:
        """Returns the message that describes this version."""
        return common_pb2.AdapterVersion(name=self.name, digest=self.digest)


def still_registered(
    before: Iterable[router_pb2.RegisteredAdapter],
    now: Sequence[router_pb2.RegisteredAdapter],
    removed: Iterable[common_pb2.AdapterVersion],
) -> list[router_pb2.RegisteredAdapter]:
    """Returns the adapters registered `now`, then those from `before` that are missing but were not removed.

    So registrations stay valid when the store loses its data.
    """
    names = {each.version.name for each in now}
    gone = {AdapterVersion.from_proto(each) for each in removed}
    lost = [
        each
        for each in before
        if each.version.name not in names and AdapterVersion.from_proto(each.version) not in gone
    ]
    return [*now, *lost]
