"""Products by whose choice no row depends on the other rows of a call; see `kernels/product_choice`.

Tensors are on the device of the weights and have their dtype.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from corolla.kernels.product_choice import BETWEEN, ProductTrial, chosen_product, rung_of, rungs
from corolla.kernels.triton.availability import missing

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes `rows W^T + b` from rows `[R, in]`, weights `[out, in]` and a bias `[out]` or None; returns `[R, out]`."""

log = logging.getLogger(__name__)

TOLERANCES: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest error of a product, as a part of its largest number."""

# The product in float64 is computed for so many outputs only, since all weights in float64 may not fit into memory.
_CHECKED_OUTPUTS: Final = 512
# The outputs of at least so many rows are compared together.
_COMPARED_ROWS: Final = 256
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


def triton_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies with the Triton kernel.

    Args:
        rows: `[R, in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.

    Returns:
        `[R, out]` in the weights' dtype, on their device.
    """
    from corolla.kernels.triton.launches import multiply

    return multiply(rows.contiguous(), weight, bias)


PRODUCTS: Final[Mapping[str, Product]] = {"ladder": functional.linear, "triton": triton_product}
"""The products that keep the rule, the fastest first. `ladder` is torch's own function, in calls padded to a ladder."""


@dataclass(frozen=True, slots=True)
class InvariantProduct:
    """The product that was chosen for weights of one shape.

    Attributes:
        name: a key of PRODUCTS.
        multiply: the product.
        ladder: the numbers of rows to which calls are padded.
    """

    name: str
    multiply: Product
    ladder: tuple[int, ...]

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies so that a row's bits do not depend on the other rows.

        Args:
            rows: `[R, in]`.
            weight: `[out, in]`.
            bias: `[out]` or None.

        Returns:
            `[R, out]` in the weights' dtype, on their device.
        """
        if self.name != "ladder":
            return self.multiply(rows, weight, bias)
        num_rows, most = rows.shape[0], self.ladder[-1]
        if num_rows > most:
            return torch.cat([self(part, weight, bias) for part in torch.split(rows, most)])
        rung = rung_of(num_rows, self.ladder)
        if rung == num_rows:
            return self.multiply(rows, weight, bias)
        return self.multiply(functional.pad(rows, (0, 0, 0, rung - num_rows)), weight, bias)[:num_rows]


@torch.inference_mode()
def choose_invariant_product(
    weight: Tensor, bias: Tensor | None = None, products: Mapping[str, Product] | None = None
) -> InvariantProduct | None:
    """Measures with these weights which product keeps the rule; None: none does, or triton is missing.

    Args:
        weight: `[out, in]`, in bfloat16, float16 or float32.
        bias: `[out]` or None.
        products: the products to try, in this order; None: PRODUCTS.
    """
    candidates = PRODUCTS if products is None else products
    ladder = rungs(weight.shape[0])

    def measured() -> Iterator[tuple[str, ProductTrial]]:
        for name, product in candidates.items():
            if name == "triton" and (lack := missing()) is not None:
                log.warning("no product of its own for these weights", extra={"failure": lack})
                continue
            try:
                trial = try_product(product, weight, bias, ladder)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                # Compilers raise errors of many kinds, and none may keep a server from starting.
                failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                log.warning("a product does not work here", extra={"product": name, "failure": failure})
                continue
            yield name, trial

    chosen = chosen_product(measured(), TOLERANCES[weight.dtype])
    shape = "x".join(map(str, weight.shape))
    if chosen is None:
        log.warning("rows of products with these weights depend on the batch", extra={"shape": shape})
        return None
    name, trial = chosen
    ladder = tuple(rung for rung in ladder if rung not in trial.broken)
    log.info("product chosen", extra={"shape": shape, "product": name, "left_out": sorted(trial.broken)})
    return InvariantProduct(name, candidates[name], ladder)


def try_product(product: Product, weight: Tensor, bias: Tensor | None, ladder: tuple[int, ...]) -> ProductTrial:
    """Multiplies as many random rows as the ladder's last rung has, in calls of every rung's number of rows.

    The trial begins with the few largest calls, and ends at the first rung, not of BETWEEN, that breaks the rule.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
        ladder: the numbers of rows of a call, in rising order.
    """
    num_rows = ladder[-1]
    generator = torch.Generator(device=weight.device).manual_seed(0)
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
    whole = product(rows, weight, bias)
    differing: dict[int, int] = {}
    for rung in reversed(ladder[:-1]):
        count = torch.zeros((), dtype=torch.int64, device=weight.device)
        # Calls of one row are thousands, so each should cost the host little more than its product.
        num_compared = rung * -(-_COMPARED_ROWS // rung)
        for start in range(0, num_rows, num_compared):
            # Where a rung does not divide the number of rows, the last calls have rows of earlier ones, too.
            first = max(0, min(start, num_rows - num_compared))
            there = slice(first, first + num_compared)
            found = torch.cat([product(part, weight, bias) for part in torch.split(rows[there], rung)])
            count += (_bits(found) != _bits(whole[there])).any(dim=-1).sum()
        differing[rung] = int(count)
        if differing[rung] and rung not in BETWEEN:
            break
    return ProductTrial(differing, _error(whole, rows, weight, bias))


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(_INTEGERS[numbers.element_size()])


def _error(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    step = -(-weight.shape[0] // _CHECKED_OUTPUTS)
    expected = functional.linear(
        rows.double(), weight[::step].double(), None if bias is None else bias[::step].double()
    )
    return float((found[:, ::step].double() - expected).abs().max() / expected.abs().max())
