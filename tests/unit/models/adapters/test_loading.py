"""The factors of an adapter go to a device by one copy, and stay what they were."""

from typing import Any

import pytest
import torch

from corolla.models.adapters.loading import on_device
from corolla.models.adapters.products import LowRank, PlaceKey


def test_all_factors_arrive_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    placed: dict[PlaceKey, list[LowRank]] = {
        (layer, ("self_attn.q_proj", "self_attn.k_proj")): [
            LowRank(draw(rank, 33), draw(rank, 7), 0), LowRank(draw(rank, 33), draw(rank, 65), 7),
        ]
        for layer, rank in ((0, 3), (1, 8))
    }  # fmt: skip
    copies: list[tuple[int, Any]] = []
    to = torch.Tensor.to

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        copies.append((tensor.numel(), arguments))
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    moved = on_device(placed, torch.device("cpu"))
    assert len(copies) == 1
    assert copies[0][1] == (torch.device("cpu"),)
    assert moved.keys() == placed.keys()
    for place, products in placed.items():
        for found, expected in zip(moved[place], products, strict=True):
            assert found.first_column == expected.first_column
            for one, other in ((found.down, expected.down), (found.up, expected.up)):
                assert torch.equal(one, other)
                assert one.is_contiguous()
                assert one.storage_offset() % 64 == 0
