"""Runs the kernels for mixtures of experts on tensors, which are on one device and contiguous."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.expert_routing import Routing
from corolla.kernels.layouts import Layout
from corolla.kernels.triton import expert_code, packed_launches
from corolla.kernels.triton.launches import launch, power_of_two, precision, tile_of
from corolla.kernels.triton.packed_launches import PanelViews, units_of_round
from corolla.kernels.triton.variants import variant

# Pairs that a program of `group_pairs` looks at together.
_PAIRS_BLOCK: Final = 1024
# Numbers of a row that a program of `add_experts` adds.
_SUM_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The experts of a call's tokens. A token and one of its experts are a pair; a token's pairs follow each other.

    Attributes:
        weights: `[N, chosen]`, the factor of each result, in float32 or the model's dtype.
        pairs: int32 `[N * chosen]`, the numbers of all pairs in the order of their experts.
        firsts: int32 `[experts + 1]`: where each expert's pairs begin in `pairs`, and where the last one's end.
    """

    weights: Tensor
    pairs: Tensor
    firsts: Tensor

    @property
    def num_experts(self) -> int:
        return len(self.firsts) - 1


def choose_experts(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> ChosenExperts:
    """Chooses the experts of each token; among equal scores the lower id wins.

    Args:
        logits: `[N, experts]` in any dtype, at least one row.
        routing: the router's rule.
        correction: `[experts]`, what is added to the scores for the choice, and not to the weights; None: nothing.
        dtype: the dtype to which the weights are rounded.
    """
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * routing.num_chosen
    ids = torch.empty(num_pairs, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, routing.num_chosen, dtype=dtype, device=logits.device)
    choice = variant(
        expert_code.choose_experts, NUM_EXPERTS=num_experts, BLOCK=power_of_two(num_experts),
        NUM_CHOSEN=routing.num_chosen, CHOSEN_BLOCK=power_of_two(routing.num_chosen), SCORE=routing.score,
        HAS_CORRECTION=correction is not None, NORMALISES=routing.normalises, NUM_GROUPS=routing.num_groups,
        NUM_CHOSEN_GROUPS=routing.num_chosen_groups, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        choice, (num_tokens,), logits, logits if correction is None else correction, ids, weights, routing.epsilon,
        routing.least_sum, routing.nearness, routing.scaling,
    )  # fmt: skip
    pairs = torch.empty_like(ids)
    firsts = torch.empty(num_experts + 1, dtype=torch.int32, device=logits.device)
    grouping = variant(expert_code.group_pairs, BLOCK=_PAIRS_BLOCK, num_warps=4)
    launch(grouping, (num_experts + 1,), ids, pairs, firsts, num_pairs)
    return ChosenExperts(weights, pairs, firsts)


def multiply_experts(rows: Tensor, weights: Tensor, chosen: ChosenExperts, bias: Tensor | None = None) -> Tensor:
    """Multiplies the row of each pair by the weights of its expert, so that no pair depends on the others.

    Args:
        rows: `[N, in]`, a row for each token, or `[pairs, in]`, one for each pair.
        weights: `[experts, out, in]` in the same dtype; of the last two dimensions, one is contiguous.
        chosen: the pairs.
        bias: `[experts, out]` in the same dtype; None: there is none.

    Returns:
        `[pairs, out]` in the same dtype.
    """
    num_experts, num_outputs, num_inputs = weights.shape
    num_pairs = len(chosen.pairs)
    out = rows.new_empty(num_pairs, num_outputs)
    tile = tile_of(-(-num_pairs // num_experts), num_inputs, rows.dtype, rows.device)
    num_tiles = _num_tiles(chosen, tile.height)
    product = variant(
        expert_code.multiply_experts, NUM_EXPERTS=num_experts, TRANSPOSED=weights.stride(2) != 1,
        EXPERT_BLOCK=power_of_two(num_experts), NUM_SHARING=num_pairs // len(rows), BM=tile.height, BN=tile.width,
        BK=tile.depth, GM=8, EVEN_K=num_inputs % tile.depth == 0, PRECISION=precision(rows.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        product, (num_tiles * -(-num_outputs // tile.width),),
        rows, weights, bias, out, chosen.pairs, chosen.firsts, num_tiles, num_outputs, num_inputs,
    )  # fmt: skip
    return out


def multiply_packed_experts(
    layout: Layout,
    rows: Tensor,
    panels: Tensor | PanelViews,
    num_outputs: int,
    chosen: ChosenExperts,
    bias: Tensor | None = None,
) -> Tensor:
    """Does what `multiply_experts` does, with packed weights.

    Args:
        layout: the layout of the panels.
        rows: `[N, in]`, a row for each token, or `[pairs, in]`, one for each pair, in float32, bfloat16 or float16.
        panels: uint8 `[experts * panels of an expert, blocks, bytes of a block]`, or the views of such panels.
        num_outputs: how many outputs an expert has; its panels may have more.
        chosen: the pairs.
        bias: `[experts, num_outputs]` in the dtype of the rows; None: there is none.

    Returns:
        `[pairs, num_outputs]` in the dtype of the rows.

    Raises:
        ValueError: rows and panels do not fit each other.
    """
    views = PanelViews.fitting(rows, panels, layout)
    num_panels, num_blocks, _ = views.panels.shape
    num_experts, num_pairs = chosen.num_experts, len(chosen.pairs)
    out = rows.new_empty(num_pairs, num_outputs)
    # A single token's experts are as many outputs together; one tile for all calls of few rows is compiled once.
    num_together = num_outputs * chosen.weights.shape[1]
    tile = packed_launches.tile_of(-(-num_pairs // num_experts), num_together, rows.dtype)
    product = variant(
        expert_code.multiply_packed_experts, layout=layout, NUM_EXPERTS=num_experts,
        EXPERT_BLOCK=power_of_two(num_experts), NUM_SHARING=num_pairs // len(rows),
        COUNT=units_of_round(num_blocks * layout.units, tile.units), HEIGHT=tile.height, WIDTH=tile.width, GROUP=8,
        PRECISION=precision(rows.dtype), num_warps=tile.warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    num_tiles = _num_tiles(chosen, tile.height)
    launch(
        product, (num_tiles * -(-num_outputs // tile.width),),
        rows.contiguous(), views.words, views.scales, views.turns, bias, out, chosen.pairs, chosen.firsts, num_tiles,
        num_outputs, num_panels // num_experts, num_blocks,
    )  # fmt: skip
    return out


def _num_tiles(chosen: ChosenExperts, height: int) -> int:
    """How many tiles of so many pairs the worst choice of experts fills: each expert may have one that is not full."""
    num_pairs = len(chosen.pairs)
    num_used = min(num_pairs, chosen.num_experts)
    return num_used + (num_pairs - num_used) // height


def add_experts(
    results: Tensor, chosen: ChosenExperts, shared: Tensor | None = None, shared_gate: Tensor | None = None
) -> Tensor:
    """Adds the weighted results of each token's experts in the order of their ranks, in float32.

    Args:
        results: `[pairs, H]`.
        chosen: the pairs.
        shared: `[N, H]`, the result of the experts that all tokens have; None: there are none.
        shared_gate: `[N, 1]`: the logistic function of these numbers is the factor of `shared`; None: it is 1.

    Returns:
        `[N, H]` in the dtype of the results.
    """
    num_tokens, num_chosen = chosen.weights.shape
    width = results.shape[-1]
    out = results.new_empty(num_tokens, width)
    block = min(_SUM_BLOCK, power_of_two(width))
    addition = variant(
        expert_code.add_experts, NUM_CHOSEN=num_chosen, HAS_SHARED=shared is not None, HAS_GATE=shared_gate is not None,
        BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        addition, (num_tokens, -(-width // block)), results, chosen.weights, results if shared is None else shared,
        results if shared_gate is None else shared_gate, out, width,
    )  # fmt: skip
    return out
