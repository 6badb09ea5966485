"""Stores the keys and values of all sessions in tensors over all pages, and gives each session access to its own."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corolla.cache.codecs import KVCodec
from corolla.cache.host_pages import HostPages
from corolla.cache.layout import NUM_KEPT_STATES, LayerGroups
from corolla.cache.pages import PagePool
from corolla.cache.prefixes import ExpectedText, PrefixKey, PrefixName, longest_match
from corolla.cache.session_pages import SessionPages
from corolla.cache.snapshots import StateSnapshots
from corolla.cache.states import LayerState, LayerStates, SessionStates, StateTable
from corolla.cache.tables import Extent
from corolla.wire.device_copies import hand_to_steps, on_copy_stream, record_copies, to_device
from corolla.wire.span import Span


class KVStore:
    """Keys and values of all sessions of a server.

    The tensors of a layer are `[num_pages * page_tokens, key heads, head_dim]`, slot by slot, like the paged caches of
    flash attention: a slot is the place of one token. A token has the same slot in all layers of a group, and layers
    with the same index in their groups share their tensors. The tensors are made at the first use of such a layer, on
    the device of its keys; on a CPU, memory that was never written costs nothing.

    Args:
        windows: for each layer of the span, how many tokens a token sees, itself included; None for all.
        max_step_tokens: the most new tokens of one step of one session.
        has_scratch_page: whether to add a page outside of the pool, for numbers that no session will read.
        codec: encodes keys and values, so that `layer` returns encoded tensors; None: they are stored as computed.
        recurrent: indices of the layers of the span that keep a recurrent state.
        pageless: indices of the layers that keep no keys and values.
        num_state_pages: how many pages stand for the memory of one session's recurrent states.
        num_snapshots: how many times the states of all layers at the end of a page are kept for other sessions.
        key_shapes: for each kind of layers, the number of key heads and the sizes of keys and values, where these
            differ; then a slot has room for the largest. Otherwise empty.
        mtp_layer: the last layer, if it is that of the multi-token prediction block.

    Attributes:
        scratch_page: the id of the scratch page; None without one.
        snapshots: the states at the ends of pages of the prefix cache.
        state_shapes: the shapes of the states of recurrent layers that were used, by layer.
        state_table: the states of all sessions, where kernels of a GPU compute them; None: each session has its own.
        mtp_layer: the argument `mtp_layer`.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        windows: Sequence[int | None],
        *,
        max_step_tokens: int = 512,
        has_scratch_page: bool = False,
        codec: KVCodec | None = None,
        recurrent: Collection[int] = (),
        pageless: Collection[int] = (),
        num_state_pages: int = 0,
        num_snapshots: int = 0,
        key_shapes: Collection[tuple[int, int, int]] = (),
        mtp_layer: int | None = None,
    ) -> None:
        self.codec = codec
        self.mtp_layer = mtp_layer
        self._key_shapes = key_shapes
        self._layer_shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.recurrent = frozenset(recurrent)
        self.pageless = frozenset(pageless)
        self.num_state_pages = num_state_pages
        self._num_snapshots = num_snapshots
        self.snapshots = StateSnapshots[LayerStates](num_snapshots)
        self.state_shapes: dict[int, LayerState] = {}
        self.state_table: StateTable | None = None
        self.pool = PagePool(num_pages, page_tokens)
        self.groups = LayerGroups.from_windows(windows, self.pageless)
        self.rules = self.groups.rules(max_step_tokens)
        self.scratch_page = num_pages if has_scratch_page else None
        self._num_pages = num_pages + int(has_scratch_page)
        self._tensors: list[tuple[Tensor, Tensor] | None] = [None] * self.groups.layers_per_group
        self._host_tensors: list[Tensor] = []

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all tensors that were made."""
        made = (tensors for tensors in self._tensors if tensors is not None)
        return sum(keys.nbytes + values.nbytes for keys, values in made) // self._num_pages

    @property
    def bytes_by_window(self) -> tuple[tuple[int | None, int], ...]:
        """The window of each group of layers, and the bytes of one token in the tensors of the group's layers."""
        made = [sum(tensor.nbytes for tensor in pair) if pair else 0 for pair in self._tensors]
        num_slots = self._num_pages * self.pool.page_tokens
        held = [0] * len(self.groups.windows)
        for layer, (group, index) in enumerate(self.groups.layer_indices):
            if layer not in self.pageless:
                held[group] += made[index] // num_slots
        return tuple(zip(self.groups.windows, held, strict=True))

    def group_of(self, layer: int) -> int:
        """The index of the page table that a layer uses; without a meaning for a pageless layer."""
        return self.groups.layer_indices[layer][0]

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token sees in a layer, itself included; None: all earlier ones."""
        return self.groups.windows[self.group_of(layer)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The stored keys and values of a layer, `[num_slots, key heads, head_dim]` each; their head sizes may differ.

        With a codec they are int8, and `head_dim` is the codec's `stored_size`; else they have their computed dtype.

        Raises:
            ValueError: the layer was never used.
        """
        tensors = self._tensors[self.groups.layer_indices[layer][1]]
        if tensors is None:
            raise ValueError(f"layer {layer} holds nothing yet")
        if not self._key_shapes:
            return tensors
        keys, values = (
            tensor[:, : shape.numel()].view(-1, *shape)
            for tensor, shape in zip(tensors, self._layer_shapes[layer], strict=True)
        )
        return keys, values

    def layer_like(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVStore.layer`; makes the tensors if they do not exist yet.

        Args:
            layer: the layer's index within the span.
            keys: computed keys `[..., key heads, head_dim]`, whose shape, dtype and device new tensors follow.
            values: computed values `[..., key heads, value head size]`, likewise.
        """
        index = self.groups.layer_indices[layer][1]
        if self._key_shapes and layer not in self._layer_shapes:
            self._layer_shapes[layer] = (self._slot_shape(keys.shape), self._slot_shape(values.shape))
        if self._tensors[index] is None:
            key_shapes = [(heads, size) for heads, size, _ in self._key_shapes]
            value_shapes = [(heads, size) for heads, _, size in self._key_shapes]
            self._tensors[index] = (self._made(keys, key_shapes), self._made(values, value_shapes))
        return self.layer(layer)

    def use_state_table(self) -> StateTable:
        """Gives all sessions a table of states, for as many sessions as pages can be promised to, and for snapshots."""
        num_sessions = self.pool.num_pages // (1 + self.num_state_pages)
        self.state_table = StateTable(NUM_KEPT_STATES * num_sessions + self._num_snapshots)
        return self.state_table

    def encoded(self, numbers: Tensor) -> Tensor:
        """The stored form `[..., stored size]` of `numbers`, keys or values `[..., head_dim]`, on the same device.

        It is int8 with a codec, else it has the dtype of `numbers`.
        """
        return numbers if self.codec is None else self.codec.encode(numbers)

    def decoded(self, stored: Tensor) -> Tensor:
        """Converts stored numbers `[..., stored size]` to keys or values `[..., head_dim]` in the model's dtype.

        They are on the same device.
        """
        return stored if self.codec is None else self.codec.decode(stored)

    def layers_of(self, span: Span, blocks: Span) -> range:
        """The layers of blocks of the span whose layers these are: as many for each, since each attention is one."""
        indices, num_layers = span.indices(blocks), len(self.groups.layer_indices) - (self.mtp_layer is not None)
        each = num_layers // len(span)
        return range(indices.start * each, indices.stop * each)

    def held_layers(self, layers: range) -> range:
        """The layers of a session whose blocks these are: behind the last block, that of the prediction block, too."""
        return range(layers.start, layers.stop + 1) if self.mtp_layer == layers.stop else layers

    def new_cache(self) -> "SessionCache":
        return SessionCache(self)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages in all layers; `copies` are pairs of source and target."""
        page_tokens = self.pool.page_tokens
        for tensors in self._tensors:
            for tensor in tensors or ():
                pages = tensor.view(self._num_pages, page_tokens, *tensor.shape[1:])
                for source, target in copies:
                    pages[target].copy_(pages[source])

    def keep_evicted(self, num_bytes: int) -> None:
        """Keeps the pages that the prefix cache evicts in so many bytes of the machine's memory.

        All layers must have been used. Without a GPU, memory that was never written costs nothing.
        """
        tensors = self._paged_tensors
        if self.recurrent or not tensors:
            return
        num_slots = num_bytes // self.page_bytes
        if self.has_copy_stream:
            # torch makes pinned tensors as large as the next power of two.
            most_bytes = 1 << max(0, (num_bytes // len(tensors)).bit_length() - 1)
            num_slots = min(most_bytes // max(1, tensor.nbytes // self._num_pages) for tensor in tensors)
        if not num_slots:
            return
        self.pool.host = HostPages(num_slots)
        self._host_tensors = [
            torch.empty(
                num_slots * self.pool.page_tokens, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
            for tensor in tensors
        ]

    @torch.inference_mode()
    def clear_predicted(self, runs: Iterable[tuple["SessionCache", int, int]]) -> None:
        """Writes zeros in the layer of the multi-token prediction block, if there is one.

        Nothing drafts for these tokens, but other sessions may share their pages.

        Args:
            runs: caches with tokens `[position, end)`, as far as they hold them.
        """
        if (layer := self.mtp_layer) is None:
            return
        group = self.group_of(layer)
        held: list[Sequence[int]] = []
        for cache, position, end in runs:
            if (num_tokens := min(end, cache.num_tokens) - position) > 0:
                held.append(cache.slots(position, num_tokens, group))
        if held:
            tensors = self.layer(layer)
            slots = to_device(torch.tensor([*itertools.chain(*held)]), tensors[0].device, torch.int64)
            for tensor in tensors:
                tensor.index_fill_(0, slots, 0)

    @property
    def has_copy_stream(self) -> bool:
        """Copies to and from the memory of the machine run while steps are computed."""
        return any(tensors is not None and tensors[0].is_cuda for tensors in self._tensors[:1])

    def before_writing(self, pages: Iterable[int]) -> None:
        """Copies those of the pages that were evicted to the memory of the machine.

        It must be called before something is written to pages, unless `SessionCache.prepare` is. What is computed
        afterwards does not change the copies.
        """
        if self.pool.host is None or not (pairs := self.pool.host.save(pages)):
            return
        copies = [
            (self._pages(kept, slot, count), self._pages(tensor, page, count))
            for kept, tensor in zip(self._host_tensors, self._paged_tensors, strict=True)
            for page, slot, count in _runs(pairs)
        ]
        if self.has_copy_stream:
            copies = [(kept, pages.clone()) for kept, pages in copies]
        with on_copy_stream(copies[0][1].device, *(pages for _, pages in copies)):
            for kept, pages in copies:
                kept.copy_(pages, non_blocking=True)

    @torch.inference_mode()
    def begin_return(self, names: Sequence[PrefixName]) -> "ReturningPages":
        """Begins to bring pages of one text back from the memory of the machine, in its order. Steps may go on."""
        if (host := self.pool.host) is None:
            return ReturningPages(())
        host.renew([key for key, _ in names])
        self.before_writing([page for key, _ in names if (page := host.page_of(key)) is not None])
        if not self.has_copy_stream:
            return ReturningPages(names)
        slots = self._slots(host, names)
        device, staged = self._paged_tensors[0].device, []
        with on_copy_stream(device):
            for kept in self._host_tensors:
                pages = torch.empty(
                    len(slots) * self.pool.page_tokens, *kept.shape[1:], dtype=kept.dtype, device=device
                )
                for slot, index, count in _runs(list(zip(slots, range(len(slots)), strict=True))):
                    self._pages(pages, index, count).copy_(self._pages(kept, slot, count), non_blocking=True)
                staged.append(pages)
            return ReturningPages(names[: len(slots)], staged, record_copies(device))

    @torch.inference_mode()
    def end_return(self, returning: "ReturningPages") -> int:
        """Makes pages that come back pages of the prefix cache. Returns how many there was room for.

        `wait` must have returned.
        """
        host, names = self.pool.host, returning.names[: self.pool.num_available]
        if host is None or not names:
            return 0
        _, before = names[0]
        previous = None if before is None else self.pool.renew_prefix(before)
        if before is not None and previous is None:
            return 0
        pages = self.pool.take(len(names), previous)
        self.before_writing(pages)
        # What was evicted just now may have taken the slots of the last ones, unless they are staged.
        staged = returning.staged
        sources = self._host_tensors if staged is None else staged
        indices = self._slots(host, names) if staged is None else list(range(len(names)))
        hand_to_steps(*sources)
        for source, target in zip(sources, self._paged_tensors, strict=True):
            for index, page, count in _runs(list(zip(indices, pages, strict=False))):
                self._pages(target, page, count).copy_(self._pages(source, index, count))
        for page, (key, before), _ in zip(pages, names, indices, strict=False):
            self.pool.add_prefix(key, page, before)
        self.pool.give(pages)
        return len(indices)

    @property
    def _paged_tensors(self) -> list[Tensor]:
        return [tensor for tensors in self._tensors for tensor in tensors or ()]

    def _slots(self, host: HostPages, names: Sequence[PrefixName]) -> list[int]:
        """The slots of the first names, up to one that has none."""
        slots = (host.slot_of(key) for key, _ in names)
        return [slot for slot in itertools.takewhile(lambda slot: slot is not None, slots) if slot is not None]

    def _pages(self, tensor: Tensor, first: int, count: int) -> Tensor:
        return tensor.narrow(0, first * self.pool.page_tokens, count * self.pool.page_tokens)

    def _made(self, like: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """An empty tensor for the tokens of all pages; if layers differ in `shapes`, `[slots, numbers]`."""
        num_slots = self._num_pages * self.pool.page_tokens
        dtype = like.dtype if self.codec is None else torch.int8
        slot = self._slot_shape(like.shape)
        if shapes:
            slot = torch.Size([max(self._slot_shape(shape).numel() for shape in shapes)])
        return torch.empty(num_slots, *slot, dtype=dtype, device=like.device)

    def _slot_shape(self, shape: Sequence[int]) -> torch.Size:
        """The stored shape of one token, whose computed shape is `[..., heads, head_dim]`."""
        *_, heads, head_size = shape
        return torch.Size([heads, head_size if self.codec is None else self.codec.stored_size(head_size)])


@dataclass(frozen=True, slots=True)
class ReturningPages:
    """Pages of one text on their way back from the memory of the machine.

    Attributes:
        names: their names.
        staged: the pages one after the other, on a GPU, `[slots, key heads, head_dim]` in the stored dtype for each
            tensor of the store; None if `end_return` copies them from the memory of the machine.
        wait: returns once the copies are made that were begun; None: none were. Any thread may call it.
    """

    names: Sequence[PrefixName]
    staged: Sequence[Tensor] | None = None
    wait: Callable[[], None] | None = None


class SessionCache(SessionPages):
    """The pages and states of one session in a store.

    Attributes:
        blocks: the run of blocks whose keys and values it holds; None before the first step.
        states: the states of recurrent layers; None if the span has no such layers. A session with states continues
            only from positions with a kept state, so it finds a beginning of its text in the prefix cache only up to a
            page at whose end the store has a snapshot.
        newest_output: for the multi-token prediction block, a position and the last block's output for the token before
            it, `[1, H]` in the model's dtype on its device; None: it is not known.
    """

    def __init__(self, store: KVStore) -> None:
        super().__init__(store.pool, store.rules, store.num_state_pages)
        self.store = store
        self.blocks: Span | None = None
        self.states = SessionStates() if store.recurrent else None
        # The name of the newest states of the session's prompt that the store keeps.
        self._newest_snapshot: bytes | None = None
        self.newest_output: tuple[int, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all pages and states that the session holds, shared ones included."""
        num_pages = sum(table.num_pages for table in self.tables)
        return num_pages * self.store.page_bytes + (0 if self.states is None else self.states.nbytes)

    @property
    def min_position(self) -> int:
        return super().min_position if self.states is None else max(super().min_position, self.states.min_position)

    def can_continue_from(self, position: int) -> bool:
        return super().can_continue_from(position) and (self.states is None or position in self.states)

    def nearest_position(self, position: int) -> int:
        return super().nearest_position(position if self.states is None else self.states.nearest(position))

    def commit(self, num_tokens: int) -> None:
        super().commit(num_tokens)
        if self.states is not None:
            self.states.commit(num_tokens, self.store.state_table)
            if not num_tokens % self.pool.page_tokens:
                self._keep_states(num_tokens, self.states.at(num_tokens))

    def set_page_hashes(self, salt: bytes, hashes: Sequence[bytes]) -> None:
        super().set_page_hashes(salt, hashes)
        num_pages = self.store.snapshots.unnamed_position(self) // self.pool.page_tokens
        if 0 < num_pages <= len(hashes):
            self._count_change(self.store.snapshots.give_name(self, salt + hashes[num_pages - 1]))
        # The next turn has another prompt.
        self._newest_snapshot = None

    def commit_copied(self, num_tokens: int) -> None:
        """Notes that the first `num_tokens` tokens were copied here, without states: the older ones stay."""
        super().commit(num_tokens)

    def can_take(self, position: int) -> bool:
        """Tokens from this position on may be copied here. They need no states, other than a step does."""
        return super().can_continue_from(position)

    def truncate(self, num_tokens: int) -> None:
        super().truncate(num_tokens)
        if self.newest_output is not None and self.newest_output[0] > num_tokens:
            self.newest_output = None
        if self.states is not None:
            self.states.truncate(num_tokens)
            if self.store.snapshots.unnamed_position(self) > num_tokens:
                self.store.snapshots.drop_unnamed(self)

    def clear(self) -> None:
        """Gives all pages and states back, promised pages included. The next tokens may belong to other blocks."""
        super().clear()
        self.blocks = self.newest_output = None
        if self.states is not None:
            self.states.truncate(0)
            self._forget_snapshots()

    def prepare(self, position: int, num_tokens: int) -> None:
        """Prepares the pages of a step before it is computed, so that they exist and may be written.

        If copying a shared page fails, the session loses the tokens on it, since its page table already names the page
        that should have become the copy.

        Raises:
            OutOfPages: the step exceeds the reserved tokens, and the pool has too few pages.
        """
        copies = self.make_writable(position, num_tokens)
        if self.pool.host is not None and self.pool.host.has_waiting:
            self.store.before_writing(self._pages_between(position, position + num_tokens))
        if copies:
            try:
                self.store.copy_pages(copies)
            except BaseException:
                self.truncate(self.nearest_position(position - position % self.pool.page_tokens))
                raise

    def state_slots(self, position: int, num_tokens: int) -> tuple[int, int]:
        """The slots of the table of states that a step reads and writes; see `SessionStates.slots`.

        Raises:
            OutOfPages: sessions have all slots.
            ValueError: the session has no states in a table.
        """
        if self.states is None or self.store.state_table is None:
            raise ValueError("the session has no states in a table")
        return self.states.slots(position, num_tokens, self.store.state_table)

    def gather(self, layer: int, end: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Copies the decoded keys and values of positions `[start, end)`, `[key heads, end - start, head_dim]` each.

        They are in the model's dtype, on the device of the pages.
        """
        extents = self.extents(end, start, self.store.group_of(layer))
        keys, values = (self.store.decoded(gathered(tensor, extents)) for tensor in self.store.layer(layer))
        return keys, values

    def has_beginning(self, last_page: PrefixKey) -> bool:
        if self.states is not None and last_page.salt + last_page.block_hash not in self.store.snapshots:
            return False
        return super().has_beginning(last_page)

    def _num_matched(self, salt: bytes, hashes: Sequence[bytes], is_there: Sequence[Sequence[bool]]) -> int:
        if self.states is None:
            return super()._num_matched(salt, hashes, is_there)
        # States are like a window of one page: only those at the end of the last one count.
        has_states = [salt + each in self.store.snapshots for each in hashes]
        num_needed = [table.num_needed_pages() for table in self.tables]
        return longest_match([*is_there, has_states], [*num_needed, 1])

    def _begin_with(self, text: ExpectedText, num_matched: int, cached: Sequence[Sequence[int]]) -> None:
        super()._begin_with(text, num_matched, cached)
        if self.states is not None:
            states = self.store.snapshots.use(text.salt + text.hashes[num_matched - 1])
            self.states.arrive(self.num_tokens, states, self.store.state_table)

    def _keep_states(self, position: int, states: LayerStates) -> None:
        """Keeps the states at the end of a page, with the page's name if it has one already."""
        snapshots, num_pages, text = self.store.snapshots, position // self.pool.page_tokens, self._text
        if text is None or num_pages > len(text.hashes):
            self._count_change(snapshots.keep_unnamed(self, position, states))
        else:
            name = text.salt + text.hashes[num_pages - 1]
            self._count_change(snapshots.keep(name, states, after=self._newest_snapshot))
            self._newest_snapshot = name

    def _count_change(self, has_evicted: bool) -> None:
        """Has the look-up of an open repeated that came before states were evicted."""
        self.pool.version += has_evicted

    def _forget_snapshots(self) -> None:
        """Begins another text."""
        self.store.snapshots.drop_unnamed(self)
        self._newest_snapshot = None

    def _pages_between(self, start: int, end: int) -> list[int]:
        """The held pages of the tokens `[start, end)` in all groups."""
        indices = range(start // self.pool.page_tokens, self.pool.pages_for(end))
        pages = (table.page(index) for table in self.tables for index in indices)
        return [page for page in pages if page is not None]

    def _take_account(self, other: SessionPages) -> None:
        super()._take_account(other)
        if isinstance(other, SessionCache):
            self.newest_output = other.newest_output
            if other.states is not None:
                self.states = other.states.share()
                self._forget_snapshots()

    def _empty(self) -> "SessionCache":
        twin = SessionCache(self.store)
        twin.blocks = self.blocks
        return twin


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Merges pairs of source and target into runs: the first source, the first target and how many."""
    start = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[end - 1]
        if end == len(pairs) or pairs[end] != (source + 1, target + 1):
            yield *pairs[start], end - start
            start = end


def gathered(tensor: Tensor, extents: Sequence[Extent]) -> Tensor:
    """Copies slots of a tensor `[slots, key heads, head_dim]` of any dtype to `[key heads, tokens, head_dim]`.

    The copy is on the same device. It has the memory layout of the caches of transformers, since the layout decides
    how products round.
    """
    parts = [tensor.narrow(0, start, count) for start, count in extents]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1).contiguous()
