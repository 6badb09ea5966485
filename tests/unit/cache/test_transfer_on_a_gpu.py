"""Parts of a session leave and come to a GPU (`tests.gpu_double`) between its steps, and these wait for no copy."""

import pytest
import torch

from corolla.cache.codecs import CODECS
from corolla.cache.store import KVStore, SessionCache
from corolla.cache.transfer import check_tokens, read_tokens, write_tokens
from corolla.chassis.errors import MalformedMessage
from tests.gpu_double import GPU, a_gpu

NUM_TOKENS = 10
LAYERS = range(3)


def a_session(page_tokens: int, kind: str = "") -> SessionCache:
    """A session with two groups of layers, whose keys and values on the GPU are drawn."""
    codec = CODECS[kind](torch.float32) if kind else None
    store = KVStore(40, page_tokens, [None, 64, None], codec=codec)
    like = torch.zeros(1, 2, 4, device=GPU)
    for layer in LAYERS:
        for number, tensor in enumerate(store.layer_like(layer, like, like)):
            generator = torch.Generator().manual_seed(2 * layer + number)
            tensor.copy_(store.encoded(torch.randn(len(tensor), 2, 4, generator=generator)).to(GPU))
    cache = store.new_cache()
    cache.reserve(NUM_TOKENS)
    return cache


@pytest.mark.parametrize("kind", ["", *CODECS])
def test_a_part_is_what_was_there_and_steps_wait_for_no_copy(kind: str) -> None:
    with a_gpu() as gpu, torch.inference_mode():
        leaving, taking = a_session(2, kind), a_session(3, kind)
        leaving.prepare(0, NUM_TOKENS)
        leaving.commit(NUM_TOKENS)
        before = [gpu.numbers(each).clone() for layer in LAYERS for each in leaving.gather(layer, NUM_TOKENS)]
        num_waits = len(gpu.waits)
        position = 0
        for num_tokens in (4, 1, 5):
            finish = read_tokens(leaving, LAYERS, position, num_tokens)
            # A later step changes the slots that were read.
            for layer in LAYERS:
                extents = leaving.extents(position + num_tokens, position, leaving.store.group_of(layer))
                for tensor in leaving.store.layer(layer):
                    for slot, count in extents:
                        tensor.narrow(0, slot, count).zero_()
            later = torch.ones(3, device=GPU) * 2
            assert len(gpu.waits) == num_waits, "the thread that computes waited"
            checked = check_tokens(taking.store, LAYERS, finish())
            assert not gpu.has_made(later), "a copy waited for a later step"
            num_waits = len(gpu.waits)
            write_tokens(taking, checked)
            del checked
            assert len(gpu.waits) == num_waits, "the thread that computes waited"
            position += num_tokens
        after = [gpu.numbers(each) for layer in LAYERS for each in taking.gather(layer, NUM_TOKENS)]
    assert all(map(torch.equal, after, before))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_found_there(number: float) -> None:
    with a_gpu(), torch.inference_mode():
        leaving, taking = a_session(2), a_session(2)
        leaving.prepare(0, NUM_TOKENS)
        leaving.commit(NUM_TOKENS)
        leaving.store.layer(2)[1][leaving.slots(7, 1, leaving.store.group_of(2))[0], 1, 3] = number
        copy = read_tokens(leaving, LAYERS, 0, NUM_TOKENS)()
        with pytest.raises(MalformedMessage, match="finite"):
            check_tokens(taking.store, LAYERS, copy)
