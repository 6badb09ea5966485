"""Keeps the outputs that this hop sent on in host memory, so that they can be sent again to a new next hop. Pure."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from corolla.chassis.errors import OutputsNotKept

PIECES_PER_PART: Final = 1024
"""How many pieces of a session are checked at a time."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The outputs of the tokens `[start, end)`, as raw bytes: one row for each token, all rows of one size."""

    start: int
    end: int
    rows: bytes

    def part(self, start: int, end: int) -> bytes:
        if (start, end) == (self.start, self.end):
            return self.rows
        return self.rows[(start - self.start) * self.row_bytes : (end - self.start) * self.row_bytes]

    @property
    def row_bytes(self) -> int:
        return len(self.rows) // (self.end - self.start)


@dataclass(slots=True)
class _Kept:
    """One session's outputs: pieces that follow each other without a gap. Pieces are shared with forks."""

    pieces: list[_Piece] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.pieces[0].start if self.pieces else 0

    @property
    def end(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    @property
    def nbytes(self) -> int:
        return self.pieces[0].row_bytes * (self.end - self.start) if self.pieces else 0


class BoundaryActivations:
    """The outputs of all sessions, in order of last use.

    When they exceed `max_bytes`, the outputs of the least recently used sessions are dropped.

    Invariants: `nbytes` is the sum of the bytes of all pieces; a piece that several sessions share counts once for each
    of them. `nbytes` is at most `max_bytes`.

    Args:
        max_bytes: the most bytes that all outputs take together; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sessions: dict[bytes, _Kept] = {}
        self.nbytes = 0
        self.num_evicted = 0

    def __iter__(self) -> Iterator[bytes]:
        """Ids of the sessions whose outputs are kept."""
        return iter(self._sessions)

    def num_bytes(self, session_id: bytes) -> int:
        """Bytes of one session's outputs."""
        return self._sessions[session_id].nbytes

    def check_whole(self, session_id: bytes) -> Iterator[bool]:
        """Checks whether a session's pieces follow each other without a gap, and have one row for each token.

        It yields one answer for each `PIECES_PER_PART` pieces. Pieces may be added or dropped between two answers.
        """
        pieces = self._sessions.get(session_id, _Kept()).pieces
        for start in itertools.count(0, PIECES_PER_PART):
            if start >= len(pieces):
                return
            part = pieces[max(0, start - 1) : start + PIECES_PER_PART]
            yield all(before.end == after.start for before, after in itertools.pairwise(part)) and all(
                len(piece.rows) == (piece.end - piece.start) * pieces[0].row_bytes for piece in part
            )

    def range(self, session_id: bytes) -> tuple[int, int]:
        """The tokens `[start, end)` whose outputs are kept."""
        kept = self._sessions.get(session_id)
        return (kept.start, kept.end) if kept is not None else (0, 0)

    def append(self, session_id: bytes, position: int, num_tokens: int, rows: bytes) -> None:
        """Keeps `rows`, the outputs of the tokens `[position, position + num_tokens)`.

        They replace all outputs that the session has from `position` on. If they alone exceed the budget, all outputs
        of the session are dropped instead.
        """
        if len(rows) > self._max_bytes:
            self.forget(session_id)
            return
        kept = self._sessions.pop(session_id, None)
        if kept is None:
            kept = _Kept()
        elif position != kept.end:
            self._cut(kept, position)
        self._sessions[session_id] = kept
        kept.pieces.append(_Piece(position, position + num_tokens, rows))
        self.nbytes += len(rows)
        while self.nbytes > self._max_bytes:
            self._forget_oldest()

    def read(self, session_id: bytes, start: int, end: int) -> bytes:
        """The outputs of the tokens `[start, end)`. Raises OutputsNotKept."""
        kept = self._sessions.get(session_id)
        if kept is None or not kept.start <= start < end <= kept.end:
            raise OutputsNotKept("a hop no longer keeps the boundary activations that it was asked to send again")
        return b"".join(
            piece.part(max(start, piece.start), min(end, piece.end))
            for piece in kept.pieces
            if piece.start < end and start < piece.end
        )

    def copy(self, session_id: bytes) -> list[_Piece]:
        """The pieces that the session has now, for `replace`."""
        kept = self._sessions.get(session_id)
        return list(kept.pieces) if kept is not None else []

    def replace(self, session_id: bytes, pieces: list[_Piece]) -> None:
        """Replaces the session's outputs with the outputs of the session from which it is forked."""
        self.forget(session_id)
        kept = self._sessions[session_id] = _Kept(pieces)
        self.nbytes += kept.nbytes
        while self.nbytes > self._max_bytes:
            self._forget_oldest()

    def forget(self, session_id: bytes) -> None:
        """Drops the outputs of a session that has ended or begins again."""
        kept = self._sessions.pop(session_id, None)
        if kept is not None:
            self.nbytes -= kept.nbytes

    def _cut(self, kept: _Kept, position: int) -> None:
        """Drops the outputs from `position` on, or all of them if a gap would remain before `position`."""
        if not kept.start < position <= kept.end:
            self.nbytes -= kept.nbytes
            kept.pieces.clear()
            return
        while kept.pieces[-1].end > position:
            piece = kept.pieces.pop()
            self.nbytes -= len(piece.rows)
            if piece.start < position:
                rest = _Piece(piece.start, position, piece.part(piece.start, position))
                kept.pieces.append(rest)
                self.nbytes += len(rest.rows)

    def _forget_oldest(self) -> None:
        self.forget(next(iter(self._sessions)))
        self.num_evicted += 1
