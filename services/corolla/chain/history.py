"""The tokens and steps of a sequence: enough to bring it to the same point on other hops. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from corolla.chain.pending import HiddenStates


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The inputs of the first block in a replay: token ids, or hidden states."""

    token_ids: Sequence[int] = ()
    hidden: "HiddenStates | None" = None


@dataclass(slots=True)
class StepShapes:
    """The lengths of a sequence's steps, in order, so that a replay can repeat them; `num_tokens` is their sum.

    A step that checked draft tokens counts only those that were right.
    """

    lengths: list[int] = field(default_factory=list)
    num_tokens: int = 0
    # The positions at which chunks of a prompt begin. A replay repeats these chunks, and merges other steps.
    _prompt_starts: set[int] = field(default_factory=set)

    def append(self, num_tokens: int, *, is_prompt: bool) -> None:
        if is_prompt:
            self._prompt_starts.add(self.num_tokens)
        self.lengths.append(num_tokens)
        self.num_tokens += num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Keeps the steps of the first `num_tokens` tokens, and forgets the rest."""
        while self.num_tokens > num_tokens:
            length = self.lengths.pop()
            self.num_tokens -= length
            if self.num_tokens < num_tokens:
                self.lengths.append(num_tokens - self.num_tokens)
                self.num_tokens = num_tokens
            else:
                self._prompt_starts.discard(self.num_tokens)

    def copy(self) -> "StepShapes":
        return StepShapes(list(self.lengths), self.num_tokens, set(self._prompt_starts))

    def replay(self, start: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yields the steps of a replay of the tokens from `start` on, each as the first and the end of its tokens.

        A step has at most `max_tokens` tokens. Neighbouring steps that are not chunks of a prompt become one step.
        """
        begin, end = start, 0
        follows_prompt = False
        for length in self.lengths:
            is_prompt = end in self._prompt_starts
            step_start, end = max(start, end), end + length
            if end <= start:
                continue
            joins = not (is_prompt or follows_prompt) and end - begin <= max_tokens
            if begin < step_start and not joins:
                yield begin, step_start
                begin = step_start
            while end - begin > max_tokens:
                yield begin, begin + max_tokens
                begin += max_tokens
            follows_prompt = is_prompt
        if begin < end:
            yield begin, end


class History(Protocol):
    """A sequence as a replay needs it: its position, its steps, and the inputs of the first block."""

    @property
    def position(self) -> int:
        """How many tokens every hop must hold."""

    @property
    def shapes(self) -> StepShapes:
        """The steps in which the sequence was processed; they may go beyond `position`."""

    def inputs(self, start: int, end: int) -> ReplayInputs:
        """The inputs of the first block for the tokens `[start, end)`."""


@dataclass(slots=True)
class TokenHistory:
    """The tokens that a whole chain has processed, and the steps in which it did so."""

    token_ids: list[int] = field(default_factory=list)
    shapes: StepShapes = field(default_factory=StepShapes)

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def inputs(self, start: int, end: int) -> ReplayInputs:
        """The ids of these tokens."""
        return ReplayInputs(self.token_ids[start:end])

    def append(self, token_ids: Sequence[int], *, is_prompt: bool) -> None:
        if not token_ids:
            return
        self.token_ids.extend(token_ids)
        self.shapes.append(len(token_ids), is_prompt=is_prompt)
