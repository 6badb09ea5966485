"""Reads an adapter's weights for one span, checks them against the model's layers, and groups them by place."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from corolla.chassis.errors import AdapterError
from corolla.models.adapters.file import AdapterContents, ProductPart, read_adapter, read_parts
from corolla.models.adapters.products import LowRank, PlaceKey, SpanAdapter
from corolla.models.span_model import SpanModel

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ALIGNED_NUMBERS: Final = 64


def adapter_bytes(folder: Path, model: SpanModel) -> int:
    """Bytes of an adapter's products for a span. Raises AdapterError if the adapter cannot be served."""
    num_values = sum(part.num_values for part in read_parts(folder) if _is_within(part, model))
    return num_values * model.dtype.itemsize


def _is_within(part: ProductPart, model: SpanModel) -> bool:
    return model.span.start <= part.block < model.span.end


def load_adapter(
    folder: Path,
    model: SpanModel,
    num_blocks: int,
    *,
    digest: str = "",
    check_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> SpanAdapter:
    """Reads an adapter's products for a span, in the model's dtype and on its device.

    Args:
        folder: the folder that PEFT wrote.
        digest: the digest that the adapter must have; empty: any.
        check_bytes: is called with the bytes that the products will take, before memory is allocated; may raise.

    Raises:
        AdapterError: the adapter cannot be served, has another digest, or was not made for this model.
    """
    contents = read_adapter(
        folder, lambda part: _is_within(part, model),
        lambda num_values: check_bytes(num_values * model.dtype.itemsize),
    )  # fmt: skip
    if digest and contents.digest != digest:
        raise AdapterError("its files differ from those that were registered; register them again")
    for part in contents.parts:
        if part.block >= num_blocks or not part.name.endswith(f"{model.family.layers}.{part.block}.{part.module}"):
            raise AdapterError(f"it was made for another model: this one has no {part.name[:128]}")
    return SpanAdapter(_placed(contents, model))


def _placed(contents: AdapterContents, model: SpanModel) -> dict[PlaceKey, list[LowRank]]:
    factors = {(part.block, part.module, part.part): part for part in contents.data}
    placed: dict[PlaceKey, list[LowRank]] = {}
    for block, module, kind in factors:
        if kind != "A":
            continue
        layer = block - model.span.start
        found = model.linear_place(layer, module)
        if found is None:
            raise AdapterError(f"it was made for another model: block {block} has no linear layer {module[:128]}")
        down, up = factors[block, module, "A"], factors[block, module, "B"]
        if (down.shape[1], up.shape[0]) != found.shape:
            raise AdapterError(f"it was made for another model: {module[:128]} has other sizes")
        scaling = contents.config.scaling_of(down.name)
        product = LowRank(
            down=_tensor(down, contents.data).to(model.dtype),
            up=(_tensor(up, contents.data).float() * scaling).t().contiguous().to(model.dtype),
            first_column=found.first_column,
        )
        # Padding of a mixed batch adds 0 times these numbers to rows of other adapters, and 0 times infinity is NaN.
        if not (bool(torch.isfinite(product.down).all()) and bool(torch.isfinite(product.up).all())):
            raise AdapterError(f"{down.name[:128]} has numbers that are not finite")
        placed.setdefault((layer, found.place), []).append(product)
    return placed if model.device.type == "cpu" else on_device(placed, model.device)


def on_device(placed: Mapping[PlaceKey, Sequence[LowRank]], device: torch.device) -> dict[PlaceKey, list[LowRank]]:
    """The same products on a device, by one copy.

    An adapter has hundreds of small factors, and each copy would wait for the step that the device computes. Factors
    are `[rank, in]` and `[rank, out]`, all in one dtype on the CPU.
    """
    products = [product for each in placed.values() for product in each]
    factors = [factor for product in products for factor in (product.down, product.up)]
    # Kernels read fastest from aligned addresses.
    padded = [functional.pad(factor.flatten(), (0, -factor.numel() % _ALIGNED_NUMBERS)) for factor in factors]
    whole = torch.split(torch.cat(padded).to(device), [len(each) for each in padded])
    moved = iter([part[: factor.numel()].view(factor.shape) for part, factor in zip(whole, factors, strict=True)])
    return {
        place: [LowRank(down=next(moved), up=next(moved), first_column=product.first_column) for product in each]
        for place, each in placed.items()
    }


def _tensor(part: ProductPart, data: Mapping[ProductPart, bytearray]) -> Tensor:
    return torch.frombuffer(data[part], dtype=_DTYPES[part.dtype]).reshape(part.shape)
