"""Keys and values of one session as bytes, to be moved to another server, whose pages lie otherwise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corolla.block_server.kv.store import KVStore, SessionCache
from corolla.chassis.errors import MalformedMessage
from corolla.wire.frames import Buffer
from corolla.wire.tensors import to_payload


@dataclass(frozen=True, slots=True)
class TokenCopy:
    """The keys and values of the tokens `[position, position + num_tokens)` in some layers.

    Attributes:
        first_tokens: for each layer the first token that is still held; those before were given back.
        payload: for each layer keys, then values, `[tokens, key heads, head_dim]`, as the cache stores them.
    """

    position: int
    num_tokens: int
    first_tokens: tuple[int, ...]
    payload: Buffer

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


def token_bytes(store: KVStore, layers: range) -> int:
    """Bytes of one token in these layers."""
    return sum(tensor[0].nbytes for layer in layers for tensor in store.layer(layer))


@torch.inference_mode()
def read_tokens(cache: SessionCache, layers: range, position: int, num_tokens: int) -> TokenCopy:
    """Copies a part of what a session holds.

    Args:
        layers: of the session, counted from the first of the server's span.

    Raises:
        ValueError: it does not hold so many tokens.
    """
    if position + num_tokens > cache.num_tokens:
        raise ValueError("tokens that are not there cannot be copied")
    store = cache.store
    first_tokens = tuple(cache.tables[store.group_of(layer)].first_token for layer in layers)
    parts: list[Tensor] = []
    for layer, first in zip(layers, first_tokens, strict=True):
        start = max(position, first)
        if start < position + num_tokens:
            extents = cache.extents(position + num_tokens, start, store.group_of(layer))
            for tensor in store.layer(layer):
                parts += [tensor.narrow(0, slot, count).reshape(-1).view(torch.uint8) for slot, count in extents]
    payload: Buffer = to_payload(torch.cat(parts)) if parts else b""
    return TokenCopy(position, num_tokens, first_tokens, payload)


@torch.inference_mode()
def write_tokens(cache: SessionCache, layers: range, copy: TokenCopy) -> None:
    """Adds what was copied elsewhere, behind what a session holds already; it forgets what it holds beyond.

    Raises:
        MalformedMessage: the payload has another size than these layers' tokens, holds what is no finite number, or
            tokens are missing that this cache cannot do without.
        OutOfPages: it goes beyond what was reserved.
        ValueError: the cache cannot go on from there.
    """
    _check_first_tokens(cache, layers, copy)
    expected = sum(
        max(0, copy.end - max(copy.position, first)) * tensor[0].nbytes
        for layer, first in zip(layers, copy.first_tokens, strict=True)
        for tensor in cache.store.layer(layer)
    )
    if len(copy.payload) != expected:
        raise MalformedMessage("payload", "its size is not that of the tokens in these blocks")
    payload = torch.frombuffer(copy.payload, dtype=torch.uint8) if expected else torch.empty(0, dtype=torch.uint8)
    if expected and not _are_finite(cache.store, layers, copy, payload):
        # Before anything is written: one such number would spoil every later token of the session.
        raise MalformedMessage("payload", "keys and values must be finite numbers")
    cache.truncate(copy.position)
    if not copy.num_tokens:
        return
    cache.prepare(copy.position, copy.num_tokens)
    for target, source in _pieces(cache, layers, copy, payload):
        target.copy_(source.view(target.dtype).view(target.shape))
    cache.commit(copy.end)


def _are_finite(store: KVStore, layers: range, copy: TokenCopy, payload: Tensor) -> bool:
    if store.codec is None:
        return bool(payload.view(store.layer(layers[0])[0].dtype).isfinite().all())
    offset = 0
    for layer, first in zip(layers, copy.first_tokens, strict=True):
        num_tokens = max(0, copy.end - max(copy.position, first))
        for tensor in store.layer(layer):
            part = payload[offset : offset + num_tokens * tensor[0].nbytes].view(tensor.dtype)
            if not store.codec.decode(part.view(num_tokens, *tensor.shape[1:])).isfinite().all():
                return False
            offset += part.nbytes
    return True


def give_back(cache: SessionCache, layers: range, first_tokens: Sequence[int]) -> None:
    """Gives back the pages of tokens that the session did not hold where it came from."""
    for layer, first in zip(layers, first_tokens, strict=True):
        cache.tables[cache.store.group_of(layer)].release_before(first)


def _check_first_tokens(cache: SessionCache, layers: range, copy: TokenCopy) -> None:
    """Layers of one group give back the same tokens, whole pages of this cache, and only behind a window."""
    firsts: dict[int, int] = {}
    for layer, first in zip(layers, copy.first_tokens, strict=True):
        group = cache.store.group_of(layer)
        if firsts.setdefault(group, first) != first:
            raise MalformedMessage("first_tokens", "layers with the same window hold the same tokens")
        is_whole = first % cache.pool.page_tokens == 0 and first <= copy.end
        if first and not (is_whole and cache.tables[group].has_window):
            raise MalformedMessage("first_tokens", "tokens are missing that blocks look at, or parts of pages")


def _pieces(cache: SessionCache, layers: range, copy: TokenCopy, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs of slots, and the bytes that belong there."""
    offset = 0
    for layer, first in zip(layers, copy.first_tokens, strict=True):
        start = max(copy.position, first)
        if start >= copy.end:
            continue
        extents = cache.extents(copy.end, start, cache.store.group_of(layer))
        for tensor in cache.store.layer(layer):
            for slot, count in extents:
                target = tensor.narrow(0, slot, count)
                yield target, payload[offset : offset + target.nbytes]
                offset += target.nbytes
