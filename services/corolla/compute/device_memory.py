"""Divides the memory of a GPU among weights, keys and values, and what a step needs. Pure."""

from dataclasses import dataclass
from typing import Final

RECORDING_BYTES: Final = 1 << 30
"""What recorded steps of all sizes take, workspaces of libraries, and what torch keeps between them."""
# Allocations of different sizes leave holes.
_SHARE_OF_HOLES: Final = 20
# Weights leave this part, since a server without keys and values serves no session.
_SHARE_OF_PAGES: Final = 5

SHARE_OF_ACTIVATIONS: Final = 8
"""Boundary activations of a server on a GPU take at most this part of the machine's memory."""
_MAX_LOGITS: Final = 16 << 20
_RECORDED_ROWS: Final = 128
_LOGIT_BYTES: Final = 8 + 20
"""What a logit takes: a float32, and as much again for masks and sampling.

That of a row that draws takes 20 more: two words and a float64 of its random stream, and a float32 for what is drawn.
"""

DEVICE_MEMORY_USES: Final = ("weights", "pages", "recordings", "workspace", "other", "free")


def most_logit_rows(vocab_size: int) -> int:
    """Returns for how many rows the last server makes logits at a time: a whole step's could take gigabytes.

    They are at least as many as the rows of the largest recorded step, so that its head, and the step after it, can be
    launched ahead whatever the size of the vocabulary.
    """
    return max(_RECORDED_ROWS, _MAX_LOGITS // vocab_size)


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step takes next to weights, keys and values.

    Attributes:
        row_bytes: what one row takes while a block computes it.
        vocab_size: the number of tokens of the vocabulary.
        fixed_bytes: what a step may take in addition, whatever its number of rows.
    """

    row_bytes: int
    vocab_size: int
    fixed_bytes: int = 0

    def num_bytes(self, num_tokens: int, *, has_head: bool) -> int:
        """The bytes of the largest step, on a server whose steps have at most so many tokens."""
        num_rows = min(num_tokens, most_logit_rows(self.vocab_size)) if has_head else 0
        return num_tokens * self.row_bytes + self.fixed_bytes + num_rows * self.vocab_size * _LOGIT_BYTES


def reserved_bytes(num_total: int, step_bytes: int, adapter_bytes: int) -> int:
    """The bytes of a device that neither weights nor pages may take: plans and servers keep the same ones free.

    Args:
        num_total: bytes of the whole device.
        step_bytes: the bytes of the largest step.
        adapter_bytes: the most bytes that adapters will take.
    """
    return RECORDING_BYTES + step_bytes + num_total // _SHARE_OF_HOLES + adapter_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device.

    Attributes:
        num_free: bytes that a process could still allocate.
        num_total: bytes of the whole device.
    """

    num_free: int
    num_total: int

    def for_pages(self, step_bytes: int, adapter_bytes: int = 0) -> int:
        """The bytes that pages may take once all weights are loaded; see `reserved_bytes`."""
        return max(0, self.num_free - reserved_bytes(self.num_total, step_bytes, adapter_bytes))

    def by_use(self, weight_bytes: int, page_bytes: int, recorded_bytes: int, num_reserved: int) -> dict[str, int]:
        """How the device's memory is used now: the bytes of each of `DEVICE_MEMORY_USES`, which add up to all of it.

        Args:
            weight_bytes: the bytes of the weights that this process holds there.
            page_bytes: the bytes of its pages.
            recorded_bytes: the bytes that recorded steps took.
            num_reserved: all bytes that this process' allocator holds there; those of no other use are workspace.
        """
        held = weight_bytes + page_bytes + recorded_bytes
        workspace = max(0, num_reserved - held)
        other = max(0, self.num_total - self.num_free - held - workspace)
        uses = (weight_bytes, page_bytes, recorded_bytes, workspace, other, self.num_free)
        return dict(zip(DEVICE_MEMORY_USES, uses, strict=True))

    def for_weights(self, page_bytes: int | None, step_bytes: int, adapter_bytes: int = 0) -> int:
        """The bytes that weights may take, before any is loaded; see `reserved_bytes`.

        Args:
            page_bytes: the bytes that pages will take; None: a fifth of what there is for both.
        """
        both = self.for_pages(step_bytes, adapter_bytes)
        return max(0, both - (both // _SHARE_OF_PAGES if page_bytes is None else page_bytes))
