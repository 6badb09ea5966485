"""Compiled attention: right for every shape of heads, and the same in every bit in whatever company."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from corolla.cache.store import KVStore, SessionCache
from corolla.compute.attention import compiled_attention
from corolla.compute.attention.base import AttentionBatch, PackedRow
from corolla.compute.attention.compiled_attention import CompiledAttention, tables_of
from corolla.kernels.attention_text import HeadShape
from corolla.kernels.chunk_source import TILE_KEYS
from tests.tiers import covering, quick

PAGE_TOKENS = 16


class Rows:
    """Sessions of given lengths, whose keys and values are drawn; the next tokens of each are asked about."""

    def __init__(
        self, lengths: Sequence[int], *, heads: int = 4, key_heads: int = 2, sizes: tuple[int, int] = (64, 64),
        dtype: torch.dtype = torch.float32, window: int | None = None, softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:  # fmt: skip
        self.window, self.scaling, self.softcap = window, sizes[0] ** -0.5, softcap
        num_pages = sum(-(-length // PAGE_TOKENS) for length in lengths) + 8
        self.store = KVStore(num_pages, PAGE_TOKENS, [window], max_step_tokens=max(lengths))
        generator = torch.Generator().manual_seed(sum(lengths))

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.keys = [draw(length, key_heads, sizes[0]) for length in lengths]
        self.values = [draw(length, key_heads, sizes[1]) for length in lengths]
        self.queries = [draw(length, heads, sizes[0]) for length in lengths]
        self.sinks = 2 * draw(heads) if has_sinks else None
        self.lengths = lengths

    def attended(self, numbers: Sequence[int], num_new: int = 1) -> list[Tensor]:
        """The last tokens of these sessions, in one batch; what was never written is not a number."""
        caches = {number: self.filled(number, self.lengths[number] - num_new) for number in numbers}
        outputs = self.attend(caches, dict.fromkeys(numbers, num_new))
        for cache in caches.values():
            cache.clear()
        return outputs

    def expected(self, number: int, num_new: int = 1) -> Tensor:
        """The output by the definition, in float64."""
        query, keys, values = (part[number].double() for part in (self.queries, self.keys, self.values))
        groups = query.shape[1] // keys.shape[1]
        keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[-num_new:], keys) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        positions = torch.arange(len(keys))
        distance = positions[-num_new:, None] - positions[None, :]
        unseen = (distance < 0) | (distance >= (self.window or len(keys)))
        scores = scores.masked_fill(unseen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, num_new, 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(keys)], values)

    def filled(self, number: int, num_tokens: int) -> SessionCache:
        cache = self.store.new_cache()
        cache.reserve(self.lengths[number])
        for tensor in self.store.layer_like(0, self.keys[0], self.values[0]):
            for page in cache.tables[0].pages:
                tensor[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = torch.nan
        if num_tokens:
            self.attend({number: cache}, {number: num_tokens}, start=0)
        return cache

    def attend(
        self, caches: dict[int, SessionCache], num_new: dict[int, int], start: int | None = None
    ) -> list[Tensor]:
        rows: list[PackedRow] = []
        given: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, cache in caches.items():
            first = cache.num_tokens if start is None else start
            cache.prepare(first, num_new[number])
            begin = rows[-1].end if rows else 0
            rows.append(PackedRow(cache, first, begin, begin + num_new[number]))
            part = slice(first, first + num_new[number])
            given.append((self.queries[number][part], self.keys[number][part], self.values[number][part]))
        query, key, value = (torch.cat([each[part] for each in given]) for part in range(3))
        output = AttentionBatch(self.store, rows, CompiledAttention()).attend(
            0, query, key, value, scaling=self.scaling, window=self.window, softcap=self.softcap, sinks=self.sinks
        )
        for row in rows:
            row.cache.commit(row.position + row.num_tokens)
        return [output[row.start : row.end] for row in rows]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
HEADS = [
    (1, 1, (16, 16)), (4, 4, (64, 64)), (9, 3, (64, 64)), (8, 1, (128, 128)), (14, 2, (64, 64)), (16, 2, (96, 96)),
    (4, 1, (256, 256)), (8, 8, (192, 128)), (71, 1, (64, 64)),
]  # fmt: skip
SHAPES = list(itertools.product(HEADS, TOLERANCES))
SOME = [(heads, list(TOLERANCES)[number % 3]) for number, heads in enumerate(HEADS)]


@pytest.mark.parametrize("shape", quick(SHAPES, *SOME[::2], kinds=SOME[1::2]), ids=str)
def test_every_shape_of_heads_is_right(shape: tuple[tuple[int, int, tuple[int, int]], torch.dtype]) -> None:
    (heads, key_heads, sizes), dtype = shape
    tolerance = TOLERANCES[dtype]
    rows = Rows([1, 16, 17, 100], heads=heads, key_heads=key_heads, sizes=sizes, dtype=dtype)
    for number, output in enumerate(rows.attended(range(4))):
        assert (output - rows.expected(number)).abs().max() < tolerance
    for num_new in (9, 50, 100):
        (output,) = rows.attended([3], num_new)
        assert (output - rows.expected(3, num_new)).abs().max() < tolerance


@pytest.mark.parametrize("sizes", [(64, 64), (128, 96)])
@pytest.mark.parametrize("num_new", [1, 70])
def test_results_do_not_depend_on_how_many_sums_fit_registers(
    sizes: tuple[int, int], num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, found = Rows([200], heads=6, sizes=sizes), []
    for max_sums in (24, 6):
        monkeypatch.setattr(compiled_attention, "max_sums", lambda max_sums=max_sums: max_sums)
        found += rows.attended([0], num_new)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "window, num_new, num_threads",
    covering([None, 1, 5, 16, 100, 1500], [1, 5, 9, 300], [1, 2]),
    indirect=["num_threads"],
)
def test_windows_and_pieces_of_long_rows_are_right(window: int | None, num_new: int, num_threads: int) -> None:
    rows = Rows([1023, 1024, 1025, 3000, max(8, num_new)], window=window)
    for number, output in enumerate(rows.attended(range(5), num_new)):
        assert (output - rows.expected(number, num_new)).abs().max() < 3e-6


@pytest.mark.parametrize("softcap, has_sinks", [(0.5, False), (30.0, True), (None, True)])
@pytest.mark.parametrize("window", [None, 5])
def test_bounded_scores_and_sinks_are_right(softcap: float | None, has_sinks: bool, window: int | None) -> None:
    """Also in a text of several pieces, in which sinks count once, and for scores far above the bound."""
    rows = Rows([1, 17, 2100], heads=6, window=window, softcap=softcap, has_sinks=has_sinks)
    if softcap is not None:
        rows.queries[1] *= 100
    for num_new in (1, 9, 40):
        for number in range(3):
            if num_new <= rows.lengths[number]:
                (output,) = rows.attended([number], num_new)
                assert (output - rows.expected(number, num_new)).abs().max() < 2e-5


@pytest.mark.parametrize(
    "num_new, softcap, has_sinks", [(1, None, False), (7, 30.0, True), (33, None, True), (33, None, False)]
)
def test_a_row_is_the_same_in_every_bit_in_whatever_company_and_place(
    num_new: int, softcap: float | None, has_sinks: bool, num_threads: int
) -> None:
    rows = Rows([40, 2100, 1300, 37], softcap=softcap, has_sinks=has_sinks)
    alone = [rows.attended([number], num_new)[0] for number in range(4)]
    torch.set_num_threads(3 - num_threads)
    hole = rows.store.new_cache()
    hole.reserve(3 * PAGE_TOKENS)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0]):
        for number, output in zip(order, rows.attended(order, num_new), strict=True):
            assert torch.equal(output, alone[number])


def test_a_load_in_another_thread_that_changes_torchs_default_type_harms_no_memory() -> None:
    rows = Rows([200, 60])
    torch.set_default_dtype(torch.bfloat16)
    try:
        outputs = [rows.attended([0, 1], num_new) for num_new in (1, 40)]
    finally:
        torch.set_default_dtype(torch.float32)
    for num_new, found in zip((1, 40), outputs, strict=True):
        for number, output in enumerate(found):
            assert (output - rows.expected(number, num_new)).abs().max() < 3e-6


def test_chunks_and_next_tokens_stand_in_one_batch() -> None:
    rows = Rows([200, 60])
    caches = {0: rows.filled(0, 100), 1: rows.filled(1, 59)}
    outputs = rows.attend(caches, {0: 100, 1: 1})
    for number, num_new in ((0, 100), (1, 1)):
        assert (outputs[number] - rows.expected(number, num_new)).abs().max() < 3e-6


@pytest.mark.parametrize("num_new", [1, 20])
@pytest.mark.parametrize("spoilt", ["keys", "values"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_in_its_own_row_only(spoilt: str, number: float, num_new: int) -> None:
    rows = Rows([40, 50])
    getattr(rows, spoilt)[0][20] = number
    first, second = rows.attended([0, 1], num_new)
    assert not torch.isfinite(first).all()
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("num_new", [1, 20])
def test_scores_of_any_size_are_right(num_new: int) -> None:
    rows = Rows([40])
    rows.queries[0] *= 1000
    (output,) = rows.attended([0], num_new)
    assert (output - rows.expected(0, num_new)).abs().max() < 1e-3


@pytest.mark.parametrize("num_new", [1, 33])
def test_pages_that_a_window_gave_back_change_no_bit(num_new: int) -> None:
    """Tiles of keys begin at the same positions, whatever page comes first."""

    def attended(num_taken_back: int) -> tuple[int, Tensor]:
        rows = Rows([420], window=100)
        rows.store = KVStore(64, PAGE_TOKENS, [100], max_step_tokens=64)
        cache = rows.store.new_cache()
        cache.reserve(420)
        for position in range(0, 300 + num_taken_back, 50):
            rows.attend({0: cache}, {0: min(50, 300 + num_taken_back - position)})
        cache.truncate(300)
        first_token = cache.tables[0].first_token
        return first_token, rows.attend({0: cache}, {0: num_new})[0]

    found = [attended(num_taken_back) for num_taken_back in (0, 16, 32, 48)]
    assert len({first_token % TILE_KEYS for first_token, _ in found}) == TILE_KEYS // PAGE_TOKENS
    for _, output in found[1:]:
        assert torch.equal(output, found[0][1])


def test_layers_of_one_group_may_differ_in_their_query_heads() -> None:
    """A block of few heads has more tokens than one of many has room for."""
    few, many = Rows([300], heads=2), Rows([300], heads=16)
    store = KVStore(32, PAGE_TOKENS, [None, None], max_step_tokens=300)
    cache = store.new_cache()
    cache.reserve(300)
    cache.prepare(0, 300)
    batch = AttentionBatch(store, [PackedRow(cache, 0, 0, 300)], CompiledAttention())
    for layer, rows in enumerate((few, many, few)):
        query, key, value = rows.queries[0], rows.keys[0], rows.values[0]
        output = batch.attend(min(layer, 1), query, key, value, scaling=rows.scaling)
        assert (output - rows.expected(0, 300)).abs().max() < 3e-6
    # A block of latents has pieces, which one of ordinary heads lacks.
    latents = HeadShape("float", 48, 32, num_shared=8, max_sums=6, rotated_size=16)
    assert len(tables_of(batch, 0, None, latents).queries) == 300
    ordinary = tables_of(batch, 0, None, replace(latents, rotated_size=0))
    assert (len(ordinary.queries), len(ordinary.blocks)) == (0, len(tables_of(batch, 0, None, latents).blocks))
