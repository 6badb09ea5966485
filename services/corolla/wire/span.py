"""A contiguous run of transformer blocks."""

from collections.abc import Iterable
from dataclasses import dataclass

from corolla.v1 import common_pb2


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Blocks `[start, end)`, numbered from 0; never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"not a span: {self.start}:{self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def covers(self, other: "Span") -> bool:
        return self.start <= other.start and other.end <= self.end

    def indices(self, blocks: "Span") -> range:
        """The indices of `blocks`, counted from this span's first block. Raises ValueError if it lacks some of them."""
        if not self.covers(blocks):
            raise ValueError(f"blocks {blocks} are not in the span {self}")
        return range(blocks.start - self.start, blocks.end - self.start)

    @classmethod
    def from_message(cls, message: common_pb2.BlockSpan) -> "Span":
        """Reads a span from its message. Raises ValueError if it is empty or begins below 0."""
        return cls(message.start, message.end)

    def to_message(self) -> common_pb2.BlockSpan:
        """The message that describes this span."""
        return common_pb2.BlockSpan(start=self.start, end=self.end)

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Reads a span from the text `"a:b"`. Raises ValueError for other text."""
        start, separator, end = text.partition(":")
        if not separator:
            raise ValueError(f"a span is written start:end, not {text!r}")
        return cls(int(start), int(end))


def gaps(spans: Iterable[Span], within: Span) -> list[Span]:
    """Returns the maximal runs of blocks of `within` that no span covers, in order."""
    missing: list[Span] = []
    boundary = within.start
    for span in sorted(spans):
        if span.start > boundary and boundary < within.end:
            missing.append(Span(boundary, min(span.start, within.end)))
        boundary = max(boundary, span.end)
    if boundary < within.end:
        missing.append(Span(boundary, within.end))
    return missing
