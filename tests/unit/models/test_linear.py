"""Tuned linear layers give the products of `nn.Linear`, with each kernel."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.kernels.products import plain_layout
from corolla.models import linear
from corolla.models.linear import (
    DenseLinear,
    choose_products,
    is_plain,
    multiply_relaid,
    padded,
    relay,
    replace_linears,
)
from corolla.models.product_rule import Processor


@pytest.mark.parametrize("num_rows", [*range(20), 64, 67, 513])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_both_ways_give_the_product(num_rows: int, bias: bool, is_shared: bool) -> None:
    plain = nn.Linear(24, 40, bias=bias)
    dense = DenseLinear(nn.Parameter(plain.weight.detach()), plain.bias)
    rows = torch.randn(num_rows, 24)
    with torch.inference_mode():
        assert torch.equal(dense(rows), plain(rows))
        dense.use(dense.weight if is_shared else relay(dense.weight))
        torch.testing.assert_close(dense(rows), plain(rows), rtol=0, atol=1e-5)
        torch.testing.assert_close(dense(rows.view(1, num_rows, 24)), plain(rows).unsqueeze(0), rtol=0, atol=1e-5)


def test_rows_are_padded_to_few_sizes_with_little_waste() -> None:
    assert [padded(num_rows) for num_rows in range(17)] == list(range(17))
    assert all(num_rows <= padded(num_rows) <= num_rows * 9 / 8 for num_rows in range(17, 5000))
    assert len({padded(num_rows) for num_rows in range(1025)}) == 17 + 6 * 8


def test_rows_that_lie_in_any_order_are_multiplied_right() -> None:
    weight, rows = torch.randn(40, 24), torch.randn(24, 4).t()
    wide = torch.randn(4, 100)
    for given in (rows, wide[:, 10:34], wide[:, 10:34].unsqueeze(0)):
        expected = functional.linear(given, weight)
        torch.testing.assert_close(multiply_relaid(given, relay(weight)), expected, rtol=0, atol=1e-5)


def test_weights_that_were_laid_out_anew_are_held_once() -> None:
    parts = nn.Linear(8, 4), nn.Linear(8, 12)
    whole = DenseLinear(nn.Parameter(torch.randn(16, 8)), parts=parts)
    for part, view in zip(parts, torch.split(whole.weight.data, [4, 12]), strict=True):
        part.weight = nn.Parameter(view)
    whole.use(relay(whole.weight))
    for layer, num_outputs in ((whole, 16), *zip(parts, (4, 12), strict=True)):
        assert layer.weight.is_meta
        assert layer.weight.shape == (num_outputs, 8)


def test_a_dense_layer_shares_the_parameters_of_the_one_it_replaces() -> None:
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
    assert not is_plain(DenseLinear(nn.Parameter(torch.ones(4, 4))))


def test_all_layers_of_a_shape_multiply_in_the_way_that_is_asked_for() -> None:
    layers = [DenseLinear(nn.Parameter(torch.randn(16, 16))) for _ in range(3)]
    choose_products(layers, asked_for="library")
    assert not any(layer.relaid for layer in layers)
    choose_products(layers, asked_for="onednn")
    assert all(layer.relaid and layer.weight.is_meta for layer in layers)


def test_weights_that_others_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for most_copied in (1 << 20, 0):
        monkeypatch.setattr(linear, "MAX_COPIED_BYTES", most_copied)
        kept = nn.Parameter(weight := torch.randn(6000, 24))
        layer = DenseLinear(kept)
        choose_products([layer], shared=[kept])
        assert (layer.relaid[0] is kept) == (not most_copied)
        assert layer.panels is None
        assert torch.equal(kept, weight)
        torch.testing.assert_close(layer(weight[:3]), functional.linear(weight[:3], weight), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_is_most_of_a_model_is_laid_out_in_pieces(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(linear, "MIN_WHOLE_BYTES", 1000)
    plain = nn.Linear(256, 1000, bias=bias).requires_grad_(False)
    layer = DenseLinear(nn.Parameter(plain.weight.clone()), plain.bias)
    given_up = layer.weight.detach()
    choose_products([layer, DenseLinear(nn.Parameter(torch.randn(16, 256)))], asked_for="onednn")
    assert [piece.shape[0] for piece in layer.relaid] == [128] * 7 + [104]
    assert layer.weight.is_meta
    # Each piece's memory is the system's again before the next piece is laid out.
    assert (given_up == 0).float().mean() > 0.9
    for num_rows in (1, 3, 100):
        rows = torch.randn(num_rows, 256)
        torch.testing.assert_close(layer(rows), plain(rows), rtol=0, atol=1e-5)


def test_a_product_that_is_not_the_same_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DenseLinear(nn.Parameter(torch.randn(16, 16)))
    monkeypatch.setattr(linear, "relay", lambda weight: relay(weight.bfloat16().float()))
    choose_products([layer], asked_for="onednn")
    assert not layer.relaid


def test_a_type_without_a_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(weight: Tensor) -> Tensor:
        raise RuntimeError("the cpu lacks support for it")

    everything = Processor({}, frozenset({"float16", "float64"}))
    layers = [DenseLinear(nn.Parameter(torch.ones(16, 16, dtype=each))) for each in (torch.float16, torch.float64)]
    monkeypatch.setattr(linear, "this_processor", lambda: everything)
    monkeypatch.setattr(linear, "relay", fails)
    choose_products(layers, asked_for="onednn")
    assert not any(layer.relaid for layer in layers)


@pytest.mark.skipif(plain_layout(torch.float32) is None, reason="nothing can be compiled here")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_give_the_product(monkeypatch: pytest.MonkeyPatch, bias: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(linear, "MIN_WHOLE_BYTES", 1000)
    plain = nn.Linear(256, 1001, bias=bias, dtype=dtype).requires_grad_(False)
    layers = [DenseLinear(nn.Parameter(plain.weight.clone()), plain.bias) for _ in range(2)]
    given_up = layers[1].weight.detach()
    choose_products(layers, asked_for="panels")
    for layer in layers:
        assert layer.panels is not None
        assert layer.weight.is_meta
    # Each part's memory is the system's again before the next part is laid out.
    assert (given_up == 0).float().mean() > 0.9
    for num_rows in (1, 3, 100):
        rows = torch.randn(num_rows, 256).to(dtype)
        torch.testing.assert_close(layers[0](rows), plain(rows), rtol=1e-5 if dtype.itemsize == 4 else 2e-2, atol=1e-5)
        assert torch.equal(layers[0](rows.unsqueeze(0))[0], layers[0](rows))
