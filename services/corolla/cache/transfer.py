"""Copies a session's keys, values and recurrent states as bytes, from the pages of one server to those of another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corolla.cache.states import LayerState
from corolla.cache.store import KVStore, SessionCache
from corolla.chassis.errors import MalformedMessage
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
) -> TokenCopy:
    """Copies a part of a session's tokens.

    Args:
        layers: the session's layers, counted from the first layer of the server's span.
        has_states: whether to add the states of recurrent layers; the part must end with the session's last token.

    Raises:
        ValueError: the session holds fewer tokens, or it holds more although its states are asked for.
    """
    if position + num_tokens > cache.num_tokens:
        raise ValueError("tokens that are not there cannot be copied")
    if has_states and position + num_tokens != cache.num_tokens:
        raise ValueError("states are those of the newest token")
    store = cache.store
    first_tokens = tuple(
        0 if layer in store.pageless else cache.tables[store.group_of(layer)].first_held_token for layer in layers
    )
    parts: list[Tensor] = []
    for layer, first in zip(layers, first_tokens, strict=True):
        if layer in store.pageless:
            continue
        start = max(position, first)
        if start < position + num_tokens:
            extents = cache.extents(position + num_tokens, start, store.group_of(layer))
            for tensor in store.layer(layer):
                parts += [tensor.narrow(0, slot, count).reshape(-1).view(torch.uint8) for slot, count in extents]
    if has_states and cache.states is not None:
        states = cache.states.at(cache.num_tokens)
        parts += [tensor.reshape(-1).view(torch.uint8) for layer in sorted(states) for tensor in states[layer].tensors]
    payload: Buffer = to_payload(torch.cat(parts)) if parts else b""
    return TokenCopy(position, num_tokens, first_tokens, payload, has_states)


@torch.inference_mode()
def write_tokens(cache: SessionCache, layers: range, copy: TokenCopy) -> None:
    """Writes a copy from another server into a session's cache, which first forgets the tokens from `copy.position` on.

    Raises:
        MalformedMessage: the payload has the wrong size for these layers, or numbers that are not finite; or tokens are
            missing that this cache needs.
        OutOfPages: the tokens exceed the reserved ones, and the pool has too few pages.
        ValueError: the cache cannot continue from that position.
    """
    _check_first_tokens(cache, layers, copy)
    expected = sum(
        max(0, copy.end - max(copy.position, first)) * tensor[0].nbytes
        for layer, first in _paged_firsts(cache.store, layers, copy)
        for tensor in cache.store.layer(layer)
    )
    num_state_bytes = state_bytes(cache.store, layers) if copy.has_states and copy.end else 0
    if len(copy.payload) != expected + num_state_bytes:
        raise MalformedMessage("payload", "its size is not that of the tokens in these blocks")
    whole = torch.frombuffer(copy.payload, dtype=torch.uint8) if copy.payload else torch.empty(0, dtype=torch.uint8)
    if expected:
        # One copy to the device brings all layers; the numbers are checked and spread there.
        whole = whole.to(cache.store.layer(_paged(cache.store, layers)[0])[0].device)
    payload = whole[:expected]
    states = _states(cache.store, layers, whole[expected:]) if num_state_bytes else {}
    # Numbers are checked before any are written: one that is not finite would spoil every later token of the session.
    if expected and not _are_finite(cache.store, layers, copy, payload):
        raise MalformedMessage("payload", "keys and values must be finite numbers")
    if not all(bool(tensor.isfinite().all()) for state in states.values() for tensor in state.tensors):
        raise MalformedMessage("payload", "recurrent states must be finite numbers")
    cache.truncate(copy.position)
    if copy.num_tokens:
        cache.prepare(copy.position, copy.num_tokens)
        _clear_unheld(cache, layers, copy)
        for target, source in _pieces(cache, layers, copy, payload):
            target.copy_(source.view(target.dtype).view(target.shape))
        cache.commit(copy.end)
    if copy.has_states and cache.states is not None:
        cache.states.arrive(copy.end, states)


def _states(store: KVStore, layers: range, payload: Tensor) -> dict[int, LayerState]:
    """Reads the states of recurrent layers from uint8 `[bytes]`, which contains nothing else."""
    states: dict[int, LayerState] = {}
    offset = 0
    for layer in layers:
        if layer not in store.recurrent:
            continue
        tensors: list[Tensor] = []
        for like in store.state_shapes[layer].tensors:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            tensor.view(-1).view(torch.uint8).copy_(payload[offset : offset + tensor.nbytes])
            tensors.append(tensor)
            offset += tensor.nbytes
        states[layer] = LayerState(*tensors)
    return states


def _paged_firsts(store: KVStore, layers: range, copy: TokenCopy) -> list[tuple[int, int]]:
    """Pairs each layer that has keys and values with its first token."""
    firsts = zip(layers, copy.first_tokens, strict=True)
    return [(layer, first) for layer, first in firsts if layer not in store.pageless]


def _are_finite(store: KVStore, layers: range, copy: TokenCopy, payload: Tensor) -> bool:
    if store.codec is None:
        return bool(payload.view(store.layer(_paged(store, layers)[0])[0].dtype).isfinite().all())
    offset = 0
    for layer, first in _paged_firsts(store, layers, copy):
        num_tokens = max(0, copy.end - max(copy.position, first))
        for tensor in store.layer(layer):
            part = payload[offset : offset + num_tokens * tensor[0].nbytes].view(tensor.dtype)
            if not store.codec.decode(part.view(num_tokens, *tensor.shape[1:])).isfinite().all():
                return False
            offset += part.nbytes
    return True


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


def _check_first_tokens(cache: SessionCache, layers: range, copy: TokenCopy) -> None:
    """Checks that the layers of a group lack the same first tokens, and only if the group has a window.

    Pages of the sending server may have another size, so the first token may lie within a page of this one. A part
    that ends before the first token has nothing for the group; only the last part, with the states, must reach it.
    """
    firsts: dict[int, int] = {}
    for layer, first in zip(layers, copy.first_tokens, strict=True):
        if layer in cache.store.pageless:
            if first:
                raise MalformedMessage("first_tokens", "a layer without keys and values has no tokens")
            continue
        group = cache.store.group_of(layer)
        if firsts.setdefault(group, first) != first:
            raise MalformedMessage("first_tokens", "layers with the same window hold the same tokens")
        is_reached = first <= copy.end or not copy.has_states
        if first and not (is_reached and cache.tables[group].has_window):
            raise MalformedMessage("first_tokens", "tokens are missing that blocks look at")


def _pieces(cache: SessionCache, layers: range, copy: TokenCopy, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields runs of slots `[tokens, key heads, head_dim]` of the cache, each with its part of the uint8 payload."""
    offset = 0
    for layer, first in _paged_firsts(cache.store, layers, copy):
        start = max(copy.position, first)
        if start >= copy.end:
            continue
        extents = cache.extents(copy.end, start, cache.store.group_of(layer))
        for tensor in cache.store.layer(layer):
            for slot, count in extents:
                target = tensor.narrow(0, slot, count)
                yield target, payload[offset : offset + target.nbytes]
                offset += target.nbytes
