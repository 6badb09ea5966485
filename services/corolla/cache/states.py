"""Recurrent states: the data of a session for recurrent layers, which keep no keys and values.

Such a layer keeps tensors of fixed size that stand for all tokens up to one position. An earlier state cannot be
computed from them, so a session keeps the states of two positions: the newest, and the one where its last step began.
Position 0 needs no state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer, in its dtype and on its device. It is never written again, so sessions may share it.

    Attributes:
        conv: `[1, channels, kernel]`, the newest inputs of a short convolution.
        recurrent: `[1, heads, key size, value size]`; None if the layer has only the convolution.
    """

    conv: Tensor
    recurrent: Tensor | None = None

    @classmethod
    def from_layer(cls, layer: LinearAttentionLayer) -> Self:
        """Takes the tensors of a transformers cache layer. Raises ValueError if the layer has computed nothing."""
        conv = layer.conv_states[0]
        if conv is None:
            raise ValueError("the layer has computed nothing")
        return cls(conv, layer.recurrent_states[0])

    def to_layer(self) -> LinearAttentionLayer:
        """Copies the state into a new layer of a transformers cache. The model continues there and changes the copy."""
        layer = LinearAttentionLayer()
        layer.conv_states[0], layer.conv_kernel_size[0] = self.conv.clone(), self.conv.shape[-1]
        layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
        if self.recurrent is not None:
            layer.recurrent_states[0] = self.recurrent.clone()
            layer.is_recurrent_states_initialized[0] = True
        return layer

    def shape(self) -> Self:
        """Returns a state with the same shapes, dtypes and devices that takes no memory and has no useful values."""
        return type(self)(*(tensor.new_empty(()).expand(tensor.shape) for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """`conv` and, if there is one, `recurrent`, with the shapes of these attributes."""
        return (self.conv,) if self.recurrent is None else (self.conv, self.recurrent)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


LayerStates = Mapping[int, LayerState]
"""The states of layers, by the layer's index within the server's span."""

_NOTHING: Final[LayerStates] = MappingProxyType({})


class SessionStates:
    """The states of one session, by position.

    Attributes:
        computed: the states, by layer, of the step that is being computed; `commit` keeps them.
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
        """The lowest position from which all positions up to the newest have states."""
        newest = max(self._kept, default=0)
        return newest - 1 if newest - 1 in self else newest

    def nearest(self, position: int) -> int:
        """The highest position, up to `position`, that has states."""
        return max((each for each in self._kept if each <= position), default=0)

    def at(self, position: int) -> LayerStates:
        """The states at a position; empty for position 0. Raises KeyError if they are not kept."""
        return self._kept[position] if position else _NOTHING

    def commit(self, position: int) -> None:
        """Keeps the computed states as the states at `position`. Of older states, it keeps the step's beginning."""
        newest = max(self._kept, default=0)
        began = {newest: self._kept[newest]} if newest else {}
        self._kept = {**began, position: self.computed}
        self.computed = {}

    def truncate(self, position: int) -> None:
        """Forgets the states after a position."""
        self._kept = {each: states for each, states in self._kept.items() if each <= position}
        self.computed = {}

    def arrive(self, position: int, states: LayerStates) -> None:
        """Keeps states that another server computed. Of older states, it keeps the newest.

        A client may not have read yet the token after which these states were.
        """
        older = max((each for each in self._kept if each < position), default=0)
        began = {older: self._kept[older]} if older else {}
        self._kept = {**began, position: states} if position else {}

    def share(self) -> "SessionStates":
        """Returns a SessionStates with the same kept states for another session."""
        twin = SessionStates()
        twin._kept = dict(self._kept)
        return twin
