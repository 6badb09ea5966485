"""Runs the kernels on tensors. All tensors of a call are on one device, and contiguous unless something else is said.

Each function returns new tensors on that device. Integer tables (pages, rows, keys) are int32, slots and positions are
int64; other tensors have the model's dtype: bfloat16, float16 or float32.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from corolla.kernels.page_tables import MOST_PART_BYTES, PageTables
from corolla.kernels.triton import device_code
from corolla.kernels.triton.compilation import SHARED_MEMORY, current
from corolla.kernels.triton.variants import Grid, Variant, variant

ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu", "relu2")
"""The activations of `gate`: SiLU; GELU by the hyperbolic tangent or the error function; squared ReLU."""

NORMS: Final = ("rounded", "offset", "wide", "centred")
"""The kinds of norms. Three divide by the root of the mean square: with numbers that are rounded before they are
multiplied by the weight, with a weight that is stored less one, as Gemma has it, and with neither. The last one
subtracts the mean before (LayerNorm, Ba et al. 2016)."""

_EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}
_LOG2E: Final = 1.4426950408889634
_KEYS_OF_BLOCK: Final = 64
# Rows of a chunk's tile, and warps: registers hold a tile's sums twice. Few heads are larger than so many numbers, and
# products of float32 take registers for whole rows of both factors.
_LARGE_HEAD: Final = 128
_CHUNK_TILE: Final = (64, 4)
_CHUNK_TILE_OF_LARGE_HEADS: Final = (32, 8)
_CHUNK_TILE_OF_FLOAT32: Final = (16, 16)
LEAST_SIDE: Final = 16
"""A product's sides have so many numbers or more."""

# About as many programs as a large GPU runs at a time. More of them only wait.
_PROGRAMS: Final = 2048
# A tile of a product of up to so many rows: its rows and outputs, inner columns of one step, warps, and steps ahead.
_TILES: Final = ((16, (16, 64, 128, 4, 4)), (32, (32, 64, 128, 4, 4)), (64, (64, 64, 128, 4, 3)))
_LARGEST_TILE: Final = (128, 128, 64, 8, 4)
# In half precision, where so many steps fit into the shared memory, few rows take longer steps: 5 to 40 % less time on
# an H100, with the same bits.
_LONG_STEP: Final = 256
_LEAST_LONG_STEPS: Final = 3
# Numbers of a head that a program of `merge_pages` merges. With one for each thread of its only warp, the threads take
# the factors of pages from each other's registers.
_MERGED_COLUMNS: Final = 32
# Columns of a row that a program of `gate` computes.
_COLUMNS_OF_GATE: Final = 1024


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of query heads and key heads.

    Attributes:
        query_weight: `[head_dim]` in the model's dtype, or `[heads * head_dim]` where all heads of a token are
            normalised together; of the kind `centred` `[heads, head_dim]`, one for each head.
        key_weight: `[head_dim]`, `[key heads * head_dim]` or `[key heads, head_dim]`, likewise.
        query_epsilon: added to the mean of the squares of queries.
        key_epsilon: likewise of keys.
        kind: one of NORMS.
    """

    query_weight: Tensor
    key_weight: Tensor
    query_epsilon: float
    key_epsilon: float
    kind: str = "rounded"


def launch(of: Variant, grid: Grid, *arguments: Any) -> None:
    """Launches a kernel, or only compiles it within `compilation.compiling`; all launches come through here.

    Args:
        of: the kernel with its constants.
        grid: one to three sizes.
        arguments: see `Variant.launch`.
    """
    if (compilation := current.get()) is not None:
        compilation.compile(of.kernel, grid, arguments, of.options)
    else:
        of.launch(grid, arguments)


def _stages(most: int, bytes_of_stage: int, shared_memory: int) -> int:
    """How many steps of a loop a kernel loads ahead: `most`, or as many as the shared memory of the device takes.

    The number changes no bit of a result.
    """
    return max(1, min(most, shared_memory // bytes_of_stage))


def _shared_memory(device: torch.device) -> int:
    return _shared_memory_of(device) if (compilation := current.get()) is None else SHARED_MEMORY[compilation.arch]


@functools.cache
def _shared_memory_of(device: torch.device) -> int:
    if device.type != "cuda":
        return max(SHARED_MEMORY.values())
    major, minor = torch.cuda.get_device_capability(device)
    return SHARED_MEMORY.get(10 * major + minor, min(SHARED_MEMORY.values()))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def precision(dtype: torch.dtype) -> str:
    """How products take float32: in full, not cut to TF32. Half precision has one way only."""
    return "ieee" if dtype == torch.float32 else "tf32"


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    epsilon: float,
    *,
    multiplier: float = 1.0,
    kind: str = "rounded",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds to the hidden states, and normalises the sum.

    Args:
        x: `[N, H]`, the hidden states.
        delta: `[N, H]`, what is added to them; None: nothing.
        weight: `[H]`, the norm's weight.
        epsilon: added to the mean of the squares.
        multiplier: the factor of `delta`.
        kind: one of NORMS.
        bias: `[H]`, what a norm of the kind `centred` adds; None: nothing.

    Returns:
        The normalised sum, and the sum, `[N, H]` each.
    """
    out, total = torch.empty_like(x), (x if delta is None else torch.empty_like(x))
    num_rows, width = x.shape
    norm = _norm(kind, width, delta is not None, multiplier != 1.0, bias is not None)
    biases = (weight if bias is None else bias,) if kind == "centred" else ()
    arguments = (x, x if delta is None else delta, weight, *biases, out, total, epsilon, multiplier, width)
    launch(norm, (num_rows,), *arguments)
    return out, total


@functools.cache
def _norm(kind: str, width: int, has_delta: bool, has_multiplier: bool, has_bias: bool) -> Variant:
    block = power_of_two(width)
    options: dict[str, Any] = {
        "HAS_DELTA": has_delta, "HAS_MULTIPLIER": has_multiplier, "BLOCK": block,
        "num_warps": min(16, max(4, block // 512)), **_EXACT,
    }  # fmt: skip
    if kind == "centred":
        return variant(device_code.add_layer_norm, HAS_BIAS=has_bias, **options)
    return variant(device_code.add_rms_norm, NORM=kind, **options)


def gate(gate_up: Tensor, activation: str, up: Tensor | None = None) -> Tensor:
    """The activation of the first half of each row times the second half.

    Args:
        gate_up: `[N, 2 G]`; `[N, G]`, only the first half, where the second one is given.
        activation: one of ACTIVATIONS.
        up: `[N, G]`, the second half; None: it is in `gate_up`.

    Returns:
        `[N, G]`.
    """
    width = gate_up.shape[-1] // 2 if up is None else gate_up.shape[-1]
    return _activated(gate_up, gate_up[:, width:] if up is None else up, width, activation, gates=True)


def activate(rows: Tensor, activation: str) -> Tensor:
    """The activation of each number, where an MLP has no gate.

    Args:
        rows: `[N, G]`.
        activation: one of ACTIVATIONS.

    Returns:
        `[N, G]`.
    """
    return _activated(rows, rows, rows.shape[-1], activation, gates=False)


def _activated(rows: Tensor, ups: Tensor, width: int, activation: str, *, gates: bool) -> Tensor:
    out = rows.new_empty(rows.shape[0], width)
    block = _columns_of_gate(width)
    grid = (rows.shape[0], -(-width // block))
    launch(_gate(activation, gates, block), grid, rows, ups, out, rows.shape[-1], width)
    return out


@functools.cache
def _gate(activation: str, gates: bool, block: int) -> Variant:
    return variant(device_code.gate, ACTIVATION=activation, GATES=gates, BLOCK=block, num_warps=4, **_EXACT)


def _columns_of_gate(width: int) -> int:
    return min(_COLUMNS_OF_GATE, power_of_two(width))


def gate_neighbours(rows: Tensor, alpha: float, limit: float) -> Tensor:
    """The gate of gpt-oss: `(up + 1) * gate * logistic(alpha * gate)`.

    Args:
        rows: `[N, 2 G]`; each gate stands before its up.
        alpha: the factor in the logistic function.
        limit: the bound of gates from above, and of ups on both sides.

    Returns:
        `[N, G]`.
    """
    width = rows.shape[-1] // 2
    out = rows.new_empty(rows.shape[0], width)
    block = _columns_of_gate(width)
    gating = variant(device_code.gate_neighbours, BLOCK=block, num_warps=4, **_EXACT)
    launch(gating, (rows.shape[0], -(-width // block)), rows, out, width, alpha, limit)
    return out


def rotate_and_store(
    qkv: Tensor,
    table: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    in_pairs: bool = False,
    norms: HeadNorms | None = None,
    norms_rotated: bool = False,
    codec: str | None = None,
) -> Tensor:
    """Normalises and rotates queries and keys, and stores keys and values in their pages.

    Args:
        qkv: `[N or more, (heads + 2 * key heads) * head_dim]`, the projections of the new tokens; norms of all heads
            together change it in place.
        table: `[rows, 2, rotary size]` in the model's dtype or float32, cosines and signed sines of the first numbers
            of a head; None: there is no rotary embedding.
        positions: int64 `[N]`, each token's row of the table.
        slots: int64 `[N]`, where each token's key and value go.
        keys: `[slots, key heads, head_dim]`, written in place; with a codec int8 `[slots, key heads, stored size]`.
        values: `[slots, key heads, head_dim]`, likewise.
        in_pairs: whether a number is rotated with its neighbour, not with the one half the rotary size away.
        norms: the norms of queries and keys; None: there are none.
        norms_rotated: whether these norms follow the rotation; then a head's numbers are normalised by themselves.
        codec: the key of `cache.codecs.CODECS` by which keys and values are stored; None: as they are.

    Returns:
        The queries, `[N or more, heads, head_dim]`; those after the new tokens are not written.
    """
    _, num_key_heads, stored = keys.shape
    head = _head_size(stored, codec)
    num_heads = qkv.shape[1] // head - 2 * num_key_heads
    query = qkv.new_empty(qkv.shape[0], num_heads, head)
    if norms is not None and (norms.query_weight.shape[-1], norms.key_weight.shape[-1]) != (head, head):
        _norm_projections(qkv, norms)
        norms = None
    weights = (qkv, qkv) if norms is None else (norms.query_weight, norms.key_weight)
    epsilons = (0.0, 0.0) if norms is None else (norms.query_epsilon, norms.key_epsilon)
    rotary, norm = 0 if table is None else table.shape[-1], "" if norms is None else norms.kind
    launch(
        _rotation(num_heads, num_key_heads, head, rotary, in_pairs, norm, norms_rotated, codec or "", stored),
        (slots.shape[0], num_heads + 2 * num_key_heads),
        qkv, qkv if table is None else table, positions, slots, query, keys, values, *weights, *epsilons,
    )  # fmt: skip
    return query


@functools.cache
def _rotation(
    num_heads: int,
    num_key_heads: int,
    head: int,
    rotary: int,
    in_pairs: bool,
    norm: str,
    norms_rotated: bool,
    codec: str,
    stored: int,
) -> Variant:
    return variant(
        device_code.rotate_and_store, NUM_HEADS=num_heads, NUM_KEY_HEADS=num_key_heads, HEAD=head,
        BLOCK=power_of_two(head), ROTARY=rotary, IN_PAIRS=in_pairs, NORM=norm, NORMS_ROTATED=norms_rotated, CODEC=codec,
        STORED=stored, num_warps=1, **_EXACT,
    )  # fmt: skip


def _norm_projections(qkv: Tensor, norms: HeadNorms) -> None:
    sizes = len(norms.query_weight), len(norms.key_weight)
    blocks = [power_of_two(size) for size in sizes]
    norm = variant(
        device_code.norm_projections, QUERY=sizes[0], QUERY_BLOCK=blocks[0], KEY=sizes[1], KEY_BLOCK=blocks[1],
        NORM=norms.kind, num_warps=min(16, max(4, max(blocks) // 512)), **_EXACT,
    )  # fmt: skip
    launch(
        norm, (qkv.shape[0], 2), qkv, norms.query_weight, norms.key_weight, norms.query_epsilon, norms.key_epsilon,
        qkv.shape[1],
    )  # fmt: skip


def _head_size(stored: int, codec: str | None) -> int:
    # The last byte of a head as int8 is its exponent.
    return stored - 1 if codec == "int8" else stored


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: PageTables,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    codec: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of all rows of some tables over their pages.

    In multi-latent attention, all heads share one key head. Its keys are latents, which are the values, too, and what
    stands for values are further numbers of keys, the rotated ones.

    Args:
        query: `[N, heads, head_dim]` of the new tokens of all rows, whose keys and values are stored; more may follow.
            `[N, heads, latent size + rotated size]` in multi-latent attention.
        keys: `[slots, key heads, head_dim]`; with a codec int8 `[slots, key heads, stored size]`.
        values: `[slots, key heads, head_dim]`, likewise.
        tables: rows of these new tokens; rows of one token each begin with the first of them.
        scaling: the factor of the scores.
        window: how many tokens a token sees, itself included; None: it sees all tokens before it.
        softcap: the bound of the scores; None: they are not bounded.
        sinks: attention sinks, `[heads]` in the model's dtype or float32; None: there are none.
        codec: the key of `cache.codecs.CODECS` by which keys and values are stored; None: as they are.
        out: `[N, heads, head_dim]`; gets the results of these rows, and keeps its other tokens; None: a new tensor.

    Returns:
        `[N, heads, head_dim]`, or `[N, heads, latent size]`; what follows the new tokens is not written.
    """
    num_rows, width = tables.pages.shape
    num_heads = query.shape[1]
    out = empty_output(query, keys, values, codec) if out is None else out
    head = out.shape[2]
    heads = _Heads(
        num_heads, head, keys.shape[1], keys.shape[2], query.dtype, codec or "", tables.page_tokens, window is not None,
        softcap is not None, _shared_memory(query.device), query.shape[2] - head, values.shape[2],
    )  # fmt: skip
    num_groups = num_heads // heads.group
    scale = scaling * (1.0 if softcap is not None else _LOG2E)
    numbers = (scale, window or 0, softcap or 0.0, width)
    if tables.max_queries == 1 and 4 * tables.num_pages * num_heads * head <= MOST_PART_BYTES:
        splits = max(1, min(width, _PROGRAMS // (num_rows * num_groups)))
        parts = torch.empty(tables.num_pages, num_heads, head, dtype=torch.float32, device=query.device)
        sums, maxima = (torch.empty_like(parts[..., 0]) for _ in range(2))
        attending, merging = _attention_of_tokens(heads)
        launch(
            attending, (splits, num_groups, num_rows), query, keys, values, sinks, parts, sums, maxima, tables.pages,
            tables.num_keys, tables.first_pages, *numbers, splits,
        )  # fmt: skip
        launch(
            merging, (num_heads, num_rows, -(-head // _MERGED_COLUMNS)), parts, sums, maxima, out,
            tables.num_keys, tables.first_pages, window or 0,
        )  # fmt: skip
        return out
    tokens, attending = _attention_of_chunks(heads)
    launch(
        attending, (-(-tables.max_queries // tokens), num_groups, num_rows), query, keys, values, sinks, out,
        tables.pages, tables.first_queries, tables.num_keys, *numbers,
    )  # fmt: skip
    return out


def empty_output(query: Tensor, keys: Tensor, values: Tensor, codec: str | None) -> Tensor:
    """A tensor for the results of `attend`.

    Args:
        query: `[N, heads, head_dim]`, or `[N, heads, latent size + rotated size]`.
        keys: `[slots, key heads, head_dim]`, or latents; see `attend`.
        values: `[slots, key heads, head_dim]`, or rotated keys.
        codec: see `attend`.

    Returns:
        `[N, heads, head_dim]`, or `[N, heads, latent size]`, in the query's dtype.
    """
    is_latent = query.shape[2] != _head_size(values.shape[2], codec)
    return query.new_empty(*query.shape[:2], _head_size(keys.shape[2], codec) if is_latent else query.shape[2])


class _Heads(NamedTuple):
    """What the constants of attention depend on; see `attend`.

    Attributes:
        shared_memory: how many bytes of shared memory a program may take.
        rotated: how many numbers of a query are rotated, in multi-latent attention; otherwise 0.
        rotated_stored: how many numbers of the pages the rotated ones of a key take.
    """

    num_heads: int
    size: int
    num_key_heads: int
    stored: int
    dtype: torch.dtype
    codec: str
    page_tokens: int
    has_window: bool
    has_softcap: bool
    shared_memory: int
    rotated: int
    rotated_stored: int

    @property
    def block(self) -> int:
        """How many keys are loaded together."""
        most = _KEYS_OF_BLOCK
        if self.rotated:
            # The shared memory has the queries, and the keys twice, of which one is transposed.
            rows = self.shared_memory // ((self.head_block + self.rotated_block) * self.dtype.itemsize)
            most = min(most, power_of_two(max(LEAST_SIDE, (rows - self.tile[0]) // 2) + 1) // 2)
        return min(most, max(LEAST_SIDE, power_of_two(self.page_tokens)))

    @property
    def head_block(self) -> int:
        return max(LEAST_SIDE, power_of_two(self.size))

    @property
    def rotated_block(self) -> int:
        return max(LEAST_SIDE, power_of_two(max(1, self.rotated)))

    @property
    def group(self) -> int:
        """How many heads, which share a key head, a program takes."""
        if not self.rotated:
            return self.num_heads // self.num_key_heads
        return max(each for each in range(1, self.tile[0] + 1) if self.num_heads % each == 0)

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "NUM_HEADS": self.num_heads, "NUM_KEY_HEADS": self.num_key_heads, "HEAD": self.size,
            "HEAD_BLOCK": self.head_block, "GROUP": self.group, "BLOCK": self.block, "PAGE": self.page_tokens,
            "HAS_WINDOW": self.has_window, "HAS_SOFTCAP": self.has_softcap, "PRECISION": precision(self.dtype),
            "CODEC": self.codec, "STORED": self.stored, "ROTATED": self.rotated,
            "ROTATED_BLOCK": self.rotated_block, "ROTATED_STORED": self.rotated_stored, **_EXACT,
        }  # fmt: skip

    def stages(self, most: int) -> int:
        # A step of the loops loads keys and values.
        return _stages(most, 2 * self.block * self.head_block * self.dtype.itemsize, self.shared_memory)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of a chunk's tile, and warps."""
        if self.dtype == torch.float32:
            return _CHUNK_TILE_OF_FLOAT32
        return _CHUNK_TILE if self.head_block <= _LARGE_HEAD else _CHUNK_TILE_OF_LARGE_HEADS


@functools.cache
def _attention_of_tokens(heads: _Heads) -> tuple[Variant, Variant]:
    """What attends to each page, and what merges the pages."""
    attending = variant(
        device_code.attend_pages, ROWS=max(LEAST_SIDE, power_of_two(heads.group)), **heads.constants,
        num_warps=heads.tile[1] if heads.rotated or heads.dtype == torch.float32 else _CHUNK_TILE[1],
        num_stages=heads.stages(3),
    )  # fmt: skip
    merging = variant(
        device_code.merge_pages, NUM_HEADS=heads.num_heads, HEAD=heads.size, COLUMNS=_MERGED_COLUMNS,
        PAGE=heads.page_tokens, num_warps=1, **_EXACT,
    )  # fmt: skip
    return attending, merging


@functools.cache
def _attention_of_chunks(heads: _Heads) -> tuple[int, Variant]:
    """How many tokens a tile has, and what attends."""
    group_block = power_of_two(heads.group)
    lanes, warps = heads.tile
    tokens = max(1, lanes // group_block)
    attending = variant(
        device_code.attend_chunks, TOKENS=tokens, GROUP_BLOCK=group_block, **heads.constants, num_warps=warps,
        num_stages=heads.stages(2),
    )  # fmt: skip
    return tokens, attending


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a product computes, and how.

    Attributes:
        height: rows of the result.
        width: outputs.
        depth: inner columns of one step.
        warps: warps of a program.
        stages: how many steps are loaded ahead.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int


def tile_of(num_rows: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile of a product of `num_rows` rows that have this dtype; no bit depends on the tile."""
    height, width, depth, warps, stages = next((tile for most, tile in _TILES if num_rows <= most), _LARGEST_TILE)
    bytes_of_column, shared_memory = (height + width) * dtype.itemsize, _shared_memory(device)
    takes_long_steps = dtype.itemsize == 2 and num_rows <= _TILES[-1][0] and num_inputs % _LONG_STEP == 0
    if takes_long_steps and _stages(stages, bytes_of_column * _LONG_STEP, shared_memory) >= _LEAST_LONG_STEPS:
        depth = _LONG_STEP
    elif num_inputs % depth:
        depth = 64
    return Tile(height, width, depth, warps, _stages(stages, bytes_of_column * depth, shared_memory))


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `rows W^T + b` with the inner dimension in one order, so that no row depends on the others.

    Args:
        rows: `[R, in]`.
        weight: `[out, in]`, in the rows' dtype or a narrower one.
        bias: `[out]`; None: there is none.

    Returns:
        `[R, out]`.
    """
    num_rows, num_inputs = rows.shape
    num_outputs = weight.shape[0]
    out = rows.new_empty(num_rows, num_outputs)
    tile = tile_of(num_rows, num_inputs, rows.dtype, rows.device)
    product = variant(
        device_code.multiply, BM=tile.height, BN=tile.width, BK=tile.depth, GM=8, HAS_BIAS=bias is not None,
        EVEN_K=num_inputs % tile.depth == 0, PRECISION=precision(rows.dtype), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    launch(
        product, (-(-num_rows // tile.height) * -(-num_outputs // tile.width),),
        rows, weight, out, out if bias is None else bias, num_rows, num_outputs, num_inputs,
    )  # fmt: skip
    return out


def row_counts() -> Sequence[int]:
    """Numbers of rows for which `multiply` takes each of its tiles once."""
    return (*(most for most, _ in _TILES), 2 * _TILES[-1][0])
