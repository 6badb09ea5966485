"""An inference session: sequences that a chain of block servers keeps, for steps by hand or by `generate`."""

import logging
import operator
import threading
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final, Self

import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError, HopSessionLost
from corolla.hf.hop_sessions import HopSessions, RemoteSpan, prompts_by_sequence, require_prompts
from corolla.hf.row_group import RowStep
from corolla.hf.rows import UNKNOWN_TOKEN, HeldRows

log = logging.getLogger(__name__)

_FIRST_CAPACITY: Final = 256

_ELSEWHERE: Final = (
    "this thread is not in the session that another thread has entered, so the answer gets a session of its own; give "
    "`generate` the session as `session=`"
)

_active: ContextVar[tuple["InferenceSession", ...]] = ContextVar("active sessions", default=())
_entered: "weakref.WeakSet[InferenceSession]" = weakref.WeakSet()


class InferenceSession:
    """Sequences of one batch that step through blocks together, while block servers keep their keys and values.

    The first step, which knows the batch size, opens the session on the hops. They free it when the session is closed
    or garbage-collected, or when the process ends. Inside `with session:`, `generate` of its model uses the session.

    Args:
        max_length: the number of positions, padding included, to reserve; None lets the session grow.
        expected_length: the number of positions that a growing session reserves first.
        prompts: `[P, H]`, floating point, on any device: trained embeddings that come before every sequence's text.
        block_prompts: floating point, on any device: trained embeddings that are added to the input of each block at
            the first P positions of every sequence: `[blocks, P, H]`, or `[blocks, B, P, H]` with other values for each
            of B sequences. Positions include `prompts` and exclude padding. A copy of a sequence, as for beams, has the
            same block prompts.

    Raises:
        ValueError: a shape or a length does not fit the model.

    Attributes:
        output_ids: int64 `[B, L]`, the token log: all text so far, given and generated; None before the first text.
        output_mask: int64 `[B, L]`, 1 for tokens that are not padding; None is all ones.
    """

    def __init__(
        self,
        blocks: RemoteSpan,
        *,
        max_length: int | None = None,
        expected_length: int = _FIRST_CAPACITY,
        prompts: Tensor | None = None,
        block_prompts: Tensor | None = None,
    ) -> None:
        if max_length is not None and not 0 < operator.index(max_length) <= blocks.context_length:
            raise ValueError(
                f"`max_length` must lie between 1 and the model's {blocks.context_length} positions, not {max_length}."
            )
        if prompts is not None:
            require_prompts(prompts, blocks)
        by_sequence = None if block_prompts is None else prompts_by_sequence(block_prompts, blocks)
        self.blocks = blocks
        self.max_length = max_length
        self.output_ids: Tensor | None = None
        self.output_mask: Tensor | None = None
        self._expected_length = expected_length
        self._prompts = prompts
        self._block_prompts = block_prompts
        self._held: HeldRows | None = None
        # A copy of another session has its rows' inputs of the first block here until the hops have computed them.
        self._past: list[Tensor] | None = None
        self._num_prompted = 1 if by_sequence is None else len(by_sequence)
        self._hop_sessions = HopSessions(blocks, by_sequence)
        self._finalizer = weakref.finalize(self, self._hop_sessions.free)
        # The threads that lived when the session was entered, once for each time that it was and has not been left.
        self._entries: list[frozenset[threading.Thread]] = []

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"position={self.position}"
        return f"{type(self).__name__}(blocks={self.blocks.span}, batch_size={self.batch_size}, {state})"

    def __enter__(self) -> Self:
        self.activate()
        return self

    def __exit__(self, *_failure: object) -> None:
        self.deactivate()
        self.close()

    def activate(self) -> None:
        """Makes this the session that `generate` of its model uses."""
        self._require_open()
        _active.set((*_active.get(), self))
        self._entries.append(frozenset(threading.enumerate()))
        _entered.add(self)

    def deactivate(self) -> None:
        """Makes the previously active session active again; this session stays open."""
        _active.set(tuple(session for session in _active.get() if session is not self))
        self._entries.clear()
        _entered.discard(self)

    @property
    def is_entered(self) -> bool:
        """Some thread has entered the session and not left it."""
        return bool(self._entries) and not self.is_closed

    @property
    def is_entered_by_older_thread(self) -> bool:
        """The running thread has started since another one entered the session."""
        return self.is_entered and threading.current_thread() not in self._entries[-1]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks.span)

    @property
    def batch_size(self) -> int | None:
        """The number of sequences in the session; None before the first step."""
        return self._held.num_rows if self._held is not None else None

    @property
    def num_prefix(self) -> int:
        """The number of leading positions that are not text."""
        return self._held.num_prefix if self._held is not None else 0

    @property
    def text_mask(self) -> Tensor | None:
        """Which processed positions of the text are not padding, bool `[B, P]`; None before the first step."""
        return self._held.mask[:, self._held.num_prefix :] if self._held is not None else None

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def last_token_id(self) -> Tensor | None:
        """The newest token of the log, int64 `[B, 1]` on the log's device; no step has processed it yet."""
        return None if self.output_ids is None else self.output_ids[:, -1:]

    @property
    def position(self) -> int:
        """The number of processed positions. Setting a smaller number forgets the rest, also in the token log."""
        return self._held.position if self._held is not None else 0

    @position.setter
    def position(self, position: int) -> None:
        if not 0 <= operator.index(position) <= self.position:
            raise ValueError(f"`position` can be set back, to between 0 and {self.position}, not to {position}.")
        if self._held is None or position == self.position:
            return
        self._held.truncate(position)
        num_kept = max(0, position - self._held.num_prefix)
        if self.output_ids is not None:
            self.output_ids = self.output_ids[:, :num_kept]
        if self.output_mask is not None:
            self.output_mask = self.output_mask[:, :num_kept]

    def step(self, hidden: Tensor) -> Tensor:
        """Takes the next positions of every sequence through the blocks.

        Args:
            hidden: `[B, T, H]`, floating point, on any device: the input of the first block.

        Returns:
            `[B, T, H]` on the same device and in the same dtype: the output of the last block before any final norm.

        Raises:
            ValueError: the shape does not fit, or the session would grow beyond `max_length`.
            CorollaError: the chain failed and could not recover; the session is lost.
        """
        if hidden.dim() != 3 or hidden.shape[1] == 0 or hidden.shape[2] != self.blocks.hidden_size:
            raise ValueError(f"`hidden` must have the shape [batch, tokens, {self.blocks.hidden_size}].")
        num_rows, num_columns = hidden.shape[:2]
        token_ids = torch.full((num_rows, num_columns), UNKNOWN_TOKEN)
        mask = torch.ones(num_rows, num_columns, dtype=torch.bool)
        output = self.advance(list(hidden.unbind()), token_ids, mask, num_columns)
        return torch.stack(output).to(device=hidden.device, dtype=hidden.dtype)

    def advance(
        self, hidden: Sequence[Tensor], token_ids: Tensor, mask: Tensor, num_result_columns: int
    ) -> list[Tensor]:
        """Takes a step like `step`, with rows in which some columns are masked.

        Args:
            hidden: `[number of unmasked columns, H]`, floating point, for each row.
            token_ids: int64 `[B, T]`, the tokens of the columns.
            mask: bool `[B, T]`, on the CPU; False for masked columns.
            num_result_columns: for how many of the last columns the output is wanted.

        Returns:
            For each row, the output of its unmasked result columns, `[number of these, H]`, on the CPU in the blocks'
            dtype.
        """
        held = self.prepare(mask.shape[0], mask.shape[1])
        wanted = mask[:, mask.shape[1] - num_result_columns :].sum(dim=1).tolist() if num_result_columns else None
        positions = held.row_positions
        steps = [
            RowStep(
                row=row,
                position=positions[row],
                hidden=states.to(device="cpu", dtype=self.blocks.dtype),
                num_results=wanted[row] if wanted else 0,
                source=held.sources[row] if held.sources[row] != row else None,
            )
            for row, states in enumerate(hidden)
            if len(states)
        ]
        outputs = self._step(steps, held) if steps else []
        held.extend(token_ids.cpu(), mask)
        by_row = {step.row: output for step, output in zip(steps, outputs, strict=True)}
        nothing = torch.empty(0, self.blocks.hidden_size, dtype=self.blocks.dtype)
        return [by_row.get(row, nothing) for row in range(held.num_rows)]

    @property
    def num_reused_positions(self) -> int:
        """How many positions of each sequence the hops had cached from the tenant's other sequences at the opening."""
        return self._hop_sessions.num_cached_tokens

    def prepare(self, num_rows: int, num_columns: int, texts: Sequence[Sequence[int]] | None = None) -> HeldRows:
        """Makes sure that the hops have room for a step; the first call opens the session on the hops.

        Args:
            num_columns: the number of new positions.
            texts: the tokens of each row, up to the first one whose output is wanted; None if they are not known.

        Raises:
            ValueError: the batch has another size, or there would be more positions than `max_length`.
        """
        self._require_open()
        num_prompts = 0 if self._prompts is None or self._held is not None else len(self._prompts)
        needed = self.position + num_prompts + num_columns
        if self._held is not None and self._held.num_rows != num_rows:
            raise ValueError(f"The session holds {self._held.num_rows} sequences; a step of {num_rows} does not fit.")
        if needed > (self.max_length or self.blocks.context_length):
            raise ValueError(
                f"Maximum length exceeded: {needed} positions are needed, and the session has "
                f"{self.max_length or self.blocks.context_length}."
            )
        origins = self._origins_of(num_rows) if self._held is None else self._held.origins
        if not self._hop_sessions.fit(origins, needed):
            capacity = self.max_length or min(self.blocks.context_length, self._room_for(needed))
            try:
                self._hop_sessions.reserve(origins, capacity, texts if self._prompts is None else None)
            except BaseException:
                self.close()  # only some hops may have the session in the next epoch
                raise
        if self._held is None:
            self._held = HeldRows(num_rows, origins)
            if self._prompts is not None:
                self._take_prompts(self._prompts, num_rows)
        if self._past is not None:
            steps = [RowStep(row, 0, hidden, num_results=0) for row, hidden in enumerate(self._past) if len(hidden)]
            if steps:
                self._step(steps, self._held)
            self._past = None
        return self._held

    def copy(self) -> "InferenceSession":
        """A session with the same sequences; before its first step, block servers compute its positions again."""
        self._require_open()
        twin = InferenceSession(
            self.blocks,
            max_length=self.max_length,
            expected_length=self._expected_length,
            prompts=self._prompts,
            block_prompts=self._block_prompts,
        )
        if self._held is not None:
            rows = zip(self._held.sources, self._held.row_positions, strict=True)
            twin._past = [self._inputs(source, position) for source, position in rows]
            twin._held = self._held.settled()
        twin.output_ids, twin.output_mask = self.output_ids, self.output_mask
        return twin

    def select_rows(self, rows: Sequence[int]) -> None:
        """Replaces row `i` by row `rows[i]`; the next step does so on the hops. The number of rows may change."""
        if self._held is None:
            raise ValueError("The session holds no sequences yet.")
        self._held.select(rows)

    def align(self, token_ids: Tensor, mask: Tensor) -> None:
        """Keeps the positions that are part of a text, and forgets the rest; sends nothing.

        Args:
            token_ids: int64 `[R, T]`, on any device.
            mask: bool `[R, T]`, on any device.
        """
        if self._held is not None:
            self._held.align(token_ids.cpu(), mask.cpu())

    def count_prefix(self) -> None:
        """Sets the prefix to the leading positions that were given as embeddings.

        Raises:
            ValueError: embeddings were also given after text.
        """
        if self._held is not None:
            self._held.count_prefix()

    def close(self) -> None:
        """Frees the session on every hop. A closed session cannot be used again."""
        self._finalizer()

    def _step(self, steps: list[RowStep], held: HeldRows) -> list[Tensor]:
        resting = set(range(held.num_rows)) - {step.row for step in steps}
        if any(held.sources[row] != row for row in resting):
            raise ValueError("A sequence that took over another's tokens needs a token of its own in the next step.")
        is_safe = False
        try:
            outputs = self._hop_sessions.step(steps)
            is_safe = True
        except CorollaError:
            raise
        except BaseException:
            # An interrupted step can be repeated from its positions, but not if rows were replaced.
            is_safe = held.is_settled
            raise
        finally:
            if not is_safe:
                self.close()
        return outputs

    def _inputs(self, row: int, position: int) -> Tensor:
        """The inputs of the first block for a row's positions before `position`."""
        if self._past is not None:
            return self._past[row][:position]
        return self._hop_sessions.inputs(row, position)

    def _take_prompts(self, prompts: Tensor, num_rows: int) -> None:
        token_ids = torch.full((num_rows, len(prompts)), UNKNOWN_TOKEN)
        self.advance([prompts] * num_rows, token_ids, torch.ones_like(token_ids, dtype=torch.bool), 0)
        self.count_prefix()

    def _origins_of(self, num_rows: int) -> list[int]:
        """The index of each row's sequence in `block_prompts`; all 0 without block prompts."""
        if num_rows % self._num_prompted:
            raise ValueError(
                f"`block_prompts` are for a batch of {self._num_prompted} sequences; one of {num_rows} does not fit."
            )
        return [row * self._num_prompted // num_rows for row in range(num_rows)]

    def _room_for(self, num_positions: int) -> int:
        """How many positions to reserve: the expected number, or twice the needed one if that is not enough."""
        return self._expected_length if num_positions <= self._expected_length else 2 * num_positions

    def _require_open(self) -> None:
        if self.is_closed:
            raise HopSessionLost("the session was closed, or lost with a hop; open another one")


def warn_of_session_elsewhere(blocks: RemoteSpan) -> None:
    """Says in the log that the running thread, which a session's owner may have started, is not in the session."""
    if any(session.blocks is blocks and session.is_entered_by_older_thread for session in tuple(_entered)):
        log.warning(_ELSEWHERE)


def active_session(blocks: RemoteSpan) -> InferenceSession | None:
    """The innermost session over exactly these blocks that the running code has entered, if any."""
    return next((session for session in reversed(_active.get()) if session.blocks is blocks), None)
