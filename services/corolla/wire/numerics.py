"""Names how a server computes, so that others can tell which servers give the same bits. Pure."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

_DIGEST_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Numerics:
    """The digests of how a server computes its blocks and its head; in text, with a plus sign between them.

    Attributes:
        blocks: the digest for the blocks; empty: the server announces none.
        head: the digest for final norm and head; empty: the server has no head.
    """

    blocks: str = ""
    head: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text that `str` gives."""
        blocks, _, head = text.partition("+")
        return cls(blocks, head)

    def __str__(self) -> str:
        return f"{self.blocks}+{self.head}" if self.head else self.blocks

    def agrees_with(self, other: "Numerics") -> bool:
        """Two servers compute alike what both can compute: the head counts only if both have one."""
        return self.blocks == other.blocks and (not self.head or not other.head or self.head == other.head)


UNKNOWN: Final = Numerics()
"""The numerics of a server that announces none."""


def digest_of(facts: Mapping[str, str]) -> str:
    """Returns the digest of facts about a computation, 12 hexadecimal characters; their order does not matter."""
    lines = "".join(f"{len(name)} {name}={len(value)} {value}\n" for name, value in sorted(facts.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:_DIGEST_CHARS]
