"""Copies a session's keys, values and recurrent states as bytes, from the pages of one server to those of another."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corolla.cache.states import LayerState
from corolla.cache.store import KVStore, SessionCache
from corolla.chassis.errors import MalformedMessage
from corolla.wire.device_copies import begin_reading, hand_to_steps, on_copy_stream, to_device
from corolla.wire.frames import Buffer
from corolla.wire.tensors import to_payload


@dataclass(frozen=True, slots=True)
class TokenCopy:
    """The keys and values of the tokens `[position, position + num_tokens)` in some layers.

    Attributes:
        first_tokens: for each layer the first token that is still held; earlier tokens were given back.
        payload: for each layer keys, then values, `[tokens, key heads, head_dim]`, in the dtype and form in which the
            cache stores them; no bytes for pageless layers.
        has_states: whether the states of recurrent layers at `end` follow in the payload; the session then ends at
            `end`.
    """

    position: int
    num_tokens: int
    first_tokens: tuple[int, ...]
    payload: Buffer
    has_states: bool = False

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


def token_bytes(store: KVStore, layers: range) -> int:
    """The bytes of one token in these layers."""
    return sum(tensor[0].nbytes for layer in _paged(store, layers) for tensor in store.layer(layer))


def state_bytes(store: KVStore, layers: range) -> int:
    """The bytes of a session's recurrent states in these layers."""
    return sum(store.state_shapes[layer].nbytes for layer in layers if layer in store.recurrent)


def _paged(store: KVStore, layers: range) -> list[int]:
    return [layer for layer in layers if layer not in store.pageless]


@torch.inference_mode()
def read_tokens(
    cache: SessionCache, layers: range, position: int, num_tokens: int, *, has_states: bool = False
) -> Callable[[], TokenCopy]:
    """Begins to copy a part of a session's tokens. What is computed afterwards does not change the copy.

    Args:
        layers: the session's layers, counted from the first layer of the server's span.
        has_states: whether to add the states of recurrent layers; the part must end with the session's last token.

    Returns:
        A function that waits for the copy and returns it. Any thread may call it.

    Raises:
        ValueError: the session holds fewer tokens, or it holds more although its states are asked for.
    """
    if position + num_tokens > cache.num_tokens:
        raise ValueError("tokens that are not there cannot be copied")
    if has_states and position + num_tokens != cache.num_tokens:
        raise ValueError("states belong to the newest token")
    store = cache.store
    first_tokens = tuple(
        0 if layer in store.pageless else cache.tables[store.group_of(layer)].first_held_token for layer in layers
    )
    copy = TokenCopy(position, num_tokens, first_tokens, b"", has_states)
    held = cache.states.at(copy.end) if has_states and cache.states is not None else {}
    states = [tensor for layer in layers if layer in held for tensor in held[layer].tensors]
    num_paged_bytes = _paged_bytes(store, layers, copy)
    device = _device(store, layers)
    gathered = torch.empty(num_paged_bytes + sum(each.nbytes for each in states), dtype=torch.uint8, device=device)
    for tensor, slots, part in _paged_parts(cache, layers, copy, gathered):
        torch.index_select(tensor, 0, slots, out=part)
    for tensor, part in _parts(states, gathered[num_paged_bytes:]):
        part.copy_(tensor.reshape(-1).view(torch.uint8))
    with on_copy_stream(device, gathered):
        finish = begin_reading(gathered)
    return lambda: replace(copy, payload=to_payload(finish()))


@dataclass(frozen=True, slots=True)
class CheckedCopy:
    """A copy from another server that fits some layers of this one, and consists of finite numbers.

    Attributes:
        whole: the payload, uint8 `[bytes]`, on the device of the pages.
        states: the states of recurrent layers, by layer.
    """

    copy: TokenCopy
    layers: range
    whole: Tensor
    states: Mapping[int, LayerState]


@torch.inference_mode()
def check_tokens(store: KVStore, layers: range, copy: TokenCopy) -> CheckedCopy:
    """Brings a copy from another server to the device, and checks it. Any thread may call this; steps do not wait.

    Raises:
        MalformedMessage: the payload has the wrong size for these layers, or numbers that are not finite; or tokens are
            missing that the layers need.
    """
    _check_first_tokens(store, layers, copy)
    num_paged_bytes = _paged_bytes(store, layers, copy)
    num_state_bytes = state_bytes(store, layers) if copy.has_states and copy.end else 0
    if len(copy.payload) != num_paged_bytes + num_state_bytes:
        raise MalformedMessage("payload", "its size is not that of the tokens in these blocks")
    if not copy.payload:
        return CheckedCopy(copy, layers, torch.empty(0, dtype=torch.uint8), {})
    device = _device(store, layers)
    with on_copy_stream(device):
        whole = to_device(torch.frombuffer(copy.payload, dtype=torch.uint8), device, torch.uint8)
        states = _states(store, layers, whole[num_paged_bytes:]) if num_state_bytes else {}
        # Numbers are checked before any are written: one that is not finite would spoil every later token of the
        # session.
        if num_paged_bytes and not _pages_are_finite(store, layers, copy, whole[:num_paged_bytes]):
            raise MalformedMessage("payload", "keys and values must be finite numbers")
        if not all(_are_finite(tensor) for state in states.values() for tensor in state.tensors):
            raise MalformedMessage("payload", "recurrent states must be finite numbers")
    return CheckedCopy(copy, layers, whole, states)


def without_last_layer(store: KVStore, layers: range, copy: TokenCopy) -> TokenCopy:
    """The copy without the last layer, which these layers of the store lack; its keys and values come last.

    A model with that layer has no recurrent states.
    """
    shorter = replace(copy, first_tokens=copy.first_tokens[: len(layers)])
    return replace(shorter, payload=memoryview(copy.payload)[: _paged_bytes(store, layers, shorter)])


@torch.inference_mode()
def write_tokens(cache: SessionCache, checked: CheckedCopy) -> None:
    """Writes a copy from another server into a session's cache, which first forgets the tokens from its position on.

    Raises:
        OutOfPages: the tokens exceed the reserved ones, and the pool has too few pages.
        ValueError: the cache cannot continue from that position.
    """
    copy, layers, store = checked.copy, checked.layers, cache.store
    hand_to_steps(checked.whole, *(tensor for state in checked.states.values() for tensor in state.tensors))
    cache.truncate(copy.position)
    if copy.num_tokens:
        cache.prepare(copy.position, copy.num_tokens)
        _clear_unheld(cache, layers, copy)
        for tensor, slots, part in _paged_parts(cache, layers, copy, checked.whole):
            tensor.index_copy_(0, slots, part)
        cache.commit_copied(copy.end)
        if store.held_layers(layers) != layers:
            store.clear_predicted([(cache, copy.position, copy.end)])
    if copy.has_states and cache.states is not None:
        cache.states.arrive(copy.end, checked.states, store.state_table)


def _device(store: KVStore, layers: range) -> torch.device:
    """The device of a session's data in these layers."""
    held = [store.layer(layer)[0] for layer in _paged(store, layers)]
    held += [store.state_shapes[layer].conv for layer in layers if layer in store.recurrent]
    return held[0].device if held else torch.device("cpu")


def _states(store: KVStore, layers: range, payload: Tensor) -> dict[int, LayerState]:
    """Reads the states of recurrent layers from uint8 `[bytes]`, which contains nothing else."""
    states = {
        layer: LayerState(*(torch.empty(like.shape, dtype=like.dtype, device=payload.device) for like in shape.tensors))
        for layer in layers
        if layer in store.recurrent
        for shape in [store.state_shapes[layer]]
    }
    for tensor, part in _parts((tensor for state in states.values() for tensor in state.tensors), payload):
        tensor.view(-1).view(torch.uint8).copy_(part)
    return states


def _parts(tensors: Iterable[Tensor], payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs tensors of any shape with their parts of the uint8 payload, which has them one after the other."""
    offset = 0
    for tensor in tensors:
        yield tensor, payload[offset : offset + tensor.nbytes]
        offset += tensor.nbytes


def _sent_runs(store: KVStore, layers: range, copy: TokenCopy) -> Iterator[tuple[int, int]]:
    """Yields each layer that has tokens in a copy, and the first of these tokens."""
    for layer, first in _paged_firsts(store, layers, copy):
        if (start := max(copy.position, first)) < copy.end:
            yield layer, start


def _paged_bytes(store: KVStore, layers: range, copy: TokenCopy) -> int:
    """The bytes of a copy's keys and values."""
    return sum(
        (copy.end - start) * tensor[0].nbytes
        for layer, start in _sent_runs(store, layers, copy)
        for tensor in store.layer(layer)
    )


def _paged_parts(
    cache: SessionCache, layers: range, copy: TokenCopy, payload: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the stored keys, then the values of each layer, the slots of the copy's tokens, and their part.

    The slots are int64 `[tokens]`. The part is a view `[tokens, key heads, head_dim]` into the uint8 payload, in the
    stored dtype.
    """
    slots_of: dict[tuple[int, int], Tensor] = {}
    for layer, start, tensor, part in _sent_parts(cache.store, layers, copy, payload):
        group = cache.store.group_of(layer)
        if (group, start) not in slots_of:
            slots = torch.tensor(cache.slots(start, copy.end - start, group))
            slots_of[group, start] = to_device(slots, payload.device, torch.int64)
        yield tensor, slots_of[group, start], part


def _sent_parts(
    store: KVStore, layers: range, copy: TokenCopy, payload: Tensor
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yields each layer with its first token, and for its keys, then its values, what is stored and what was sent."""
    offset = 0
    for layer, start in _sent_runs(store, layers, copy):
        for tensor in store.layer(layer):
            num_bytes = (copy.end - start) * tensor[0].nbytes
            sent = payload[offset : offset + num_bytes].view(tensor.dtype).view(-1, *tensor.shape[1:])
            yield layer, start, tensor, sent
            offset += num_bytes


def _paged_firsts(store: KVStore, layers: range, copy: TokenCopy) -> list[tuple[int, int]]:
    """Pairs each layer that has keys and values with its first token."""
    firsts = zip(layers, copy.first_tokens, strict=True)
    return [(layer, first) for layer, first in firsts if layer not in store.pageless]


def _pages_are_finite(store: KVStore, layers: range, copy: TokenCopy, payload: Tensor) -> bool:
    if store.codec is None:
        return _are_finite(payload.view(store.layer(_paged(store, layers)[0])[0].dtype))
    return all(_are_finite(store.decoded(sent)) for *_, sent in _sent_parts(store, layers, copy, payload))


def _are_finite(numbers: Tensor) -> bool:
    # One pass without new tensors; on a CPU, `isfinite` takes 20 to 40 times as long. NaN is both least and greatest.
    least, greatest = numbers.aminmax()
    return bool(least.isfinite() & greatest.isfinite())


def _clear_unheld(cache: SessionCache, layers: range, copy: TokenCopy) -> None:
    """Writes zeros over the tokens before the first one that was sent, as far as they lie on its page.

    No token sees them, but attention multiplies their values by 0, which must not give NaN.
    """
    for layer, first in _paged_firsts(cache.store, layers, copy):
        group = cache.store.group_of(layer)
        start = max(first - first % cache.pool.page_tokens, cache.tables[group].first_token)
        if copy.position <= first <= copy.end and start < first:
            for tensor in cache.store.layer(layer):
                for slot, count in cache.extents(first, start, group):
                    tensor.narrow(0, slot, count).zero_()


def forget_unsent(cache: SessionCache, layers: range, first_tokens: Sequence[int]) -> None:
    """Gives back the pages of tokens that the session no longer held on the sending server, and notes their lack."""
    for layer, first in zip(layers, first_tokens, strict=True):
        if layer not in cache.store.pageless:
            cache.tables[cache.store.group_of(layer)].forget_before(first)


def note_unsent(unsent_before: dict[int, int], store: KVStore, layers: range, copy: TokenCopy) -> None:
    """Notes for each group of layers before which token some may lack, because the sender no longer held them.

    A part that begins at or after the first token that the sender held continues the part before it.
    """
    for layer, first in _paged_firsts(store, layers, copy):
        if first > copy.position:
            unsent_before[store.group_of(layer)] = first


def _check_first_tokens(store: KVStore, layers: range, copy: TokenCopy) -> None:
    """Checks that the layers of a group lack the same first tokens, and only if the group has a window.

    Pages of the sending server may have another size, so the first token may lie within a page of this one. A part
    that ends before the first token has nothing for the group; only the last part, with the states, must reach it.
    """
    firsts: dict[int, int] = {}
    for layer, first in zip(layers, copy.first_tokens, strict=True):
        if layer in store.pageless:
            if first:
                raise MalformedMessage("first_tokens", "a layer without keys and values has no tokens")
            continue
        group = store.group_of(layer)
        if firsts.setdefault(group, first) != first:
            raise MalformedMessage("first_tokens", "layers with the same window hold the same tokens")
        is_reached = first <= copy.end or not copy.has_states
        if first and not (is_reached and store.rules[group].window is not None):
            raise MalformedMessage("first_tokens", "tokens are missing that blocks look at")
