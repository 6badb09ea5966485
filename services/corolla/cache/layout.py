"""How keys, values and recurrent states of a span lie in pages: servers and plans count by this. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from corolla.cache.pages import PagePool
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule

NUM_KEPT_STATES: Final = 3
"""A session has states in memory for two positions of each layer, and the one that is being computed."""

_TOKENS_OF_STATES: Final = 64

_SHARE_OF_SNAPSHOTS: Final = 8
"""The part of a cache with recurrent states in which states at the ends of pages wait for other sessions."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of layers of a span that share page tables.

    Layers with the same window are of one kind, since they need the same tokens. A page holds its tokens for the layers
    of one group. Pages of all groups have one size and come from one pool, so no group has more layers than the rarest
    kind, and larger kinds are cut into several groups. vLLM's hybrid KV cache manager divides its memory in the same
    way.

    Attributes:
        windows: the window of each group; None if a token sees all tokens before it.
        layer_indices: for each layer its group, and its index within the group; `(0, 0)`, without a meaning, for
            layers without keys and values.
        layers_per_group: the number of layers of the largest group.
    """

    windows: tuple[int | None, ...]
    layer_indices: tuple[tuple[int, int], ...]
    layers_per_group: int

    @classmethod
    def from_windows(cls, windows: Sequence[int | None], pageless: Collection[int] = ()) -> "LayerGroups":
        """Groups layers by their windows.

        Args:
            windows: the window of each layer of the span, in order.
            pageless: indices of the layers that keep no keys and values.
        """
        layers_by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            if layer not in pageless:
                layers_by_window.setdefault(window, []).append(layer)
        if not layers_by_window:
            # One group without layers remains, since the session's tokens are still counted in pages.
            return cls((None,), ((0, 0),) * len(windows), 1)
        layers_per_group = min(map(len, layers_by_window.values()))
        group_windows: list[int | None] = []
        indices = [(0, 0)] * len(windows)
        for window, layers in layers_by_window.items():
            for start in range(0, len(layers), layers_per_group):
                for index, layer in enumerate(layers[start : start + layers_per_group]):
                    indices[layer] = (len(group_windows), index)
                group_windows.append(window)
        return cls(tuple(group_windows), tuple(indices), layers_per_group)

    def rules(self, max_step_tokens: int) -> tuple[GroupRule, ...]:
        """The rule of each group, on a server whose steps have at most so many new tokens of one session."""
        return tuple(GroupRule(window, max_step_tokens) for window in self.windows)


def stand_in_bytes(state_bytes: int) -> int:
    """The bytes of a token in pages of a model without keys and values, by the states of a block: pages stand for them.

    So a session has a few pages, and a page does not hold several sessions.
    """
    return max(1, state_bytes // _TOKENS_OF_STATES)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The pages of a server's sessions.

    Attributes:
        groups: the groups of the span's layers.
        page_tokens: tokens of one page.
        token_bytes: what one token takes in one layer.
        max_step_tokens: the most new tokens of one step of one session.
        state_bytes: the recurrent states of one session at one position.
        has_snapshots: whether states at the ends of pages are kept for other sessions.
    """

    groups: LayerGroups
    page_tokens: int
    token_bytes: int
    max_step_tokens: int
    state_bytes: int = 0
    has_snapshots: bool = True

    @property
    def page_bytes(self) -> int:
        """A page holds its tokens for all layers of a group, and pages of all groups have one size."""
        return self.token_bytes * self.groups.layers_per_group * self.page_tokens

    @property
    def num_state_pages(self) -> int:
        """How many pages stand for the recurrent states of one session."""
        return -(-self.state_bytes * NUM_KEPT_STATES // self.page_bytes)

    def num_pages(self, cache_bytes: int) -> int:
        """How many pages a server has within so many bytes, states included.

        A part of them is for snapshots. Recurrent states take memory in addition to the pages that stand for them. They
        take the most if each session has only one other page: for every 1 + num_state_pages pages, the states then need
        num_state_pages pages more.
        """
        cache_bytes -= self.snapshot_bytes(cache_bytes)
        return cache_bytes // self.page_bytes * (1 + self.num_state_pages) // (1 + 2 * self.num_state_pages)

    def snapshot_bytes(self, cache_bytes: int) -> int:
        """How many of so many bytes are for states at the ends of pages."""
        return cache_bytes // _SHARE_OF_SNAPSHOTS if self.state_bytes and self.has_snapshots else 0

    def num_snapshots(self, cache_bytes: int) -> int:
        """How many times a server keeps the states of all layers at the end of a page."""
        return self.snapshot_bytes(cache_bytes) // self.state_bytes if self.state_bytes else 0

    def session_pages(self, num_tokens: int) -> int:
        """How many pages a server promises to a session of so many tokens."""
        rules = self.groups.rules(self.max_step_tokens)
        return SessionPages(PagePool(1, self.page_tokens), rules, self.num_state_pages).worst_case(num_tokens)

    def num_sessions(self, cache_bytes: int, num_tokens: int) -> int:
        """How many sessions of so many tokens a server takes within so many bytes."""
        return self.num_pages(cache_bytes) // self.session_pages(num_tokens)

    def session_bytes(self, num_tokens: int) -> int:
        """What a session of so many tokens takes from the memory for keys and values."""
        num_pages = self.session_pages(num_tokens)
        num_bytes = -(-num_pages * self.page_bytes * (1 + 2 * self.num_state_pages) // (1 + self.num_state_pages))
        if not self.snapshot_bytes(num_bytes):
            return num_bytes
        return -(-num_bytes * _SHARE_OF_SNAPSHOTS // (_SHARE_OF_SNAPSHOTS - 1))
