"""Keys and values in eight bits: what is read once is what is read ever after."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.cache.codecs import CODECS
from corolla.cache.store import KVStore
from corolla.cache.transfer import TokenCopy, check_tokens, read_tokens, write_tokens
from corolla.chassis.errors import MalformedMessage

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_what_was_read_is_stored_as_the_same_bytes(kind: str, data: st.DataObject, dtype: torch.dtype) -> None:
    codec = CODECS[kind](dtype)
    magnitude = data.draw(st.sampled_from([1e-6, 1e-3, 0.5, 1.0, 127.0, 400.0, 3e4]))
    numbers = st.floats(-1, 1, width=32).map(lambda number: number * magnitude)
    given = torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=1, max_size=3)))
    stored = codec.encode(given.to(dtype))
    assert stored.shape == (*given.shape[:-1], codec.stored_size(8))
    read = codec.decode(stored)
    assert read.dtype == dtype
    assert torch.equal(codec.encode(read), stored)
    assert torch.equal(codec.decode(codec.encode(read)), read)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [127.0, 126.5, 126.4, 64.0, 63.5, 63.4])
@pytest.mark.parametrize("exponent", [-12, -8, 0, 1, 8])
def test_the_largest_code_is_kept_as_it_is(largest: float, exponent: int, dtype: torch.dtype) -> None:
    codec = CODECS["int8"](dtype)
    stored = codec.encode(torch.tensor([largest, -1.0]).mul(2.0**exponent).to(dtype))
    assert torch.equal(codec.encode(codec.decode(stored)), stored)


@pytest.mark.parametrize("kind, most", [("fp8", 2**-4), ("int8", 2**-7)])
def test_rounding_is_as_small_as_the_bits_allow(kind: str, most: float) -> None:
    numbers = torch.randn(64, 4, 64, generator=torch.Generator().manual_seed(0))
    codec = CODECS[kind](torch.float32)
    error = (codec.decode(codec.encode(numbers)) - numbers).abs()
    scale = numbers.abs() if kind == "fp8" else numbers.abs().amax(-1, keepdim=True)
    assert (error <= most * scale + 2**-10).all()
    assert error.max() > most / 8


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_is_noticed(kind: str, odd: float) -> None:
    numbers = torch.ones(2, 3, 8)
    numbers[1, 2, 3] = odd
    codec = CODECS[kind](torch.float32)
    read = codec.decode(codec.encode(numbers))
    assert read[0].isfinite().all()
    if kind == "int8" or odd != odd:
        assert not read[1, 2].isfinite().all()
    else:
        assert read[1, 2, 3] == 448


@pytest.mark.parametrize("kind", CODECS)
def test_tokens_are_moved_as_they_are_stored(kind: str) -> None:
    stores = [KVStore(8, 4, [None], codec=CODECS[kind](torch.float32)) for _ in range(2)]
    caches = [store.new_cache() for store in stores]
    keys = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0))
    for store, cache in zip(stores, caches, strict=True):
        cache.reserve(6)
        store.layer_like(0, keys, keys)
    source, target = caches
    source.prepare(0, 6)
    for tensor in stores[0].layer(0):
        tensor.index_copy_(0, torch.tensor(source.slots(0, 6, 0)), stores[0].encoded(keys))
    source.commit(6)
    copy = read_tokens(source, range(1), 0, 6)()
    codec = stores[0].codec
    assert codec is not None
    assert len(copy.payload) == 6 * 2 * 2 * codec.stored_size(8)
    write_tokens(target, check_tokens(target.store, range(1), copy))
    assert torch.equal(target.gather(0, 6)[0], source.gather(0, 6)[0])
    odd = bytearray(copy.payload)
    odd[-1] = 0x80 if kind == "int8" else 0x7F
    with pytest.raises(MalformedMessage):
        check_tokens(target.store, range(1), TokenCopy(0, 6, copy.first_tokens, bytes(odd)))
