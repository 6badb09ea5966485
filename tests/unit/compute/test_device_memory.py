"""How the memory of a GPU is divided, and how long reading it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from corolla.block_server.metrics import BlockServerMetrics
from corolla.cache.store import KVStore
from corolla.compute.decode_graphs import SIZES
from corolla.compute.device_memory import DEVICE_MEMORY_USES, DeviceMemory, StepSize, most_logit_rows
from corolla.compute.memory_bound import MemoryBound
from corolla.compute.speed import measure_bandwidth

GIB = 1 << 30


@given(
    st.integers(0, 200 * GIB), st.integers(0, 200 * GIB), st.none() | st.integers(0, 200 * GIB),
    st.integers(0, 8 * GIB), st.integers(0, 8 * GIB),
)  # fmt: skip
def test_parts_never_exceed_what_is_free(
    num_free: int, num_used: int, page_bytes: int | None, step_bytes: int, adapter_bytes: int
) -> None:
    memory = DeviceMemory(num_free, num_free + num_used)
    weights = memory.for_weights(page_bytes, step_bytes, adapter_bytes)
    assert weights >= 0
    if weights:
        assert weights + (page_bytes or 0) + step_bytes + adapter_bytes < num_free
    left = DeviceMemory(num_free - weights, memory.num_total)
    assert 0 <= left.for_pages(step_bytes, adapter_bytes) <= left.num_free
    if weights and page_bytes is not None:
        assert left.for_pages(step_bytes, adapter_bytes) == page_bytes


def test_an_8b_model_in_bfloat16_fits_a_card_of_24_gib_and_80_gib_serve_many_sessions() -> None:
    weights, step = 15 * GIB, StepSize(row_bytes=151 << 10, vocab_size=128256).num_bytes(2048, has_head=True)
    small = DeviceMemory(round(23.5 * GIB), 24 * GIB)
    assert small.for_weights(None, step, GIB // 2) > weights
    large = DeviceMemory(79 * GIB - weights, 80 * GIB)
    assert large.for_pages(step, GIB // 2) > 57 * GIB


def test_a_device_that_is_full_has_room_for_nothing() -> None:
    full = DeviceMemory(GIB, 24 * GIB)
    assert full.for_pages(0) == full.for_weights(None, 0) == full.for_weights(GIB, 0) == 0


def test_pages_leave_room_for_the_largest_step_and_not_for_the_one_token_that_warms_up() -> None:
    # 70B: 8,192 wide, 28,672 within its MLPs.
    step = StepSize(row_bytes=2 * (8 * 8192 + 3 * 28672), vocab_size=128256)
    memory = DeviceMemory(79 * GIB - 60 * GIB, 80 * GIB)
    usual, large = (memory.for_pages(step.num_bytes(tokens, has_head=False)) for tokens in (2048, 16384))
    assert usual - large == 14336 * step.row_bytes
    assert step.num_bytes(16384, has_head=False) > 4.9e9


def test_the_logits_of_the_largest_recorded_step_are_made_at_a_time_and_have_room() -> None:
    for vocab_size, num_rows in ((1, 2048), (32_000, 524), (128_256, 130), (262_144, 128), (1 << 24, 128)):
        most = most_logit_rows(vocab_size)
        assert most >= SIZES[-1]
        assert min(2048, most) == num_rows
        step = StepSize(row_bytes=1, vocab_size=vocab_size)
        drawn = step.num_bytes(2048, has_head=True) - step.num_bytes(2048, has_head=False)
        assert drawn == num_rows * vocab_size * 28


def test_the_metrics_show_what_the_memory_is_used_for_at_each_look() -> None:
    registry, free = CollectorRegistry(), [20 * GIB]
    BlockServerMetrics(registry).follow_device(
        lambda: DeviceMemory(free[0], 80 * GIB).by_use(15 * GIB, 40 * GIB, GIB, 58 * GIB),
        MemoryBound(1e12, 1, 0, 0, ()),
    )

    def shown() -> list[float | None]:
        return [registry.get_sample_value("corolla_device_memory_bytes", {"use": use}) for use in DEVICE_MEMORY_USES]

    assert shown() == [15 * GIB, 40 * GIB, GIB, 2 * GIB, 2 * GIB, 20 * GIB]
    free[0] = 10 * GIB
    assert shown() == [15 * GIB, 40 * GIB, GIB, 2 * GIB, 12 * GIB, 10 * GIB]


def test_an_iteration_reads_weights_once_and_the_keys_and_values_that_each_row_sees() -> None:
    bound = MemoryBound(1000.0, num_blocks=4, block_bytes=8000, head_bytes=500, groups=[(None, 3), (10, 1)])
    assert bound.seconds(4, [20, 5], has_head=True) == pytest.approx((8000 + 3 * 25 + 10 + 5 + 500) / 1000)
    assert bound.seconds(2, [20, 5], has_head=False) == pytest.approx((4000 + (3 * 25 + 15) / 2) / 1000)


def test_a_store_knows_what_a_token_takes_in_layers_with_and_without_a_window() -> None:
    # The layer without keys and values takes nothing; layers of a window share the tensors of the other group.
    store = KVStore(4, 8, [None, 16, None, None, 16], pageless=[2])
    like = torch.zeros(1, 2, 6, dtype=torch.bfloat16)
    for layer in (0, 1, 3, 4):
        store.layer_like(layer, like, like)
    token_bytes = 2 * 2 * 6 * 2
    assert store.bytes_by_window == ((None, 2 * token_bytes), (16, 2 * token_bytes))


def test_the_measured_bandwidth_counts_what_is_read_and_what_is_written() -> None:
    times_s = iter((0.0, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0))
    assert measure_bandwidth(torch.device("cpu"), 1 << 20, lambda: next(times_s)) == 4 * 2 * (1 << 20) / 0.5
