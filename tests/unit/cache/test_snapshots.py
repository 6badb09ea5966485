"""Which recurrent states stay for other sessions, and which go first."""

import pytest
import torch

from corolla.cache.prefixes import ExpectedText, PrefixKey
from corolla.cache.snapshots import StateSnapshots
from corolla.cache.states import LayerState
from corolla.cache.store import KVStore, SessionCache


def test_what_was_used_least_recently_goes_first() -> None:
    snapshots = StateSnapshots[str](2)
    snapshots.keep(b"a", "states of a")
    snapshots.keep(b"b", "states of b")
    assert snapshots.use(b"a") == "states of a"
    snapshots.keep(b"c", "states of c")
    assert [name in snapshots for name in (b"a", b"b", b"c")] == [True, False, True]
    with pytest.raises(KeyError):
        snapshots.use(b"b")


def test_earlier_ends_of_a_prompt_go_before_its_last_one_and_before_other_prompts() -> None:
    snapshots = StateSnapshots[int](4)
    snapshots.keep(b"other", 0)
    ends = [b"512", b"1024", b"1536"]
    for number, name in enumerate(ends):
        snapshots.keep(name, number, after=ends[number - 1] if number else None)
    snapshots.keep(b"new", 9)
    assert [name in snapshots for name in (b"other", *ends)] == [True, True, False, True]
    snapshots.keep(b"newer", 9)
    assert [name in snapshots for name in (b"other", *ends)] == [True, False, False, True]


def test_states_wait_for_a_name_and_get_it_once() -> None:
    snapshots = StateSnapshots[str](3)
    session = object()
    assert snapshots.unnamed_position(session) == 0
    snapshots.keep_unnamed(session, 32, "at 32")
    snapshots.keep_unnamed(session, 64, "at 64")
    assert (snapshots.unnamed_position(session), len(snapshots)) == (64, 1)
    snapshots.give_name(session, b"name")
    assert (snapshots.use(b"name"), snapshots.unnamed_position(session)) == ("at 64", 0)
    with pytest.raises(KeyError):
        snapshots.give_name(session, b"again")
    snapshots.keep_unnamed(session, 96, "at 96")
    snapshots.drop_unnamed(session)
    snapshots.drop_unnamed(session)
    assert len(snapshots) == 1


def test_many_answers_leave_prompts_three_quarters_of_the_places() -> None:
    snapshots = StateSnapshots[int](8)
    names = [bytes([number]) for number in range(8)]
    for number, name in enumerate(names):
        snapshots.keep(name, number)
    sessions = [object() for _ in range(5)]
    for session in sessions:
        snapshots.keep_unnamed(session, 32, 0)
    assert [name in snapshots for name in names] == [False] * 2 + [True] * 6
    assert [snapshots.unnamed_position(session) for session in sessions] == [0, 0, 0, 32, 32]
    assert len(snapshots) == 8


@pytest.mark.parametrize("num_places", [0, 1])
def test_a_small_budget_holds(num_places: int) -> None:
    snapshots = StateSnapshots[int](num_places)
    for number in range(4):
        snapshots.keep(bytes([number]), number)
        snapshots.keep_unnamed(number, 32, number)
        assert len(snapshots) <= num_places


SALT, PAGE_TOKENS = b"s" * 16, 16


def store_of(num_snapshots: int) -> KVStore:
    store = KVStore(
        64, PAGE_TOKENS, [None, None], recurrent=[0], pageless=[0], num_state_pages=1, num_snapshots=num_snapshots
    )
    store.layer_like(1, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    return store


def compute(cache: SessionCache, end: int, mark: int) -> None:
    """Computes the tokens up to `end`; the state then has the number `mark`."""
    position = cache.num_tokens
    cache.prepare(position, end - position)
    assert cache.states is not None
    cache.states.computed = {0: LayerState(torch.full((1, 1, 1), float(mark)))}
    cache.commit(end)


def number_of(cache: SessionCache) -> float:
    assert cache.states is not None
    return float(cache.states.at(cache.num_tokens)[0].conv)


def test_a_session_begins_with_the_states_of_its_own_text_only() -> None:
    store = store_of(8)
    first, other = store.new_cache(), store.new_cache()
    for cache in (first, other):
        cache.allocate(64)
    compute(first, 16, mark=1)
    compute(other, 16, mark=3)
    compute(other, 17, mark=4)
    first.adopt(other.fork())
    for cache in (first, other):
        cache.set_page_hashes(SALT, (b"B" * 16,))
        assert number_of(cache) == 4
    found = store.new_cache()
    found.allocate(64, ExpectedText(SALT, (b"B" * 16,), 20))
    assert (found.num_tokens, number_of(found)) == (16, 3)


def test_states_behind_a_text_that_was_taken_back_get_no_name() -> None:
    store = store_of(8)
    cache = store.new_cache()
    cache.allocate(64)
    compute(cache, 15, mark=1)
    compute(cache, 16, mark=2)
    cache.truncate(15)
    compute(cache, 17, mark=3)
    cache.set_page_hashes(SALT, (b"A" * 16,))
    assert len(store.snapshots) == 0
    assert store.new_cache().num_found_tokens(ExpectedText(SALT, (b"A" * 16,), 20), 64) == 0


def test_an_open_looks_again_if_states_went_after_it_looked() -> None:
    store = store_of(1)
    cache, late = store.new_cache(), store.new_cache()
    texts = [ExpectedText(SALT, (name * 16,), 20) for name in (b"A", b"B")]
    cache.allocate(64, texts[0])
    compute(cache, 16, mark=1)
    assert late.num_found_tokens(texts[0], 64) == 16
    other = store.new_cache()
    other.allocate(64, texts[1])
    compute(other, 16, mark=2)
    late.allocate(64, texts[0])
    assert late.num_tokens == 0


def test_a_text_begins_only_where_its_states_are() -> None:
    """Pages may stay longer than the states at their ends."""
    store = store_of(1)
    first, second = (PrefixKey(SALT, name * 16, 0) for name in (b"A", b"B"))
    caches = [store.new_cache(), store.new_cache()]
    for number, (cache, key) in enumerate(zip(caches, (first, second), strict=True)):
        cache.allocate(64, ExpectedText(SALT, (key.block_hash,), 20))
        compute(cache, 16, mark=number)
        assert cache.has_beginning(key)
    assert store.pool.has_prefix(first)
    assert not caches[0].has_beginning(first)
