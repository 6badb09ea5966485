"""The default number of tokens of a page."""

from typing import Any

import pytest

from corolla.block_server.settings import BlockServerSettings


@pytest.mark.parametrize(
    "given, device, expected", [(0, "cpu", 32), (0, "cuda", 256), (0, "cuda:1", 256), (16, "cpu", 16), (64, "cuda", 64)]
)
def test_pages_are_of_a_size_that_the_device_can_read(given: int, device: str, expected: int) -> None:
    given_settings: dict[str, Any] = {"page_tokens": given, "device": device}
    assert BlockServerSettings(**given_settings).num_page_tokens == expected
