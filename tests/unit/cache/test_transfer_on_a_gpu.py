"""Parts of a handover on a GPU (`tests.gpu_double`): steps go on beside their copies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from corolla.cache.store import KVStore, SessionCache
from corolla.cache.transfer import check_tokens, read_tokens, write_tokens
from tests.gpu_double import GPU, a_gpu

NUM_TOKENS, PAGE_TOKENS, LAYERS = 11, 4, range(2)


def session_of(store: KVStore, texts: Sequence[tuple[Tensor, Tensor]]) -> SessionCache:
    """A session whose tokens have these keys and values, `[tokens, heads, size]` for each layer, on the GPU."""
    cache = store.new_cache()
    cache.allocate(NUM_TOKENS + PAGE_TOKENS)
    cache.prepare(0, NUM_TOKENS)
    slots = torch.tensor(cache.slots(0, NUM_TOKENS, 0), pin_memory=True).to(GPU, non_blocking=True)
    for layer, text in zip(LAYERS, texts, strict=True):
        for tensor, numbers in zip(store.layer_like(layer, *text), text, strict=True):
            tensor.index_copy_(0, slots, numbers)
    cache.commit(NUM_TOKENS)
    return cache


def test_steps_go_on_while_a_part_is_copied() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        drawn = [[torch.randn(NUM_TOKENS, 2, 4, generator=generator) for _ in range(2)] for _ in range(4)]
        (first, second, *others) = [(gpu.put(keys), gpu.put(values)) for keys, values in drawn]
        source_store, target_store = (KVStore(9, PAGE_TOKENS, [None, None]) for _ in range(2))
        source, target = session_of(source_store, [first, second]), session_of(target_store, others)
        gpu.waits.clear()
        finish = read_tokens(source, LAYERS, 0, NUM_TOKENS)
        # A step that comes after the reading changes the pages.
        for layer in LAYERS:
            for tensor in source_store.layer(layer):
                tensor.zero_()
        assert not gpu.waits
        step = torch.ones(3, device=GPU)
        copy = finish()
        assert not gpu.has_made(step)
        checked = check_tokens(target_store, LAYERS, copy)
        assert not gpu.has_made(step)
        gpu.waits.clear()
        write_tokens(target, checked)
        del checked
        assert not gpu.waits
        for layer, expected in zip(LAYERS, drawn, strict=False):
            for found, numbers in zip(target.gather(layer, NUM_TOKENS), expected, strict=True):
                assert torch.equal(gpu.numbers(found), numbers.transpose(0, 1))
