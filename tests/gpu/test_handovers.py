"""Parts of a handover leave a device and come to one while it computes, and neither waits for the other's numbers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from corolla.cache.codecs import CODECS
from corolla.cache.store import KVStore, SessionCache
from corolla.cache.transfer import check_tokens, read_tokens, write_tokens
from corolla.chassis.errors import MalformedMessage
from tests.gpu.devices import Device, on, on_float32

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 6, 2, 16
LAYERS = range(NUM_LAYERS)


def a_session(device: Device, page_tokens: int, num_tokens: int, kind: str = "") -> SessionCache:
    """A session whose pages lie apart, with drawn keys and values for `num_tokens` tokens on the device."""
    codec = CODECS[kind](torch.float32) if kind else None
    store = KVStore(2 * (2 + -(-num_tokens // page_tokens)), page_tokens, [None] * NUM_LAYERS, codec=codec)
    like = torch.zeros(1, NUM_HEADS, HEAD_SIZE, device=device.name)
    generator = torch.Generator().manual_seed(num_tokens)
    for layer in LAYERS:
        for tensor in store.layer_like(layer, like, like):
            drawn = torch.randn(*tensor.shape[:2], HEAD_SIZE, generator=generator)
            tensor.copy_(store.encoded(drawn).to(device.name))
    others = [store.new_cache() for _ in range(store.pool.num_pages)]
    for other in others:
        other.reserve(page_tokens)
    for other in others:
        if other.tables[0].pages[0] % 2:
            other.clear()
    cache = store.new_cache()
    cache.reserve(num_tokens)
    assert len(cache.extents(num_tokens)) > 2
    return cache


@pytest.mark.parametrize("kind", ["", *CODECS])
@on_float32()
def test_a_part_is_what_was_there_when_its_copy_began(device: Device, kind: str) -> None:
    num_tokens = 50
    leaving, taking = a_session(device, 4, num_tokens, kind), a_session(device, 16, num_tokens, kind)
    leaving.prepare(0, num_tokens)
    leaving.commit(num_tokens)
    before = [numbers.cpu() for layer in LAYERS for numbers in leaving.gather(layer, num_tokens)]
    tensors = [tensor for layer in LAYERS for tensor in leaving.store.layer(layer)]
    busy = torch.ones(2048, 2048, device=device.name) if device.is_gpu else torch.ones(8, 8)
    with ThreadPoolExecutor(2) as threads:
        for start, count in ((0, 20), (20, 1), (21, 29)):
            for _ in range(20):
                busy = busy @ busy
            finish = read_tokens(leaving, LAYERS, start, count)
            # A step that comes later changes what the copy has taken.
            kept = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.zero_()
            copy = threads.submit(finish).result(60)
            write_tokens(taking, threads.submit(check_tokens, taking.store, LAYERS, copy).result(60))
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.copy_(old)
    after = [numbers.cpu() for layer in LAYERS for numbers in taking.gather(layer, num_tokens)]
    assert all(map(torch.equal, after, before))


@on_float32()
def test_a_number_that_is_not_finite_is_found_and_nothing_is_written(device: Device) -> None:
    leaving, taking = a_session(device, 4, 20), a_session(device, 4, 20)
    leaving.prepare(0, 20)
    leaving.commit(20)
    for number in (torch.nan, torch.inf, -torch.inf):
        leaving.store.layer(NUM_LAYERS - 1)[1][leaving.slots(13, 1)[0], 1, 7] = number
        copy = read_tokens(leaving, LAYERS, 0, 20)()
        with pytest.raises(MalformedMessage, match="finite"):
            check_tokens(taking.store, LAYERS, copy)
    assert taking.num_tokens == 0


@on(Device("cuda", "float32"))
def test_a_part_comes_while_the_device_computes(device: Device) -> None:
    """The check reads a number of the device, and waits for its own copy alone."""
    leaving, taking = a_session(device, 32, 2048), a_session(device, 32, 2048)
    leaving.prepare(0, 2048)
    leaving.commit(2048)
    copy = read_tokens(leaving, LAYERS, 0, 2048)()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(check_tokens, taking.store, LAYERS, copy).result(60)  # memory and streams are there
        busy = torch.ones(8192, 8192, device=device.name) / 8192
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(20):
            busy = busy @ busy
        threads.submit(check_tokens, taking.store, LAYERS, copy).result(60)
        checked_s = time.perf_counter() - began_s
        torch.cuda.synchronize()
        assert checked_s < (time.perf_counter() - began_s) / 2
