"""Keeps the outputs that this hop sent on in host memory, so that they can be sent again to a new next hop. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corolla.chassis.errors import OutputsNotKept


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


def _nbytes(pieces: Sequence[_Piece]) -> int:
    """The bytes of pieces that follow each other without a gap."""
    return pieces[0].row_bytes * (pieces[-1].end - pieces[0].start) if pieces else 0


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
        # The pieces of a session follow each other without a gap. They are shared with forks.
        self._sessions: dict[bytes, list[_Piece]] = {}
        self.nbytes = 0
        self.num_evicted = 0

    def __iter__(self) -> Iterator[bytes]:
        """Ids of the sessions whose outputs are kept."""
        return iter(self._sessions)

    def num_bytes(self, session_id: bytes) -> int:
        """Bytes of one session's outputs."""
        return _nbytes(self._sessions[session_id])

    def range(self, session_id: bytes) -> tuple[int, int]:
        """The tokens `[start, end)` whose outputs are kept."""
        pieces = self._sessions.get(session_id)
        return (pieces[0].start, pieces[-1].end) if pieces else (0, 0)

    def append(self, session_id: bytes, position: int, num_tokens: int, rows: bytes) -> None:
        """Keeps `rows`, the outputs of the tokens `[position, position + num_tokens)`.

        They replace all outputs that the session has from `position` on. If they alone exceed the budget, all outputs
        of the session are dropped instead.
        """
        if len(rows) > self._max_bytes:
            self.forget(session_id)
            return
        pieces = self._sessions[session_id] = self._sessions.pop(session_id, [])
        if pieces and position != pieces[-1].end:
            self._cut(pieces, position)
        pieces.append(_Piece(position, position + num_tokens, rows))
        self.nbytes += len(rows)
        while self.nbytes > self._max_bytes:
            self._forget_oldest()

    def read(self, session_id: bytes, start: int, end: int) -> bytes:
        """The outputs of the tokens `[start, end)`. Raises OutputsNotKept."""
        first, last = self.range(session_id)
        if not first <= start < end <= last:
            raise OutputsNotKept("a hop no longer keeps the boundary activations that it was asked to send again")
        return b"".join(
            piece.part(max(start, piece.start), min(end, piece.end))
            for piece in self._sessions[session_id]
            if piece.start < end and start < piece.end
        )

    def copy(self, session_id: bytes) -> list[_Piece]:
        """The pieces that the session has now, for `replace`."""
        return list(self._sessions.get(session_id, ()))

    def replace(self, session_id: bytes, pieces: list[_Piece]) -> None:
        """Replaces the session's outputs with the outputs of the session from which it is forked."""
        self.forget(session_id)
        self._sessions[session_id] = pieces
        self.nbytes += _nbytes(pieces)
        while self.nbytes > self._max_bytes:
            self._forget_oldest()

    def forget(self, session_id: bytes) -> None:
        """Drops the outputs of a session that has ended or begins again."""
        self.nbytes -= _nbytes(self._sessions.pop(session_id, ()))

    def _cut(self, pieces: list[_Piece], position: int) -> None:
        """Drops the outputs from `position` on, or all of them if a gap would remain before `position`."""
        if not pieces[0].start < position <= pieces[-1].end:
            self.nbytes -= _nbytes(pieces)
            pieces.clear()
            return
        while pieces[-1].end > position:
            piece = pieces.pop()
            self.nbytes -= len(piece.rows)
            if piece.start < position:
                rest = _Piece(piece.start, position, piece.part(piece.start, position))
                pieces.append(rest)
                self.nbytes += len(rest.rows)

    def _forget_oldest(self) -> None:
        self.forget(next(iter(self._sessions)))
        self.num_evicted += 1
