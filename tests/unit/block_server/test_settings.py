"""Defaults that depend on the device."""

from typing import Any

import pytest

from corolla.block_server.settings import BlockServerSettings


@pytest.mark.parametrize(
    "given, device, expected", [(0, "cpu", 32), (0, "cuda", 256), (0, "cuda:1", 256), (16, "cpu", 16), (64, "cuda", 64)]
)
def test_pages_are_of_a_size_that_the_device_can_read(given: int, device: str, expected: int) -> None:
    given_settings: dict[str, Any] = {"page_tokens": given, "device": device}
    assert BlockServerSettings(**given_settings).num_page_tokens == expected


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "float32"),
        ({"device": "cuda"}, "bfloat16"),
        ({"device": "cuda:1"}, "bfloat16"),
        ({"device": "cuda", "dtype": "fp16"}, "float16"),
    ],
)
def test_gpus_compute_with_bfloat16_unless_another_type_is_set(given: dict[str, Any], expected: str) -> None:
    assert BlockServerSettings(**given).dtype == expected
