"""Trained prompts: embeddings that are added to the input of each block at a session's first positions.

This is deep prompt tuning (P-Tuning v2, Liu et al., 2021) in the form of Petals (Borzunov et al., 2022): the embeddings
are added to the hidden states that enter a block, not put before them, so they take no positions of their own.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import MAX_PROMPT_BYTES, Buffer
from corolla.wire.tensors import from_payload


@dataclass(slots=True)
class BlockPrompts:
    """The embeddings that one session adds on this server.

    Attributes:
        values: `[blocks of the session on this server, P, H]` on the CPU, in the dtype of the weights; read-only.
    """

    values: Tensor
    _there: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @classmethod
    def read(
        cls, description: pb.BlockPrompts, payload: Buffer, num_blocks: int, dtype: pb.TensorType.ValueType, width: int
    ) -> Self:
        """Makes the embeddings from received bytes, as a view without a copy.

        Args:
            num_blocks: how many blocks the session has on this server.
            dtype: the dtype of the weights.
            width: the size of hidden states.

        Raises:
            MalformedMessage: the payload does not match its description or the model, or is too large.
        """
        if description.num_tokens == 0 or description.dtype != dtype or description.hidden_size != width:
            raise MalformedMessage("block_prompts", "must have tokens, and the model's dtype and hidden size")
        if len(payload) > MAX_PROMPT_BYTES:
            raise MalformedMessage("block_prompts", f"at most {MAX_PROMPT_BYTES >> 20} MiB for the blocks of one hop")
        rows = from_payload(payload, dtype, num_blocks * description.num_tokens, width)
        return cls(rows.view(num_blocks, description.num_tokens, width))

    def copy(self) -> "BlockPrompts":
        """A copy that does not keep the received message alive."""
        return BlockPrompts(self.values.clone())

    def part(self, block: int, position: int, num_tokens: int, device: torch.device) -> Tensor:
        """The embeddings `[n, H]` for the first `n` of `num_tokens` tokens from `position` on; `n` may be 0.

        They are on `device`, in the dtype of `values`. The first call copies the embeddings of all blocks to it.

        Args:
            block: the block's index, counted from the session's first block on this server.
            device: the device of hidden states, the same one in all calls.
        """
        if self._there is None:
            self._there = self.values.to(device)
        return self._there[block, position : position + num_tokens]
