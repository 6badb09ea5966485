"""Recurrent states: what a session holds of layers that keep no keys and values.

Such a layer keeps tensors of fixed size that stand for all tokens up to one position. Nothing leads back from there, so
a session keeps the states of two positions: where it stands, and where its last step began. Position 0 needs none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

NUM_KEPT_STATES: Final = 3
"""Of each layer, for one session: those of two positions, and the one that a step computes."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer. Its tensors are never written again, so sessions may share them.

    Attributes:
        conv: `[1, channels, kernel]`, the newest inputs of a short convolution.
        recurrent: `[1, heads, key size, value size]`; None where the layer has only the convolution.
    """

    conv: Tensor
    recurrent: Tensor | None = None

    @classmethod
    def of(cls, layer: LinearAttentionLayer) -> Self:
        """What the library's cache of a layer holds, which is to be used no more. Raises ValueError if it never was."""
        conv = layer.conv_states[0]
        if conv is None:
            raise ValueError("the layer has computed nothing")
        return cls(conv, layer.recurrent_states[0])

    def to_layer(self) -> LinearAttentionLayer:
        """A copy as the library's cache, which goes on from here and changes it in place."""
        layer = LinearAttentionLayer()
        layer.conv_states[0], layer.conv_kernel_size[0] = self.conv.clone(), self.conv.shape[-1]
        layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
        if self.recurrent is not None:
            layer.recurrent_states[0] = self.recurrent.clone()
            layer.is_recurrent_states_initialized[0] = True
        return layer

    def shape(self) -> Self:
        """A state of this shape, dtype and device that takes no memory; it cannot be read."""
        return type(self)(*(tensor.new_empty(()).expand(tensor.shape) for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.conv,) if self.recurrent is None else (self.conv, self.recurrent)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


LayerStates = Mapping[int, LayerState]
"""By index of the layer within the server's span."""

_NOTHING: Final[LayerStates] = MappingProxyType({})


class SessionStates:
    """The states of one session, by position.

    Attributes:
        computed: of the step that is computed; they count from its commit on.
    """

    def __init__(self) -> None:
        self.computed: dict[int, LayerState] = {}
        self._kept: dict[int, LayerStates] = {}  # by rising position

    def __contains__(self, position: object) -> bool:
        return position == 0 or position in self._kept

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for states in self._kept.values() for state in states.values())

    @property
    def min_position(self) -> int:
        """From here to the newest position there is a state everywhere."""
        newest = max(self._kept, default=0)
        return newest - 1 if newest - 1 in self else newest

    def nearest(self, position: int) -> int:
        """The highest position, up to this one, of which there is a state."""
        return max((each for each in self._kept if each <= position), default=0)

    def at(self, position: int) -> LayerStates:
        """Raises KeyError where they are not kept."""
        return self._kept[position] if position else _NOTHING

    def commit(self, position: int) -> None:
        """What was computed are the states at this position; those where the step began stay."""
        newest = max(self._kept, default=0)
        began = {newest: self._kept[newest]} if newest else {}
        self._kept = {**began, position: self.computed}
        self.computed = {}

    def truncate(self, position: int) -> None:
        """Forgets what is beyond a position."""
        self._kept = {each: states for each, states in self._kept.items() if each <= position}
        self.computed = {}

    def arrive(self, position: int, states: LayerStates) -> None:
        """States that were computed elsewhere; whatever was kept before is of no use."""
        self._kept = {position: states} if position else {}

    def share(self) -> "SessionStates":
        """The same ones, for another session."""
        twin = SessionStates()
        twin._kept = dict(self._kept)
        return twin
