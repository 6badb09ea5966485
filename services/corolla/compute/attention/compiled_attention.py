"""Attention by compiled functions, on CPUs, for all rows of a batch in one call or two.

torch's attention needs a call for each row, and with few keys the call takes longer than the computation. With many
keys, it is half as fast as these functions. All tensors are on the CPU.
"""

import ctypes
import functools
import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from corolla.chassis.errors import StartupError
from corolla.compute.attention.base import SHORT_ROW, AttentionBackend, AttentionBatch, LayerInput, PackedRow
from corolla.compute.attention.sdpa import SdpaAttention
from corolla.kernels import chunk_source, next_token_source
from corolla.kernels.attention_text import CONSTANTS, HeadShape
from corolla.kernels.chunk_source import TILE_KEYS, block_tokens
from corolla.kernels.compiler import Compiled, max_sums, share, why_unavailable
from corolla.kernels.llvm_text import LANES
from corolla.kernels.next_token_source import JOB

ELEMENTS: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "float", torch.bfloat16: "bfloat", torch.float16: "half",
}  # fmt: skip

_PIECE_TOKENS: Final = 1024
"""How many keys a thread processes as one piece; a multiple of the 16 keys of a tile."""

_LEAST_KEYS_OF_THREADS: Final = 256
"""How many keys all queries must see together so that it pays to wake other threads."""

_ALL_KEYS: Final = 1 << 30
"""The window of a layer without one, whose tokens see all tokens before them."""

EXPONENTIAL: Final = torch.tensor(CONSTANTS, dtype=torch.float32)
"""`CONSTANTS` as a tensor, whose address compiled functions get."""

_Job: Final = ctypes.c_int64 * len(JOB)
_ChunkJob: Final = ctypes.c_int64 * len(chunk_source.JOB)


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a batch as compiled functions read them, for one group of layers; int32.

    A piece is a run of a query's keys that one thread processes; a block is a run of a chunk's tokens.

    Attributes:
        pieces: `[pieces, 4]`: query, first key, end of keys, index of the row's first entry in `pages`; keys are
            counted from the row's first page.
        queries: `[queries, 3]`: query, first piece, end of pieces.
        blocks: `[blocks, entries]` for the chunks; see `chunk_source.BLOCK`. Those of latents have pieces, too.
        pages: `[pages]`: the ids of all rows' pages.
        num_keys: how many keys all queries of `queries` see together.
        num_states: how many pieces all queries have together.
    """

    pieces: Tensor
    queries: Tensor
    blocks: Tensor
    pages: Tensor
    num_keys: int
    num_states: int


class CompiledAttention(AttentionBackend):
    """Attention by compiled functions, or by torch's after gathering if they do not support the heads or the cache.

    Raises:
        StartupError: functions cannot be compiled on this machine.
    """

    name = "compiled"

    def __init__(self) -> None:
        if (reason := why_unavailable()) is not None:
            raise StartupError(f"COROLLA_ATTENTION=compiled does not work here: {reason}. Set it to auto.")
        self._others = SdpaAttention()

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        shape = _shape_of(given)
        page_tokens = batch.store.pool.page_tokens
        if shape is None or batch.store.codec is not None or page_tokens % LANES:
            return self._others.attend(batch, given)
        tables = tables_of(batch, given.layer, given.window, shape)
        keys, values = batch.write(given.layer, given.key, given.value)
        query = given.query.contiguous()
        output = torch.empty(*query.shape[:2], shape.value_size, dtype=torch.float32)
        sinks = None if given.sinks is None else given.sinks.detach().float().contiguous()
        next_tokens, chunks, _states = jobs_of(
            tables, query.data_ptr(), keys, values, output.data_ptr(), page_tokens, shape, given.scaling, given.window,
            given.softcap or 0.0, 0 if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        num_key_heads, num_threads = keys.shape[1], torch.get_num_threads()
        if next_tokens is not None:
            at, functions = ctypes.addressof(next_tokens), next_token_module(shape)
            most = num_threads if tables.num_keys >= _LEAST_KEYS_OF_THREADS else 1
            share(functions.address("piece"), at, len(tables.pieces) * num_key_heads, most)
            # Merging is too little work for several threads.
            share(functions.address("merge"), at, len(tables.queries) * num_key_heads, 1)
        if chunks is not None:
            block, num_items = chunk_module(shape).address("block"), len(tables.blocks) * num_key_heads
            share(block, ctypes.addressof(chunks), num_items, num_threads)
        return output.to(query.dtype)

    def attend_to_latents(self, batch: AttentionBatch, layer: int, query: Tensor, scaling: float) -> Tensor | None:
        """See `AttentionBackend.attend_to_latents`."""
        store = batch.store
        if store.codec is not None or store.pool.page_tokens % LANES:
            return None
        latents, rotated = store.layer(layer)
        sizes, element = (latents.shape[-1], rotated.shape[-1]), ELEMENTS.get(query.dtype)
        if element is None or any(size % LANES for size in sizes):
            return None
        shape = HeadShape(element, sum(sizes), sizes[0], query.shape[1], max_sums(), rotated_size=sizes[1])
        tables = tables_of(batch, layer, None, shape)
        output = torch.empty(*query.shape[:2], shape.value_size, dtype=torch.float32)
        _, job, _states = jobs_of(
            tables, query.data_ptr(), latents, rotated, output.data_ptr(), store.pool.page_tokens, shape, scaling, None
        )
        at, functions = ctypes.addressof(job), chunk_module(shape)
        num_threads = torch.get_num_threads() if tables.num_keys >= _LEAST_KEYS_OF_THREADS else 1
        share(functions.address("block"), at, len(tables.blocks), num_threads)
        share(functions.address("merge"), at, len(tables.queries), num_threads)
        return output


def jobs_of(
    tables: Tables,
    query: int,
    keys: Tensor,
    values: Tensor,
    output: int,
    page_tokens: int,
    shape: HeadShape,
    scaling: float,
    window: int | None,
    softcap: float = 0.0,
    sinks: int = 0,
) -> tuple[Any, Any, Tensor]:
    """The jobs, arrays of arguments, that compiled functions get for a batch.

    Args:
        tables: the rows of the batch.
        query: the address of `[N, heads, key size]` in the shape's element type.
        keys: `[slots, key heads, key size]` in the same type.
        values: `[slots, key heads, value size]` in the same type.
        output: the address of the output, float32 `[N, heads, value size]`.
        page_tokens: tokens of a page.
        shape: the heads.
        scaling: the factor of the scores.
        window: how many tokens a token sees, itself included; None: all tokens before it.
        softcap: the bound of the scores, where the shape has one.
        sinks: the address of the sinks, float32 `[heads]`, where the shape has some.

    Returns:
        The job for `next_token_module`, and the one for `chunk_module`; None where no row has one. Then the memory for
        intermediate results, float32 `[states * key heads * shape.state_floats]`: it must live as long as the jobs.
    """
    strides = (stride * shape.element_bytes for part in (keys, values) for stride in part.stride()[:2])
    states = torch.empty(tables.num_states * keys.shape[1] * shape.state_floats, dtype=torch.float32)
    common = (
        query, keys.data_ptr(), values.data_ptr(), output, tables.pages.data_ptr(), EXPONENTIAL.data_ptr(),
        keys.shape[1], page_tokens, *strides, float_bits(scaling), states.data_ptr(), tables.queries.data_ptr(),
        float_bits(softcap), sinks,
    )  # fmt: skip
    next_tokens = chunks = None
    if len(tables.pieces):
        next_tokens = _Job(*common, tables.pieces.data_ptr())
    if len(tables.blocks):
        chunks = _ChunkJob(*common, tables.blocks.data_ptr(), min(window or _ALL_KEYS, _ALL_KEYS))
    return next_tokens, chunks, states


def _shape_of(given: LayerInput) -> HeadShape | None:
    """The shape for which a layer's functions are compiled; None if compiled functions do not support the layer."""
    key_heads, key_size = given.key.shape[1:]
    value_size = given.value.shape[2]
    element = ELEMENTS.get(given.query.dtype)
    if element is None or key_size % LANES or value_size % LANES:
        return None
    return HeadShape(
        element, key_size, value_size, given.query.shape[1] // key_heads, max_sums(),
        has_softcap=given.softcap is not None, has_sinks=given.sinks is not None,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def float_bits(number: float) -> int:
    """The bits of a number as float32, the form in which a job's fields hold numbers."""
    bits: int = struct.unpack("I", struct.pack("f", number))[0]
    return bits


@functools.cache
def next_token_module(shape: HeadShape) -> Compiled:
    """The compiled functions for single new tokens of a shape, made once in the process."""
    return Compiled(next_token_source.module_source(shape))


@functools.cache
def chunk_module(shape: HeadShape) -> Compiled:
    """The compiled functions for chunks of a shape, made once in the process."""
    return Compiled(chunk_source.module_source(shape))


def tables_of(batch: AttentionBatch, layer: int, window: int | None, shape: HeadShape) -> Tables:
    """The tables for a layer. Layers of one group share them if their blocks have the same number of tokens.

    Those of latents have tables of their own.
    """
    group, num_block_tokens = batch.store.group_of(layer), block_tokens(shape)
    # Layers of one group may differ in their number of heads, and so in the tokens of a block.
    prepared: dict[tuple[int, bool], Tables] = batch.prepared.setdefault(group, {})
    kind = (num_block_tokens, bool(shape.rotated_size))
    tables = prepared.get(kind)
    if tables is None:
        if shape.rotated_size:
            tables = _tables_of_latents(batch.rows, group, num_block_tokens)
        else:
            tables = _tables(batch.rows, group, window, batch.store.pool.page_tokens, num_block_tokens)
        prepared[kind] = tables
    return tables


def _tables_of_latents(rows: Sequence[PackedRow], group: int, num_block_tokens: int) -> Tables:
    """The tables of rows that attend to latents, in which every token has a block, and each block all of its pieces.

    A token's pieces follow from its position and its row's own number of tokens: if that is large, there are enough
    blocks for all threads, and the states of several pieces would take much memory.
    """
    blocks: list[tuple[int, ...]] = []
    queries: list[tuple[int, int, int]] = []
    pages: list[int] = []
    num_states = num_keys = 0
    for row in rows:
        for token in range(0, row.num_tokens, num_block_tokens):
            first, count = row.position + token, min(num_block_tokens, row.num_tokens - token)
            end = first + count
            piece_tokens = _PIECE_TOKENS if row.num_tokens <= SHORT_ROW else end
            cuts = range(0, end, piece_tokens)
            for number, cut in enumerate(cuts):
                last = min(end, cut + piece_tokens)
                blocks.append((row.start + token, count, first, len(pages), cut, last, num_states + number, len(cuts)))
            for index in range(count):
                seen = -(-(first + index + 1) // piece_tokens)
                own = num_states + index * len(cuts)
                queries.append((row.start + token + index, own, own + seen))
            num_states += count * len(cuts)
            num_keys += count * end
        pages.extend(row.cache.tables[group].pages)
    return Tables(_integers(()), _integers(queries), _integers(blocks), _integers(pages), num_keys, num_states)


def _tables(
    rows: Sequence[PackedRow], group: int, window: int | None, page_tokens: int, num_block_tokens: int
) -> Tables:
    pieces: list[tuple[int, int, int, int]] = []
    queries: list[tuple[int, int, int]] = []
    blocks: list[tuple[int, ...]] = []
    pages: list[int] = []
    num_keys = 0
    for row in rows:
        table = row.cache.tables[group]
        if row.num_tokens > SHORT_ROW:
            # A tile begins at a multiple of TILE_KEYS, but the window may have freed the pages there: the first page
            # that is left stands in for them, and the keys there are masked.
            num_stand_ins = next(n for n in itertools.count() if (table.first_token - n * page_tokens) % TILE_KEYS == 0)
            stand_ins = [table.pages[0]] * num_stand_ins
            first_key = table.first_token - len(stand_ins) * page_tokens
            for token in range(0, row.num_tokens, num_block_tokens):
                count, key = min(num_block_tokens, row.num_tokens - token), row.position + token - first_key
                first = 0 if window is None else max(0, key + 1 - window) // TILE_KEYS * TILE_KEYS
                blocks.append((row.start + token, count, key, len(pages), first, key + count, 0, 0))
            pages.extend(stand_ins)
        else:
            for token in range(row.num_tokens):
                end = row.position + token + 1
                start = 0 if window is None else max(0, end - window)
                num_keys += end - start
                first_piece = len(pieces)
                for cut in range(start - start % _PIECE_TOKENS, end, _PIECE_TOKENS):
                    first, last = max(start, cut), min(end, cut + _PIECE_TOKENS)
                    pieces.append((row.start + token, first - table.first_token, last - table.first_token, len(pages)))
                queries.append((row.start + token, first_piece, len(pieces)))
        pages.extend(table.pages)
    return Tables(_integers(pieces), _integers(queries), _integers(blocks), _integers(pages), num_keys, len(pieces))


def _integers(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
