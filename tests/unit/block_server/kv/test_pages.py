import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.kv.pages import PagePool
from corolla.chassis.errors import OutOfPages


@given(st.integers(1, 1000), st.integers(1, 64), st.integers(0, 10_000))
def test_pages_hold_the_tokens_with_less_than_a_page_to_spare(
    num_pages: int, page_tokens: int, num_tokens: int
) -> None:
    needed = PagePool(num_pages, page_tokens).pages_for(num_tokens)
    assert needed * page_tokens >= num_tokens > (needed - 1) * page_tokens


@given(st.lists(st.integers(0, 12), max_size=40))
def test_what_is_taken_is_gone_until_it_comes_back(wishes: list[int]) -> None:
    pool = PagePool(20, 4)
    taken: list[int] = []
    for wish in wishes:
        if wish <= 20 - sum(taken):
            pool.take(wish)
            taken.append(wish)
        else:
            with pytest.raises(OutOfPages) as caught:
                pool.take(wish)
            assert caught.value.metadata == {"pages_needed": str(wish), "pages_free": str(20 - sum(taken))}
            if taken:
                pool.give(taken.pop(0))
        assert pool.num_free == 20 - sum(taken)
    for pages in taken:
        pool.give(pages)
    assert pool.num_free == 20


def test_more_cannot_come_back_than_was_taken() -> None:
    pool = PagePool(4, 1)
    pool.take(2)
    with pytest.raises(ValueError, match="more pages"):
        pool.give(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("num_pages, page_tokens", [(0, 1), (1, 0), (-1, 4)])
def test_a_pool_has_pages(num_pages: int, page_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        PagePool(num_pages, page_tokens)
