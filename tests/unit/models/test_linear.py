"""Tuned linear layers give what `nn.Linear` gives, whichever order they were told to use."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from corolla.models.linear import MAX_TUNED_ROWS, TunedLinear, is_plain, multiply_columns, replace_linears, tune


@pytest.mark.parametrize("num_rows", range(1, 20))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by_columns", [True, False])
def test_both_orders_give_the_product(num_rows: int, bias: bool, by_columns: bool) -> None:
    plain = nn.Linear(24, 40, bias=bias)
    tuned = TunedLinear(nn.Parameter(plain.weight), plain.bias)
    tuned.by_columns = (by_columns,) * (MAX_TUNED_ROWS + 1)
    rows = torch.randn(num_rows, 24)
    torch.testing.assert_close(tuned(rows), plain(rows), rtol=0, atol=1e-5)
    torch.testing.assert_close(tuned(rows.view(1, num_rows, 24)), plain(rows).unsqueeze(0), rtol=0, atol=1e-5)


def test_rows_that_lie_column_by_column_are_multiplied_right() -> None:
    weight, rows = torch.randn(40, 24), torch.randn(24, 4).t()
    torch.testing.assert_close(multiply_columns(weight, rows), functional.linear(rows, weight), rtol=0, atol=1e-5)


def test_a_tuned_layer_shares_the_parameters_of_the_one_it_replaces() -> None:
    root = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 4, bias=False)))
    weights = [parameter.data_ptr() for parameter in root.parameters()]
    replaced = replace_linears(root)
    assert len(replaced) == 2
    assert [parameter.data_ptr() for parameter in root.parameters()] == weights
    assert replace_linears(root) == []


def test_only_torchs_own_linear_layers_are_plain() -> None:
    class Quantised(nn.Linear):
        pass

    assert is_plain(nn.Linear(4, 4))
    assert not is_plain(Quantised(4, 4))
    assert not is_plain(nn.Embedding(4, 4))
    assert not is_plain(TunedLinear(nn.Parameter(torch.ones(4, 4))))


def test_the_faster_order_is_chosen_for_every_number_of_rows() -> None:
    # Three readings per repetition: before the rows' order, between, and after the columns' order.
    layer = TunedLinear(nn.Parameter(torch.randn(16, 16)))
    readings = iter(_scripted(rows_s=2e-6, columns_s=1e-6))
    tune([layer], budget_s=1.0, clock=lambda: next(readings))
    assert layer.by_columns == (False,) + (True,) * MAX_TUNED_ROWS
    readings = iter(_scripted(rows_s=1e-6, columns_s=1e-6))
    tune([layer], budget_s=1.0, clock=lambda: next(readings))
    assert layer.by_columns == (False,) * (MAX_TUNED_ROWS + 1)


def _scripted(rows_s: float, columns_s: float) -> Iterator[float]:
    """Readings of a clock for `tune`: the deadline's, then for each measurement one check and its repetitions'."""
    now_s = 0.0
    yield now_s
    for _ in range(MAX_TUNED_ROWS):
        yield now_s
        is_clear = max(rows_s, columns_s) > 1.25 * min(rows_s, columns_s)
        for _ in range(7 if is_clear else 24):
            yield now_s
            yield (now_s := now_s + rows_s)
            yield (now_s := now_s + columns_s)


def test_a_spent_budget_leaves_the_librarys_order() -> None:
    layer = TunedLinear(nn.Parameter(torch.randn(16, 16)))
    tune([layer], budget_s=0.0)
    assert not any(layer.by_columns)


def test_other_types_are_not_tuned() -> None:
    layer = TunedLinear(nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16)))
    tune([layer])
    assert not any(layer.by_columns)
