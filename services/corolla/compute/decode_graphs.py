"""Decode steps that are recorded once and then replayed.

Python may take longer to launch the kernels of a small step one by one than the GPU takes to run them. A recorded step
is a single launch. It repeats the same kernels on the same addresses, so each batch size is recorded by itself, and
rows without a session are padding (as in vLLM and TensorRT-LLM).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from corolla.compute.attention.base import AttentionBackend
from corolla.compute.base import Embed, PackedStep, RecordableBlocks
from corolla.compute.decode_buffers import DecodeBuffers, DecodeStep, NewToken
from corolla.compute.low_rank import NO_SLOT, RECORDED_RANK, LowRankBatch
from corolla.models.adapters.products import SpanAdapter
from corolla.models.cuda_capture import Record
from corolla.wire.device_copies import to_copy

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""The numbers of rows of recorded steps.

Up to 64 rows, memory bandwidth limits a GPU, so padding costs little. Beyond, a step has up to a third of padding.
"""


class DecodeGraphs:
    """Recorded steps of all layers of a span, one for each size.

    Args:
        blocks: the span's blocks. Steps are recorded a second time, with adapters, where kernels multiply by these.
        buffers: buffers with room for the rows of the largest size.
        backend: the attention; it may read only what the batch has prepared, and not the batch's rows.
        record: see `Record`.
        sizes: for each recorded step, its number of rows.
        num_layers: how many layers a step runs, from the first one on; None: all.

    Attributes:
        buffers: the tensors that the recorded steps read and write.
        num_replays: how many steps were replayed.

    Raises:
        RuntimeError: the step cannot be recorded.
    """

    def __init__(
        self,
        blocks: RecordableBlocks,
        buffers: DecodeBuffers,
        backend: AttentionBackend,
        record: Record,
        sizes: Sequence[int] = SIZES,
        num_layers: int | None = None,
    ) -> None:
        self.num_replays = 0
        self._blocks = blocks
        self._layers = range(blocks.num_layers if num_layers is None else num_layers)
        self.buffers = buffers
        self._backend = backend
        self._low_rank = blocks.low_rank
        device = buffers.hidden.device
        self._tiles = torch.tensor(LowRankBatch.tiles_of_tokens([NO_SLOT] * max(sizes)), dtype=torch.int32).to(device)
        # The first step makes tensors that later steps read; they must not lie in the memory pool of a recording.
        self._step(max(sizes), self._layers)
        self._replays = self._recorded(record, sizes)
        self._adapting = {} if self._low_rank is None else self._recorded(record, sizes, has_adapters=True)
        self._sizes = sorted(sizes)
        # The recordings hold the addresses of these tables, so they must stay alive when the blocks replace them for
        # longer texts.
        self._kept = blocks.kept_tables

    @property
    def max_rows(self) -> int:
        """The most rows of a recorded step."""
        return self._sizes[-1]

    def step(self, tokens: Sequence[NewToken], adapters: Sequence[SpanAdapter | None] = ()) -> DecodeStep | None:
        """The step of these new tokens, whose pages may be written; None if no recorded step fits.

        Args:
            adapters: the adapters of all rows; empty: no row has one.
        """
        if len(tokens) > self.max_rows:
            return None
        if all(adapter is None for adapter in adapters):
            return self.buffers.step(tokens)
        slots = None if self._low_rank is None else self._low_rank.slots(adapters)
        if slots is None or self._low_rank is None or self._low_rank.most_rank(slots) > RECORDED_RANK:
            return None
        step = self.buffers.step(tokens)
        return None if step is None else replace(step, slots=slots)

    def prepare(self, step: DecodeStep) -> None:
        """Gives the device all of a step but its hidden states; `replay` then does not write that again."""
        self.buffers.write(step, self._size_for(step))

    def replay(self, step: DecodeStep, hidden: Tensor | Embed) -> Tensor:
        """Runs all layers over one new token of each row, and stores their keys and values.

        Args:
            hidden: `[rows, H]`, any device and dtype; or what makes it once the positions are on the device.

        Returns:
            The output `[rows, H]`, a copy on the model's device and in its dtype.
        """
        self.prepare(step)
        buffers, num_rows, size = self.buffers, len(step.tokens), self._size_for(step)
        if isinstance(hidden, Tensor):
            hidden = to_copy(hidden, buffers.hidden.device, buffers.hidden.dtype)
        else:
            hidden = hidden(buffers.positions.narrow(0, 0, num_rows))
        buffers.hidden.narrow(0, 0, num_rows).copy_(hidden, non_blocking=True)
        if step.slots is None:
            self._replays[size]()
        else:
            padding = [NO_SLOT] * (size - num_rows)
            buffers.write_numbers(self._tiles[:size], LowRankBatch.tiles_of_tokens([*step.slots, *padding]))
            self._adapting[size]()
        self.num_replays += 1
        return buffers.output.narrow(0, 0, num_rows).clone()

    def _size_for(self, step: DecodeStep) -> int:
        """The size of the smallest recorded step that has room for the rows."""
        return next(size for size in self._sizes if size >= len(step.tokens))

    def _recorded(
        self, record: Record, sizes: Sequence[int], *, has_adapters: bool = False
    ) -> dict[int, Callable[[], None]]:
        # All layers of a kind launch the same kernels, so a warm-up has one of them.
        both = (self._layers, self._blocks.first_of_kinds)
        # The largest is recorded first, so that the others fit into its memory.
        return {
            size: record(*(partial(self._step, size, layers, has_adapters) for layers in both))
            for size in sorted(sizes, reverse=True)
        }

    def _step(self, size: int, layers: Sequence[int], has_adapters: bool = False) -> None:
        buffers = self.buffers
        adapters = None
        if has_adapters and self._low_rank is not None:
            adapters = LowRankBatch(self._low_rank, self._tiles[:size], RECORDED_RANK)
        batch = buffers.batch(size, self._backend)
        step = PackedStep((), buffers.positions[:size], buffers.max_tokens, batch, adapters, buffers.states(size))
        buffers.output[:size].copy_(self._blocks.forward(step, buffers.hidden[:size], layers))
