"""Products and norms by whose choice no row depends on the other rows of a call; see `kernels/product_choice`.

torch sums the numbers of a norm in an order that depends on how many rows there are; the Triton kernel does not.

Tensors are on the device of the weights and have their dtype.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.kernels.kernel_trial import KernelTrial, relative_error, try_kernel
from corolla.kernels.product_choice import BETWEEN, rung_of, rungs
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

    shape = "x".join(map(str, weight.shape))
    for name, product in candidates.items():
        lack = missing() if name == "triton" else None
        trial = KernelTrial[int](lack) if lack is not None else try_product(product, weight, bias, ladder, BETWEEN)
        if trial.failure is None:
            ladder = tuple(rung for rung in ladder if rung not in trial.differing)
            log.info("product chosen", extra={"shape": shape, "product": name, "left_out": sorted(trial.differing)})
            return InvariantProduct(name, product, ladder)
        log.warning("a product is not used", extra={"shape": shape, "product": name, "failure": trial.failure})
    log.warning("rows of products with these weights depend on the batch", extra={"shape": shape})
    return None


def try_product(
    product: Product, weight: Tensor, bias: Tensor | None, ladder: tuple[int, ...], may_differ: Collection[int] = ()
) -> KernelTrial[int]:
    """Multiplies as many random rows as the ladder's last rung has, in calls of every rung's number of rows.

    The trial begins with the few largest calls.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
        ladder: the numbers of rows of a call, in rising order.
        may_differ: rungs at which a row may have other bits.
    """
    num_rows = ladder[-1]
    generator = torch.Generator(device=weight.device).manual_seed(0)
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)

    def run(rung: int) -> Iterator[Tensor]:
        # Calls of one row are thousands, so each should cost the host little more than its product.
        num_compared = rung * -(-_COMPARED_ROWS // rung)
        for start in range(0, num_rows, num_compared):
            outputs = []
            for begin in range(start, min(start + num_compared, num_rows), rung):
                # Where a rung does not divide the number of rows, the last call has rows of earlier ones, too.
                first = min(begin, num_rows - rung)
                outputs.append(product(rows[first : first + rung], weight, bias)[begin - first :])
            yield torch.cat(outputs)

    return try_kernel(
        run, reversed(ladder), lambda found: _error(found, rows, weight, bias), TOLERANCES[weight.dtype], may_differ
    )


def _error(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    step = -(-weight.shape[0] // _CHECKED_OUTPUTS)
    part = None if bias is None else bias[::step].double()
    return relative_error(found[:, ::step], functional.linear(rows.double(), weight[::step].double(), part))


_CHECKED_ROWS = 3
# transformers' classes of the kinds "centred", "offset" and "wide" of `launches.NORMS`.
_CENTRED: Final = ("CohereLayerNorm", "Cohere2LayerNorm")
_OFFSET: Final = (
    "Gemma2RMSNorm", "Gemma3RMSNorm", "GemmaRMSNorm", "Qwen3NextRMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3_5RMSNorm",
    "VaultGemmaRMSNorm",
)  # fmt: skip
_WIDE: Final = (
    "AfmoeRMSNorm", "FlexOlmoRMSNorm", "GptOssRMSNorm", "HeliumRMSNorm", "NemotronHRMSNorm", "Olmo2RMSNorm",
    "Olmo3RMSNorm", "OlmoHybridRMSNorm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the last dimension.

    Attributes:
        weight: `[H]` in the model's dtype or float32, on its device; `[heads, head_dim]` where each head has its own.
        epsilon: added to the mean of the squares.
        kind: one of `launches.NORMS`.
        bias: `[H]` likewise, what is added to the products; None: nothing.
    """

    weight: Tensor
    epsilon: float
    kind: str = "rounded"
    bias: Tensor | None = None

    @classmethod
    def from_module(cls, module: Any) -> Self | None:
        """The norm that a family's module computes, judged by its class; None: it is of another kind."""
        name = type(module).__name__
        if type(module) is nn.LayerNorm and module.elementwise_affine and len(module.normalized_shape) == 1:
            return cls(module.weight, module.eps, "centred", module.bias)
        if name == "NemotronLayerNorm1P":
            return cls(module.weight + 1, module.eps, "centred", module.bias)
        if name == "StableLmLayerNormPerHead":
            return cls(torch.stack([each.weight for each in module.norms]), module.norms[0].eps, "centred")
        if name in _CENTRED:
            return cls(module.weight, module.variance_epsilon, "centred")
        if name in _OFFSET:
            return cls(module.weight, module.eps, "offset")
        if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            return cls(module.weight, module.variance_epsilon, "wide" if name in _WIDE else "rounded")
        return None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension of `hidden`, `[..., H]`; returns the same shape and dtype."""
        from corolla.kernels.triton.launches import add_norm

        rows = hidden.reshape(-1, hidden.shape[-1])
        normed, _ = add_norm(rows.contiguous(), None, self.weight, self.epsilon, kind=self.kind, bias=self.bias)
        return normed.view(hidden.shape)


class InvariantNorm(nn.Module):
    """A family's norm, computed by the Triton kernel."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, norm.weight)
        self._norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension of `hidden`, `[..., H]` on the weight's device; the dtype stays."""
        return self._norm(hidden)


@torch.inference_mode()
def invariant_norm(module: nn.Module) -> nn.Module:
    """A module with the results of `module` up to rounding, whose rows do not depend on each other.

    It is `module` itself where the kernel does not compute what `module` does, or cannot run here.
    """
    norm, failure = Norm.from_module(module), missing()
    if norm is None or failure is not None or norm.weight.dtype not in TOLERANCES:
        log.warning(
            "rows of the final norm may depend on the batch",
            extra={"failure": failure or f"there is no kernel for {type(module).__name__}"},
        )
        return module
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_CHECKED_ROWS, len(norm.weight), generator=generator).to(norm.weight)

    def run(num_rows: int) -> Iterator[Tensor]:
        return (norm(part) for part in torch.split(hidden, num_rows))

    trial = try_kernel(
        run, (_CHECKED_ROWS, 1), lambda found: relative_error(found, module(hidden)), TOLERANCES[norm.weight.dtype]
    )
    if trial.failure is not None:
        log.warning("rows of the final norm may depend on the batch", extra={"failure": trial.failure})
        return module
    return InvariantNorm(norm)
