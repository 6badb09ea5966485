"""Plans fit into their devices, are as even as they can be, and say what memory allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from corolla.chassis.errors import SettingsError
from corolla.compute.device_memory import RECORDING_BYTES, StepSize
from corolla.compute.sizing import (
    GIB,
    HOST_BYTES,
    LIBRARY_BYTES,
    MIB,
    BlockSize,
    Demand,
    ModelSize,
    parse_bytes,
    plan_servers,
)
from corolla.wire.span import Span


def model_of(*blocks: BlockSize, ends: int = 64 * MIB, is_tied: bool = False) -> ModelSize:
    return ModelSize(
        "model", blocks, ends, ends, is_tied, StepSize(64 << 10, 32000), hidden_bytes=8 << 10, context_length=4096
    )


BLOCK = BlockSize(weight_bytes=400 * MIB, loading_bytes=400 * MIB, token_bytes=4096)
DEMAND = Demand(sessions=4, session_tokens=4096, page_tokens=256, batch_tokens=512)


@given(
    some.lists(some.integers(1, 900), min_size=1, max_size=24),
    some.integers(3, 40),
    some.integers(1, 40),
    some.sampled_from([1, 64, 5000]),
    some.booleans(),
)
def test_servers_cover_all_blocks_and_fit(
    weights: list[int], gib: int, sessions: int, tokens: int, is_tied: bool
) -> None:
    blocks = [
        BlockSize(mib * MIB, 2 * mib * MIB, 4096 * (index % 3), window=512 if index % 2 else None)
        for index, mib in enumerate(weights)
    ]
    model, demand = model_of(*blocks, is_tied=is_tied), Demand(sessions, tokens, 32, 256, 512 * MIB)
    try:
        plan = plan_servers(model, gib * GIB, demand)
    except SettingsError:
        # One block alone is too large at the most demanding place.
        assert max(weights) * MIB * 2 + sessions * 8192 * (tokens + 800) + 4.5 * GIB > gib * GIB
        return
    ends = [server.span.end for server in plan.servers]
    assert [server.span.start for server in plan.servers] == [0, *ends[:-1]]
    assert ends[-1] == len(blocks)
    for server in plan.servers:
        held = server.weight_bytes + server.edge_bytes + server.work_bytes
        assert held + server.cache_bytes == gib * GIB
        assert server.weight_bytes == sum(block.weight_bytes for block in blocks[server.span.start : server.span.end])
        of_server = blocks[server.span.start : server.span.end]
        loading = server.weight_bytes + max(block.loading_bytes - block.weight_bytes for block in of_server)
        assert loading + server.edge_bytes + LIBRARY_BYTES <= gib * GIB
        # A pool has one setting for all of its servers.
        assert plan.kv_cache_mib * MIB >= demand.sessions * server.session_bytes
        assert plan.weights_mib * MIB >= server.weight_bytes + server.edge_bytes
        assert len(server.span) <= plan.capacity_blocks
    assert plan.max_sessions >= sessions


def test_as_few_servers_as_fit_share_the_blocks_evenly() -> None:
    # A server has 24 GiB less 2 of libraries and recordings: 50 blocks at most with their sessions, ends aside.
    plan = plan_servers(model_of(*[BLOCK] * 100), 24 * GIB, DEMAND)
    assert len(plan.servers) == 3
    assert {len(server.span) for server in plan.servers} <= {33, 34}
    assert len(plan_servers(model_of(*[BLOCK] * 4), 24 * GIB, DEMAND).servers) == 1


def test_what_is_quantised_after_reading_needs_room_while_it_is_read() -> None:
    packed = BlockSize(100 * MIB, 100 * MIB, 0)
    quantised = BlockSize(100 * MIB, 12 * GIB, 0)
    assert len(plan_servers(model_of(*[packed] * 40), 16 * GIB, DEMAND).servers) == 1
    # A server holds one of its blocks at a time as it is read.
    assert len(plan_servers(model_of(*[quantised] * 40), 16 * GIB, DEMAND).servers) == 2


@pytest.mark.parametrize(
    "num_windowed, num_tokens, num_pages",
    [
        (0, 1000, 4),
        (0, 100_000, 391),
        # Six layers with a window of 512 are one group, and a step of 2,048 tokens comes while 2,048 may be taken back.
        (6, 100_000, 19),
        (6, 1000, 4),
        # The layer without a window shares pages with none of them, so each page holds one layer.
        (5, 100_000, 391 + 5 * 19),
    ],
)
def test_a_session_is_promised_its_window_and_the_largest_step_twice(
    num_windowed: int, num_tokens: int, num_pages: int
) -> None:
    blocks = [BlockSize(0, 0, 2, window=512 if index < num_windowed else None) for index in range(6)]
    layout = model_of(*blocks).cache_layout(Span(0, 6), page_tokens=256, max_step_tokens=2048)
    assert layout.session_pages(num_tokens) == num_pages
    assert layout.page_bytes == 256 * 2 * (1 if num_windowed == 5 else 6)
    assert layout.session_bytes(num_tokens) == num_pages * layout.page_bytes


def test_pods_get_memory_for_what_a_server_keeps_outside_of_its_device() -> None:
    plan = plan_servers(model_of(BLOCK), 24 * GIB, DEMAND)
    activations = 4 * 4096 * (8 << 10)
    assert plan.host_bytes == HOST_BYTES + BLOCK.loading_bytes + activations
    assert plan.most_host_bytes == 2 * plan.host_bytes
    # Sessions that are long leave much behind: an eighth of the limit has room for it.
    longer = plan_servers(model_of(replace(BLOCK, token_bytes=16)), 24 * GIB, replace(DEMAND, session_tokens=1 << 20))
    assert longer.most_host_bytes >= 8 * 256 * activations


def test_tied_ends_on_one_server_are_one_tensor() -> None:
    for is_tied, both in ((True, 64), (False, 128)):
        model = model_of(BLOCK, BLOCK, is_tied=is_tied)
        assert model.edge_bytes(Span(0, 2)) == both * MIB
        assert model.edge_bytes(Span(0, 1)) == model.edge_bytes(Span(1, 2)) == 64 * MIB


def test_memory_bounds_the_speed() -> None:
    block = BlockSize(GIB, GIB, 0)
    model = model_of(*[block] * 30, ends=GIB)
    bandwidth = 31.0 * GIB
    # One stream waits for all weights, on however many servers they are.
    for memory in (64, 24, 12):
        plan = plan_servers(model, memory * GIB, DEMAND)
        assert plan.tokens_per_second(1, bandwidth) == pytest.approx(1.0)
    # Streams on one server share one read; servers read at the same time.
    assert plan_servers(model, 64 * GIB, DEMAND).tokens_per_second(8, bandwidth) == pytest.approx(8.0)
    split = plan_servers(model, 24 * GIB, DEMAND)
    most = max(server.read_bytes for server in split.servers)
    assert len(split.servers) == 2
    assert split.tokens_per_second(8, bandwidth) == pytest.approx(4 * bandwidth / most)
    # Keys and values are read, too.
    held = plan_servers(model_of(*[BLOCK] * 4), 24 * GIB, DEMAND)
    assert held.tokens_per_second(64, 1e12) < 64 * held.tokens_per_second(1, 1e12)


def test_a_device_that_is_too_small_is_refused_with_what_is_needed() -> None:
    with pytest.raises(SettingsError, match=r"block 0 of model needs 3\.1 GiB .* the device has 2\.0 GiB"):
        plan_servers(model_of(BLOCK), 2 * GIB, DEMAND)
    assert LIBRARY_BYTES + RECORDING_BYTES + BLOCK.weight_bytes < 3.1 * GIB


@pytest.mark.parametrize(
    "text, size", [("24GiB", 24 * GIB), ("22.5Gi", int(22.5 * GIB)), ("80GB", 80 * 10**9), (" 512 mib ", 512 * MIB)]
)
def test_sizes_of_memory_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "much", "-1GiB", "nan", "infGiB", "0", "24"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="no size of memory"):
        parse_bytes(text)
