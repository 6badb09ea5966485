"""Servers take a product that keeps the rule, and no other: no row depends on the other rows of a call."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.kernels.kernel_trial import KernelTrial
from corolla.kernels.product_choice import BETWEEN, LADDER, rung_of, rungs
from corolla.models.invariant import Product, choose_invariant_product, try_product
from corolla.models.linear import DenseLinear, make_invariant

WEIGHT = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(7, generator=torch.Generator().manual_seed(2))


def by_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums in one order, whatever the number of rows."""
    total = torch.zeros(len(rows), len(weight)) if bias is None else bias.repeat(len(rows), 1)
    for inner in range(weight.shape[1]):
        total = total + rows[:, inner, None] * weight[None, :, inner]
    return total


class Splitting:
    """A product that sums in another order for some numbers of rows, which shows in one number of one row only.

    Args:
        rows_of_call: the numbers of rows.
        row: a row's index within the large input.
    """

    def __init__(self, rows_of_call: set[int], row: int) -> None:
        self._rows_of_call, self._row = rows_of_call, row
        self.calls: list[int] = []

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.calls.append(len(rows))
        output = by_rows(rows, weight, bias)
        if len(rows) in self._rows_of_call:
            generator = torch.Generator().manual_seed(0)
            marked = torch.randn(LADDER[-1], weight.shape[1], generator=generator)[self._row]
            there = (rows == marked).all(dim=-1)
            output[there, 3] = torch.nextafter(output[there, 3], torch.tensor(torch.inf))
        return output


def test_the_ladder_is_shorter_where_outputs_are_many() -> None:
    assert rungs(4096) == LADDER
    assert rungs(128_256)[-1] == 1024
    assert rungs(1 << 40) == (1,)
    assert [rung_of(count, LADDER) for count in (1, 3, 64, 65, 513, 2048)] == [1, 4, 64, 128, 640, 2048]


@pytest.mark.parametrize("rung, row", [(1, 2047), (16, 1337), (1024, 0)])
def test_one_number_of_one_row_of_many_breaks_the_rule(rung: int, row: int) -> None:
    splitting = Splitting({rung}, row)
    found = try_product(splitting, WEIGHT, BIAS, LADDER)
    assert found.failure == "a row's bits depend on the batch"
    assert set(splitting.calls) == {each for each in LADDER if each >= rung}
    chosen = choose_invariant_product(WEIGHT, BIAS, {"ladder": splitting, "own": by_rows})
    assert chosen is not None
    assert chosen.name == "own"
    assert choose_invariant_product(WEIGHT, BIAS, {"ladder": splitting}) is None


@pytest.mark.parametrize("rung, row", [(192, 2047), (640, 1337), (1536, 0)])
def test_a_size_that_only_spares_padding_may_break_the_rule(rung: int, row: int) -> None:
    splitting = Splitting({rung}, row)
    chosen = choose_invariant_product(WEIGHT, BIAS, {"ladder": splitting, "own": by_rows})
    assert chosen is not None
    assert chosen.name == "ladder"
    assert set(LADDER) - set(chosen.ladder) == {rung}
    splitting.calls.clear()
    chosen(torch.randn(rung, 5), WEIGHT, BIAS)
    assert splitting.calls == [next(each for each in LADDER if each > rung)]


@pytest.mark.parametrize("num_rungs", [1, 4, len(LADDER)])
def test_all_rows_are_multiplied_in_calls_of_every_rung(num_rungs: int) -> None:
    ladder = LADDER[:num_rungs]
    most = ladder[-1]
    given: dict[int, list[Tensor]] = {}

    def noted(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.setdefault(len(rows), []).append(rows)
        return by_rows(rows, weight, bias)

    found = try_product(noted, WEIGHT, BIAS, ladder)
    assert found == KernelTrial(None)
    assert given.keys() == set(ladder)
    for rung, parts in given.items():
        rows = {row for part in parts for row in map(tuple, part.tolist())}
        assert rows == set(map(tuple, given[most][0].tolist()))
        assert rung in BETWEEN or torch.equal(torch.cat(parts), given[most][0])
    assert len(set(map(tuple, given[most][0].tolist()))) == most


def test_a_product_that_is_wrong_in_every_call_is_not_taken() -> None:
    def doubled(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * by_rows(rows, weight, bias)

    assert choose_invariant_product(WEIGHT, None, {"ladder": doubled}) is None


def test_a_product_that_does_not_run_here_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_rows: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
        raise FileNotFoundError("there is no C compiler\nmore lines")

    assert choose_invariant_product(WEIGHT, BIAS, {"wrong": fails}) is None
    chosen = choose_invariant_product(WEIGHT, BIAS, {"other": fails, "own": by_rows})
    assert chosen is not None
    assert chosen.name == "own"
    failures = [vars(each)["failure"] for each in caplog.records if "is not used" in each.message]
    assert failures == ["FileNotFoundError: there is no C compiler"] * 2


def test_calls_are_padded_to_the_sizes_that_were_tried() -> None:
    # A size between two rungs breaks the rule; no call has it.
    splitting = Splitting({3, 5, 6, 7, 100}, 0)
    layer = DenseLinear(nn.Parameter(WEIGHT, requires_grad=False), nn.Parameter(BIAS, requires_grad=False))
    assert layer.way == "library"
    make_invariant([layer], {"ladder": splitting})
    assert layer.way == "ladder"
    splitting.calls.clear()
    rows = torch.randn(2500, 5)
    whole = layer.forward(rows)
    torch.testing.assert_close(whole, functional.linear(rows, WEIGHT, BIAS))
    for start, end in ((0, 3), (4, 9), (2040, 2140), (2499, 2500)):
        assert torch.equal(layer.forward(rows[start:end]), whole[start:end])
    assert torch.equal(layer.forward(rows[:6].view(2, 3, 5)), whole[:6].view(2, 3, 7))
    assert splitting.calls == [2048, 512, 4, 8, 128, 1, 8]


def test_layers_of_one_shape_are_tried_once() -> None:
    products: dict[str, Product] = {"ladder": Splitting(set(), 0)}
    layers = [DenseLinear(nn.Parameter(torch.randn(7, 5), requires_grad=False)) for _ in range(3)]
    make_invariant(layers, products)
    assert [layer.way for layer in layers] == ["ladder"] * 3
    splitting = products["ladder"]
    assert isinstance(splitting, Splitting)
    assert splitting.calls.count(1) == LADDER[-1]
