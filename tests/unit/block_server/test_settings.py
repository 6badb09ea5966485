"""Defaults that depend on the device."""

from typing import Any

import pytest

from corolla.block_server.settings import BlockServerSettings


@pytest.mark.parametrize(
    "given, device, expected", [(0, "cpu", 32), (0, "cpu:0", 32), (0, "cuda:1", 64), (16, "cpu", 16), (32, "cuda", 32)]
)
def test_a_device_has_pages_of_its_own_size(given: int, device: str, expected: int) -> None:
    given_settings: dict[str, Any] = {"page_tokens": given, "device": device}
    assert BlockServerSettings(**given_settings).num_page_tokens == expected


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "float32"),
        ({"device": "cpu:0"}, "float32"),
        ({"device": "cuda"}, "bfloat16"),
        ({"device": "cuda:1"}, "bfloat16"),
        ({"device": "cuda", "dtype": "fp16"}, "float16"),
    ],
)
def test_gpus_compute_with_bfloat16_unless_another_type_is_set(given: dict[str, Any], expected: str) -> None:
    assert BlockServerSettings(**given).dtype == expected


@pytest.mark.parametrize(
    "given, most, during_decode, per_frame",
    [
        ({}, 256, 64, 512),
        ({"device": "cpu:0"}, 256, 64, 512),
        ({"device": "cuda"}, 2048, 512, 2048),
        ({"device": "cuda", "max_batch_tokens": 64}, 64, 16, 512),
    ],
)
def test_gpus_take_larger_steps(given: dict[str, Any], most: int, during_decode: int, per_frame: int) -> None:
    settings = BlockServerSettings(**given)
    assert settings.num_batch_tokens == most
    assert settings.prefill_tokens_during_decode == during_decode
    assert settings.max_tokens_per_frame == per_frame
