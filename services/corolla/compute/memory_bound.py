"""The least time that iterations take on a device, by what they read from its memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """What a server reads in an iteration, and how fast: the roofline of steps with few rows.

    An iteration reads each weight once, whatever its number of rows, and the keys and values that each row sees. All
    weights count, although rows of a mixture of experts may need only a part of them. Prompts take longer than this
    bound, since computing bounds them.

    Attributes:
        bandwidth: bytes per second that the device reads.
        num_blocks: the number of blocks of the span.
        block_bytes: bytes of the weights of all these blocks.
        head_bytes: bytes of the head's weights; 0: the server has no head.
        groups: for each group of layers its window in tokens (None: tokens see all tokens before them), and the bytes
            of one token's keys and values in the group.
    """

    bandwidth: float
    num_blocks: int
    block_bytes: int
    head_bytes: int
    groups: Sequence[tuple[int | None, int]]

    def seconds(self, num_blocks: int, num_seen: Sequence[int], *, has_head: bool) -> float:
        """The seconds of one iteration.

        Args:
            num_blocks: how many of the blocks run.
            num_seen: how many tokens each row sees, its own included.
            has_head: whether the head runs, too.
        """
        cached = sum(
            num_bytes * sum(num_seen if window is None else (min(seen, window) for seen in num_seen))
            for window, num_bytes in self.groups
        )
        of_blocks = (self.block_bytes + cached) * num_blocks / self.num_blocks
        return (of_blocks + self.head_bytes * has_head) / self.bandwidth
