"""Writes the product of rows with a packed or a plain matrix, as LLVM's text.

Each number of the product is one sum from the first column to the last. So no bit of a row's result depends on the
other rows of the call. Packed weights are unpacked to float32 with the rounding of the package `gguf`. Rows in float32
are multiplied by fused multiply-adds. Rows in bfloat16 are multiplied two columns at a time, where the processor has
instructions for that; the weights are then rounded once more, to bfloat16.
"""

import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from corolla.kernels.compiler import processor_features
from corolla.kernels.layouts import PLAIN_BFLOAT16, PLAIN_FLOAT32, UNIT, Layout, PlainLayout
from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, FLOATS, INTS, LANES, Fields, Function
from corolla.kernels.weights_source import HEAD_OF_PERMUTATIONS, columns, panel_part

_PAIRS: Final = f"<{2 * LANES} x bfloat>"
_DOT: Final = "llvm.x86.avx512bf16.dpbf16ps.512"
_ROUND: Final = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
# How many panels a group may have. Groups that are unpacked before the product are small, so they stay in the cache.
_PANELS: Final = (4, 2, 1)
UNPACKED_PANELS: Final = 2
MAX_FEW_ROWS: Final = 8
"""The most rows for which weights are unpacked during the product; for more rows, they are unpacked before it."""

_HEAD_OF_PAIRS: Final = f"""\
declare {FLOATS} @{_DOT}({FLOATS}, {_PAIRS}, {_PAIRS})
declare {_PAIRS} @{_ROUND}({FLOATS}, {FLOATS})
"""


class Rows(enum.Enum):
    """The type of the rows: float32, or bfloat16 for instructions that multiply pairs."""

    FLOAT32 = "float"
    BFLOAT16 = "bfloat"


JOB: Final[Fields] = (
    ("ptr", "x"),  # [rows, columns]
    ("i64", "rows"),
    ("i64", "columns"),
    ("ptr", "weights"),
    ("ptr", "y"),  # float32 [rows, 16 * panels]
    ("i64", "panels"),
    ("ptr", "scratch"),  # `scratch_bytes` for each item; only for a packed matrix and many rows
    ("i64", "scratch_bytes"),
    ("i64", "size"),  # panels of an item
)
"""The fields of the job that `share` gets."""

Tiles = Sequence[tuple[int, int]]
"""The sizes of tiles: how many rows and panels are multiplied at once, as many as registers allow. One of the tiles has
a single row, and for each number of rows there is a tile with a single panel."""


def module_source(layout: Layout | PlainLayout, rows: Rows, *, packed_tiles: Tiles, plain_tiles: Tiles) -> str:
    """LLVM's text of a module with three functions, or with the first two for plain weights. All counts are int64.

    `share(job, item)` multiplies `[rows, columns]` by the panels of an item; see `JOB`.

    `part(x, rows, columns, weights, y, panels, scratch, first, end)` multiplies by the panels `[first, end)`.

    `expand(ids, count, columns, weights, y)` unpacks rows of the matrix, by number, to float32 `[count, columns]`.

    Args:
        layout: the layout of the panels.
        rows: the type of the rows.
        packed_tiles: the tile sizes for weights that are unpacked during the product.
        plain_tiles: the tile sizes for plain weights, and for weights that are unpacked before the product.
    """
    parts = [DECLARATIONS, _HEAD_OF_PAIRS if rows is Rows.BFLOAT16 else ""]
    tile = _FloatTile if rows is Rows.FLOAT32 else _PairTile
    if isinstance(layout, PlainLayout):
        parts += [_tile(tile(layout, *size), "tile") for size in plain_tiles]
        parts += [_part("part", layout, plain_tiles, rows)]
    else:
        unpacked = unpacked_layout(rows)
        if layout.bits == 4 and layout.is_float and processor_features().get("avx512f"):
            parts.append(HEAD_OF_PERMUTATIONS)
        few = [size for size in plain_tiles if size[1] <= UNPACKED_PANELS]
        parts += [_tile(tile(layout, *size), "tile") for size in packed_tiles]
        parts += [_unpack(layout, rows), *(_tile(tile(unpacked, *size), "unpacked") for size in few)]
        parts += [_part("few", layout, packed_tiles, rows), _part("many", layout, few, rows, unpacked)]
        parts += [_MANY_OR_FEW, _expand(layout)]
    return "\n".join([*parts, _share(), ATTRIBUTES])


def unpacked_layout(rows: Rows) -> PlainLayout:
    """The layout to which weights are unpacked for a product with many rows."""
    return PLAIN_FLOAT32 if rows is Rows.FLOAT32 else PLAIN_BFLOAT16


def scratch_bytes(num_columns: int, rows: Rows) -> int:
    """Bytes of scratch memory that an item or a thread needs for a group of unpacked panels."""
    layout = unpacked_layout(rows)
    return UNPACKED_PANELS * num_columns // layout.block_weights * layout.block_bytes


_Place = tuple[int, int]
"""A row and a panel of a tile."""


class _FloatTile:
    """Writes the products of a tile of rows and panels for one round of columns, in float32."""

    rows = Rows.FLOAT32

    def __init__(self, layout: Layout | PlainLayout, num_rows: int, num_panels: int) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.num_panels = num_panels

    def add(
        self, function: Function, unit: str, inputs: Sequence[str], panels: Sequence[str], sums: dict[_Place, str]
    ) -> None:
        """Writes the addition of a round's products to the sums, which get new names.

        Args:
            unit: the number of the round.
            inputs: the addresses of the rows.
            panels: the addresses of the panels.
            sums: the names of the sums; they are replaced.
        """
        first = function.let(f"mul i64 {unit}, {self.layout.step}")
        units = [columns(function, self.layout, panel, unit) for panel in panels]
        for column, weights in enumerate(zip(*units, strict=True)):
            place = function.let(f"add i64 {first}, {column}")
            for row, base in enumerate(inputs):
                one = function.let(f"load float, ptr {function.at(base, place, 'float')}, align 4")
                lanes = function.splat(one)
                for panel, weight in enumerate(weights):
                    sums[row, panel] = function.sum_of_product(weight, lanes, sums[row, panel])


class _PairTile(_FloatTile):
    """Writes the products of a tile in bfloat16: each lane adds the products of two columns."""

    rows = Rows.BFLOAT16

    def add(
        self, function: Function, unit: str, inputs: Sequence[str], panels: Sequence[str], sums: dict[_Place, str]
    ) -> None:
        first = function.let(f"mul i64 {unit}, {self.layout.step}")
        units = [_rounded_pairs(function, self.layout, panel, unit) for panel in panels]
        for pair, weights in enumerate(zip(*units, strict=True)):
            place = function.let(f"add i64 {first}, {2 * pair}")
            for row, base in enumerate(inputs):
                both = function.let(f"load i32, ptr {function.at(base, place, 'bfloat')}, align 2")
                pairs = function.let(f"bitcast {INTS} {function.splat(both, 'i32')} to {_PAIRS}")
                for panel, weight in enumerate(weights):
                    arguments = f"{FLOATS} {sums[row, panel]}, {_PAIRS} {weight}, {_PAIRS} {pairs}"
                    sums[row, panel] = function.let(f"call {FLOATS} @{_DOT}({arguments})")


def _rounded_pairs(function: Function, layout: Layout | PlainLayout, panel: str, unit: str) -> Iterator[str]:
    """Yields vectors with two neighbouring columns of each row of a panel, in bfloat16."""
    if isinstance(layout, PlainLayout):
        yield function.load(_PAIRS, panel_part(function, layout, panel, unit))
        return
    order = ", ".join(f"i32 {lane + half}" for lane in range(LANES) for half in (0, LANES))
    singly = columns(function, layout, panel, unit)
    for first, second in zip(singly, singly, strict=True):
        apart = function.let(f"call {_PAIRS} @{_ROUND}({FLOATS} {second}, {FLOATS} {first})")
        yield function.let(f"shufflevector {_PAIRS} {apart}, {_PAIRS} poison, <{2 * LANES} x i32> <{order}>")


def _tile(tile: _FloatTile, name: str) -> str:
    """Writes the function of a tile, whose sums stay in registers from the first column to the last."""
    element = tile.rows.value
    function = Function(
        f"@{name}_{tile.num_rows}_{tile.num_panels}(ptr noalias %x, i64 %columns, "
        "ptr noalias %w, i64 %panel_bytes, ptr noalias %y, i64 %y_columns)"
    )
    num_units = function.let(f"udiv i64 %columns, {tile.layout.step}")
    rows, panels = range(tile.num_rows), range(tile.num_panels)
    x = [function.row("%x", "%columns", row, element) for row in rows]
    y = [function.row("%y", "%y_columns", row, "float") for row in rows]
    w = [function.row("%w", "%panel_bytes", panel) for panel in panels]
    places = list(itertools.product(rows, panels))
    carried = {f"sum_{row}_{panel}": "zeroinitializer" for row, panel in places}
    with function.loop("units", num_units, 1, carried) as names:
        sums = {(row, panel): names[f"sum_{row}_{panel}"] for row, panel in places}
        tile.add(function, names["number"], x, w, sums)
        names |= {f"sum_{row}_{panel}": value for (row, panel), value in sums.items()}
    for row, panel in places:
        function.store(f"%units_sum_{row}_{panel}_after", function.at(y[row], LANES * panel, "float"))
    return function.source()


def _unpack(layout: Layout, rows: Rows) -> str:
    """Writes `unpack`, which converts a packed panel to a plain one."""
    unpacked = unpacked_layout(rows)
    function = Function("@unpack(ptr noalias %w, i64 %columns, ptr noalias %to)")
    kind, blocks = (FLOATS, columns) if rows is Rows.FLOAT32 else (_PAIRS, _rounded_pairs)
    unit_bytes = UNIT // unpacked.block_weights * unpacked.block_bytes
    with function.loop("units", function.let(f"udiv i64 %columns, {UNIT}")) as names:
        target = function.row("%to", names["number"], unit_bytes)
        for number, weights in enumerate(blocks(function, layout, "%w", names["number"])):
            place = function.at(target, number * unpacked.block_bytes)
            function.lines.append(f"  store {kind} {weights}, ptr {place}, align {LANES}")
    return function.source()


_PASSED: Final[Fields] = (*JOB[:7], ("i64", "first"), ("i64", "end"))
_ARGUMENTS: Final = ", ".join(f"{kind} %{name}" for kind, name in _PASSED)


def _part(
    name: str, layout: Layout | PlainLayout, tiles: Tiles, rows: Rows, unpacked: PlainLayout | None = None
) -> str:
    """Writes a function that multiplies all rows by the panels `[first, end)`, one group of panels at a time.

    Args:
        name: its name; `part` can be called from outside.
        unpacked: the layout to which a group's weights are unpacked before all rows are multiplied by them; None: they
            are unpacked during the product.
    """
    function = Function(f"@{name}({_ARGUMENTS})", is_internal=name != "part")

    def bytes_of(read: Layout | PlainLayout) -> str:
        return function.let(f"mul i64 {function.let(f'udiv i64 %columns, {read.block_weights}')}, {read.block_bytes}")

    panel_bytes, y_columns = bytes_of(layout), function.let(f"mul i64 %panels, {LANES}")
    unpacked_bytes = "" if unpacked is None else bytes_of(unpacked)
    widths = [width for width in _PANELS if width <= UNPACKED_PANELS or unpacked is None]
    with function.loop("groups", "%end", start="%first") as groups:
        left, num_panels = function.let(f"sub i64 %end, {groups['number']}"), "1"
        for width in sorted(widths)[1:]:
            fits = function.let(f"icmp uge i64 {left}, {width}")
            num_panels = function.let(f"select i1 {fits}, i64 {width}, i64 {num_panels}")
        groups["step"] = num_panels
        w = function.row("%weights", groups["number"], panel_bytes)
        y = function.row("%y", groups["number"], LANES, "float")
        read_from, stride = w, panel_bytes
        if unpacked is not None:
            read_from, stride = "%scratch", unpacked_bytes
            with function.loop("unpacking", num_panels) as names:
                packed = function.row(w, names["number"], panel_bytes)
                target = function.row("%scratch", names["number"], unpacked_bytes)
                function.lines.append(f"  call void @unpack(ptr {packed}, i64 %columns, ptr {target})")

        with function.loop("rows", "%rows") as names:
            x_row = function.row("%x", names["number"], "%columns", rows.value)
            y_row = function.row(y, names["number"], y_columns, "float")
            left = function.let(f"sub i64 %rows, {names['number']}")
            tile = "tile" if unpacked is None else "unpacked"
            for height, width in _chosen_tiles(function, tiles, widths, left, num_panels):
                at_once = max(size for tall, size in tiles if tall == height and size <= width)
                for first in range(0, width, at_once):
                    w_tile = function.row(read_from, stride, first)
                    y_tile = function.at(y_row, LANES * first, "float")
                    function.lines.append(
                        f"  call void @{tile}_{height}_{at_once}(ptr {x_row}, i64 %columns, ptr {w_tile}, "
                        f"i64 {stride}, ptr {y_tile}, i64 {y_columns})"
                    )
            names["step"] = "%height"
    return function.source()


def _chosen_tiles(
    function: Function, tiles: Tiles, widths: Sequence[int], num_rows: str, num_panels: str
) -> Iterator[tuple[int, int]]:
    """Writes a branch over tile sizes. Yields the rows and panels of each case, for which the caller adds the lines.

    After the branch, `%height` is the number of rows of the tile that ran.

    Args:
        num_rows: how many rows are left.
        num_panels: how many panels the group has, one of `widths`.
    """
    lines, heights = function.lines, sorted({height for height, _ in tiles}, reverse=True)
    lines.append(f"  br label %height_{heights[0]}")
    for height, lower in zip(heights, [*heights[1:], None], strict=True):
        lines.append(f"height_{height}:")
        if lower is not None:
            fits = function.let(f"icmp uge i64 {num_rows}, {height}")
            lines.append(f"  br i1 {fits}, label %width_{height}, label %height_{lower}\nwidth_{height}:")
        cases = " ".join(f"i64 {width}, label %do_{height}_{width}" for width in widths[:-1])
        lines.append(f"  switch i64 {num_panels}, label %do_{height}_1 [{cases}]")
        for width in widths:
            lines.append(f"do_{height}_{width}:")
            yield height, width
            lines.append("  br label %tile_done")
    sources = ", ".join(f"[{height}, %do_{height}_{width}]" for height in heights for width in widths)
    lines.append(f"tile_done:\n  %height = phi i64 {sources}")


_MANY_OR_FEW: Final = f"""\
define void @part({_ARGUMENTS}) #0 {{
  %are_many = icmp ugt i64 %rows, {MAX_FEW_ROWS}
  br i1 %are_many, label %unpack, label %keep
unpack:
  call void @many({_ARGUMENTS})
  ret void
keep:
  call void @few({_ARGUMENTS})
  ret void
}}"""


def _share() -> str:
    """Writes `share`, which multiplies by the panels of one item of a job."""
    function = Function("@share(ptr %job, i64 %item)", is_internal=False)
    fields = {name: function.field("%job", JOB, name) for _, name in JOB}
    first = function.let(f"mul i64 %item, {fields['size']}")
    after = function.let(f"add i64 {first}, {fields['size']}")
    end = function.let(f"call i64 @llvm.umin.i64(i64 {after}, i64 {fields['panels']})")
    scratch = function.row(fields["scratch"], "%item", fields["scratch_bytes"])
    values = {**fields, "scratch": scratch, "first": first, "end": end}
    passed = ", ".join(f"{kind} {values[name]}" for kind, name in _PASSED)
    function.lines.append(f"  call void @part({passed})")
    return function.source()


def _expand(layout: Layout) -> str:
    function = Function("@expand(ptr %ids, i64 %count, i64 %columns, ptr %w, ptr %y)", is_internal=False)
    lines = function.lines
    units = function.let(f"udiv i64 %columns, {UNIT}")
    blocks = function.let(f"udiv i64 %columns, {layout.block_weights}")
    panel_bytes = function.let(f"mul i64 {blocks}, {layout.block_bytes}")
    lines.append("  %is_any = icmp ugt i64 %count, 0\n  br i1 %is_any, label %some, label %none\nsome:")
    with function.loop("rows", "%count") as names:
        row = function.let(f"load i64, ptr {function.at('%ids', names['number'], 'i64')}, align 8")
        lane = function.let(f"urem i64 {row}, {LANES}")
        panel_at = function.let(f"mul i64 {function.let(f'udiv i64 {row}, {LANES}')}, {panel_bytes}")
        panel = function.at("%w", panel_at)
        target = function.row("%y", names["number"], "%columns", "float")
        with function.loop("units", units) as inner:
            place = function.row(target, inner["number"], UNIT, "float")
            for column, weights in enumerate(columns(function, layout, panel, inner["number"])):
                one = function.let(f"extractelement {FLOATS} {weights}, i64 {lane}")
                lines.append(f"  store float {one}, ptr {function.at(place, column, 'float')}, align 4")
    lines.append("  br label %none\nnone:")
    return function.source()
