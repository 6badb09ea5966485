"""Several sequences that step through one chain together, each with any number of new tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from corolla.chain.history import ReplayInputs, StepShapes
from corolla.chain.identity import SessionIdentity
from corolla.chain.pending import HiddenStates, RowFuture
from corolla.chain.recovery import OpenSequences, Recovery
from corolla.chain.recovery_budget import RecoveryBudget
from corolla.chain.reservations import ChainBinding, ChainLimits
from corolla.chain.rewinds import Rewinds
from corolla.chain.standbys import Standbys
from corolla.chain.step_window import StepWindow
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, InternalError, OutOfPages
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.tensors import from_payload, tensor_type, to_payload


@dataclass(slots=True)
class StateHistory:
    """Like `TokenHistory`, for a sequence that was given hidden states, which cannot be computed again from tokens.

    Attributes:
        parts: `[T, H]` for each step, on the CPU in the blocks' dtype: the inputs of the first block.
        shapes: the number of tokens of each step.
    """

    # The tensors are never changed in place, since forked sequences share them.
    parts: list[torch.Tensor] = field(default_factory=list)
    shapes: StepShapes = field(default_factory=StepShapes)

    @property
    def position(self) -> int:
        return self.shapes.num_tokens

    def append(self, hidden: torch.Tensor) -> None:
        """Appends a step's inputs of the first block, `[T, H]`."""
        self.parts.append(hidden)
        self.shapes.append(len(hidden), is_prompt=len(hidden) > 1)

    def until(self, position: int) -> "StateHistory":
        """The history up to `position`, for a sequence that continues from there."""
        shapes = self.shapes.copy()
        shapes.truncate(position)
        parts = self.parts[: len(shapes.lengths)]
        if shapes.lengths and len(parts[-1]) > shapes.lengths[-1]:
            parts[-1] = parts[-1][: shapes.lengths[-1]]
        return StateHistory(parts, shapes)

    def num_same_tokens(self, other: "StateHistory") -> int:
        """How many of the first tokens have the same inputs, and were processed in the same steps."""
        num_same = 0
        for mine, theirs in zip(self.parts, other.parts, strict=False):
            length = min(len(mine), len(theirs))
            if mine is not theirs and not torch.equal(mine[:length], theirs[:length]):
                break
            num_same += length
            if len(mine) != len(theirs):
                break
        return num_same

    def inputs(self, start: int, end: int) -> ReplayInputs:
        """The inputs of the first block at the positions `[start, end)`."""
        wanted: list[torch.Tensor] = []
        position = 0
        for part in self.parts:
            if position < end and start < position + len(part):
                wanted.append(part[max(0, start - position) : end - position])
            position += len(part)
        return ReplayInputs(hidden=as_hidden_states(torch.cat(wanted)))


def as_hidden_states(hidden: torch.Tensor) -> HiddenStates:
    """Hidden states `[T, H]`, of any dtype that the wire knows, on any device, in the form in which they are sent."""
    return HiddenStates(to_payload(hidden), len(hidden), tensor_type(hidden.dtype), hidden.shape[1])


@dataclass(frozen=True, slots=True)
class RowStep:
    """The part of one sequence in a step.

    Attributes:
        row: the index of the sequence.
        position: the number of the sequence's tokens before this step; hops forget its tokens beyond that.
        hidden: `[T, H]` on the CPU in the blocks' dtype, the input of the first block for T >= 1 new tokens.
        num_results: for how many of the last new tokens the output is wanted.
        source: the index of a sequence whose tokens replace this one's before the step, for all rows of the step at
            the same time; None keeps the sequence's own tokens.
    """

    row: int
    position: int
    hidden: torch.Tensor
    num_results: int
    source: int | None = None


class RowGroup(OpenSequences):
    """Sequences that are open on every hop of one chain; row `i` is the binding's `i`-th identity.

    The class keeps the inputs of the first block. If hops are lost in a step, the class replaces them, replays these
    inputs on the new hops, and sends the step again.

    Args:
        limits: a step of more tokens than `prefill_chunk_tokens`, or than a hop takes at once, is sent in chunks.
        earlier: the group of the same sequences before sequences or room were added.

    Attributes:
        num_cached_tokens: how many tokens of each sequence's text all hops had when the sequences were first opened.
            The first step may include these tokens: they are kept for replays, but not sent.
    """

    def __init__(
        self,
        binding: ChainBinding,
        plane: DataPlane,
        recovery: Recovery,
        standbys: Standbys,
        limits: ChainLimits,
        earlier: "RowGroup | None" = None,
    ) -> None:
        super().__init__(binding, plane, recovery, standbys)
        self._limits = limits
        if earlier is not None:
            binding.standbys, binding.rewinds = earlier._binding.standbys, earlier._binding.rewinds
        self.num_cached_tokens = binding.num_cached_tokens if earlier is None else 0
        self._has_stepped = False
        known: list[StateHistory] = earlier._histories if earlier is not None else []
        self._histories: list[StateHistory] = [*known, *(StateHistory() for _ in binding.identities[len(known) :])]

    def raise_epoch(self) -> tuple[SessionIdentity, ...]:
        """Raises the epoch. Returns the identities that the caller must open again. `close` frees them even if this
        opening fails."""
        self._binding.raise_epoch([history.position for history in self._histories])
        return self._binding.identities

    async def step(self, rows: Sequence[RowStep]) -> list[torch.Tensor]:
        """Takes new tokens of different sequences through the chain.

        Returns:
            The output of the last block before the final norm, `[num_results, H]` for each of `rows`, on the CPU
            in the blocks' dtype.

        Raises:
            CorollaError: a row failed, and so did the step. Hops forget the other rows' new tokens at the next step.
        """
        if not rows or any(len(row.hidden) == 0 for row in rows):
            raise InternalError("a step has rows, and each row new tokens")
        if not self._has_stepped:
            rows = [self._skip_cached(row) for row in rows]
            self._has_stepped = True
        self._truncate_texts(rows)
        num_tokens = sum(len(row.hidden) for row in rows) + sum(history.position for history in self._histories)
        self._look_after(num_tokens, lambda: self._binding.open_options.named_texts)
        pasts = [self._history_before(row) for row in rows]
        self._note_rewinds(rows, pasts)
        budget = RecoveryBudget(self._limits.max_recoveries)
        to_send, has_sent = list(rows), False

        async def send() -> list[torch.Tensor]:
            nonlocal has_sent
            has_sent = True
            return await self._send_chunks(to_send)

        async def recover(failure: CorollaError) -> None:
            if has_sent:
                for row, past in zip(rows, pasts, strict=True):
                    self._histories[row.row] = past
            await self.recover(failure, budget)
            if has_sent:
                to_send[:] = [replace(row, source=None) for row in to_send]

        outputs = await self._with_recovery(send, recover)
        for row, past in zip(rows, pasts, strict=True):
            past.append(row.hidden)
            self._histories[row.row] = past
        return outputs

    def inputs(self, row: int, position: int) -> torch.Tensor:
        """The inputs of the first block for a sequence's tokens before `position`.

        They are `[position, H]` on the CPU in the blocks' dtype.
        """
        parts = self._histories[row].until(position).parts
        return torch.cat(parts) if parts else torch.empty(0)

    async def recover(self, failure: CorollaError, budget: RecoveryBudget) -> None:
        """Recovers all sequences from a failure, or raises."""
        await self._recovery.recover(self._binding, self._histories, failure, budget)

    def _note_rewinds(self, rows: Sequence[RowStep], pasts: Sequence[StateHistory]) -> None:
        """Notes which tokens the step takes back, before any hop knows: a hop may be lost before it has the step."""
        for row, past in zip(rows, pasts, strict=True):
            own = self._histories[row.row]
            num_kept = past.position if row.source is None else own.num_same_tokens(past)
            if num_kept < own.position:
                rewinds = self._binding.rewinds.setdefault(self.identities[row.row].session_id, Rewinds())
                rewinds.add(self._plane.newest_step_id, num_kept)

    def _skip_cached(self, row: RowStep) -> RowStep:
        num_cached = self.num_cached_tokens
        if not num_cached or row.position or row.source is not None or num_cached > len(row.hidden) - row.num_results:
            return row
        self._histories[row.row].append(row.hidden[:num_cached])
        return replace(row, position=num_cached, hidden=row.hidden[num_cached:])

    def _truncate_texts(self, rows: Sequence[RowStep]) -> None:
        """Cuts the known texts to the tokens that the sequences keep, for hops that open the sequences again."""
        known = self._binding.open_options.texts
        if known is None:
            return
        texts = list(known)
        for row in rows:
            if row.source is not None or row.position < self._histories[row.row].position:
                text = known[row.row if row.source is None else row.source]
                texts[row.row] = text if row.position >= len(text) else text.until(row.position)
        if any(text is not before for text, before in zip(texts, known, strict=True)):
            self._binding.open_options = replace(self._binding.open_options, texts=texts)

    def _history_before(self, row: RowStep) -> StateHistory:
        own = self._histories[row.row]
        if row.source is None and row.position == own.position:
            return own
        return self._histories[row.row if row.source is None else row.source].until(row.position)

    async def _send_chunks(self, rows: Sequence[RowStep]) -> list[torch.Tensor]:
        wanted = max(self._limits.prefill_chunk_tokens, len(self.identities))
        max_step_tokens = min(wanted, self._binding.max_step_tokens)
        chunk_tokens = max_step_tokens // len(rows)
        if chunk_tokens == 0:
            raise OutOfPages(f"a step takes at most {max_step_tokens} sequences")
        results: list[list[HiddenStates]] = [[] for _ in rows]

        def keep(numbers: Sequence[int], answers: Sequence[HiddenStates]) -> None:
            for number, answer in zip(numbers, answers, strict=True):
                results[number].append(answer)

        with StepWindow(len(self.chain.hops), self._limits.step_timeout_s, keep) as window:
            for start in range(0, max(len(row.hidden) for row in rows), chunk_tokens):
                await window.make_room()
                self._renew()
                window.add(*self._send(rows, start, chunk_tokens))
            await window.drain()
        return [_joined(parts, row.hidden) for parts, row in zip(results, rows, strict=True)]

    def _send(
        self, rows: Sequence[RowStep], start: int, chunk_tokens: int
    ) -> tuple[Sequence[int], Sequence[RowFuture]]:
        """Sends one frame: each row's new tokens `[start, start + chunk_tokens)`, if it has any there.

        Returns:
            The indices in `rows` of these rows, and the futures of their results.
        """
        numbers, step_rows, parts = [], [], []
        for number, row in enumerate(rows):
            end = min(start + chunk_tokens, len(row.hidden))
            if start >= end:
                continue
            first_result = max(start, len(row.hidden) - row.num_results)
            source = self.identities[row.source].session_id if row.source is not None and start == 0 else b""
            numbers.append(number)
            parts.append(row.hidden[start:end])
            step_rows.append(
                pb.StepRow(
                    session_id=self.identities[row.row].session_id,
                    epoch=self.identities[row.row].epoch,
                    position=row.position + start,
                    num_tokens=end - start,
                    num_result_tokens=max(0, end - first_result),
                    source_session_id=source,
                )
            )
        hidden = as_hidden_states(torch.cat(parts))
        return numbers, self._plane.step(self.chain.hops, step_rows, hidden)


def _joined(parts: Sequence[HiddenStates], like: torch.Tensor) -> torch.Tensor:
    tensors = [from_payload(part.payload, part.dtype, part.num_tokens, part.hidden_size) for part in parts]
    return torch.cat(tensors) if tensors else like.new_empty(0, like.shape[1])
