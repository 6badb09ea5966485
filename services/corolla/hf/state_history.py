"""The history of a sequence that was given hidden states."""

from dataclasses import dataclass, field

import torch

from corolla.chain.history import ReplayInputs, StepShapes
from corolla.chain.pending import HiddenStates
from corolla.wire.tensors import tensor_type, to_payload


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
