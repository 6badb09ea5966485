"""What the layers of a span ask of attention: heads, their sizes, windows and bounds."""

from dataclasses import dataclass

from torch import Tensor

from corolla.compute.attention.batch import AttentionBatch, LayerInput


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer asks of attention; the defaults are ordinary sizes.

    Attributes:
        num_heads: how many query heads there are.
        num_key_heads: how many key heads, and value heads, there are.
        key_size: the size of a query head and of a key head.
        value_size: the size of a value head.
        scaling: the factor of the scores.
        window: how many tokens a token sees, itself included; None: it sees all tokens before it.
        softcap: the bound of the scores; None: they are not bounded.
        has_sinks: whether each head has a sink, see `LayerInput`.
    """

    num_heads: int = 4
    num_key_heads: int = 2
    key_size: int = 64
    value_size: int = 64
    scaling: float = 0.125
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


class ShapeProbe:
    """An attention backend that notes what layers ask for, and computes nothing.

    Attributes:
        shapes: what the layers asked for, in the order of their first calls.
    """

    name = "probe"

    def __init__(self) -> None:
        self.shapes: dict[AttentionShape, None] = {}

    def attend(self, _batch: AttentionBatch, given: LayerInput) -> Tensor:
        """Returns zeros; see `AttentionBatch.attend`."""
        num_tokens, num_heads, key_size = given.query.shape
        num_key_heads, value_size = given.value.shape[1:]
        shape = AttentionShape(
            num_heads,
            num_key_heads,
            key_size,
            value_size,
            given.scaling,
            given.window,
            given.softcap,
            given.sinks is not None,
        )
        self.shapes[shape] = None
        return given.query.new_zeros(num_tokens, num_heads, value_size)
