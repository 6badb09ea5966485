"""Where one session's keys and values lie on one server."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _LayerStore:
    keys: Tensor
    values: Tensor
    num_owners: int = 1


class SessionCache:
    """Keys and values of one session: for each layer that it runs, two tensors `[heads, capacity, head_dim]`.

    Memory is taken at a layer's first token, in whole pages, for as many tokens as were reserved. `num_tokens` counts
    what all layers hold; tokens beyond it (of a step that failed half way) are overwritten by the next step.

    Args:
        num_layers: layers of the server's span; a session that runs only some of them takes memory for those.
        page_tokens: tokens of a page.
    """

    def __init__(self, num_layers: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._num_reserved_tokens = 0
        self._num_tokens = 0
        self._layers: list[_LayerStore | None] = [None] * num_layers

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes taken, used or not."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers if layer is not None)

    def reserve(self, max_tokens: int) -> None:
        """Says how many tokens the session may come to hold, so that later growth copies nothing."""
        self._num_reserved_tokens = max(self._num_reserved_tokens, max_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens from position `num_tokens` on.

        Raises:
            ValueError: the cache does not hold that many.
        """
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot truncate a cache of {self._num_tokens} tokens to {num_tokens}")
        self._num_tokens = num_tokens

    def shrink(self) -> None:
        """Gives back the memory beyond the pages of the tokens held, and the reservation with it."""
        self._num_reserved_tokens = held = self._num_tokens
        if not held:
            self.clear()
            return
        for index, store in enumerate(self._layers):
            if store is not None and store.keys.shape[1] >= held + self.page_tokens:
                store.num_owners -= 1
                self._layers[index] = self._grown(store, held, held, store.keys, store.values)

    def clear(self) -> None:
        """Gives all memory back; the reservation stands."""
        self._num_tokens = 0
        for store in self._layers:
            if store is not None:
                store.num_owners -= 1
        self._layers = [None] * len(self._layers)

    def fork(self) -> "SessionCache":
        """A cache with the same tokens. Both share memory until one of them writes; that one copies what it held."""
        twin = SessionCache(len(self._layers), self.page_tokens)
        twin._num_tokens = self._num_tokens
        for index, store in enumerate(self._layers):
            if store is not None:
                store.num_owners += 1
                twin._layers[index] = store
        return twin

    def write(self, layer: int, position: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new tokens at `position`.

        Args:
            layer: index within the server's span.
            position: of the first new token; at most `num_tokens`.
            keys: `[heads, T, head_dim]`; values likewise, with a head size of their own.

        Returns:
            Keys and values of all tokens up to the last new one: views, valid until the next write.

        Raises:
            ValueError: the layer did not run the tokens before.
        """
        end = position + keys.shape[1]
        store = self._layers[layer]
        if store is None and position:
            raise ValueError(f"layer {layer} holds nothing of the {position} tokens before; a session keeps its blocks")
        if store is None or store.keys.shape[1] < end or store.num_owners > 1:
            grown = self._grown(store, position, end, keys, values)
            if store is not None:
                store.num_owners -= 1
            store = self._layers[layer] = grown
        # `narrow` costs a third of slicing, which counts at one token and every layer.
        store.keys.narrow(1, position, end - position).copy_(keys)
        store.values.narrow(1, position, end - position).copy_(values)
        return store.keys.narrow(1, 0, end), store.values.narrow(1, 0, end)

    def commit(self, num_tokens: int) -> None:
        """Makes the tokens that every layer wrote since the last commit count."""
        self._num_tokens = num_tokens

    def _grown(self, store: _LayerStore | None, held: int, end: int, keys: Tensor, values: Tensor) -> _LayerStore:
        num_pages = -(-max(end, self._num_reserved_tokens) // self.page_tokens)
        capacity = num_pages * self.page_tokens
        grown = _LayerStore(
            keys=torch.empty(keys.shape[0], capacity, keys.shape[2], dtype=keys.dtype, device=keys.device),
            values=torch.empty(values.shape[0], capacity, values.shape[2], dtype=values.dtype, device=values.device),
        )
        if store is not None:
            grown.keys[:, :held] = store.keys[:, :held]
            grown.values[:, :held] = store.values[:, :held]
        return grown
