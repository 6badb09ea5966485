"""Recurrent states: the data of a session for recurrent layers, which keep no keys and values.

Such a layer keeps tensors of fixed size that stand for all tokens up to one position. An earlier state cannot be
computed from them, so a session keeps the states of two positions: the newest, and the one where its last step began.
Position 0 needs no state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from corolla.chassis.errors import OutOfPages


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

NO_SLOT: Final = -1
"""Stands for the slot of a session that begins: its states are zeros."""

_NOTHING: Final[LayerStates] = MappingProxyType({})


class StateTable:
    """The states of all sessions in tensors that stay where they are, for kernels of GPUs.

    A slot has the states of all recurrent layers of one session at one position. It is written by one step, and then
    read until no session holds it any more.

    Args:
        num_slots: how many slots sessions may have.

    Attributes:
        scratch_slot: one more slot, for states that no session will read.
    """

    def __init__(self, num_slots: int) -> None:
        self.scratch_slot = num_slots
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def tensors_like(self, layer: int, state: LayerState) -> tuple[Tensor, ...]:
        """The states of a layer in all slots; makes the tensors if they do not exist yet.

        Args:
            layer: the layer's index within the span.
            state: has the shapes, dtypes and devices of the layer's states, see `LayerState.shape`.

        Returns:
            `[slots, channels, kernel]` and, if there is one, `[slots, heads, key size, value size]`.
        """
        if layer not in self._tensors:
            self._tensors[layer] = tuple(
                each.new_empty(self.scratch_slot + 1, *each.shape[1:]) for each in state.tensors
            )
        return self._tensors[layer]

    def take(self) -> "SlotStates":
        """A slot whose states are still to be written.

        Raises:
            OutOfPages: sessions have all slots.
        """
        if not self._free:
            raise OutOfPages("a block server has too few slots for recurrent states")
        return SlotStates(self._tensors, self._free)

    @torch.inference_mode()
    def fill(self, slot: "SlotStates", states: LayerStates) -> None:
        """Copies states that lie elsewhere into a slot."""
        for layer, state in states.items():
            for tensor, own in zip(self.tensors_like(layer, state.shape()), state.tensors, strict=True):
                tensor[slot.number].copy_(own[0])


class SlotStates(Mapping[int, LayerState]):
    """The states of a slot, which goes back to its table once nothing holds this object.

    Args:
        tensors: the tensors of the table, by layer, see `StateTable.tensors_like`: `[slots, ...]` each, in the dtypes
            and on the device of states.
        free: the numbers of free slots, at least one.

    Attributes:
        number: the number of the slot.
    """

    def __init__(self, tensors: Mapping[int, tuple[Tensor, ...]], free: list[int]) -> None:
        self.number = free.pop()
        self._tensors, self._free = tensors, free

    def __del__(self) -> None:
        self._free.append(self.number)

    def __getitem__(self, layer: int) -> LayerState:
        return LayerState(*(tensor.narrow(0, self.number, 1) for tensor in self._tensors[layer]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class SessionStates:
    """The states of one session, by position.

    Attributes:
        computed: the states, by layer, of the step that is being computed; `commit` keeps them.
    """

    def __init__(self) -> None:
        self.computed: dict[int, LayerState] = {}
        self._kept: dict[int, LayerStates] = {}  # by rising position
        self._written: tuple[int, SlotStates] | None = None

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

    def slots(self, position: int, num_tokens: int, table: StateTable) -> tuple[int, int]:
        """The slots of a table that a step from `position` on reads and writes; the first is NO_SLOT at position 0.

        A step that is prepared again, or anew after one that failed, writes the same slot.

        Raises:
            OutOfPages: sessions have all slots.
            KeyError: the states at the position are not kept.
            ValueError: they were kept without the table.
        """
        held, source = self.at(position), NO_SLOT
        if position:
            if not isinstance(held, SlotStates):
                raise ValueError("the states lie outside of the table")
            source = held.number
        slot = table.take() if self._written is None else self._written[1]
        self._written = (position + num_tokens, slot)
        return source, slot.number

    def commit(self, position: int, table: StateTable | None = None) -> None:
        """Keeps the computed states as the states at `position`. Of older states, it keeps the step's beginning.

        Args:
            table: keeps states that lie elsewhere, too, since it has slots for as many as sessions may keep.
        """
        newest = max(self._kept, default=0)
        self._kept = {newest: self._kept[newest]} if newest else {}
        computed: LayerStates = self.computed
        if not computed and self._written is not None and self._written[0] == position:
            computed, self._written = self._written[1], None
        self._keep(position, computed, table)
        self.computed = {}

    def truncate(self, position: int) -> None:
        """Forgets the states after a position."""
        self._kept = {each: states for each, states in self._kept.items() if each <= position}
        self.computed = {}
        if not position:
            self._written = None

    def arrive(self, position: int, states: LayerStates, table: StateTable | None = None) -> None:
        """Keeps states that another server computed. Of older states, it keeps the newest.

        A client may not have read yet the token after which these states were.

        Args:
            table: see `commit`.
        """
        older = max((each for each in self._kept if each < position), default=0)
        self._kept = {older: self._kept[older]} if older else {}
        if position:
            self._keep(position, states, table)

    def _keep(self, position: int, states: LayerStates, table: StateTable | None) -> None:
        if table is not None and not isinstance(states, SlotStates):
            slot = table.take() if self._written is None else self._written[1]
            self._written = None
            table.fill(slot, states)
            states = slot
        self._kept[position] = states

    def share(self) -> "SessionStates":
        """Returns a SessionStates with the same kept states for another session."""
        twin = SessionStates()
        twin._kept = dict(self._kept)
        return twin
