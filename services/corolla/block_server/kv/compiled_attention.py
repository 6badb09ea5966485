"""Attention of next tokens by compiled functions, for all rows of a batch in one call; for CPUs.

torch's flash attention takes a call for each row, and with few keys a call takes longer than its work.
"""

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from corolla.block_server.kv.attention import AttentionBatch, LayerInput, PackedRow
from corolla.block_server.kv.attention_source import JOB, HeadShape, module_source
from corolla.block_server.kv.kernels import flash_cpu
from corolla.block_server.kv.run_attention import RunAttention
from corolla.chassis.errors import StartupError
from corolla.models.compiler import Compiled, has_openmp, objection
from corolla.models.llvm_text import LANES

_ELEMENTS: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "float", torch.bfloat16: "bfloat", torch.float16: "half",
}  # fmt: skip

_MAX_TOKENS: Final = 8
"""New tokens of a row, at most: each goes through the row's keys by itself."""

_PIECE_TOKENS: Final = 1024
"""Keys that one thread goes through at once; a multiple of every tile."""

_LEAST_KEYS_OF_THREADS: Final = 256
"""Fewer, over all queries, take less time than it takes to wake another thread."""

_Job: Final = ctypes.c_int64 * len(JOB)


@dataclass(frozen=True, slots=True)
class _Tables:
    """The short rows of a batch for one group of layers, int32.

    Attributes:
        pieces: `[pieces, 4]`: query, first key, end, and where the row's pages begin; keys count from the first page.
        queries: `[queries, 3]`: query, first piece and end.
        pages: ids of all rows' pages.
        num_keys: of all queries together.
    """

    pieces: Tensor
    queries: Tensor
    pages: Tensor
    num_keys: int


class CompiledAttention:
    """Rows of few new tokens by compiled functions, all else by torch's flash attention.

    Raises:
        StartupError: nothing can be compiled here.
    """

    name = "compiled"

    def __init__(self) -> None:
        if (reason := objection()) is not None:
            raise StartupError(f"COROLLA_ATTENTION=compiled does not work here: {reason}. Set it to auto.")
        self._runs = RunAttention("flash", flash_cpu)

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        shape = _shape_of(given)
        page_tokens = batch.store.pool.page_tokens
        if shape is None or batch.store.codec is not None or page_tokens % LANES:
            return self._runs.attend(batch, given)
        group = batch.store.group_of(given.layer)
        tables = batch.prepared.get(group)
        if tables is None:
            tables = batch.prepared[group] = _tables(batch.rows, group, given.window, page_tokens)
        if not len(tables.queries):
            return self._runs.attend(batch, given)
        keys, values = batch.write(given.layer, given.key, given.value)
        output = self._attend(shape, given, keys, values, tables, page_tokens)
        for number, row in enumerate(batch.rows):
            if row.num_tokens > _MAX_TOKENS:
                output[row.start : row.end] = self._runs.attend_row(batch, number, given, keys, values)
        return output

    def _attend(
        self, shape: HeadShape, given: LayerInput, keys: Tensor, values: Tensor, tables: _Tables, page_tokens: int
    ) -> Tensor:
        query = given.query.contiguous()
        num_key_heads = keys.shape[1]
        output = torch.empty(*query.shape[:2], shape.value_size)
        states = torch.empty(len(tables.pieces) * num_key_heads * shape.state_floats)
        job: Any = _Job(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr(), states.data_ptr(),
            tables.pieces.data_ptr(), tables.pages.data_ptr(), tables.queries.data_ptr(), 0, num_key_heads, page_tokens,
            keys.stride(0) * shape.element_bytes, keys.stride(1) * shape.element_bytes,
            values.stride(0) * shape.element_bytes, values.stride(1) * shape.element_bytes, _float_bits(given.scaling),
            0, len(tables.pieces) * num_key_heads, len(tables.queries) * num_key_heads,
        )  # fmt: skip
        num_threads = torch.get_num_threads() if tables.num_keys >= _LEAST_KEYS_OF_THREADS else 1
        _function(shape)(job, num_threads)
        return output.to(query.dtype)


def _shape_of(given: LayerInput) -> HeadShape | None:
    """What has to be compiled for a layer; None where it cannot be."""
    key_heads, key_size = given.key.shape[1:]
    value_size = given.value.shape[2]
    element = _ELEMENTS.get(given.query.dtype)
    if given.softcap is not None or element is None or key_size % LANES or value_size % LANES:
        return None
    return HeadShape(element, key_size, value_size, given.query.shape[1] // key_heads)


@functools.lru_cache(maxsize=1024)
def _float_bits(number: float) -> int:
    bits: int = struct.unpack("I", struct.pack("f", number))[0]
    return bits


@functools.cache
def _function(shape: HeadShape) -> Any:
    """The process's only one for a shape."""
    return Compiled(module_source(shape, has_threads=has_openmp())).function("attend", _Job, ctypes.c_int64)


def _tables(rows: Sequence[PackedRow], group: int, window: int | None, page_tokens: int) -> _Tables:
    pieces: list[tuple[int, int, int, int]] = []
    queries: list[tuple[int, int, int]] = []
    pages: list[int] = []
    num_keys = 0
    for row in rows:
        if row.num_tokens > _MAX_TOKENS:
            continue
        table = row.cache.tables[group]
        for token in range(row.num_tokens):
            end = row.position + token + 1
            start = 0 if window is None else max(0, end - window)
            num_keys += end - start
            first_piece = len(pieces)
            for cut in range(start - start % _PIECE_TOKENS, end, _PIECE_TOKENS):
                first, last = max(start, cut) - table.first_token, min(end, cut + _PIECE_TOKENS) - table.first_token
                pieces.append((row.start + token, first, last, len(pages)))
            queries.append((row.start + token, first_piece, len(pieces)))
        pages.extend(table.pages)

    def integers(values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return _Tables(integers(pieces), integers(queries), integers(pages), num_keys)
