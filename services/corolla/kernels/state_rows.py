"""The rows of a batch, and the places of their recurrent states, which kernels for GPUs read."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a call, and the slots of their states in a table. The tensors lie on one device.

    Attributes:
        sources: int64 `[rows]`, the slots that are read; below 0: the row begins, and its states are zeros.
        targets: int64 `[rows]`, the slots that are written; none of them is read.
        first_tokens: int32 `[rows + 1]`: where each row's tokens begin, and where the last row's end.
        rows_of_tokens: int32 `[N]`, the row of each token.
    """

    sources: Tensor
    targets: Tensor
    first_tokens: Tensor
    rows_of_tokens: Tensor
