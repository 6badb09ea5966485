"""Sessions that go to a server with pages of another size."""

import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corolla.cache.prefixes import PrefixKey
from corolla.cache.store import KVStore, SessionCache
from corolla.cache.transfer import TokenCopy, check_tokens, forget_unsent, read_tokens, write_tokens
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import SpanModel, load_span
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import FrameParser, encode
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

SPAN = Span(0, 5)
WINDOW, MAX_STEP_TOKENS = 12, 4
SENT_BY_THE_LAST_RELEASE = (
    "c0010c0038000000580000000a10737373737373737373737373737373731003180320042a0300040035bac401cd380140014a1078787878"
    "7878787878787878787878784040003f8040003fa040003fc040003f4040c03f8040c03fa040c03fc040c03f80402841a0402841c0402841"
    "80403841a0403841c04038414040a4418040a441a040a441c040a4414040ac418040ac41a040ac41c040ac41"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("gemma3_text", tmp_path_factory.mktemp("transfer") / "gemma3_text")


@pytest.fixture(scope="module")
def model(folder: Path) -> SpanModel:
    return load_span(Checkpoint.from_pretrained(str(folder)), SPAN, dtype=torch.float32)


def make_runner(model: SpanModel, page_tokens: int) -> SpanRunner:
    runner = SpanRunner(
        model, num_pages=400 // page_tokens, page_tokens=page_tokens, max_step_tokens=MAX_STEP_TOKENS,
        attention="sdpa", is_fused=False,
    )  # fmt: skip
    runner.warm_up()
    # Memory that was never written may hold any numbers.
    with torch.inference_mode():
        for layer in range(len(SPAN)):
            for tensor in runner.store.layer(layer):
                tensor.fill_(torch.nan)
    return runner


def step(runner: SpanRunner, cache: SessionCache, hidden: Tensor) -> Tensor:
    return runner.forward([RowWork(cache, cache.num_tokens, len(hidden))], hidden, SPAN)


@pytest.mark.parametrize(
    "sizes, num_tokens, part_tokens, num_taken_back",
    [
        ((2, 32), 70, 4, 0), ((2, 8), 45, 3, 4), ((3, 16), 30, 4, 2), ((5, 7), 61, 4, 3), ((16, 2), 50, 4, 4),
        ((2, 32), 5, 3, 1), ((2, 16), 33, 1, 4),
    ],
)  # fmt: skip
def test_a_session_goes_on_as_if_it_had_stayed(
    model: SpanModel, sizes: tuple[int, int], num_tokens: int, part_tokens: int, num_taken_back: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    sender, receiver = (make_runner(model, size) for size in sizes)
    layers = range(len(SPAN))

    def draw(count: int) -> Tensor:
        return torch.randn(count, sender.model.hidden_size, generator=generator)

    staying, moved = sender.new_cache(), receiver.new_cache()
    for cache in (staying, moved):
        cache.allocate(120)
    for start in range(0, num_tokens, MAX_STEP_TOKENS):
        step(sender, staying, draw(min(MAX_STEP_TOKENS, num_tokens - start)))
    # The session takes steps while its first parts travel.
    position = 0
    while position < staying.num_tokens:
        copy = read_tokens(staying, layers, position, min(part_tokens, staying.num_tokens - position))()
        write_tokens(moved, check_tokens(moved.store, layers, copy))
        position = copy.end
        if staying.num_tokens < num_tokens + 8:
            step(sender, staying, draw(1))
    forget_unsent(moved, layers, copy.first_tokens)
    moved.blocks = SPAN
    assert moved.num_tokens == staying.num_tokens
    assert moved.min_position >= staying.min_position, "tokens that were not sent do not count as held"
    back = max(staying.num_tokens - num_taken_back, moved.min_position)
    for cache in (staying, moved):
        cache.truncate(back)
    for count in (1, MAX_STEP_TOKENS, 1, 1):
        hidden = draw(count)
        torch.testing.assert_close(step(receiver, moved, hidden), step(sender, staying, hidden), rtol=1e-5, atol=1e-5)


def test_a_page_that_lacks_its_first_tokens_is_not_shared_and_its_tokens_are_not_sent_on(model: SpanModel) -> None:
    sender, receiver = make_runner(model, 2), make_runner(model, 16)
    layers = range(len(SPAN))
    first, second = sender.new_cache(), receiver.new_cache()
    for cache in (first, second):
        cache.allocate(80)
    for _ in range(11):
        step(sender, first, torch.ones(MAX_STEP_TOKENS, sender.model.hidden_size))
    copy = read_tokens(first, layers, 0, first.num_tokens)()
    held = max(copy.first_tokens)
    assert held % 16
    write_tokens(second, check_tokens(second.store, layers, copy))
    forget_unsent(second, layers, copy.first_tokens)
    assert max(read_tokens(second, layers, 0, second.num_tokens)().first_tokens) == held
    hashes = [bytes([index]) * 32 for index in range(3)]
    second.set_page_hashes(b"salt", hashes)
    found = {
        table.has_window: second.pool.find_prefix(PrefixKey(b"salt", hashes[held // 16], group)) is not None
        for group, table in enumerate(second.tables)
    }
    assert found == {True: False, False: True}


def test_a_part_lies_as_servers_of_the_last_release_read_and_write_it() -> None:
    """Keys, then values of one block after another, by tokens, without those that a window has left."""
    stores = [KVStore(40, page_tokens, [None, 4, None], max_step_tokens=2) for page_tokens in (2, 3)]
    caches = [store.new_cache() for store in stores]
    one = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    for store, cache in zip(stores, caches, strict=True):
        for layer in range(3):
            for tensor in store.layer_like(layer, one, one):
                tensor.zero_()
        cache.reserve(9)
    source, target = caches
    for position in range(9):
        source.prepare(position, 1)
        for layer in range(3):
            slot = source.slots(position, 1, stores[0].group_of(layer))[0]
            for number, tensor in enumerate(stores[0].layer(layer)):
                tensor[slot] = torch.tensor([[position, 10 * layer + number + 0.5]])
        source.commit(position + 1)
    first = source.tables[stores[0].group_of(1)].first_held_token
    assert first == 4
    numbers = [
        (float(position), 10 * layer + number + 0.5)
        for layer, start in ((0, 3), (1, 4), (2, 3))
        for number in (0, 1)
        for position in range(start, 7)
    ]
    payload = b"".join(
        struct.pack("<f", number)[2:]
        for pair in numbers
        for number in pair  # bfloat16 is the upper half
    )
    assert bytes(read_tokens(source, range(3), 3, 4)().payload) == payload
    before = TokenCopy(0, 3, (0, 4, 0), bytes(3 * 2 * 2 * 2 * 2))
    for copy in (before, TokenCopy(3, 4, (0, 4, 0), payload)):
        write_tokens(target, check_tokens(stores[1], range(3), copy))
    assert bytes(read_tokens(target, range(3), 4, 3)().payload) == bytes(read_tokens(source, range(3), 4, 3)().payload)
    frame = pb.HandoverTokens(
        session_id=b"s" * 16, epoch=3, position=3, num_tokens=4, first_tokens=(0, 4, 0), checksum=zlib.crc32(payload),
        is_last=True, is_idle=True, transfer_id=b"x" * 16,
    )  # fmt: skip
    sent = b"".join(bytes(part) for part in encode(frame, payload))
    assert sent == bytes.fromhex(SENT_BY_THE_LAST_RELEASE)
    (received,) = FrameParser(1 << 20).feed(bytes.fromhex(SENT_BY_THE_LAST_RELEASE))
    assert (received.control, bytes(received.payload)) == (frame, payload)
