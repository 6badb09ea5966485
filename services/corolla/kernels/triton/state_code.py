"""Kernels of recurrent states and of latents, in Triton's language; `state_launches` runs them.

States lie in slots of a table. A row has a slot that it reads, or NO_SLOT (below 0) for zeros, and another slot that it
writes. A program takes a part of one head's state and runs all new tokens of one row through it, one or a thousand, so
a token has the same bits however its text is cut, and whatever other rows the call has. All sums are over numbers of
one head, in an order that the constants fix. The compiler must contract nothing (`enable_fp_fusion=False`).

Sources: the gated delta rule of Yang et al. 2024 ("Gated Delta Networks"), with a decay for each number of a key as in
Kimi Linear (2025), and the state space of Dao and Gu 2024 ("Transformers are SSMs").
"""

import triton
import triton.language as tl


@triton.jit
def _logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """`log(1 + e^x)`, exact also where `e^x` is small (Goldberg 1991, theorem 4)."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    small = power * (tl.log(total) / tl.where(total == 1.0, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, tl.where(total == 1.0, power, small))


@triton.jit
def _input(inputs, windows, place, begin, source, at, inside, stride, channels, KERNEL: tl.constexpr):
    """The inputs of a convolution at a place, which lies in a row's window if it is before the row's first token."""
    is_new = place >= begin
    new = tl.load(inputs + place.to(tl.int64) * stride + at, mask=inside & is_new, other=0.0)
    older = (source * channels + at) * KERNEL + (KERNEL + place - begin)
    kept = tl.load(windows + older, mask=inside & (place < begin) & (source >= 0), other=0.0)
    return tl.where(is_new, new.to(tl.float32), kept.to(tl.float32))


@triton.jit(do_not_specialize=["stride"])
def convolve(
    inputs, weight, bias, windows, out, rows_of_tokens, first_tokens, sources, targets, stride, channels,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for some channels of a token: a short convolution over the newest inputs, and SiLU if there is one.

    The program of a row's last token writes the row's new window.
    """
    token, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    row = tl.load(rows_of_tokens + token)
    begin, end = tl.load(first_tokens + row), tl.load(first_tokens + row + 1)
    source = tl.load(sources + row)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        number = _input(
            inputs, windows, token - (KERNEL - 1) + tap, begin, source, at, inside, stride, channels, KERNEL
        )
        total += number * tl.load(weight + at * KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ACTIVATION:
        total = total * _logistic(total)
    tl.store(out + token.to(tl.int64) * channels + at, total, mask=inside)
    if token == end - 1:
        target = (tl.load(targets + row) * channels + at) * KERNEL
        for tap in tl.static_range(KERNEL):
            number = _input(
                inputs, windows, token - (KERNEL - 1) + tap, begin, source, at, inside, stride, channels, KERNEL
            )
            tl.store(windows + target + tap, number.to(windows.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rate_stride", "decay_stride"])
def run_delta_rule(
    mixed, rates, decays, offsets, factors, states, out, first_tokens, sources, targets, rate_stride, decay_stride,
    scaling, most_rate, epsilon,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE: tl.constexpr, COLUMNS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """A program for COLUMNS columns of one head of a row's state: the gated delta rule.

    Each token of `mixed` has queries, keys and values, one after the other. A decay is of a head or, where IS_WIDE, of
    a number of a key.
    """
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    WIDTH: tl.constexpr = 2 * NUM_KEY_HEADS * KEY + NUM_HEADS * VALUE
    at, inner = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, KEY_BLOCK)
    inside, is_key = at < VALUE, inner < KEY
    there = is_key[:, None] & inside[None, :]
    places = inner[:, None] * VALUE + at[None, :]
    source, target = tl.load(sources + row), tl.load(targets + row)
    state = tl.load(
        states + (source * NUM_HEADS + head) * (KEY * VALUE) + places, mask=there & (source >= 0), other=0.0
    )
    factor = tl.load(factors + head)
    offset = tl.load(offsets + head * KEY + inner, mask=is_key, other=0.0) if IS_WIDE else tl.load(offsets + head)
    first, end = tl.load(first_tokens + row), tl.load(first_tokens + row + 1)
    begin = first.to(tl.int64)
    base, of_rates, of_decays = mixed + begin * WIDTH, rates + begin * rate_stride + head, decays + begin * decay_stride
    to = out + (begin * NUM_HEADS + head) * VALUE + at
    for _ in range(first, end):
        query = tl.load(base + key_head * KEY + inner, mask=is_key, other=0.0)
        key = tl.load(base + (NUM_KEY_HEADS + key_head) * KEY + inner, mask=is_key, other=0.0)
        value = tl.load(base + 2 * NUM_KEY_HEADS * KEY + head * VALUE + at, mask=inside, other=0.0)
        query = query * tl.rsqrt(tl.sum(query * query, 0) + epsilon) * scaling
        key = key * tl.rsqrt(tl.sum(key * key, 0) + epsilon)
        rate = _logistic(tl.load(of_rates).to(tl.float32)) * most_rate
        if IS_WIDE:
            number = tl.load(of_decays + head * KEY + inner, mask=is_key, other=0.0).to(tl.float32)
            state = state * tl.exp(_softplus(number + offset) * factor)[:, None]
        else:
            number = tl.load(of_decays + head).to(tl.float32)
            state = state * tl.exp(_softplus(number + offset) * factor)
        change = (value - tl.sum(state * key[:, None], 0)) * rate
        state = state + key[:, None] * change[None, :]
        tl.store(to, tl.sum(state * query[:, None], 0), mask=inside)
        base += WIDTH
        of_rates += rate_stride
        of_decays += decay_stride
        to += NUM_HEADS * VALUE
    tl.store(states + (target * NUM_HEADS + head) * (KEY * VALUE) + places, state, mask=there)


@triton.jit(do_not_specialize=["step_stride"])
def run_state_space(
    mixed, steps, offsets, factors, skips, states, out, first_tokens, sources, targets, step_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program for ROWS rows of one head of a row's state: the state space of Mamba-2.

    Each token of `mixed` has values, keys (there called B) and queries (C), one after the other.
    """
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    WIDTH: tl.constexpr = 2 * NUM_KEY_HEADS * KEY + NUM_HEADS * VALUE
    at, inner = part * ROWS + tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK)
    inside, is_key = at < VALUE, inner < KEY
    there = inside[:, None] & is_key[None, :]
    places = at[:, None] * KEY + inner[None, :]
    source, target = tl.load(sources + row), tl.load(targets + row)
    state = tl.load(
        states + (source * NUM_HEADS + head) * (KEY * VALUE) + places, mask=there & (source >= 0), other=0.0
    )
    offset, factor, skip = tl.load(offsets + head), tl.load(factors + head), tl.load(skips + head)
    first, end = tl.load(first_tokens + row), tl.load(first_tokens + row + 1)
    begin = first.to(tl.int64)
    base, of_steps = mixed + begin * WIDTH, steps + begin * step_stride + head
    to = out + (begin * NUM_HEADS + head) * VALUE + at
    for _ in range(first, end):
        value = tl.load(base + head * VALUE + at, mask=inside, other=0.0)
        keys = base + NUM_HEADS * VALUE + key_head * KEY + inner
        key = tl.load(keys, mask=is_key, other=0.0)
        query = tl.load(keys + NUM_KEY_HEADS * KEY, mask=is_key, other=0.0)
        length = _softplus(tl.load(of_steps).to(tl.float32) + offset)
        state = state * tl.exp(length * factor) + (value * length)[:, None] * key[None, :]
        tl.store(to, tl.sum(state * query[None, :], 1) + value * skip, mask=inside)
        base += WIDTH
        of_steps += step_stride
        to += NUM_HEADS * VALUE
    tl.store(states + (target * NUM_HEADS + head) * (KEY * VALUE) + places, state, mask=there)


@triton.jit(do_not_specialize=["gate_stride"])
def norm_gated(
    x, gates, weight, out, epsilon, gate_stride,
    NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr, SHARES_WEIGHT: tl.constexpr,
):  # fmt: skip
    """A program for a group of a row: its root mean square norm, and a gate before or after it."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + (row * NUM_GROUPS + group) * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gates + row * gate_stride + group * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        opening = opening * _logistic(opening)
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "an activation without a kernel")
        opening = _logistic(opening)
    if GATES_FIRST:
        value = value * opening
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + epsilon)
    weights = weight + at if SHARES_WEIGHT else weight + group * SIZE + at
    value = tl.load(weights, mask=inside, other=0.0).to(tl.float32) * (value * scale)
    if not GATES_FIRST:
        value = value * opening
    tl.store(out + (row * NUM_GROUPS + group) * SIZE + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "row", "head"])
def multiply_heads(
    a, b, c, M, N, K, row, head, of_head, of_output, of_input, to_row, to_head,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiplies the numbers of each head, `[M, K]`, by the head's own weight, `[N, K]`, in the order of `multiply`.

    The numbers after `K` are distances: in `a` between rows and heads, in `b` between heads, outputs and inputs, and in
    `c` between rows and heads.
    """
    pm, pn, number = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    pa = a + number * head + (rm % M).to(tl.int64)[:, None] * row + rk[None, :]
    pb = b + number * of_head + (rn % N).to(tl.int64)[None, :] * of_output + rk[:, None] * of_input
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = tl.load(pa, mask=(start + rk < K)[None, :], other=0.0)
        right = tl.load(pb, mask=(start + rk < K)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        pa += BK
        pb += BK * of_input
    where = c + number * to_head + rm.to(tl.int64)[:, None] * to_row + rn[None, :]
    tl.store(where, acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))
