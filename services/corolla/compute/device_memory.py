"""Divides the memory of a GPU among weights, keys and values, and what a step needs. Pure."""

from dataclasses import dataclass
from typing import Final

# CUDA's context, workspaces of libraries, recorded steps, and the hidden states and logits of a step.
_RESERVED_BYTES: Final = 3 << 29
# Allocations of different sizes leave holes.
_SHARE_OF_HOLES: Final = 20
# Weights leave this part, since a server without keys and values serves no session.
_SHARE_OF_PAGES: Final = 5

DEVICE_MEMORY_USES: Final = ("weights", "pages", "recordings", "workspace", "other", "free")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device.

    Attributes:
        num_free: bytes that a process could still allocate.
        num_total: bytes of the whole device.
    """

    num_free: int
    num_total: int

    def for_pages(self, adapter_bytes: int = 0) -> int:
        """The bytes that pages may take once all weights are loaded.

        Args:
            adapter_bytes: the most bytes that adapters will take.
        """
        return max(0, self.num_free - _RESERVED_BYTES - self.num_total // _SHARE_OF_HOLES - adapter_bytes)

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

    def for_weights(self, page_bytes: int | None, adapter_bytes: int = 0) -> int:
        """The bytes that weights may take, before any is loaded.

        Args:
            page_bytes: the bytes that pages will take; None: a fifth of what there is for both.
            adapter_bytes: the most bytes that adapters will take.
        """
        both = self.for_pages(adapter_bytes)
        return max(0, both - (both // _SHARE_OF_PAGES if page_bytes is None else page_bytes))
