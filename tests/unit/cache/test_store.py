"""Keys and values on pages: a session reads its own writes, on any pages."""

import pytest
import torch
from torch import Tensor

from corolla.cache.layout import NUM_KEPT_STATES, LayerGroups
from corolla.cache.states import LayerState, SessionStates, SlotStates
from corolla.cache.store import KVStore, SessionCache

NUM_PAGES, PAGE_TOKENS, NUM_LAYERS, HEADS, HEAD_SIZE = 12, 4, 2, 3, 5
PAGE_BYTES = NUM_LAYERS * 2 * PAGE_TOKENS * HEADS * HEAD_SIZE * 4


@pytest.fixture
def store() -> KVStore:
    return KVStore(NUM_PAGES, PAGE_TOKENS, (None,) * NUM_LAYERS)


def written(cache: SessionCache, position: int, num_tokens: int) -> Tensor:
    """Writes random keys, and minus them as values, into all layers; gives the keys, head by head."""
    keys = torch.randn(num_tokens, HEADS, HEAD_SIZE)
    cache.truncate(position)
    cache.prepare(position, num_tokens)
    slots = torch.tensor(list(cache.slots(position, num_tokens)))
    for layer in range(NUM_LAYERS):
        held = cache.store.layer_like(layer, keys, -keys)
        for tensor, new in zip(held, (keys, -keys), strict=True):
            tensor.index_copy_(0, slots, new)
    cache.commit(position + num_tokens)
    return keys.transpose(0, 1)


def assert_holds(cache: SessionCache, keys: Tensor) -> None:
    for layer in range(NUM_LAYERS):
        held_keys, held_values = cache.gather(layer, cache.num_tokens)
        assert torch.equal(held_keys, keys)
        assert torch.equal(held_values, -keys)


def test_memory_is_counted_in_pages(store: KVStore) -> None:
    cache = store.new_cache()
    assert cache.nbytes == 0
    written(cache, 0, 9)
    assert cache.nbytes == 3 * PAGE_BYTES == 3 * store.page_bytes
    cache.clear()
    assert (cache.nbytes, cache.num_tokens) == (0, 0)


def test_a_session_reads_its_own_writes_over_several_runs_of_pages(store: KVStore) -> None:
    caches = [store.new_cache() for _ in range(3)]
    for cache in caches:
        cache.allocate(16)
    keys: list[list[Tensor]] = [[], [], []]
    for position in range(0, 15, 5):
        for cache, parts in zip(caches, keys, strict=True):
            parts.append(written(cache, position, 5))
    assert len(caches[2].extents(15)) > 1, "the others have left no run that is large enough"
    assert sum(count for _, count in caches[2].extents(15)) == 15
    for cache, parts in zip(caches, keys, strict=True):
        assert_holds(cache, torch.cat(parts, dim=1))


def test_a_reservation_is_one_run(store: KVStore) -> None:
    one, two = store.new_cache(), store.new_cache()
    one.allocate(22)
    two.allocate(22)
    for position in range(22):
        written(one, position, 1)
        written(two, position, 1)
    assert len(one.extents(22)) == len(two.extents(22)) == 1
    assert one.slots(3, 10) == range(one.slots(3, 1)[0], one.slots(3, 1)[0] + 10)


def test_a_fork_shares_until_one_of_them_writes(store: KVStore) -> None:
    one, two = store.new_cache(), store.new_cache()
    keys = written(one, 0, 10)
    two.allocate(12)
    twin = one.fork()
    two.adopt(twin)
    assert_holds(two, keys)
    assert store.pool.num_used == 3
    more = written(two, 10, 2)
    assert_holds(one, keys)
    assert_holds(two, torch.cat([keys, more], dim=1))
    assert store.pool.num_used == 4, "only the page that was written to is there twice"
    other = written(one, 6, 2)
    assert_holds(one, torch.cat([keys[:, :6], other], dim=1))
    assert_holds(two, torch.cat([keys, more], dim=1))


def test_a_layer_that_never_ran_holds_nothing(store: KVStore) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        store.layer(1)
    like = torch.zeros(1, HEADS, HEAD_SIZE)
    for layer in range(NUM_LAYERS):
        store.layer_like(layer, like, like)
    assert store.page_bytes == PAGE_BYTES
    assert store.layer(1)[0].shape == (NUM_PAGES * PAGE_TOKENS, HEADS, HEAD_SIZE)


def test_layers_of_one_kind_share_tables_and_groups_have_one_size() -> None:
    assert LayerGroups.from_windows([None] * 3) == LayerGroups((None,), ((0, 0), (0, 1), (0, 2)), 3)
    mixed = LayerGroups.from_windows([8, 8, None, 8, 8, None, 8])
    assert mixed.windows == (8, 8, 8, None)
    assert mixed.layer_indices == ((0, 0), (0, 1), (3, 0), (1, 0), (1, 1), (3, 1), (2, 0))
    assert mixed.layers_per_group == 2


def test_states_that_arrive_leave_the_newest_older_ones() -> None:
    """They may belong to a token that the client service has not read yet when the hop dies."""
    states = SessionStates()
    for position in (3, 7, 9):
        states.arrive(position, {})
    assert [position in states for position in (3, 7, 9)] == [False, True, True]
    assert states.nearest(8) == 7


def test_a_table_keeps_states_that_lie_elsewhere_in_slots_of_their_session() -> None:
    """Rows with adapters and other servers compute them outside of it; the promise of slots covers them all."""
    pages = 1 + NUM_KEPT_STATES
    store = KVStore(pages, 4, [None], recurrent=[0], pageless=[0], num_state_pages=pages - 1, num_snapshots=1)
    table, cache = store.use_state_table(), store.new_cache()
    assert table.scratch_slot == NUM_KEPT_STATES + 1
    cache.allocate(4)
    assert cache.states is not None
    for position in range(4):
        cache.prepare(position, 1)
        if position == 2:
            cache.state_slots(position, 1)  # a step that fails before the row is computed elsewhere
        cache.states.computed = {0: LayerState(torch.full((1, 1, 1), 1.0 + position))}
        cache.commit(position + 1)
        held = cache.states.at(position + 1)
        assert isinstance(held, SlotStates)
        assert held[0].conv.item() == 1 + position
    cache.states.arrive(4, {0: LayerState(torch.full((1, 1, 1), 9.0))}, table)
    source, target = cache.state_slots(4, 1)
    assert (table.tensors_like(0, LayerState(torch.empty(1, 1, 1)))[0][source].item(), source == target) == (9.0, False)
    del held
    cache.clear()
    assert len([table.take() for _ in range(table.scratch_slot - 1)]) == NUM_KEPT_STATES, "the snapshot keeps its slot"
