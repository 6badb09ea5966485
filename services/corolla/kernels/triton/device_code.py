"""The kernels themselves, in Triton's language.

The rule that they keep: a row's output has the same bits whatever other rows the call has, and whether the tokens of a
text come in one call, in several, or one by one. Every large sum is therefore a `tl.dot`: on Hopper, the bits of a
product's row are the same for every tile height and number of rows, as long as the inner dimension is walked in one
order and never split. The compiler must contract nothing else (`enable_fp_fusion=False`). Attention walks a text's keys
page after page in the same order for single tokens and for chunks, with one arithmetic for a page (`_page`).

That arithmetic was proven on a device. Windows, softcaps, float32, and masks for sizes other than powers of two
add operations that leave it alone: masks add zeros to sums, and a page without a visible key changes nothing. Keys and
values in 8 bits become numbers of the model's dtype in registers before they are multiplied.

Sizes that change from call to call are not specialised, so that no new number of rows makes Triton compile again.
"""

import triton
import triton.language as tl

from corolla.kernels.triton.cache_code import decoded, store_head

# The base of the exponentials is 2, so scores are multiplied by this number.
_LOG2E = tl.constexpr(1.4426950408889634)
# Merging pages: the factors of so many pages are computed together, and the loads of so many are under way together.
_FACTORS = tl.constexpr(32)
MERGED_AT_ONCE = tl.constexpr(16)


@triton.jit
def _scaled(unit, weight, dtype: tl.constexpr, NORM: tl.constexpr):
    """Numbers whose squares have the mean 1, times a norm's weight, in float32."""
    if NORM == "rounded":
        scaled = unit.to(dtype).to(tl.float32) * weight.to(tl.float32)
    elif NORM == "offset":
        # Gemma's norm: the weight is stored less one, and the product is rounded once.
        scaled = unit * (1.0 + weight.to(tl.float32))
    else:
        tl.static_assert(NORM == "wide" or NORM == "centred", "a norm without a kernel")
        scaled = unit * weight.to(tl.float32)
    return scaled


@triton.jit
def add_rms_norm(
    x, delta, weight, out, total, eps, multiplier, width,
    HAS_DELTA: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row: the sum of `x` and `delta`, and its root mean square norm."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + row * width + at, mask=inside, other=0.0)
        if HAS_MULTIPLIER:
            change = (change.to(tl.float32) * multiplier).to(value.dtype)
        value = (value.to(tl.float32) + change.to(tl.float32)).to(value.dtype)
        tl.store(total + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / width
    scale = tl.load(weight + at, mask=inside, other=0.0)
    normed = _scaled(wide * tl.rsqrt(mean + eps), scale, value.dtype, NORM)
    tl.store(out + row * width + at, normed.to(value.dtype), mask=inside)


@triton.jit
def add_layer_norm(
    x, delta, weight, bias, out, total, eps, multiplier, width,
    HAS_DELTA: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each row: the sum of `x` and `delta`, and its norm around the mean."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + row * width + at, mask=inside, other=0.0)
        if HAS_MULTIPLIER:
            change = (change.to(tl.float32) * multiplier).to(value.dtype)
        value = (value.to(tl.float32) + change.to(tl.float32)).to(value.dtype)
        tl.store(total + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    variance = tl.sum(wide * wide, 0) / width
    normed = wide * tl.rsqrt(variance + eps) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, normed.to(value.dtype), mask=inside)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def gate(gates, ups, out, stride, width, ACTIVATION: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr):
    """A program for a part of a row: the activation of the gate's numbers, times the other ones where it GATES."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gated = tl.load(gates + row * stride + at, mask=inside, other=0.0)
    if GATES:
        up = tl.load(ups + row * stride + at, mask=inside, other=0.0)
    wide = gated.to(tl.float32)
    if ACTIVATION == "silu":
        active = (wide / (1.0 + tl.exp(-wide))).to(gated.dtype)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = (0.5 * wide * (1.0 + _tanh(inner))).to(gated.dtype)
    elif ACTIVATION == "relu2":
        positive = tl.where(wide < 0.0, 0.0, wide)
        active = (positive * positive).to(gated.dtype)
    else:
        tl.static_assert(ACTIVATION == "gelu", "an activation without a kernel")
        active = (0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))).to(gated.dtype)
    if GATES:
        tl.store(out + row * width + at, (active.to(tl.float32) * up.to(tl.float32)).to(gated.dtype), mask=inside)
    else:
        tl.store(out + row * width + at, active, mask=inside)


@triton.jit
def gate_neighbours(rows, out, width, alpha, limit, BLOCK: tl.constexpr):
    """A program for a part of a row: each gate times its logistic function, times the number after it and one."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gated = tl.load(rows + (row * width + at) * 2, mask=inside, other=0.0)
    up = tl.load(rows + (row * width + at) * 2 + 1, mask=inside, other=0.0).to(tl.float32)
    wide = gated.to(tl.float32)
    # Comparisons, unlike minima, leave what is not a number as it is.
    wide = tl.where(wide > limit, limit, wide)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    tl.store(out + row * width + at, ((up + 1.0) * (wide / (1.0 + tl.exp(-wide * alpha)))).to(gated.dtype), mask=inside)


@triton.jit
def _norm_in_place(numbers, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(numbers + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(numbers + at, _scaled(wide * inverse, scale, value.dtype, NORM).to(value.dtype), mask=inside)


@triton.jit
def norm_projections(
    qkv, query_weight, key_weight, query_eps, key_eps, stride, QUERY: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    KEY: tl.constexpr, KEY_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A program for a token's QUERY numbers of all query heads, and one for its KEY numbers: their norm, in place."""
    numbers = qkv + tl.program_id(0).to(tl.int64) * stride
    if tl.program_id(1) == 0:
        _norm_in_place(numbers, query_weight, query_eps, QUERY, QUERY_BLOCK, NORM)
    else:
        _norm_in_place(numbers + QUERY, key_weight, key_eps, KEY, KEY_BLOCK, NORM)


@triton.jit
def _normed_head(value, squares, weight, eps, inside, HEAD: tl.constexpr, NORM: tl.constexpr):
    """A head's numbers `value`, normalised like the head `squares`, of which `value` may be another order."""
    wide = squares.to(tl.float32)
    if NORM == "centred":
        mean = tl.sum(wide, 0) / HEAD
        wide = tl.where(inside, wide - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / HEAD + eps)
        normed = (value.to(tl.float32) - mean) * inverse
    else:
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / HEAD + eps)
        normed = value.to(tl.float32) * inverse
    return _scaled(normed, weight, value.dtype, NORM).to(value.dtype)


@triton.jit
def _weight_of(weight, head, HEAD: tl.constexpr, NORM: tl.constexpr):
    """Where the weight of a head's norm lies. Norms of the kind `centred` have one for each head."""
    return weight + head * HEAD if NORM == "centred" else weight


@triton.jit
def rotate_and_store(
    qkv, table, positions, slots, query, keys, values, query_weight, key_weight, query_eps, key_eps,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, IN_PAIRS: tl.constexpr, NORM: tl.constexpr, NORMS_ROTATED: tl.constexpr,
    CODEC: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """A program for a token's head: norm, rotation, and the place in `query`, or in the pages.

    The first ROTARY numbers of a head are rotated: each with the one half of them away, or IN_PAIRS with its neighbour.
    With NORMS_ROTATED the norm follows. A head takes STORED numbers of the pages.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HEAD
    source = qkv + token * (NUM_HEADS + 2 * NUM_KEY_HEADS) * HEAD + head * HEAD
    value = tl.load(source + at, mask=inside, other=0.0)
    if head < NUM_HEADS + NUM_KEY_HEADS:
        if IN_PAIRS:
            other = at ^ 1
        elif ROTARY == HEAD or ROTARY == 0:
            other = (at + HEAD // 2) % HEAD
        else:
            other = tl.where(at < ROTARY, (at + ROTARY // 2) % ROTARY, at)
        rolled = tl.load(source + other, mask=inside, other=0.0)
        if NORM != "":
            if head < NUM_HEADS:
                weight = tl.load(_weight_of(query_weight, head, HEAD, NORM) + at, mask=inside, other=0.0)
                rolled_weight = tl.load(_weight_of(query_weight, head, HEAD, NORM) + other, mask=inside, other=0.0)
                eps = query_eps
            else:
                weight = tl.load(_weight_of(key_weight, head - NUM_HEADS, HEAD, NORM) + at, mask=inside, other=0.0)
                rolled_weight = tl.load(
                    _weight_of(key_weight, head - NUM_HEADS, HEAD, NORM) + other, mask=inside, other=0.0
                )
                eps = key_eps
            if not NORMS_ROTATED:
                rolled = _normed_head(rolled, value, rolled_weight, eps, inside, HEAD, NORM)
                value = _normed_head(value, value, weight, eps, inside, HEAD, NORM)
        if ROTARY:
            position = tl.load(positions + token)
            turns = inside if ROTARY == HEAD else at < ROTARY
            cos = tl.load(table + position * 2 * ROTARY + at, mask=turns, other=0.0).to(tl.float32)
            sin = tl.load(table + position * 2 * ROTARY + ROTARY + at, mask=turns, other=0.0).to(tl.float32)
            rotated = ((value.to(tl.float32) * cos).to(value.dtype).to(tl.float32) + rolled.to(tl.float32) * sin).to(
                value.dtype
            )
            value = rotated if ROTARY == HEAD else tl.where(turns, rotated, value)
        if NORM != "" and NORMS_ROTATED:
            value = _normed_head(value, value, weight, eps, inside, HEAD, NORM)
    if head < NUM_HEADS:
        tl.store(query + (token * NUM_HEADS + head) * HEAD + at, value, mask=inside)
    else:
        slot = tl.load(slots + token)
        if head < NUM_HEADS + NUM_KEY_HEADS:
            place = (slot * NUM_KEY_HEADS + head - NUM_HEADS) * STORED
            store_head(keys + place, value, inside, HEAD, CODEC, BLOCK)
        else:
            place = (slot * NUM_KEY_HEADS + head - NUM_HEADS - NUM_KEY_HEADS) * STORED
            store_head(values + place, value, inside, HEAD, CODEC, BLOCK)


@triton.jit
def _stored(
    numbers, inner, at, inside, there, dtype: tl.constexpr,
    STRIDE: tl.constexpr, HEAD: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Keys or values of the tokens `inner` of a page."""
    if CODEC == "":
        found = tl.load(numbers + inner[:, None] * STRIDE + at[None, :], mask=there, other=0.0)
    else:
        codes = tl.load(numbers + inner[:, None] * STRIDE + at[None, :], mask=there, other=0)
        exponents = inner
        if CODEC == "int8":
            exponents = tl.load(numbers + inner * STRIDE + HEAD, mask=inside, other=0)
        found = decoded(codes, exponents, dtype, CODEC)
    return found


@triton.jit
def _page(
    q, rotated, keys, values, positions, start, end, scale, window, softcap,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    CODEC: tl.constexpr, ROTATED: tl.constexpr, ROTATED_BLOCK: tl.constexpr, ROTATED_STORED: tl.constexpr,
):  # fmt: skip
    """One page's part: the greatest score, the sum of weights (as a column of a product), the weighted values.

    Where ROTATED is not 0, `values` has so many more numbers of each key, for the queries `rotated`, and keys are
    values, too.
    """
    greatest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)
    acc = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    at, one = tl.arange(0, HEAD_BLOCK), tl.full([BLOCK, 16], 1.0, q.dtype)
    for block in range(0, PAGE, BLOCK):
        if start + block < end:
            inner = block + tl.arange(0, BLOCK)
            inside = (start + inner) < end
            if PAGE % BLOCK != 0:
                inside = inside & (inner < PAGE)
            there = inside[:, None]
            if HEAD != HEAD_BLOCK:
                there = there & (at < HEAD)[None, :]
            key = _stored(keys, inner, at, inside, there, q.dtype, STRIDE, HEAD, CODEC)
            scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
            if ROTATED:
                more = tl.arange(0, ROTATED_BLOCK)
                are_there = inside[:, None]
                if ROTATED != ROTATED_BLOCK:
                    are_there = are_there & (more < ROTATED)[None, :]
                other = _stored(values, inner, more, inside, are_there, q.dtype, ROTATED_STORED, ROTATED, CODEC)
                scores = tl.dot(rotated, tl.trans(other), scores, input_precision=PRECISION)
            scores = scores * scale
            if HAS_SOFTCAP:
                scores = softcap * _tanh(scores / softcap) * _LOG2E
            seen = inside[None, :] & ((start + inner)[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen = seen & ((start + inner)[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
            new = tl.maximum(greatest, tl.max(scores, 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            weights = tl.exp2(scores - safe[:, None]).to(q.dtype)
            fade = tl.exp2(greatest - safe)
            value = key
            if ROTATED == 0:
                value = _stored(values, inner, at, inside, there, q.dtype, STRIDE, HEAD, CODEC)
            total = tl.dot(weights, one, total * fade[:, None], input_precision=PRECISION)
            acc = tl.dot(weights, value, acc * fade[:, None], input_precision=PRECISION)
            greatest = new
    return greatest, total, acc


@triton.jit
def _rotated(
    query, number, inside, like, HEAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_BLOCK: tl.constexpr
):  # fmt: skip
    """The rotated numbers of queries, which follow their HEAD others; `like` where there are none."""
    found = like
    if ROTATED:
        more = tl.arange(0, ROTATED_BLOCK)
        there = inside[:, None]
        if ROTATED != ROTATED_BLOCK:
            there = there & (more < ROTATED)[None, :]
        found = tl.load(query + number[:, None] * (HEAD + ROTATED) + HEAD + more[None, :], mask=there, other=0.0)
    return found


@triton.jit(do_not_specialize=["table_width", "window"])
def attend_chunks(
    query, keys, values, sinks, out, pages, first_queries, num_keys, scale, window, softcap, table_width,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    CODEC: tl.constexpr, STORED: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_BLOCK: tl.constexpr, ROTATED_STORED: tl.constexpr,
):  # fmt: skip
    """Chunks: a tile of TOKENS tokens of one row times the GROUP heads that share a key head, page after page.

    Where all heads share one, a group is a part of them; see `_page` for ROTATED.
    """
    tile, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, stop = tl.load(first_queries + row), tl.load(first_queries + row + 1)
    if begin + tile * TOKENS >= stop:
        return
    ROWS: tl.constexpr = TOKENS * GROUP_BLOCK
    STRIDE: tl.constexpr = NUM_KEY_HEADS * STORED
    lane = tl.arange(0, ROWS)
    token = begin + tile * TOKENS + lane // GROUP_BLOCK
    head = key_head * GROUP + lane % GROUP_BLOCK
    inside = token < stop
    if GROUP != GROUP_BLOCK:
        inside = inside & (lane % GROUP_BLOCK < GROUP)
    at = tl.arange(0, HEAD_BLOCK)
    of_head = (token * NUM_HEADS + head).to(tl.int64)
    where = of_head[:, None] * HEAD + at[None, :]
    there = inside[:, None]
    if HEAD != HEAD_BLOCK:
        there = there & (at < HEAD)[None, :]
    q = tl.load(query + of_head[:, None] * (HEAD + ROTATED) + at[None, :], mask=there, other=0.0)
    rotated = _rotated(query, of_head, inside, q, HEAD, ROTATED, ROTATED_BLOCK)
    held = tl.load(num_keys + row)
    positions = held - (stop - token)
    end = tl.minimum(held - (stop - (begin + (tile + 1) * TOKENS)), held)
    first = 0
    if HAS_WINDOW:
        # No token of the tile sees earlier pages; leaving them out changes no bit.
        first = tl.maximum(held - (stop - (begin + tile * TOKENS)) - window + 1, 0) // PAGE
    greatest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)
    acc = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    if sinks is not None:
        greatest = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * _LOG2E
        total += 1.0
    for number in range(first, tl.cdiv(end, PAGE)):
        slot = tl.load(pages + row * table_width + number).to(tl.int64) * PAGE
        base = slot * STRIDE + (0 if ROTATED else key_head * STORED)
        m, l, a = _page(
            q, rotated, keys + base, values + (slot * ROTATED_STORED if ROTATED else base), positions, number * PAGE,
            end, scale, window, softcap, STRIDE, ROWS, HEAD, HEAD_BLOCK, BLOCK, PAGE, HAS_WINDOW, HAS_SOFTCAP,
            PRECISION, CODEC, ROTATED, ROTATED_BLOCK, ROTATED_STORED,
        )  # fmt: skip
        new = tl.maximum(greatest, m)
        safe = tl.where(new == -float("inf"), 0.0, new)
        old, fresh = tl.exp2(greatest - safe), tl.exp2(m - safe)
        total = total * old[:, None] + l * fresh[:, None]
        acc = acc * old[:, None] + a * fresh[:, None]
        greatest = new
    weight = tl.max(total, 1)
    tl.store(out + where, (acc / weight[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit
def _with_sinks(sinks, are_there, greatest, total, acc):
    """A page's part, with an attention sink."""
    sink = tl.load(sinks, mask=are_there, other=-float("inf")).to(tl.float32) * _LOG2E
    new = tl.maximum(greatest, sink)
    safe = tl.where(new == -float("inf"), 0.0, new)
    old, fresh = tl.exp2(greatest - safe), tl.exp2(sink - safe)
    return new, total * old[:, None] + fresh[:, None], acc * old[:, None]


@triton.jit(do_not_specialize=["table_width", "window", "splits"])
def attend_pages(
    query, keys, values, sinks, parts, sums, maxima, pages, num_keys, first_parts, scale, window, softcap, table_width,
    splits,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    CODEC: tl.constexpr, STORED: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_BLOCK: tl.constexpr, ROTATED_STORED: tl.constexpr,
):  # fmt: skip
    """Single tokens: each page of one row by itself, for the GROUP heads that share a key head.

    A program takes every `splits`th page. That decides who computes a page's part, and changes none. Pages before the
    window have no part. The part of the first page that has one has the sinks.
    """
    split, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = tl.load(num_keys + row)
    if split * PAGE >= held:
        return
    STRIDE: tl.constexpr = NUM_KEY_HEADS * STORED
    lane, at = tl.arange(0, ROWS), tl.arange(0, HEAD_BLOCK)
    inside = lane < GROUP
    of_head = row * NUM_HEADS + key_head * GROUP + lane
    there = inside[:, None]
    if HEAD != HEAD_BLOCK:
        there = there & (at < HEAD)[None, :]
    q = tl.load(query + of_head[:, None] * (HEAD + ROTATED) + at[None, :], mask=there, other=0.0)
    rotated = _rotated(query, of_head, inside, q, HEAD, ROTATED, ROTATED_BLOCK)
    positions = tl.full([ROWS], 0, tl.int32) + held - 1
    first_part = tl.load(first_parts + row).to(tl.int64)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(held - window, 0) // PAGE
    for number in range(first + split, tl.cdiv(held, PAGE), splits):
        slot = tl.load(pages + row * table_width + number).to(tl.int64) * PAGE
        base = slot * STRIDE + (0 if ROTATED else key_head * STORED)
        m, l, a = _page(
            q, rotated, keys + base, values + (slot * ROTATED_STORED if ROTATED else base), positions, number * PAGE,
            held, scale, window, softcap, STRIDE, ROWS, HEAD, HEAD_BLOCK, BLOCK, PAGE, HAS_WINDOW, HAS_SOFTCAP,
            PRECISION, CODEC, ROTATED, ROTATED_BLOCK, ROTATED_STORED,
        )  # fmt: skip
        if sinks is not None:
            m, l, a = _with_sinks(sinks + key_head * GROUP + lane, inside & (number == first), m, l, a)
        place = (first_part + number) * NUM_HEADS + key_head * GROUP + lane
        tl.store(maxima + place, m, mask=inside)
        tl.store(sums + place, tl.max(l, 1), mask=inside)
        tl.store(parts + place[:, None] * HEAD + at[None, :], a, mask=there)


@triton.jit
def _greater(one, other):
    return tl.maximum(one, other)


@triton.jit(do_not_specialize=["window"])
def merge_pages(
    parts, sums, maxima, out, num_keys, first_parts, window,
    NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Single tokens: merges the parts of a row's pages in their order, for COLUMNS numbers of one head.

    A window of 0 means that there is none.

    Maxima are exact in any order, so each thread of a warp computes the factors of a page. The sums take the pages in
    their order.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    held = tl.load(num_keys + row)
    at = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < HEAD
    place = tl.load(first_parts + row).to(tl.int64) * NUM_HEADS + head
    num_pages = tl.cdiv(held, PAGE)
    lane = tl.arange(0, _FACTORS)
    greatest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    begin = tl.where(window > 0, tl.maximum(held - window, 0) // PAGE, 0)
    for first in range(begin, num_pages, _FACTORS):
        number = first + lane
        is_there = number < num_pages
        m = tl.load(maxima + place + number * NUM_HEADS, mask=is_there, other=-float("inf"))
        l = tl.load(sums + place + number * NUM_HEADS, mask=is_there, other=0.0)
        has_earlier = (lane > 0) & (number <= num_pages)
        earlier = tl.load(maxima + place + (number - 1) * NUM_HEADS, mask=has_earlier, other=-float("inf"))
        earlier = tl.maximum(tl.associative_scan(earlier, 0, _greater), greatest)
        new = tl.maximum(earlier, m)
        # No key of the first pages may be within the window.
        safe = tl.where(new == -float("inf"), 0.0, new)
        old, fresh = tl.exp2(earlier - safe), tl.exp2(m - safe)
        weighted = l * fresh
        greatest = tl.max(new, 0)
        for group in range(0, tl.minimum(num_pages - first, _FACTORS), MERGED_AT_ONCE):
            # A page that is not there leaves the sums as they are: its factors are one and zero.
            for index in tl.static_range(MERGED_AT_ONCE):
                page = group + index
                there = (place + (first + page) * NUM_HEADS) * HEAD + at
                a = tl.load(parts + there, mask=inside & (first + page < num_pages), other=0.0)
                chosen = tl.zeros([COLUMNS], tl.int32) + page
                fade = tl.gather(old, chosen, 0)
                total = total * fade + tl.gather(weighted, chosen, 0)
                acc = acc * fade + a * tl.gather(fresh, chosen, 0)
    tl.store(out + (row * NUM_HEADS + head) * HEAD + at, (acc / total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def multiply(
    a, b, c, bias, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GM: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiplies `a [M, K]` by `b^T [N, K]`. It never splits the inner dimension, so all tiles give the same bits.

    The numbers of `b` are taken in the type of `a`, which may be wider.
    """
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = (pid // (GM * num_n)) * GM
    height = tl.minimum(num_m - first, GM)
    pm = first + (pid % (GM * num_n)) % height
    pn = (pid % (GM * num_n)) // height
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    pa = a + (rm % M).to(tl.int64)[:, None] * K + rk[None, :]
    pb = b + (rn % N).to(tl.int64)[None, :] * K + rk[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            acc = tl.dot(tl.load(pa), tl.load(pb).to(a.dtype.element_ty), acc, input_precision=PRECISION)
        else:
            left = tl.load(pa, mask=(start + rk < K)[None, :], other=0.0)
            right = tl.load(pb, mask=(start + rk < K)[:, None], other=0.0)
            acc = tl.dot(left, right.to(a.dtype.element_ty), acc, input_precision=PRECISION)
        pa += BK
        pb += BK
    if HAS_BIAS:
        acc += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    where = rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(c + where, acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))
