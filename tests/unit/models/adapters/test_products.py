"""Products in groups equal those that are computed for each row alone."""

import random

import pytest
import torch
from torch import Tensor

from corolla.models.adapters.products import AdapterBatch, AdapterStacks, LowRank, PlaceKey, SpanAdapter

PLACES: list[tuple[PlaceKey, int, tuple[int, ...]]] = [
    ((0, ("q", "k")), 12, (8, 4)),
    ((0, ("o",)), 8, (12,)),
    ((1, ("o",)), 8, (12,)),
]


def draw_adapter(rng: random.Random) -> SpanAdapter:
    """Draws an adapter with ranks of its own, not at every place, and not for every layer of a place."""
    places: dict[PlaceKey, list[LowRank]] = {}
    for key, num_in, widths in PLACES:
        column = 0
        for width in widths:
            if rng.random() < 0.8:
                rank = rng.randint(1, 5)
                places.setdefault(key, []).append(LowRank(torch.randn(rank, num_in), torch.randn(rank, width), column))
            column += width
    return SpanAdapter(places)


@pytest.mark.parametrize("seed", range(30))
def test_any_batch_equals_its_rows_alone(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    adapters = [draw_adapter(rng) for _ in range(rng.randint(1, 5))]
    stacks = AdapterStacks()
    stacks.stack_of(adapters)
    rows = [(rng.choice([None, *adapters]), rng.choice([1, 1, 1, 3, 40])) for _ in range(rng.randint(1, 9))]
    rows.append((rng.choice(adapters), 1))
    num_tokens = sum(count for _, count in rows)
    batch = AdapterBatch(rows, stacks, torch.device("cpu"))
    assert batch.num_tokens == num_tokens
    for (layer, place), num_in, widths in PLACES:
        given, before = torch.randn(num_tokens, num_in), torch.randn(num_tokens, sum(widths))
        output = before.clone()
        batch.add(layer, place, given, output)
        start = 0
        for adapter, count in rows:
            end = start + count
            expected = before[start:end].clone()
            if adapter is None:
                assert torch.equal(output[start:end], expected)
            elif (layer, place) in adapter.places:
                for each in adapter.places[layer, place].products:
                    change = given[start:end] @ each.down.t() @ each.up
                    expected[:, each.first_column : each.first_column + each.up.shape[1]] += change
            torch.testing.assert_close(output[start:end], expected)
            start = end


def test_long_batches_cost_what_their_adapters_do_and_not_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    key, num_in, widths = PLACES[0]
    one, other = (SpanAdapter({key: [LowRank(torch.randn(2, num_in), torch.randn(2, widths[0]), 0)]}) for _ in range(2))
    multiplied: list[Tensor] = []
    multiply = torch.bmm

    def counted(rows: Tensor, factors: Tensor) -> Tensor:
        multiplied.append(rows)
        return multiply(rows, factors)

    monkeypatch.setattr(torch, "bmm", counted)
    batch = AdapterBatch([(one, 2), (None, 1), (other, 2)] * 20, AdapterStacks(), torch.device("cpu"))
    batch.add(*key, torch.randn(100, num_in), torch.randn(100, sum(widths)))
    assert sum(rows.shape[-1] == num_in for rows in multiplied) == 2


def test_a_row_without_an_adapter_gets_none_of_those_that_ran_before() -> None:
    key, num_in, widths = PLACES[0]
    earlier, *both = (
        SpanAdapter({key: [LowRank(torch.randn(2, num_in), torch.randn(2, widths[0]), 0)]}) for _ in range(3)
    )
    stacks = AdapterStacks()
    stacks.stack_of([earlier, *both])
    batch = AdapterBatch([(None, 1), (both[0], 1), (both[1], 1)], stacks, torch.device("cpu"))
    output = torch.randn(3, sum(widths))
    before = output.clone()
    batch.add(*key, torch.randn(3, num_in), output)
    assert torch.equal(output[0], before[0])
    assert not torch.equal(output[1:], before[1:])
