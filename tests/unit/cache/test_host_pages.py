"""Evicted pages lie in the memory of the machine and come back as they were, on a processor and on a GPU's double."""

import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corolla.cache.host_pages import HostPages
from corolla.cache.layout import LayerGroups
from corolla.cache.prefixes import ExpectedText, PrefixKey
from corolla.cache.store import KVStore, SessionCache
from tests.gpu_double import GPU, a_gpu

PAGE_TOKENS, NUM_PAGES = 2, 14
WINDOWS = ([None, None], [None, 4, None, None])
CPU = torch.device("cpu")
Numbers = Callable[[Tensor], Tensor]


class Texts:
    """A store in which sessions compute texts: a token's keys are numbers of its text, its position and its layer."""

    def __init__(self, windows: list[int | None], num_slots: int, device: torch.device, numbers: Numbers) -> None:
        self.store = KVStore(
            NUM_PAGES * len(LayerGroups.from_windows(windows).windows),
            PAGE_TOKENS,
            windows,
            max_step_tokens=PAGE_TOKENS,
        )
        self.layers, self.device, self.numbers = range(len(windows)), device, numbers
        like = torch.zeros(1, 1, 2, device=device)
        for layer in self.layers:
            self.store.layer_like(layer, like, like)
        self.store.keep_evicted(num_slots * self.store.page_bytes)
        assert num_slots // 2 < (0 if self.store.pool.host is None else self.store.pool.host.num_slots) <= num_slots

    def expected(self, text: int, num_tokens: int) -> ExpectedText:
        digests = [hashlib.sha256(f"{text} {index}".encode()).digest()[:16] for index in range(num_tokens // 2)]
        return ExpectedText(b"salt", tuple(digests), num_tokens)

    def keys(self, text: int, start: int, end: int, layer: int) -> Tensor:
        return torch.tensor([[1000.0 * text + position, layer] for position in range(start, end)])[:, None]

    def bring_back(self, text: int, num_tokens: int) -> int:
        """Brings back what a session of so many tokens would begin with. Returns how many pages."""
        names = self.store.new_cache().pages_to_return(self.expected(text, num_tokens), num_tokens)
        num_back = 0
        for start in range(0, len(names), 3):
            returning = self.store.begin_return(names[start : start + 3])
            if returning.wait is not None:
                returning.wait()
            num_back += self.store.end_return(returning)
        return num_back

    def open(self, text: int, num_tokens: int) -> SessionCache:
        session = self.store.new_cache()
        session.allocate(num_tokens, self.expected(text, num_tokens))
        return session

    def compute(self, session: SessionCache, text: int, end: int) -> None:
        while session.num_tokens < end:
            start = session.num_tokens
            num_tokens = min(PAGE_TOKENS, end - start)
            session.prepare(start, num_tokens)
            for layer in self.layers:
                new = self.keys(text, start, start + num_tokens, layer).to(self.device)
                slots = session.slots(start, num_tokens, self.store.group_of(layer))
                for tensor, sign in zip(self.store.layer(layer), (1, -1), strict=True):
                    for slot, number in zip(slots, new, strict=True):
                        tensor.narrow(0, slot, 1).copy_(number[None] * sign)
            session.commit(start + num_tokens)

    def assert_holds(self, session: SessionCache, text: int) -> None:
        for layer in self.layers:
            window = self.store.window_of(layer)
            start = 0 if window is None else max(0, session.num_tokens - window + 1)
            if start < session.num_tokens:
                keys, values = session.gather(layer, session.num_tokens, start)
                should = self.keys(text, start, session.num_tokens, layer).transpose(0, 1)
                assert torch.equal(self.numbers(keys), should)
                assert torch.equal(self.numbers(values), -should)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[tuple[torch.device, Numbers]]:
    if request.param == "cpu":
        yield CPU, lambda tensor: tensor
        return
    with a_gpu() as gpu, torch.inference_mode():
        yield GPU, gpu.numbers


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_text_comes_back_after_others_took_its_pages(
    device: tuple[torch.device, Numbers], windows: list[int | None]
) -> None:
    texts = Texts(windows, 256, *device)
    for text in range(3):
        session = texts.open(text, 17)
        assert session.num_tokens == 0
        texts.compute(session, text, 17)
        session.clear()
    for text in (0, 1, 0):
        session = texts.open(text, 17)
        assert session.num_tokens < 16, "nothing was evicted"
        session.clear()
        assert texts.bring_back(text, 17)
        session = texts.open(text, 17)
        assert session.num_tokens == 16
        texts.assert_holds(session, text)
        texts.compute(session, text, 17)
        texts.assert_holds(session, text)
        session.clear()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(WINDOWS),
    st.integers(1, 40),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(0, 20), st.booleans()), min_size=6, max_size=25
    ),
)
def test_what_comes_back_is_what_was_computed(
    windows: list[int | None], num_slots: int, uses: list[tuple[int, int, int, bool]]
) -> None:
    """Whatever is evicted, dropped and overwritten meanwhile, by sessions that are open or have ended."""
    texts, held = Texts(windows, num_slots, CPU, lambda tensor: tensor), list[SessionCache]()
    pool = texts.store.pool
    for text, num_tokens, num_computed, stays in uses:
        needed = texts.store.new_cache().worst_case(num_tokens)
        before = pool.num_used, pool.num_available
        texts.bring_back(text, num_tokens)
        assert (pool.num_used, pool.num_available) == before
        while held and needed > pool.num_available:
            held.pop(0).clear()
        if needed > pool.num_available:
            continue
        session = texts.open(text, num_tokens)
        texts.assert_holds(session, text)
        texts.compute(session, text, min(num_computed, num_tokens))
        texts.assert_holds(session, text)
        if stays:
            held.append(session)
        else:
            session.clear()
    for session in held:
        session.clear()
    assert pool.num_available == pool.num_pages
    assert pool.num_used == 0


def test_texts_are_dropped_from_their_ends_and_the_one_used_last_is_dropped_last() -> None:
    names = {text: [PrefixKey(text, bytes([index]), 0) for index in range(4)] for text in (b"a", b"b")}
    host = HostPages(6)
    for text in names:
        for page, key in reversed([*enumerate(names[text])]):
            host.evicted(key, page)
            assert host.save([page, page + 1]) == [(page, host.slot_of(key))]
    assert [len([key for key in names[text] if key in host]) for text in names] == [2, 4]
    assert all(key in host for key in names[b"a"][:2])
    host.renew(names[b"a"])
    for page in range(3):
        host.evicted(PrefixKey(b"c", bytes([page]), 0), page)
    assert [[key in host for key in names[text]] for text in names] == [
        [True, True, False, False], [True, False, False, False]
    ]  # fmt: skip


def test_a_page_that_got_other_contents_is_lost() -> None:
    host, first, second = HostPages(2), PrefixKey(b"", b"1", 0), PrefixKey(b"", b"2", 0)
    host.evicted(first, 7)
    host.evicted(second, 8)
    host.overwritten(7)
    assert (first in host, second in host, host.page_of(second)) == (False, True, 8)
    host.evicted(first, 7)
    assert [page for page, _ in host.save([7, 8])] == [7, 8]
    assert host.save([7, 8]) == []
    host.overwritten(7)
    assert first in host
