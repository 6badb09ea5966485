import pytest
import torch

from corolla.block_server.kv.store import SessionCache

PAGE_TOKENS, NUM_LAYERS, HEADS, HEAD_SIZE = 4, 2, 3, 5
BYTES_PER_PAGE = NUM_LAYERS * 2 * PAGE_TOKENS * HEADS * HEAD_SIZE * 4


def written(cache: SessionCache, position: int, num_tokens: int) -> torch.Tensor:
    keys = torch.randn(HEADS, num_tokens, HEAD_SIZE)
    for layer in range(NUM_LAYERS):
        cache.write(layer, position, keys, -keys)
    cache.commit(position + num_tokens)
    return keys


def test_memory_is_taken_in_pages_for_what_was_reserved() -> None:
    cache = SessionCache(NUM_LAYERS, PAGE_TOKENS)
    cache.reserve(9)
    assert cache.nbytes == 0
    written(cache, 0, 2)
    assert cache.nbytes == 3 * BYTES_PER_PAGE


def test_a_parked_cache_keeps_its_tokens_and_no_more_pages_than_they_need() -> None:
    cache = SessionCache(NUM_LAYERS, PAGE_TOKENS)
    cache.reserve(40)
    keys = written(cache, 0, 6)
    cache.truncate(5)
    cache.shrink()
    assert cache.nbytes == 2 * BYTES_PER_PAGE
    cache.reserve(12)
    more = torch.randn(HEADS, 2, HEAD_SIZE)
    held_keys, held_values = cache.write(1, 5, more, -more)
    assert torch.equal(held_keys, torch.cat([keys[:, :5], more], dim=1))
    assert torch.equal(held_values, -held_keys)


def test_a_parked_cache_without_tokens_holds_no_memory() -> None:
    cache = SessionCache(NUM_LAYERS, PAGE_TOKENS)
    cache.reserve(40)
    written(cache, 0, 6)
    cache.truncate(0)
    cache.shrink()
    assert cache.nbytes == 0
    written(cache, 0, 1)
    assert cache.nbytes == BYTES_PER_PAGE, "the reservation went with the memory"


def test_a_fork_is_not_harmed_when_its_original_shrinks() -> None:
    cache = SessionCache(NUM_LAYERS, PAGE_TOKENS)
    cache.reserve(40)
    keys = written(cache, 0, 6)
    twin = cache.fork()
    cache.truncate(1)
    cache.shrink()
    written(cache, 1, 3)
    more = torch.randn(HEADS, 1, HEAD_SIZE)
    held, _ = twin.write(0, 6, more, more)
    assert torch.equal(held, torch.cat([keys, more], dim=1))


def test_a_cache_cannot_forget_what_it_never_held() -> None:
    cache = SessionCache(NUM_LAYERS, PAGE_TOKENS)
    written(cache, 0, 3)
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(4)
    with pytest.raises(ValueError, match="holds nothing"):
        SessionCache(NUM_LAYERS, PAGE_TOKENS).write(0, 2, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
