"""Every kernel against its definition, and against itself for the same rows in other calls, bit by bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm

from corolla.cache.codecs import CODECS
from corolla.kernels.triton import device_code, launches
from corolla.kernels.triton.launches import (
    HeadNorms,
    activate,
    add_norm,
    gate,
    gate_neighbours,
    multiply,
    rotate_and_store,
)
from corolla.models.invariant import InvariantNorm, invariant_norm
from tests.tiers import covering, quick
from tests.triton_kernels import DEVICE
from tests.triton_kernels.ordered_products import install
from tests.triton_kernels.paged_texts import PagedTexts

# The interpreter cuts bfloat16 where a GPU rounds it.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 6e-3, torch.bfloat16: 6e-2}
DTYPES = list(TOLERANCES)
MERGED_AT_ONCE = device_code.MERGED_AT_ONCE


@pytest.fixture(autouse=True, scope="module")
def one_order() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, torch.device(DEVICE):
        install(patch)
        yield


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1)
    assert error <= TOLERANCES[found.dtype]


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize(
    "kind, multiplier, has_bias",
    [
        ("rounded", 1.0, False), ("offset", 1.0, False), ("wide", 1.0, False), ("rounded", 0.22, False),
        ("centred", 0.22, False), ("centred", 1.0, True),
    ],
)  # fmt: skip
def test_sums_are_normalised(dtype: torch.dtype, kind: str, multiplier: float, has_bias: bool) -> None:
    x, delta, weight = draw(5, 200, dtype=dtype), draw(6, 200, dtype=dtype)[:5], draw(200, dtype=dtype)
    x = x + 3.0
    bias = draw(2, 200, dtype=dtype)[1] if has_bias else None
    normed, total = add_norm(x, delta, weight, 1e-6, multiplier=multiplier, kind=kind, bias=bias)
    sums = x.double() + delta.double() * multiplier
    factor = weight.double() + float(kind == "offset")
    assert_near(total, sums)
    if kind == "centred":
        # The sum was rounded before.
        sums = total.double() - total.double().mean(-1, keepdim=True)
    unit = sums * torch.rsqrt(sums.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert_near(normed, unit * factor + (0.0 if bias is None else bias.double()))
    if kind == "wide":
        # gpt-oss keeps the weights of norms in float32.
        assert torch.equal(add_norm(x, delta, weight.float(), 1e-6, multiplier=multiplier, kind=kind)[0], normed)
    alone = add_norm(x[3:4], delta[3:4], weight, 1e-6, multiplier=multiplier, kind=kind, bias=bias)
    assert torch.equal(torch.cat(alone), torch.stack((normed[3], total[3])))
    # The first block of a span has nothing to add: what it normalises is what another server has added.
    first, same = add_norm(total, None, weight, 1e-6, kind=kind, bias=bias)
    assert torch.equal(first, normed)
    assert torch.equal(same, total)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, Olmo3RMSNorm, CohereLayerNorm, nn.LayerNorm])
def test_the_final_norm_of_a_row_has_the_same_bits_whatever_the_others(kind: Any) -> None:
    module = kind(72).requires_grad_(False)
    module.weight.copy_(draw(72, dtype=torch.float32))
    with torch.device("cpu"):
        norm = invariant_norm(module)
    assert isinstance(norm, InvariantNorm)
    hidden = draw(1, 5, 72, dtype=torch.float32)
    whole = norm(hidden)
    torch.testing.assert_close(whole, module(hidden))
    assert torch.equal(norm(hidden[:, 2:3]), whole[:, 2:3])


def test_a_norm_of_another_kind_stays() -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 0.01

    for module in (OlmoLayerNorm(72), nn.LayerNorm(72, elementwise_affine=False), ShiftedRMSNorm(72)):
        with torch.device("cpu"):
            assert invariant_norm(module) is module


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize(
    "name, activation",
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("relu2", lambda x: functional.relu(x).square()),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_gates_activate_their_first_half(dtype: torch.dtype, name: str, activation: Callable[[Tensor], Tensor]) -> None:
    gate_up = draw(3, 2 * 1100, dtype=dtype) * 3
    found = gate(gate_up, name)
    assert_near(activate(gate_up, name), activation(gate_up.double()))
    assert_near(found, activation(gate_up[:, :1100].double()) * gate_up[:, 1100:].double())
    assert torch.equal(gate(gate_up[1:2], name), found[1:2])


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
def test_gates_may_stand_between_the_numbers_that_they_open(dtype: torch.dtype) -> None:
    rows = draw(3, 2 * 1100, dtype=dtype) * 6
    gates, ups = rows.double()[:, ::2].clamp(max=7.0), rows.double()[:, 1::2].clamp(-7.0, 7.0)
    found = gate_neighbours(rows, 1.702, 7.0)
    assert_near(found, (ups + 1) * gates * torch.sigmoid(gates * 1.702))
    assert torch.equal(gate_neighbours(rows[1:2], 1.702, 7.0), found[1:2])


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize("head", [64, 48])
@pytest.mark.parametrize(
    "rotates, kind, normalised",
    [
        (True, None, "heads"), (True, "rounded", "heads"), (True, "offset", "heads"), (True, "wide", "all"),
        (False, "rounded", "all"), (True, "centred", "heads"), (False, None, "heads"),
    ],
)  # fmt: skip
def test_keys_are_rotated_and_stored(
    dtype: torch.dtype, head: int, rotates: bool, kind: str | None, normalised: str
) -> None:
    heads, key_heads, tokens = 6, 2, 9
    qkv = draw(tokens, (heads + 2 * key_heads) * head, dtype=dtype)
    angles = draw(100, head // 2, dtype=torch.float32)
    table = torch.stack((angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)), dim=1).to(dtype)
    positions, slots = torch.randperm(100)[:tokens], torch.randperm(40)[:tokens]
    keys, values = (torch.zeros(40, key_heads, head, dtype=dtype) for _ in range(2))
    sizes = (heads * head, key_heads * head) if normalised == "all" else (head, head)
    weights = [draw(size, dtype=dtype) for size in sizes]
    if kind == "centred":
        weights = [draw(count, head, dtype=dtype) for count in (heads, key_heads)]
    norms = None if kind is None else HeadNorms(weights[0], weights[1], 1e-6, 1e-5, kind)
    own = table if rotates else None
    query = rotate_and_store(qkv.clone(), own, positions, slots, keys, values, norms=norms)

    split = qkv.double().view(tokens, -1, head)
    rotated = split[:, : heads + key_heads]
    if kind is not None:
        parts = []
        for part, weight, epsilon in zip((rotated[:, :heads], rotated[:, heads:]), weights, (1e-6, 1e-5), strict=True):
            together = part.reshape(tokens, -1, weight.shape[-1])
            if kind == "centred":
                together = together - together.mean(-1, keepdim=True)
            unit = together * torch.rsqrt(together.pow(2).mean(-1, keepdim=True) + epsilon)
            parts.append((unit * (weight.double() + float(kind == "offset"))).view(tokens, -1, head))
        rotated = torch.cat(parts, dim=1)
    if rotates:
        cos, sin = table[positions].double().unbind(1)
        rotated = rotated * cos[:, None] + rotated.roll(head // 2, -1) * sin[:, None]
    assert_near(query, rotated[:, :heads])
    assert_near(keys[slots], rotated[:, heads:])
    assert torch.equal(values[slots], qkv.view(tokens, -1, head)[:, heads + key_heads :])
    others = torch.ones(40, dtype=torch.bool).index_fill_(0, slots, False)
    assert not keys[others].any()
    assert not values[others].any()
    alone = rotate_and_store(qkv[4:5], own, positions[4:5], slots[4:5], keys, values, norms=norms)
    assert torch.equal(alone, query[4:5])


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(96, 256), (130, 200), (40, 24)])
def test_a_row_of_a_product_has_the_same_bits_whatever_the_others(
    dtype: torch.dtype, has_bias: bool, sizes: tuple[int, int]
) -> None:
    outputs, inputs = sizes
    rows, weight = draw(150, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype) * inputs**-0.5
    bias = draw(outputs, dtype=dtype) if has_bias else None
    whole = multiply(rows, weight, bias)
    assert_near(whole, rows.double() @ weight.double().T + (0 if bias is None else bias.double()))
    for start, end in ((0, 1), (7, 23), (3, 33), (100, 150), (20, 90), (140, 141)):
        assert torch.equal(multiply(rows[start:end], weight, bias), whole[start:end])


@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("head, size", [(48, 16), (32, 32)])
def test_a_part_of_a_head_is_rotated_by_halves_or_in_pairs(
    dtype: torch.dtype, in_pairs: bool, head: int, size: int
) -> None:
    heads, key_heads, tokens = 3, 1, 4
    qkv = draw(tokens, (heads + 2 * key_heads) * head, dtype=dtype)
    angles = draw(9, size // 2, dtype=torch.float32)
    table = torch.zeros(9, 2, size)
    first, second = (slice(0, size, 2), slice(1, size, 2)) if in_pairs else (slice(size // 2), slice(size // 2, size))
    for part, sign in ((first, -1), (second, 1)):
        table[:, 0, part], table[:, 1, part] = angles.cos(), sign * angles.sin()
    table = table.to(dtype)
    positions, slots = torch.tensor([8, 0, 3, 5]), torch.tensor([2, 0, 3, 1])
    keys, values = (torch.zeros(tokens, key_heads, head, dtype=dtype) for _ in range(2))
    query = rotate_and_store(qkv, table, positions, slots, keys, values, in_pairs=in_pairs)
    expected = qkv.double().view(tokens, -1, head).clone()
    one, two = expected[..., first].clone(), expected[..., second].clone()
    cos, sin = table[positions].double()[:, :, None, second].unbind(1)
    expected[..., first], expected[..., second] = one * cos - two * sin, two * cos + one * sin
    assert_near(query, expected[:, :heads])
    assert_near(keys[slots], expected[:, heads : heads + key_heads])
    split = qkv.view(tokens, -1, head)
    assert torch.equal(query[..., size:], split[:, :heads, size:])
    assert torch.equal(values[slots], split[:, heads + key_heads :])


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("dtype", quick(DTYPES, torch.float32))
def test_what_is_stored_in_eight_bits_has_the_codes_of_the_codec(dtype: torch.dtype, kind: str) -> None:
    codec, head = CODECS[kind](dtype), 48
    exponents = torch.arange(-150, 126, 11) if dtype == torch.float32 else torch.arange(-24, 15, 3)
    numbers = 2.0 ** exponents[:, None, None] * draw(len(exponents), 4, head, dtype=torch.float32)
    # Zeros, the least numbers, those around the largest code, halves between two codes, and what is not finite.
    odd = [0.0, -0.0, 2.0**-149, 63 * 2.0**-149, 64 * 2.0**-149, 126.5, 127.0, 127.5, 448.0, 464.0, 1e4]
    odd += [2.0**-10, 3 * 2.0**-10, -(2.0**-9), 2.5, -3.5, torch.inf, -torch.inf, torch.nan]
    numbers = torch.cat((numbers, torch.tensor(odd)[:, None, None] * torch.ones(4, head)))
    numbers[-3:, :, 1:] = draw(3, 4, head - 1, dtype=torch.float32)
    numbers = numbers.to(dtype)
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        # The interpreter does not read subnormal numbers of bfloat16.
        numbers = torch.where(numbers.abs() < torch.finfo(dtype).tiny, 0.0, numbers)
    tokens = torch.arange(len(numbers))
    keys, values = (torch.empty(len(numbers), 1, codec.stored_size(head), dtype=torch.int8) for _ in range(2))
    rotate_and_store(numbers.flatten(1), None, tokens, tokens, keys, values, codec=kind)
    assert torch.equal(keys, codec.encode(numbers[:, 2:3]))
    assert torch.equal(values, codec.encode(numbers[:, 3:4]))


Case = tuple[int, tuple[int, int], int, int | None, float | None, bool, int]
"""Page tokens, (heads, key heads), head size, window, softcap, whether there are sinks, numbers of a rotated key."""
CASES: list[Case] = [
    (32, (4, 2), 16, 40, None, True, 0),
    (64, (8, 2), 64, None, None, False, 0),
    (48, (7, 1), 80, None, 20.0, True, 0),
    (4, (4, 2), 16, 9, 30.0, False, 0),
    (4, (3, 1), 24, None, None, False, 8),
    (32, (40, 1), 64, None, None, False, 16),
]


# The interpreter cannot fill a tensor of bfloat16.
ATTENTION_DTYPES = DTYPES if DEVICE != "cpu" else [torch.float32, torch.float16]


@pytest.mark.parametrize(
    "case",
    quick(
        covering(CASES, ATTENTION_DTYPES, [None, *CODECS]),
        (CASES[0], torch.float32, None), (CASES[4], torch.float32, None),
    ),
)  # fmt: skip
def test_attention_has_the_same_bits_in_every_cut(case: tuple[Case, torch.dtype, str | None]) -> None:
    (page_tokens, heads, head, window, softcap, has_sinks, rotated), dtype, kind = case
    sinks = 2 * draw(heads[0], dtype=dtype) if has_sinks else None
    lengths = (2 * page_tokens + 9, page_tokens + 2, 5)

    def texts() -> PagedTexts:
        codec = None if kind is None else CODECS[kind](dtype)
        return PagedTexts(lengths, page_tokens, heads, head, dtype, codec, rotated)

    whole = [texts().step([(text, 0, length)], window, softcap, sinks)[0] for text, length in enumerate(lengths)]
    for text in range(len(lengths)):
        assert_near(whole[text], texts().definition(text, window, softcap, sinks))
    own = texts()
    together = own.step([(text, 0, length) for text, length in enumerate(lengths)], window, softcap, sinks)
    assert all(map(torch.equal, together, whole))

    # Chunks of several sizes, one of a single token, among chunks of the others.
    mixed, found = texts(), [torch.empty_like(each) for each in whole]
    at = [0, 0, 0]
    sizes = (page_tokens - 3, 1, 17, 2)
    for turn in range(200):
        chunks = [
            (text, at[text], min(length, at[text] + sizes[(turn + text) % 4]))
            for text, length in enumerate(lengths)
            if at[text] < length
        ]
        if not chunks:
            break
        for (text, start, end), output in zip(chunks, mixed.step(chunks, window, softcap, sinks), strict=True):
            found[text][start:end], at[text] = output, end
    assert all(map(torch.equal, found, whole))

    # Single tokens: alone, and with single tokens of the others, at the start and around the ends of pages.
    single = texts()
    single.step([(text, 0, length) for text, length in enumerate(lengths)], window, softcap, sinks)
    ends = sorted({1, 2, page_tokens, page_tokens + 1, 2 * page_tokens, 2 * page_tokens + 1, lengths[0]})
    for end in ends:
        rows = [(text, min(end, length) - 1, min(end, length)) for text, length in enumerate(lengths)]
        for part in (rows[:1], rows[::-1]):
            for (text, start, stop), output in zip(part, single.step(part, window, softcap, sinks), strict=True):
                assert torch.equal(output, whole[text][start:stop])


@pytest.mark.parametrize("window", quick([None, 70], 70))
@pytest.mark.parametrize("length", quick([4 * 32, 4 * 67 + 1], 4 * 32))
def test_a_token_with_many_pages_has_the_bits_of_a_chunk(
    length: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors of 32 pages are computed together, and parts of 16 are read together. Pages before a window are not."""
    monkeypatch.setattr(device_code, "MERGED_AT_ONCE", MERGED_AT_ONCE)
    texts, sinks = PagedTexts((length, 40), 4, (2, 1), 16, torch.float32), draw(2, dtype=torch.float32)
    (chunk,) = texts.step([(0, 0, length)], window, None, sinks)
    assert_near(chunk[-1:], texts.definition(0, window, None, sinks)[-1:])
    if window is not None:
        texts.spoil(0, length - window)
    for rows in ([(0, length - 1, length)], [(1, 39, 40), (0, length - 1, length)]):
        assert torch.equal(texts.step(rows, window, None, sinks)[-1], chunk[-1:])
    # Where there is no room for the results of all pages.
    monkeypatch.setattr(launches, "MOST_PART_BYTES", 0)
    assert torch.equal(texts.step([(0, length - 1, length)], window, None, sinks)[-1], chunk[-1:])


@pytest.mark.parametrize("kind", CODECS)
def test_attention_to_codes_has_the_bits_of_attention_to_their_numbers(kind: str) -> None:
    """In chunks and in single tokens; slots without tokens hold codes of NaN."""
    lengths = (20, 7)
    texts = [
        PagedTexts(lengths, 16, (4, 2), 24, torch.float32, CODECS[kind](torch.float32)),
        PagedTexts(lengths, 16, (4, 2), 24, torch.float32),
    ]
    texts[1].texts = texts[0].texts
    for rows in ([(0, 0, 19), (1, 0, 6)], [(0, 19, 20), (1, 6, 7)]):
        coded, plain = (each.step(rows, None, None) for each in texts)
        assert all(map(torch.equal, coded, plain))
