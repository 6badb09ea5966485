"""How a CPU multiplies follows from its processor, the dtype and the shape of weights."""

from dataclasses import replace

import pytest

from corolla.models.product_rule import MAX_COPIED_BYTES, Processor, Way, way_of

AVX2 = Processor({"float32": 1, "bfloat16": 2}, frozenset({"float32"}))
AVX512 = replace(AVX2, onednn=frozenset({"float32", "bfloat16"}))
AMX = replace(AVX512, onednn=frozenset({"float32", "bfloat16", "float16"}), matrices=frozenset({"bfloat16"}))
WITHOUT_COMPILER = replace(AVX512, panels={})
SHAPE = (3072, 576)
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@pytest.mark.parametrize(
    "processor, dtype, way",
    [
        (AVX512, "float32", Way.PANELS), (AVX2, "float32", Way.PANELS), (AVX512, "bfloat16", Way.PANELS),
        (AVX2, "bfloat16", Way.PANELS), (AVX2, "float16", Way.LIBRARY), (AMX, "float32", Way.PANELS),
        (AMX, "bfloat16", Way.ONEDNN), (AMX, "float16", Way.ONEDNN), (WITHOUT_COMPILER, "float32", Way.ONEDNN),
        (replace(WITHOUT_COMPILER, onednn=frozenset()), "float32", Way.LIBRARY),
    ],
)  # fmt: skip
def test_the_way_follows_from_processor_and_dtype(processor: Processor, dtype: str, way: Way) -> None:
    assert way_of(processor, dtype, SHAPE, 576 * 3072 * BYTES[dtype]) is way


@pytest.mark.parametrize(
    "dtype, shape, way",
    [
        pytest.param("float32", (256, 256), Way.LIBRARY, id="weights that are too small"),
        pytest.param("float32", SHAPE, Way.ONEDNN, id="a copy"),
        pytest.param("float32", (128_256, 4096), Way.ONEDNN, id="no copy, as they are"),
        pytest.param("bfloat16", (128_256, 4096), Way.LIBRARY, id="no copy, and nothing gained as they are"),
    ],
)
def test_weights_that_others_read_are_never_panels(dtype: str, shape: tuple[int, int], way: Way) -> None:
    num_bytes = shape[0] * shape[1] * BYTES[dtype]
    assert (num_bytes > MAX_COPIED_BYTES) == (shape[0] > 100_000)
    assert way_of(AVX512, dtype, shape, num_bytes, is_shared=True) is way


def test_panels_of_pairs_need_an_even_number_of_inputs() -> None:
    assert way_of(AVX512, "bfloat16", (3072, 577), 3072 * 577 * 2) is Way.ONEDNN
    assert way_of(AVX512, "float32", (3072, 577), 3072 * 577 * 4) is Way.PANELS


@pytest.mark.parametrize("shape, way", [((192, 64), Way.LIBRARY), ((256, 64), Way.PANELS)])
def test_a_call_by_panels_costs_more_than_small_weights_gain(shape: tuple[int, int], way: Way) -> None:
    assert way_of(AVX512, "float32", shape, 4 * shape[0] * shape[1]) is way
    assert way_of(AMX, "bfloat16", shape, 2 * shape[0] * shape[1]) is way


def test_a_setting_comes_before_the_rule_wherever_it_is_possible() -> None:
    for way in Way:
        assert way_of(AMX, "float32", SHAPE, 1, asked_for=way) is way
    assert way_of(AMX, "float16", SHAPE, 1, asked_for="panels") is Way.LIBRARY
    assert way_of(AVX2, "bfloat16", SHAPE, 1, asked_for="onednn") is Way.LIBRARY
