"""The kernels for mixtures of experts, in Triton's language.

A token and one of its experts are a pair. The pairs of a call are put into the order of their experts, and each tile of
a product has pairs of one expert, as in vLLM's and SGLang's `fused_moe`. No number goes to the host, and the grids
depend on the number of tokens alone: programs for which there is no tile end at once. So a step can be recorded.

The rule of `device_code` holds: a pair's product walks the inner dimension in one order, whatever tile the pair is in,
and a token's results are added in the order of their ranks.
"""

import triton
import triton.language as tl

from corolla.kernels.layouts import UNIT
from corolla.kernels.triton.packed_code import sums_of_tile

_UNIT = tl.constexpr(UNIT)
# Below all scores of experts, and above those of the lanes that stand for no expert.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _first_of(values, at, greatest, BLOCK: tl.constexpr):
    """The lowest index with the greatest value."""
    return tl.min(tl.where(values == greatest, at, BLOCK), 0)


@triton.jit
def _of_best_groups(
    scores, at, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """The scores, which become the lowest outside of the groups whose two best experts have the greatest scores."""
    group = at // (NUM_EXPERTS // NUM_GROUPS)
    sums = tl.full([BLOCK], -float("inf"), tl.float32)
    for number in tl.static_range(NUM_GROUPS):
        own = tl.where(group == number, scores, -float("inf"))
        best = tl.max(own, 0)
        second = tl.max(tl.where(at == _first_of(own, at, best, BLOCK), -float("inf"), own), 0)
        sums = tl.where((at < NUM_EXPERTS) & (group == number), best + second, sums)
    is_chosen = at >= NUM_EXPERTS
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        number = _first_of(sums, at, tl.max(sums, 0), BLOCK) // (NUM_EXPERTS // NUM_GROUPS)
        is_chosen = is_chosen | (group == number)
        sums = tl.where(group == number, -float("inf"), sums)
    return tl.where(is_chosen, scores, _LOWEST)


@triton.jit
def choose_experts(
    logits, correction, ids, weights, epsilon, least_sum, nearness, scaling,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
    SCORE: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALISES: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program for each token: its experts in falling order of their scores, of equal ones the lower id first."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < NUM_EXPERTS
    logit = tl.load(logits + token * NUM_EXPERTS + at, mask=inside, other=-float("inf")).to(tl.float32)
    if SCORE == "softmax":
        powers = tl.exp(logit - tl.max(logit, 0))
        score = powers / tl.sum(powers, 0)
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        tl.static_assert(SCORE == "chosen" or SCORE == "near", "a score without a kernel")
        score = logit
    left = score
    if HAS_CORRECTION:
        left += tl.load(correction + at, mask=inside, other=0.0).to(tl.float32)
    # A token whose numbers are not finite gets experts, too, so that it harms no other token of the call.
    left = tl.where(left > _LOWEST, left, _LOWEST)
    left = tl.where(inside, left, -float("inf"))
    if NUM_GROUPS > 1:
        left = _of_best_groups(left, at, NUM_EXPERTS, BLOCK, NUM_GROUPS, NUM_CHOSEN_GROUPS)
    rank = tl.arange(0, CHOSEN_BLOCK)
    chosen = tl.zeros([CHOSEN_BLOCK], tl.int32)
    weight = tl.zeros([CHOSEN_BLOCK], tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        best = tl.max(left, 0)
        first = _first_of(left, at, best, BLOCK)
        chosen = tl.where(rank == number, first, chosen)
        if SCORE == "near":
            is_far = (best - score) / tl.maximum(tl.abs(score), best) > nearness
            own = 1.0 / tl.sum(tl.where(is_far | (left == -float("inf")), 0.0, tl.exp(score - best)), 0)
        else:
            own = tl.sum(tl.where(at == first, score, 0.0), 0)
        weight = tl.where(rank == number, own, weight)
        left = tl.where(at == first, -float("inf"), left)
    if SCORE == "chosen":
        own = tl.where(rank < NUM_CHOSEN, weight, -float("inf"))
        powers = tl.exp(own - tl.max(own, 0))
        weight = powers / tl.sum(powers, 0)
    if NORMALISES:
        weight = weight / (tl.maximum(tl.sum(weight, 0), least_sum) + epsilon)
    weight *= scaling
    place = token * NUM_CHOSEN + rank
    tl.store(ids + place, chosen, mask=rank < NUM_CHOSEN)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=rank < NUM_CHOSEN)


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs(ids, pairs, firsts, num_pairs, BLOCK: tl.constexpr):
    """Each program writes the numbers of one expert's pairs behind those of lower experts; one more writes the end."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        inside = start + at < num_pairs
        lower += (inside & (tl.load(ids + start + at, mask=inside, other=0) < expert)).to(tl.int32)
    first = tl.sum(lower, 0)
    tl.store(firsts + expert, first)
    for start in range(0, num_pairs, BLOCK):
        inside = start + at < num_pairs
        own = inside & (tl.load(ids + start + at, mask=inside, other=0) == expert)
        count = own.to(tl.int32)
        tl.store(pairs + first + tl.cumsum(count, 0) - 1, start + at, mask=own)
        first += tl.sum(count, 0)


@triton.jit
def _tile_of_program(
    firsts, num_tiles, num_n, NUM_EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, BM: tl.constexpr, GM: tl.constexpr
):
    """The tile of a program: its expert, the tiles of each expert, its number, and which of `num_n` tiles of outputs.

    A program without a tile gets NUM_EXPERTS or a greater number as its expert.
    """
    pid = tl.program_id(0)
    first = (pid // (GM * num_n)) * GM
    height = tl.minimum(num_tiles - first, GM)
    tile = first + (pid % (GM * num_n)) % height
    pn = (pid % (GM * num_n)) // height
    experts = tl.arange(0, EXPERT_BLOCK)
    begin = tl.load(firsts + experts, mask=experts < NUM_EXPERTS, other=0)
    end = tl.load(firsts + experts + 1, mask=experts < NUM_EXPERTS, other=0)
    tiles = (end - begin + BM - 1) // BM
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    return expert, tiles, tile, pn


@triton.jit
def _pairs_of_tile(pairs, firsts, expert, tiles, tile, EXPERT_BLOCK: tl.constexpr, BM: tl.constexpr):
    """The numbers of the pairs of a tile, int64 `[BM]`, and which of them are of the expert."""
    before = tl.sum(tl.where(tl.arange(0, EXPERT_BLOCK) < expert, tiles, 0), 0)
    start = tl.load(firsts + expert) + (tile - before) * BM
    place = start + tl.arange(0, BM)
    inside = place < tl.load(firsts + expert + 1)
    return tl.load(pairs + tl.where(inside, place, start)).to(tl.int64), inside


@triton.jit(do_not_specialize=["num_tiles"])
def multiply_experts(
    rows, weights, bias, out, pairs, firsts, num_tiles, N, K,
    NUM_EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, NUM_SHARING: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GM: tl.constexpr,
    EVEN_K: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of one expert times a tile of its weights `[N, K]`, as `device_code.multiply` does it.

    NUM_SHARING pairs that follow each other have one row. TRANSPOSED weights lie as `[K, N]`.
    """
    expert, tiles, tile, pn = _tile_of_program(firsts, num_tiles, tl.cdiv(N, BN), NUM_EXPERTS, EXPERT_BLOCK, BM, GM)
    if expert >= NUM_EXPERTS:
        return
    pair, inside = _pairs_of_tile(pairs, firsts, expert, tiles, tile, EXPERT_BLOCK, BM)
    rn, rk = pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    pa = rows + (pair // NUM_SHARING)[:, None] * K + rk[None, :]
    if TRANSPOSED:
        pb = weights + expert.to(tl.int64) * N * K + rk.to(tl.int64)[:, None] * N + (rn % N)[None, :]
    else:
        pb = weights + expert.to(tl.int64) * N * K + (rn % N).to(tl.int64)[None, :] * K + rk[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for inner in range(0, K, BK):
        if EVEN_K:
            acc = tl.dot(tl.load(pa), tl.load(pb), acc, input_precision=PRECISION)
        else:
            left = tl.load(pa, mask=(inner + rk < K)[None, :], other=0.0)
            right = tl.load(pb, mask=(inner + rk < K)[:, None], other=0.0)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        pa += BK
        pb += BK * N if TRANSPOSED else BK
    if bias is not None:
        acc += tl.load(bias + expert * N + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    where = out + pair[:, None] * N + rn[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=inside[:, None] & (rn < N)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def multiply_packed_experts(
    rows, words, scales, turns, bias, out, pairs, firsts, num_tiles, num_outputs, num_panels, num_blocks,
    layout: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, NUM_SHARING: tl.constexpr,
    COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of one expert times a tile of its packed weights.

    Each expert has `num_panels` panels. NUM_SHARING pairs that follow each other have one row.
    """
    expert, tiles, tile, part = _tile_of_program(
        firsts, num_tiles, tl.cdiv(num_outputs, WIDTH), NUM_EXPERTS, EXPERT_BLOCK, HEIGHT, GROUP
    )
    if expert >= NUM_EXPERTS:
        return
    pair, inside = _pairs_of_tile(pairs, firsts, expert, tiles, tile, EXPERT_BLOCK, HEIGHT)
    at = rows + (pair // NUM_SHARING)[:, None] * (num_blocks * layout.units * _UNIT)
    sums = sums_of_tile(
        at, words, scales, turns, expert * num_panels, num_panels, part, num_blocks, layout,
        COUNT, HEIGHT, WIDTH, PRECISION,
    )  # fmt: skip
    output = part * WIDTH + tl.arange(0, WIDTH)
    if bias is not None:
        own = bias + expert * num_outputs + output
        sums += tl.load(own, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    there = out + pair[:, None] * num_outputs + output[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=inside[:, None] & (output < num_outputs)[None, :])


@triton.jit
def add_experts(
    results, weights, shared, shared_gate, out, width,
    NUM_CHOSEN: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for a part of a token: the weighted sum of its experts' results, and what all tokens share."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + rank
        result = tl.load(results + pair * width + at, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    if HAS_SHARED:
        own = tl.load(shared + token * width + at, mask=inside, other=0.0)
        if HAS_GATE:
            opening = 1.0 / (1.0 + tl.exp(-tl.load(shared_gate + token).to(tl.float32)))
            own = (own.to(tl.float32) * opening.to(own.dtype).to(tl.float32)).to(own.dtype)
        total = (total.to(tl.float32) + own.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token * width + at, total, mask=inside)
