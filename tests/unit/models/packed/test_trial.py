"""A product with packed weights is tried at start; where it fails, the weights are expanded."""

import pytest
import torch
from torch import Tensor

from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.products import multiplied
from corolla.models.packed import modules
from corolla.models.packed.modules import PackedLinear
from corolla.models.packed.trial import choose_packed_products, failed_trial


def layer_of(name: str, order: Tensor | None = None) -> PackedLinear:
    layout, source = LAYOUTS[name], torch.Generator().manual_seed(0)
    layer = PackedLinear(256, 40, layout)
    panels = torch.randint(0, 256, (3, 256 // layout.block_weights, layout.block_bytes), generator=source)
    # Scales of such bytes are small numbers.
    panels[:, :, : layout.low_at] = 0x11
    layer.panels, layer.order = panels.to(torch.uint8), order
    return layer


def test_a_product_that_fails_or_depends_on_the_batch_gives_way_to_expanded_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).int()
    layers = [layer_of("Q4_0", order), layer_of("Q6_K")]
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    expected = [layer(rows) for layer in layers]
    assert failed_trial(layers[0], torch.float32) is None

    def wrong(*arguments: object) -> Tensor:
        return multiplied(*arguments) * 1.01  # type: ignore[arg-type]

    def mixing(layout: object, given: Tensor, *arguments: object) -> Tensor:
        return multiplied(layout, given + given.mean() * 1e-6, *arguments)  # type: ignore[arg-type]

    for product, sentence in ((wrong, "its results differ by 1"), (mixing, "a row's bits depend on the batch")):
        monkeypatch.setattr(modules, "multiplied", product)
        assert str(failed_trial(layers[0], torch.float32)).startswith(sentence)
    choose_packed_products(layers, torch.float32)
    assert [layer.panels for layer in layers] == [None, None]
    for layer, output in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(rows), output, rtol=1e-5, atol=1e-5)
