"""Draws the random numbers of many samplers on a GPU: those that their generators would draw on a CPU, bit for bit.

For 128,256 tokens, a CPU takes 0.7 ms for each row, and the copy a megabyte. So a stream lies on the device and goes on
there. Where it is then comes back with each token, since the next server may have to go on from there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from corolla.decoding import kernel_trials
from corolla.decoding.device_rows import DeviceRows, Slot, indices_of
from corolla.decoding.random_jump import Words, words_of
from corolla.decoding.sampling import Draw, Sampler, exponential_of
from corolla.wire.device_copies import await_copies, begin_reading, on_stream_of_copies, to_device

NUM_WORDS: Final = 624
"""A stream in its row: a block of MT19937, then how many of its words were used."""

STREAM_WIDTH: Final = 640
"""Each row begins at an aligned address."""

_TRIAL_WIDTHS: Final = (9_999, 1, 313, 1_000)
_TRIAL_ROWS: Final = 3

DrawNegated = Callable[[Tensor, Tensor, int], Tensor]
"""See `launched_numbers`."""


def launched_numbers(streams: Tensor, slots: Tensor, width: int) -> Tensor:
    """Draws the next numbers of streams by the Triton kernel, and moves the streams.

    Args:
        streams: int32 `[S, STREAM_WIDTH]`.
        slots: int64 `[R]` on the same device: the rows of the streams; each occurs once.

    Returns:
        float64 `[R, width]`, on the same device: the 53 bits of each draw as a number between -1 and 0.
    """
    from corolla.kernels.triton import choice_launches

    return choice_launches.draw_negated(streams, slots, width)


class RandomStreams:
    """The random streams of samplers on one device, which draws from them by `draw_negated`.

    All work on the streams runs on the stream of copies, so numbers can be drawn while a step is computed.
    """

    def __init__(self, device: torch.device, draw_negated: DrawNegated = launched_numbers) -> None:
        self._device = device
        with torch.inference_mode(), on_stream_of_copies(device):
            self._rows = DeviceRows(STREAM_WIDTH, torch.int32, device)
        self._draw_negated = draw_negated
        self._last: tuple[tuple[int, ...], Tensor] | None = None

    @torch.inference_mode()
    def begin(self, state: bytes) -> Slot:
        """Copies a stream to the device, by the state of its `torch.Generator`."""
        words, num_used = words_of(state)
        row = np.zeros(STREAM_WIDTH, np.uint32)
        row[:NUM_WORDS], row[NUM_WORDS] = words, num_used
        with on_stream_of_copies(self._device):
            return self._rows.take(torch.from_numpy(row.view(np.int32)))

    @torch.inference_mode()
    def draw(self, slots: Sequence[Slot], width: int) -> Draw:
        """Draws the next numbers of some streams, `width` for each; if memory is too small for them, no stream moves.

        Until `await_copies`, the numbers may not be there yet.

        Args:
            slots: no one occurs twice.
        """
        with on_stream_of_copies(self._device):
            streams, at = self._rows.numbers, self._indices(slots)
            numbers = torch.empty(len(slots), width, device=self._device)
            moved = torch.empty(len(slots), STREAM_WIDTH, dtype=torch.int32, device=self._device)
            # The numbers of `exponential_of`, without more memory.
            numbers.copy_(self._draw_negated(streams, at, width).log1p_().neg_())
            torch.index_select(streams, 0, at, out=moved)
            read = begin_reading(moved)
        if self._device.type == "cuda":
            # The memory came from the other stream, which would use it again as soon as it is free.
            numbers.record_stream(torch.cuda.current_stream(self._device))

        def words() -> Sequence[tuple[Words, int]]:
            return [(row[:NUM_WORDS].view(np.uint32), int(row[NUM_WORDS])) for row in read().numpy()]

        return Draw(numbers, functools.cache(words))

    def _indices(self, slots: Sequence[Slot]) -> Tensor:
        indices = indices_of(slots)
        if self._last is None or self._last[0] != indices:
            self._last = indices, to_device(torch.tensor(indices), self._device, torch.int64)
        return self._last[1]

    @torch.inference_mode()
    def draw_ahead(self, samplers: Sequence[Sampler], width: int) -> None:
        """Draws the numbers of the samplers' next choices, as far as that is not done; no sampler occurs twice."""
        begun = [(sampler, sampler.stream(self.begin, width)) for sampler in samplers]
        pairs = [(sampler, slot) for sampler, slot in begun if slot is not None]
        if not pairs:
            return
        draw = self.draw([slot for _, slot in pairs], width)
        for index, (sampler, _) in enumerate(pairs):
            sampler.take_draw(draw, index)


@functools.cache
def streams_of(device: torch.device) -> RandomStreams | None:
    """The streams on a device; None if the CPU draws for it. The kernel is tried when this is first called."""
    holds = kernel_trials.holds("random numbers", "the CPU draws them", device, draws_as_a_cpu)
    return RandomStreams(device) if holds else None


@torch.inference_mode()
def draws_as_a_cpu(device: torch.device, draw_negated: DrawNegated = launched_numbers) -> bool:
    """Compares numbers of streams on a device, and where the streams are then, with those of generators."""
    streams = RandomStreams(device, draw_negated)
    generators = [torch.Generator().manual_seed(seed) for seed in range(_TRIAL_ROWS)]
    slots = [streams.begin(each.get_state().numpy().tobytes()) for each in generators]
    for width in _TRIAL_WIDTHS:
        draw = streams.draw(slots, width)
        await_copies(device)
        expected = torch.stack([torch.rand(width, dtype=torch.float64, generator=each) for each in generators])
        if not torch.equal(draw.numbers, exponential_of(-expected.to(device))):
            return False
        for (words, num_used), generator in zip(draw.moved(), generators, strict=True):
            expected_words, expected_used = words_of(generator.get_state().numpy().tobytes())
            if num_used != expected_used or not np.array_equal(words, expected_words):
                return False
    return True
