"""Trained prompts of a session: embeddings that are added to the input of each block at its first positions.

This is deep prompt tuning (P-Tuning v2, Liu et al., 2021) in the form that Petals gave it: what a prompt says to a
block is added to the hidden states that enter it, not put before them, so that it takes no positions of its own.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import MAX_PROMPT_BYTES, Buffer
from corolla.wire.tensors import from_payload


@dataclass(frozen=True, slots=True)
class BlockPrompts:
    """What one session adds on this server.

    Attributes:
        values: `[blocks of the session here, P, H]` on the CPU, in the dtype of the weights; read-only.
    """

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @classmethod
    def read(
        cls, description: pb.BlockPrompts, payload: Buffer, num_blocks: int, dtype: pb.TensorType.ValueType, width: int
    ) -> Self:
        """A view of the received bytes: nothing is copied yet.

        Args:
            num_blocks: of the session on this server.
            dtype: of the weights.
            width: of hidden states.

        Raises:
            MalformedMessage: it is described otherwise than it is, does not fit the model, or is too large.
        """
        if description.num_tokens == 0 or description.dtype != dtype or description.hidden_size != width:
            raise MalformedMessage("block_prompts", "no tokens, or dtype or hidden size is not the model's")
        if len(payload) > MAX_PROMPT_BYTES:
            raise MalformedMessage("block_prompts", f"at most {MAX_PROMPT_BYTES >> 20} MiB for the blocks of one hop")
        rows = from_payload(payload, dtype, num_blocks * description.num_tokens, width)
        return cls(rows.view(num_blocks, description.num_tokens, width))

    def copy(self) -> "BlockPrompts":
        """A copy that does not keep the received message alive."""
        return BlockPrompts(self.values.clone())

    def part(self, block: int, position: int, num_tokens: int) -> Tensor:
        """`[n, H]`, what the first `n` of a session's tokens from `position` on get; `n` may be 0.

        Args:
            block: counted from the first of the session's blocks here.
        """
        return self.values[block, position : position + num_tokens]
