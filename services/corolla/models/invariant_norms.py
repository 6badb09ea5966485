"""Norms on GPUs, whose rows do not depend on the other rows of a call.

torch sums a row's numbers in an order that depends on how many rows there are. The Triton kernel sums each row alike.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import torch
from torch import Tensor, nn

from corolla.kernels.kernel_trial import relative_error, try_kernel
from corolla.kernels.triton.availability import missing
from corolla.models.invariant_products import TOLERANCES

log = logging.getLogger(__name__)

_CHECKED_ROWS = 3
# transformers' classes of the kinds "centred", "offset" and "wide" of `launches.NORMS`.
_CENTRED: Final = ("CohereLayerNorm", "Cohere2LayerNorm")
_OFFSET: Final = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "VaultGemmaRMSNorm")
_WIDE: Final = ("FlexOlmoRMSNorm", "GptOssRMSNorm", "HeliumRMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm")


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
