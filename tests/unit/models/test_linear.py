"""Tuned linear layers give the products of `nn.Linear`, with each kernel."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.kernels.products import plain_layout
from corolla.models import linear
from corolla.models.linear import (
    TunedLinear,
    is_plain,
    measured_gain,
    multiply_relaid,
    padded,
    relay,
    replace_linears,
    tune,
)


@pytest.mark.parametrize("num_rows", [*range(20), 64, 67, 513])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_both_ways_give_the_product(num_rows: int, bias: bool, is_shared: bool) -> None:
    plain = nn.Linear(24, 40, bias=bias)
    tuned = TunedLinear(nn.Parameter(plain.weight.detach()), plain.bias)
    rows = torch.randn(num_rows, 24)
    with torch.inference_mode():
        assert torch.equal(tuned(rows), plain(rows))
        tuned.use(tuned.weight if is_shared else relay(tuned.weight))
        torch.testing.assert_close(tuned(rows), plain(rows), rtol=0, atol=1e-5)
        torch.testing.assert_close(tuned(rows.view(1, num_rows, 24)), plain(rows).unsqueeze(0), rtol=0, atol=1e-5)


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
    whole = TunedLinear(nn.Parameter(torch.randn(16, 8)), parts=parts)
    for part, view in zip(parts, torch.split(whole.weight.data, [4, 12]), strict=True):
        part.weight = nn.Parameter(view)
    whole.use(relay(whole.weight))
    for layer, num_outputs in ((whole, 16), *zip(parts, (4, 12), strict=True)):
        assert layer.weight.is_meta
        assert layer.weight.shape == (num_outputs, 8)


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


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the result of the measurement."""
    return lambda found: monkeypatch.setattr(linear, "measured_gain", lambda *_: found)


@pytest.fixture
def no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves weights as they are, as where nothing can be compiled."""
    monkeypatch.setattr(linear, "plain_layout", lambda _: None)


@pytest.mark.usefixtures("no_panels")
def test_the_faster_way_is_chosen_for_all_layers_of_a_shape(gain: Callable[[float], None]) -> None:
    layers = [TunedLinear(nn.Parameter(torch.randn(16, 16))) for _ in range(3)]
    gain(1.0)
    tune(layers)
    assert not any(layer.relaid for layer in layers)
    gain(2.0)
    tune(layers)
    assert all(layer.relaid and layer.weight.is_meta for layer in layers)


def test_weights_that_others_read_stay(monkeypatch: pytest.MonkeyPatch, gain: Callable[[float], None]) -> None:
    gain(2.0)
    monkeypatch.setattr(linear, "MIN_TIMED_BYTES", 1000)
    for most_copied in (1 << 20, 0):
        monkeypatch.setattr(linear, "MAX_COPIED_BYTES", most_copied)
        kept = nn.Parameter(weight := torch.randn(700, 24))
        layer = TunedLinear(kept)
        tune([layer], shared=[kept])
        assert (layer.relaid[0] is kept) == (not most_copied)
        assert torch.equal(kept, weight)
        torch.testing.assert_close(layer(weight[:3]), functional.linear(weight[:3], weight), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("no_panels")
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_is_most_of_a_model_is_laid_out_in_pieces(
    monkeypatch: pytest.MonkeyPatch, gain: Callable[[float], None], bias: bool
) -> None:
    gain(2.0)
    monkeypatch.setattr(linear, "MIN_TIMED_BYTES", 1000)
    plain = nn.Linear(256, 1000, bias=bias).requires_grad_(False)
    layer = TunedLinear(nn.Parameter(plain.weight.clone()), plain.bias)
    given_up = layer.weight.detach()
    tune([layer, TunedLinear(nn.Parameter(torch.randn(16, 256)))])
    assert [piece.shape[0] for piece in layer.relaid] == [128] * 7 + [104]
    assert layer.weight.is_meta
    # Each piece's memory is the system's again before the next piece is laid out.
    assert (given_up == 0).float().mean() > 0.9
    for num_rows in (1, 3, 100):
        rows = torch.randn(num_rows, 256)
        torch.testing.assert_close(layer(rows), plain(rows), rtol=0, atol=1e-5)


def test_the_gain_is_the_ratio_of_the_best_times() -> None:
    def readings() -> Iterator[float]:
        """Before the plain product, between the two, and after the other one."""
        now_s = 0.0
        for plain_s, relaid_s in itertools.cycle([(5.0, 1.0), (2.0, 3.0)]):
            yield now_s
            yield (now_s := now_s + plain_s)
            yield (now_s := now_s + relaid_s)

    clock, weight = readings(), torch.randn(16, 16)
    assert measured_gain(torch.ones(1, 16), [weight], [relay(weight)], multiply_relaid, lambda: next(clock)) == 2.0


def test_a_spent_budget_leaves_the_librarys_order() -> None:
    layer = TunedLinear(nn.Parameter(torch.randn(16, 16)))
    tune([layer], budget_s=0.0)
    assert not layer.relaid


@pytest.mark.usefixtures("no_panels")
def test_a_product_that_is_not_the_same_is_not_used(
    monkeypatch: pytest.MonkeyPatch, gain: Callable[[float], None]
) -> None:
    gain(2.0)
    layer = TunedLinear(nn.Parameter(torch.randn(16, 16)))
    monkeypatch.setattr(linear, "relay", lambda weight: relay(weight.bfloat16().float()))
    tune([layer])
    assert not layer.relaid


def test_a_type_without_a_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch, gain: Callable[[float], None]) -> None:
    gain(2.0)

    def fails(weight: Tensor) -> Tensor:
        raise RuntimeError("the cpu lacks support for it")

    layers = [TunedLinear(nn.Parameter(torch.ones(16, 16, dtype=each))) for each in (torch.float16, torch.float64)]
    monkeypatch.setattr(linear, "relay", fails)
    tune(layers)
    assert not any(layer.relaid for layer in layers)


needs_panels = pytest.mark.skipif(plain_layout(torch.float32) is None, reason="nothing can be compiled here")


@needs_panels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_give_the_product(
    monkeypatch: pytest.MonkeyPatch, gain: Callable[[float], None], bias: bool, dtype: torch.dtype
) -> None:
    if plain_layout(dtype) is None:
        pytest.skip("this processor has no instructions for pairs of bfloat16")
    gain(2.0)
    monkeypatch.setattr(linear, "MIN_TIMED_BYTES", 1000)
    plain = nn.Linear(256, 1001, bias=bias, dtype=dtype).requires_grad_(False)
    layers = [TunedLinear(nn.Parameter(plain.weight.clone()), plain.bias) for _ in range(2)]
    given_up = layers[1].weight.detach()
    tune(layers)
    for layer in layers:
        assert layer.panels is not None
        assert layer.weight.is_meta
    # Each part's memory is the system's again before the next part is laid out.
    assert (given_up == 0).float().mean() > 0.9
    for num_rows in (1, 3, 100):
        rows = torch.randn(num_rows, 256).to(dtype)
        torch.testing.assert_close(layers[0](rows), plain(rows), rtol=1e-5 if dtype.itemsize == 4 else 2e-2, atol=1e-5)
        assert torch.equal(layers[0](rows.unsqueeze(0))[0], layers[0](rows))


@needs_panels
@pytest.mark.parametrize("gains, has_panels", [((2.0, 2.0), True), ((2.0, 2.8), True), ((2.0, 3.0), False)])
def test_panels_are_for_all_shapes_or_none(
    monkeypatch: pytest.MonkeyPatch, gains: tuple[float, float], has_panels: bool
) -> None:
    """`gains`: of panels, and of oneDNN."""

    def gain(*arguments: object) -> float:
        return gains[arguments[3] is multiply_relaid]

    monkeypatch.setattr(linear, "measured_gain", gain)
    layers = [TunedLinear(nn.Parameter(torch.randn(16 * count, 32))) for count in (1, 2, 2)]
    tune(layers)
    assert [layer.panels is not None for layer in layers] == [has_panels] * 3
    assert [bool(layer.relaid) for layer in layers] == [not has_panels] * 3


@needs_panels
def test_weights_that_others_read_are_never_panels(gain: Callable[[float], None]) -> None:
    gain(2.0)
    layer = TunedLinear(kept := nn.Parameter(torch.randn(32, 32)))
    tune([layer], shared=[kept])
    assert layer.panels is None
    assert not kept.is_meta
