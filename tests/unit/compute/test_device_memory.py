"""How the memory of a GPU is divided."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from corolla.block_server.metrics import BlockServerMetrics
from corolla.compute.device_memory import DEVICE_MEMORY_USES, DeviceMemory

GIB = 1 << 30


@given(
    st.integers(0, 200 * GIB), st.integers(0, 200 * GIB), st.none() | st.integers(0, 200 * GIB), st.integers(0, 8 * GIB)
)
def test_parts_never_exceed_what_is_free(
    num_free: int, num_used: int, page_bytes: int | None, adapter_bytes: int
) -> None:
    memory = DeviceMemory(num_free, num_free + num_used)
    weights = memory.for_weights(page_bytes, adapter_bytes)
    assert weights >= 0
    if weights:
        assert weights + (page_bytes or 0) + adapter_bytes < num_free
    left = DeviceMemory(num_free - weights, memory.num_total)
    assert 0 <= left.for_pages(adapter_bytes) <= left.num_free
    if weights and page_bytes is not None:
        assert left.for_pages(adapter_bytes) == page_bytes


def test_an_8b_model_in_bfloat16_fits_a_card_of_24_gib_and_80_gib_serve_many_sessions() -> None:
    weights = 15 * GIB
    small = DeviceMemory(round(23.5 * GIB), 24 * GIB)
    assert small.for_weights(None, GIB // 2) > weights
    large = DeviceMemory(79 * GIB - weights, 80 * GIB)
    assert large.for_pages(GIB // 2) > 57 * GIB


def test_a_device_that_is_full_has_room_for_nothing() -> None:
    full = DeviceMemory(GIB, 24 * GIB)
    assert full.for_pages() == full.for_weights(None) == full.for_weights(GIB) == 0


def test_the_metrics_show_what_the_memory_is_used_for_at_each_look() -> None:
    registry, free = CollectorRegistry(), [20 * GIB]
    BlockServerMetrics(registry).follow_device(lambda: DeviceMemory(free[0], 80 * GIB).by_use(15 * GIB, 40 * GIB))

    def shown() -> list[float | None]:
        return [registry.get_sample_value("corolla_device_memory_bytes", {"use": use}) for use in DEVICE_MEMORY_USES]

    assert shown() == [15 * GIB, 40 * GIB, 5 * GIB, 20 * GIB]
    free[0] = 10 * GIB
    assert shown() == [15 * GIB, 40 * GIB, 15 * GIB, 10 * GIB]
