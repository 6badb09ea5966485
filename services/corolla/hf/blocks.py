"""The remote blocks of a model: they can be counted, sliced, and run without a cache."""

from dataclasses import replace
from typing import overload

from torch import Tensor

from corolla.hf.hop_sessions import RemoteSpan
from corolla.hf.session import InferenceSession
from corolla.wire.span import Span


class RemoteBlocks:
    """Consecutive blocks of a model that run on block servers. A slice is `RemoteBlocks`, too."""

    def __init__(self, remote: RemoteSpan) -> None:
        self.remote = remote

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.remote.span})"

    def __len__(self) -> int:
        return len(self.remote.span)

    @overload
    def __getitem__(self, blocks: int) -> "RemoteBlocks": ...

    @overload
    def __getitem__(self, blocks: slice) -> "RemoteBlocks": ...

    def __getitem__(self, blocks: int | slice) -> "RemoteBlocks":
        """One block, or a run of them; both are `RemoteBlocks`.

        Raises:
            IndexError: there is no such block.
            ValueError: the slice is empty or leaves blocks out.
        """
        chosen = range(len(self))[blocks]
        if isinstance(chosen, int):
            chosen = range(chosen, chosen + 1)
        if chosen.step != 1 or not chosen:
            raise ValueError("A slice of blocks must be consecutive and not empty.")
        start = self.remote.span.start
        return RemoteBlocks(replace(self.remote, span=Span(start + chosen.start, start + chosen.stop)))

    def __call__(self, hidden: Tensor, *, block_prompts: Tensor | None = None) -> Tensor:
        """Runs the blocks once from position 0; the servers keep no keys and values afterwards.

        Args:
            hidden: `[B, T, H]`, floating point, on any device: the input of the first of these blocks.
            block_prompts: `[blocks, P, H]` or `[blocks, B, P, H]`, added to the input of each block at the first P
                positions.

        Returns:
            `[B, T, H]`, the output of the last block before any final norm, on the device and in the dtype of `hidden`.
        """
        session = self.inference_session(max_length=max(1, hidden.shape[1]), block_prompts=block_prompts)
        try:
            return session.step(hidden)
        finally:
            session.close()

    def inference_session(
        self,
        *,
        max_length: int | None = None,
        prompts: Tensor | None = None,
        block_prompts: Tensor | None = None,
    ) -> InferenceSession:
        """A session over these blocks. See `InferenceSession`."""
        return InferenceSession(self.remote, max_length=max_length, prompts=prompts, block_prompts=block_prompts)
