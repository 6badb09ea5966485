"""Tries the grouped products of a mixture of experts with the server's own weights, before they are used."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.expert_routing import Routing
from corolla.kernels.kernel_trial import relative_error, try_kernel
from corolla.models.invariant_products import TOLERANCES, try_product
from corolla.models.mixtures import ExpertWeights, Mixture, matrix_of, multiply_experts

# The product in float64 is computed for about so many outputs only; all weights in float64 may not fit into memory.
_CHECKED_OUTPUTS: Final = 128
# Calls of single tokens are many, so only so many tokens are tried one by one.
_SINGLE_TOKENS: Final = 16


@torch.inference_mode()
def failed_mixture_trial(mixture: Mixture, dtype: torch.dtype, row_counts: Sequence[int]) -> str | None:
    """Returns what failed, as a sentence's end, or None if the products hold.

    They hold if each token and each pair has the same bits in calls of all sizes, near the numbers of float64. These
    calls are of the kinds that steps have, so that Triton compiles nothing while a server serves.

    Args:
        row_counts: for how many rows of an expert a product takes each of its tiles, in rising order.
    """
    num_chosen = mixture.routing.num_chosen
    # A token's pairs share its row, and have rows of their own behind the gate.
    return (
        _failed_router(mixture, (1, *row_counts))
        or failed_experts_trial(mixture.gate_up, dtype, num_chosen, row_counts, bias=mixture.gate_up_bias)
        or failed_experts_trial(mixture.down, dtype, num_chosen, row_counts, num_chosen, mixture.down_bias)
    )


@torch.inference_mode()
def failed_experts_trial(
    weights: ExpertWeights,
    dtype: torch.dtype,
    num_chosen: int,
    row_counts: Sequence[int],
    rows_of_token: int = 1,
    bias: Tensor | None = None,
) -> str | None:
    """Does what `failed_mixture_trial` does, for the products of one weight.

    Args:
        num_chosen: how many experts a token gets.
        row_counts: for how many rows of an expert a product takes each of its tiles, in rising order.
        rows_of_token: 1, or `num_chosen`: each pair has a row of its own.
        bias: `[experts, out]` in `dtype`, on the device of the weights; None: there is none.
    """
    num_experts, _, num_inputs = weights.shape
    device = matrix_of(weights, 0, dtype).device
    if not any(bool(matrix_of(weights, expert, dtype).any()) for expert in range(num_experts)):
        return None  # made-up weights may be zero in this dtype
    routing = Routing(num_experts, num_chosen, "chosen")
    sizes = [-(-count * num_experts // num_chosen) for count in row_counts]
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(sizes[-1], rows_of_token, num_inputs, generator=generator, device=device).to(dtype)
    logits = torch.randn(sizes[-1], num_experts, generator=generator, device=device)

    def run(size: int) -> Iterator[Tensor]:
        num_tokens = _SINGLE_TOKENS if size == 1 else len(rows)
        for part, own in zip(torch.split(rows[:num_tokens], size), torch.split(logits[:num_tokens], size), strict=True):
            yield _products(part, own, weights, bias, routing)

    trial = try_kernel(
        run, (sizes[-1], 1, *sizes[:-1]), lambda whole: _error(whole, rows, logits, weights, bias), TOLERANCES[dtype]
    )
    return trial.failure and f"products of its experts: {trial.failure}"


def _failed_router(mixture: Mixture, ladder: tuple[int, ...]) -> str | None:
    from corolla.kernels.triton.launches import multiply

    # A router may be narrower than its rows; the trial draws rows like the weight.
    weight = mixture.router_weight.float() if mixture.is_wide else mixture.router_weight
    bias = mixture.router_bias
    trial = try_product(lambda rows, *_: multiply(rows, mixture.router_weight, bias), weight, bias, ladder)
    return trial.failure and f"the product of its router: {trial.failure}"


def _products(rows: Tensor, logits: Tensor, weights: ExpertWeights, bias: Tensor | None, routing: Routing) -> Tensor:
    """The product of each token with each of its experts: `[N, chosen, out]`."""
    from corolla.kernels.triton.expert_launches import choose_experts

    found = multiply_experts(rows.flatten(0, 1), weights, choose_experts(logits, routing), bias)
    return found.view(len(rows), routing.num_chosen, -1)


def _error(found: Tensor, rows: Tensor, logits: Tensor, weights: ExpertWeights, bias: Tensor | None) -> float:
    """The largest difference from the product in float64, as a part of its largest number."""
    step = -(-weights.shape[1] // _CHECKED_OUTPUTS)
    ids = logits.topk(found.shape[1]).indices
    rows = rows.expand(-1, found.shape[1], -1)
    found = found[..., ::step].double()
    expected = torch.empty_like(found)
    for expert in range(logits.shape[1]):
        tokens, ranks = torch.where(ids == expert)
        own = rows[tokens, ranks].double() @ matrix_of(weights, expert, rows.dtype)[::step].double().T
        expected[tokens, ranks] = own if bias is None else own + bias[expert, ::step].double()
    return relative_error(found, expected)
