"""Evicted pages come back in small copies, once for sessions that open together, and no failure refuses an open."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from prometheus_client import CollectorRegistry

from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.page_returns import PageReturns
from corolla.block_server.sessions import SessionTable
from corolla.cache.prefixes import ExpectedText, PrefixKeys
from corolla.cache.store import KVStore, SessionCache
from corolla.chassis.tasks import TaskGroup
from corolla.wire.span import Span

NUM_PAGES, PAGE_TOKENS, TEXT_PAGES = 12, 2, 9
MIB = 1 << 20
TEXT = ExpectedText(b"salt", tuple(bytes([index]) * 16 for index in range(TEXT_PAGES)), TEXT_PAGES * PAGE_TOKENS + 1)


class Copies:
    """An engine that makes copies one after the other, and may fail at one of them."""

    def __init__(self, store: KVStore) -> None:
        self.registry = CollectorRegistry()
        self.metrics = BlockServerMetrics(self.registry)
        self.store, self.num_pages, self.failing = store, list[int](), -1

    async def copy(self, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        if len(self.num_pages) == self.failing:
            self.num_pages.append(0)
            raise RuntimeError("the copy failed")
        before = self.store.pool.num_cached
        try:
            return work()
        finally:
            self.num_pages.append(self.store.pool.num_cached - before)


def evicted_text() -> tuple[PageReturns, Copies, OpenRequest]:
    """A text whose pages of 2 MiB are all in the memory of the machine."""
    store = KVStore(NUM_PAGES, PAGE_TOKENS, [None])
    like = torch.zeros(1, 1, MIB // 8)
    store.layer_like(0, like, like)
    assert store.page_bytes == 2 * MIB
    store.keep_evicted(NUM_PAGES * store.page_bytes)
    pages = store.pool.take(TEXT_PAGES)
    for index, page in enumerate(pages):
        for key, before in PrefixKeys([None]).of_page(TEXT.salt, TEXT.hashes, index):
            store.pool.add_prefix(key, page, before)
    store.pool.give(pages)
    store.pool.give(store.pool.take(NUM_PAGES))
    assert store.pool.num_cached == 0
    engine = Copies(store)
    sessions: SessionTable[SessionCache] = SessionTable(store.pool, store.new_cache)
    request = OpenRequest(
        session_id=b"s", epoch=1, tenant="t", client_id=b"c", resume=False, max_tokens=20, blocks=Span(0, 1),
        lease_s=60.0, transient=False, text=TEXT,
    )  # fmt: skip
    return PageReturns(sessions, store, cast(Any, engine), TaskGroup()), engine, request


async def test_pages_come_back_in_copies_of_four_mebibytes_once_for_all_who_wait() -> None:
    returns, engine, request = evicted_text()
    assert len(returns.names(request)) == TEXT_PAGES
    await asyncio.gather(*(returns.bring_back(request) for _ in range(3)))
    assert engine.num_pages == [2, 2, 2, 2, 1]
    assert returns.names(request) == []
    assert engine.registry.get_sample_value("corolla_host_cache_hits_total") == TEXT_PAGES * PAGE_TOKENS


async def test_who_leaves_does_not_stop_the_copies() -> None:
    returns, engine, request = evicted_text()
    leaving = asyncio.create_task(returns.bring_back(request))
    await asyncio.sleep(0.001)
    leaving.cancel()
    await asyncio.wait({leaving})
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine.num_pages == [2, 2, 2, 2, 1]
    assert returns.store.pool.num_cached == TEXT_PAGES


async def test_after_a_failure_the_session_finds_the_pages_before_it() -> None:
    returns, engine, request = evicted_text()
    engine.failing = 2
    await returns.bring_back(request)
    assert engine.num_pages == [2, 2, 0, 0, 0]
    session = returns.sessions.open(request, 0.0)
    assert session.cache.num_tokens == 4 * PAGE_TOKENS


async def test_a_session_that_goes_on_asks_for_nothing() -> None:
    returns, _, request = evicted_text()
    session = returns.sessions.open(request, 0.0)
    assert session.cache.num_tokens == 0
    assert returns.names(replace(request, resume=True, epoch=2)) == ()
