"""Sessions that go to a server with pages of another size."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from corolla.cache.prefixes import PrefixKey
from corolla.cache.store import SessionCache
from corolla.cache.transfer import forget_unsent, read_tokens, write_tokens
from corolla.compute.span_runner import RowWork, SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import SpanModel, load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

SPAN = Span(0, 5)
WINDOW, MAX_STEP_TOKENS = 12, 4


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
        copy = read_tokens(staying, layers, position, min(part_tokens, staying.num_tokens - position))
        write_tokens(moved, layers, copy)
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
    copy = read_tokens(first, layers, 0, first.num_tokens)
    held = max(copy.first_tokens)
    assert held % 16
    write_tokens(second, layers, copy)
    forget_unsent(second, layers, copy.first_tokens)
    assert max(read_tokens(second, layers, 0, second.num_tokens).first_tokens) == held
    hashes = [bytes([index]) * 32 for index in range(3)]
    second.set_page_hashes(b"salt", hashes)
    found = {
        table.has_window: second.pool.find_prefix(PrefixKey(b"salt", hashes[held // 16], group)) is not None
        for group, table in enumerate(second.tables)
    }
    assert found == {True: False, False: True}
