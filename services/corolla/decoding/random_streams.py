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
from corolla.wire.device_copies import begin_reading, on_device

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
    """The random streams of samplers on one device, which draws from them by `draw_negated`."""

    def __init__(self, device: torch.device, draw_negated: DrawNegated = launched_numbers) -> None:
        self._rows = DeviceRows(STREAM_WIDTH, torch.int32, device)
        self._draw_negated = draw_negated

    def begin(self, state: bytes) -> Slot:
        """Copies a stream to the device, by the state of its `torch.Generator`."""
        words, num_used = words_of(state)
        row = np.zeros(STREAM_WIDTH, np.uint32)
        row[:NUM_WORDS], row[NUM_WORDS] = words, num_used
        return self._rows.take(torch.from_numpy(row.view(np.int32)))

    def draw(self, slots: Sequence[Slot], width: int) -> tuple[Tensor, Callable[[], Sequence[tuple[Words, int]]]]:
        """Draws the next numbers of some streams.

        Args:
            slots: no one occurs twice.
            width: how many numbers each gets.

        Returns:
            The numbers, float64 `[slots, width]` on the device; and a function that waits for the device, and returns
            the streams, as `words_of` returns those of a generator.
        """
        streams = self._rows.numbers
        at = on_device(indices_of(slots), streams.device, torch.int64)
        drawn = self._draw_negated(streams, at, width)
        read = begin_reading(streams[at])

        def moved() -> Sequence[tuple[Words, int]]:
            return [(row[:NUM_WORDS].view(np.uint32), int(row[NUM_WORDS])) for row in read().numpy()]

        return drawn, moved


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
        drawn, moved = streams.draw(slots, width)
        expected = torch.stack([torch.rand(width, dtype=torch.float64, generator=each) for each in generators])
        if not torch.equal(drawn.cpu(), -expected):
            return False
        for (words, num_used), generator in zip(moved(), generators, strict=True):
            expected_words, expected_used = words_of(generator.get_state().numpy().tobytes())
            if num_used != expected_used or not np.array_equal(words, expected_words):
                return False
    return True
