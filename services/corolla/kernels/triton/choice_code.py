"""Kernels that draw tokens: random streams that go on, and the draw from the most probable tokens of a row.

All in them is exact. Words of a stream are integers, sums of probabilities are integers, and a quotient is rounded as
IEEE 754 says. So the results are those of a processor, and no row depends on the others.
"""

import triton
import triton.language as tl

from corolla.kernels.triton.device_code import _ordered

# MT19937: a word is made of the words 624, 623 and 227 places before it, and so many can be made at a time.
_WORDS = tl.constexpr(624)
_AT_A_TIME = tl.constexpr(227)


@triton.jit
def continue_streams(streams, slots, words, num_blocks, num_drawn, STREAM: tl.constexpr, LANES: tl.constexpr):
    """One program for each row: writes the words that follow its stream's block, and moves the stream.

    A row of `words` gets the block, `num_blocks` more blocks, and the number of words of the first one that were used.
    """
    own = streams + tl.load(slots + tl.program_id(0)) * STREAM
    out = words + tl.program_id(0).to(tl.int64) * ((num_blocks + 1) * _WORDS + 16)
    every = tl.arange(0, 1024)
    tl.store(out + every, tl.load(own + every, mask=every < _WORDS, other=0), mask=every < _WORDS)
    used = tl.load(own + _WORDS)
    total = num_blocks * _WORDS
    tl.store(out + _WORDS + total, used)
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    inside = lane < _AT_A_TIME
    last = tl.load(out + _WORDS - _AT_A_TIME + lane, mask=inside, other=0)
    high = tl.load(out + lane, mask=inside, other=0)
    low = tl.load(out + 1 + lane, mask=inside, other=0)
    for start in tl.range(0, total, _AT_A_TIME, num_stages=1):
        # These words were stored before the last barrier, so their loads need not wait for this step.
        following = start + _AT_A_TIME + lane
        next_high = tl.load(out + following, mask=inside & (following < total), other=0)
        next_low = tl.load(out + following + 1, mask=inside & (following < total), other=0)
        mixed = (high & -0x80000000) | (low & 0x7FFFFFFF)
        last = last ^ ((mixed >> 1) & 0x7FFFFFFF) ^ ((mixed & 1) * -0x66F74F21)
        tl.store(out + _WORDS + start + lane, last, mask=inside & (start + lane < total))
        high, low = next_high, next_low
        tl.debug_barrier()
    # A stream keeps the last block of which a word was used.
    moved = (used + num_drawn - 1) // _WORDS * _WORDS
    tl.store(own + every, tl.load(out + moved + every, mask=every < _WORDS, other=0), mask=every < _WORDS)
    tl.store(own + _WORDS, used + num_drawn - moved)


@triton.jit
def _tempered(word):
    word = word ^ ((word >> 11) & 0x1FFFFF)
    word = word ^ ((word << 7) & -0x62D3A980)
    word = word ^ ((word << 15) & -0x103A0000)
    return word ^ ((word >> 18) & 0x3FFF)


@triton.jit
def negated_shares(words, out, width, num_blocks, BLOCK: tl.constexpr):
    """One program for each part of a row: numbers evenly drawn between -1 and 0, of 53 bits of two words each."""
    row = tl.program_id(0).to(tl.int64)
    own = words + row * ((num_blocks + 1) * _WORDS + 16)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    first = own + tl.load(own + (num_blocks + 1) * _WORDS) + 2 * at
    high = _tempered(tl.load(first, mask=inside, other=0)) & 0x1FFFFF
    low = _tempered(tl.load(first + 1, mask=inside, other=0))
    number = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(out + row * width + at, number.to(tl.float64) * -(2.0**-53), mask=inside)


@triton.jit
def draw_tokens(
    scores, probabilities, numbers, shares, out, width, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program for each row: the token with the largest quotient of probability and number, among those that stay.

    Tokens of the lowest scores do not stay, as long as they have at most a share of probability together. A token that
    does not stay tells that no token up to its score does, so the next search leaves these out. A search more is rare.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * width
    probabilities += row * width
    numbers += row * width
    share = tl.load(shares + row)
    lane = tl.arange(0, BLOCK)
    scale = tl.full((), 1 << BITS, tl.float64)
    bound = tl.full((), -(1 << 62), tl.int64)
    bound_at = tl.full((), 0, tl.int32)
    token = tl.full((), 0, tl.int32)
    goes_on = tl.full((), 1, tl.int32)
    while goes_on > 0:
        best = tl.full((BLOCK,), -1.0, tl.float32)
        best_at = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, width, BLOCK):
            at = start + lane
            inside = at < width
            key = _ordered(tl.load(scores + at, mask=inside, other=0.0))
            part = tl.load(probabilities + at, mask=inside, other=0.0)
            quotient = tl.div_rn(part, tl.load(numbers + at, mask=inside, other=1.0))
            is_left = inside & ((key > bound) | ((key == bound) & (at > bound_at)))
            is_better = is_left & (quotient > best)
            best = tl.where(is_better, quotient, best)
            best_at = tl.where(is_better, at, best_at)
        largest = tl.max(best, 0)
        found = tl.min(tl.where(best == largest, best_at, width), 0).to(tl.int32)
        # Where a row has numbers that are not finite, no quotient may be found; its token counts for nothing.
        is_found = largest >= 0.0
        token = tl.where(is_found, found, token)
        bound = _ordered(tl.load(scores + token))
        bound_at = token
        below = tl.zeros((BLOCK,), tl.int64)
        every = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, width, BLOCK):
            at = start + lane
            inside = at < width
            key = _ordered(tl.load(scores + at, mask=inside, other=0.0))
            part = tl.load(probabilities + at, mask=inside, other=0.0)
            units = (part.to(tl.float64) * scale).to(tl.int64)
            below += tl.where((key < bound) | ((key == bound) & (at <= bound_at)), units, 0)
            every += units
        # The last token stays, however large the share is.
        is_excluded = tl.sum(below, 0) <= tl.minimum(share, tl.sum(every, 0) - 1)
        goes_on = (is_found & is_excluded).to(tl.int32)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def penalise(
    logits, are_seen, counts, settings, out, width, HAS_SEEN: tl.constexpr, HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each part of a row: the logits with the penalties for tokens of the text, in their order."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    score = tl.load(logits + row * width + at, mask=inside, other=0.0)
    if HAS_SEEN:
        factor = tl.load(settings + 3 * row)
        is_seen = tl.load(are_seen + row * width + at, mask=inside, other=0) != 0
        penalised = tl.where(score < 0.0, score * factor, tl.div_rn(score, factor + tl.zeros_like(score)))
        score = tl.where(is_seen, penalised, score)
    if HAS_COUNTS:
        frequency, presence = tl.load(settings + 3 * row + 1), tl.load(settings + 3 * row + 2)
        count = tl.load(counts + row * width + at, mask=inside, other=0.0)
        score = score - (count * frequency + tl.where(count > 0.0, 1.0, 0.0) * presence)
    tl.store(out + row * width + at, score, mask=inside)
