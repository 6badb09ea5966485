"""Writes the attention of a chunk of a prompt to pages of keys and values, as LLVM's text.

An item of work is a block of queries: some tokens of the query heads that share a key head. It goes through all keys
that the block sees, in tiles of 64 keys. A tile's keys are transposed, and its values copied, once for the block. Then
the scores of 12 queries at a time are computed and turned into weights, which multiply the values; the softmax is
computed tile by tile (see `next_token_source`), as FlashAttention does (Dao et al. 2022). All numbers are float32. No
bit of a query's result depends on where its pages lie or on the number of threads; the result does depend on the
query's block, and so on where its chunk begins.

In multi-latent attention all heads share one key, whose first numbers are the value, too, so that even a single token
has a block of queries. Then an item is a block and a piece of the keys, whose states `merge` merges; a token's result
does not depend on its block, only on the pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from corolla.kernels.attention_text import (
    COMMON_FIELDS,
    FIRST_LANE,
    LEAST,
    HeadShape,
    bounded,
    exponential_of_difference,
    item_of,
    larger_of,
    largest_of,
    merge,
    numbers_of,
    sink_of,
    slot_of,
)
from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, FLOATS, INTS, LANES, Function

TILE_KEYS: Final = 64
_TILE_RUNS: Final = TILE_KEYS // LANES
_SCORE_RUNS: Final = 2
"""How many runs of 16 keys are multiplied at once; one run on processors with few registers."""
_BLOCK_ROWS: Final = 96
"""How many queries a block has at most, unless one token alone has more."""

BLOCK: Final = (
    "first_token",
    "num_tokens",
    "key",  # that of the first token
    "page",  # the index of its row's first page
    "first_key",  # of the piece of keys, a multiple of 64
    "end_key",
    "state",  # the number of the first token's state of this piece; states of the token's other pieces lie around it
    "token_states",  # how many states lie between those of two neighbouring tokens
)
"""The entries of a block; the last two have a meaning only where `HeadShape.rotated_size` is not 0."""

JOB: Final = (
    *COMMON_FIELDS,
    ("ptr", "blocks"),  # the entries of each block
    ("i64", "window"),  # how many keys a token sees, its own included
)


def block_tokens(shape: HeadShape) -> int:
    """How many tokens a block has; a chunk's last block may have fewer."""
    return max(1, _BLOCK_ROWS // shape.num_shared)


def module_source(shape: HeadShape) -> str:
    """The text of a module with the public function `block(job, item)`.

    Where `HeadShape.rotated_size` is not 0, there is `merge(job, item)`, too, which has to be called after all blocks.

    A job has the fields `JOB`; each block has an item for each key head, and `merge` one for each pair of a query and a
    key head. Counts are int64, and tables int32.
    """
    scores, values = _product_of_keys(shape), _products_of_values(shape)
    sizes = [shape.key_size - shape.rotated_size, shape.rotated_size] if shape.rotated_size else [shape.key_size]
    parts = [DECLARATIONS, *(_transpose(shape, size) for size in sizes), _copy(shape), _weigh(shape)]
    parts += [each.source() for each in dict.fromkeys([scores, *values])]
    parts += [merge(shape)] if shape.rotated_size else []
    return "\n".join([*parts, _Block(shape, scores, values).source(), ATTRIBUTES])


def _rows(shape: HeadShape) -> int:
    """How many queries' scores are computed and turned into weights together.

    Where heads share latents, their number is mostly a multiple of 8, and a block may be a single token.
    """
    return 8 if shape.rotated_size else 12


def _value_rows(shape: HeadShape) -> int:
    """How many queries' sums of values are computed at once."""
    most = min(shape.max_sums, _rows(shape) if shape.rotated_size else 6)
    return max(each for each in range(1, most + 1) if _rows(shape) % each == 0)


def _num_rows(shape: HeadShape) -> int:
    """How many queries a block has, rounded up to a multiple of `_rows`."""
    rows = _rows(shape)
    return -(-block_tokens(shape) * shape.num_shared // rows) * rows


@dataclass(frozen=True, slots=True)
class _Product:
    """A function that multiplies a few rows by some vectors of a matrix, with all sums in registers.

    Attributes:
        row_floats: the distance from a row to the next one, in numbers.
        line_floats: the distance from a line of the matrix to the next one, in numbers.
        sum_floats: the distance from a row of sums to the next one, in numbers.
        is_corrected: whether the function multiplies earlier sums by a factor per row, and adds the products to them.
    """

    name: str
    num_rows: int
    num_vectors: int
    row_floats: int
    line_floats: int
    sum_floats: int
    is_corrected: bool

    def source(self) -> str:
        function = Function(
            f"@{self.name}(ptr noalias %rows, ptr noalias %matrix, i64 %count, "
            "ptr noalias %sums, ptr noalias %corrections)"
        )
        rows, vectors = range(self.num_rows), range(self.num_vectors)
        places = {
            f"sum_{row}_{vector}": function.at("%sums", 4 * (self.sum_floats * row + LANES * vector))
            for row in rows
            for vector in vectors
        }
        before = dict.fromkeys(places, "zeroinitializer")
        for row in rows if self.is_corrected else ():
            correction = function.load(FLOATS, "%corrections", 4 * LANES * row, 4)
            for name in (f"sum_{row}_{vector}" for vector in vectors):
                sums = function.load(FLOATS, places[name], align=4)
                before[name] = function.let(f"fmul {FLOATS} {sums}, {correction}")
        with function.loop("lines", "%count", 1, before) as names:
            line = function.row("%matrix", names["number"], 4 * self.line_floats)
            numbers = [function.load(FLOATS, line, 4 * LANES * vector, 4) for vector in vectors]
            column = function.at("%rows", names["number"], "float")
            for row in rows:
                one = function.let(f"load float, ptr {function.at(column, 4 * self.row_floats * row)}, align 4")
                lanes = function.splat(one)
                for vector in vectors:
                    name = f"sum_{row}_{vector}"
                    names[name] = function.sum_of_product(numbers[vector], lanes, names[name])
        for name, place in places.items():
            function.store(f"%lines_{name}_after", place)
        return function.source()


def _product_of_keys(shape: HeadShape) -> _Product:
    rows = _rows(shape)
    num_runs = _SCORE_RUNS if shape.max_sums >= _SCORE_RUNS * rows else 1
    num_rows = max(each for each in range(1, min(rows, shape.max_sums // num_runs) + 1) if rows % each == 0)
    return _Product("scores", num_rows, num_runs, shape.key_size, TILE_KEYS, TILE_KEYS, is_corrected=False)


def _products_of_values(shape: HeadShape) -> list[_Product]:
    """The functions that together cover all vectors of a value."""
    left, num_rows = shape.value_size // LANES, _value_rows(shape)
    most = max(1, shape.max_sums // num_rows)
    widths = [most] * (left // most) + [left % most] * bool(left % most)
    size = shape.value_size
    return [_Product(f"values_{width}", num_rows, width, TILE_KEYS, size, size, is_corrected=True) for width in widths]


def _transpose(shape: HeadShape, size: int) -> str:
    """Writes `transpose_SIZE`, which stores `size` numbers of each of 16 keys as columns of the tile."""
    function = Function(f"@transpose_{size}(ptr noalias %keys, i64 %key_slot, ptr noalias %to)")
    keys = [function.row("%keys", "%key_slot", number) for number in range(LANES)]
    for part in range(size // LANES):
        vectors = [numbers_of(function, shape, key, part) for key in keys]
        distance = 1
        while distance < LANES:
            lower = ", ".join(f"i32 {(lane ^ distance) + LANES if lane & distance else lane}" for lane in range(LANES))
            upper = ", ".join(f"i32 {lane + LANES if lane & distance else lane ^ distance}" for lane in range(LANES))
            moved = list(vectors)
            for number in range(LANES):
                if not number & distance:
                    both = f"{FLOATS} {vectors[number]}, {FLOATS} {vectors[number | distance]}"
                    moved[number] = function.let(f"shufflevector {both}, {INTS} <{lower}>")
                    moved[number | distance] = function.let(f"shufflevector {both}, {INTS} <{upper}>")
            vectors, distance = moved, 2 * distance
        for number, vector in enumerate(vectors):
            function.store(vector, function.at("%to", 4 * TILE_KEYS * (LANES * part + number)))
    return function.source()


def _copy(shape: HeadShape) -> str:
    """Writes `copy`, which stores 16 values as lines of the tile."""
    function = Function("@copy(ptr noalias %values, i64 %value_slot, ptr noalias %to)")
    for number in range(LANES):
        value = function.row("%values", "%value_slot", number)
        for part in range(shape.value_size // LANES):
            place = function.at("%to", 4 * (shape.value_size * number + LANES * part))
            function.store(numbers_of(function, shape, value, part), place)
    return function.source()


def _weigh(shape: HeadShape) -> str:
    """Writes `weigh`, which turns the scores of queries into weights, and stores factors for their earlier sums."""
    function = Function(
        "@weigh(ptr noalias %weights, ptr noalias %last, i64 %window, i64 %tile, float %softcap, "
        "ptr noalias %constants, ptr noalias %corrections, ptr noalias %sums, ptr noalias %largest)"
    )
    numbers = ", ".join(f"i32 {lane}" for lane in range(LANES))
    tile = function.splat(function.let("trunc i64 %tile to i32"), "i32")
    window = function.let("trunc i64 %window to i32")
    from_tile = function.let(f"add {INTS} {tile}, <{numbers}>")
    softcap = function.splat("%softcap") if shape.has_softcap else ""
    with function.loop("rows", _rows(shape)) as names:
        of_row = function.row("%weights", names["number"], 4 * TILE_KEYS)
        places = [function.at(of_row, 4 * LANES * run) for run in range(_TILE_RUNS)]
        last_one = function.load("i32", function.at("%last", names["number"], "i32"), align=4)
        last = function.splat(last_one, "i32")
        before = function.splat(function.let(f"sub i32 {last_one}, {window}"), "i32")
        seen, scores, larger = [], [], ""
        for run, place in enumerate(places):
            position = function.let(f"add {INTS} {from_tile}, splat (i32 {LANES * run})")
            not_later = function.let(f"icmp sle {INTS} {position}, {last}")
            in_window = function.let(f"icmp sgt {INTS} {position}, {before}")
            seen.append(function.let(f"and <{LANES} x i1> {not_later}, {in_window}"))
            given = function.load(FLOATS, place, align=4)
            if softcap:
                given = bounded(function, "%constants", given, softcap)
            scores.append(function.let(f"select <{LANES} x i1> {seen[run]}, {FLOATS} {given}, {FLOATS} {LEAST}"))
            larger = larger_of(function, scores[run], larger) if run else scores[0]
        lane = function.let(f"mul i64 {names['number']}, {4 * LANES}")
        largest_at, sums_at, correction_at = (function.at(name, lane) for name in ("%largest", "%sums", "%corrections"))
        largest_before = function.load(FLOATS, largest_at, align=4)
        largest = larger_of(function, function.splat(largest_of(function, larger)), largest_before)
        # A query that has seen neither key nor sink yet has sums of 0, and minus infinity as its largest score.
        has_seen = function.let(f"fcmp one {FLOATS} {largest_before}, {LEAST}")
        raised = exponential_of_difference(function, "%constants", largest_before, largest)
        correction = function.let(f"select <{LANES} x i1> {has_seen}, {FLOATS} {raised}, {FLOATS} zeroinitializer")
        total = function.let(f"fmul {FLOATS} {function.load(FLOATS, sums_at, align=4)}, {correction}")
        for run, place in enumerate(places):
            raised = exponential_of_difference(function, "%constants", scores[run], largest)
            weights = function.let(f"select <{LANES} x i1> {seen[run]}, {FLOATS} {raised}, {FLOATS} zeroinitializer")
            total = function.let(f"fadd {FLOATS} {total}, {weights}")
            function.store(weights, place)
        for value, place in ((largest, largest_at), (total, sums_at), (correction, correction_at)):
            function.store(value, place)
    return function.source()


class _Block:
    """Writes `block`, which computes the outputs, or states, of a block of queries of one key head."""

    def __init__(self, shape: HeadShape, scores: _Product, values: Sequence[_Product]) -> None:
        self._shape, self._scores, self._values = shape, scores, values
        self._function = function = Function("@block(ptr %job, i64 %item)", is_internal=False)
        num_rows, rows = _num_rows(shape), _rows(shape)
        self._scratch = {
            name: function.let(f"alloca [{floats} x float], align 64")
            for name, floats in (
                ("query", num_rows * shape.key_size), ("last", num_rows), ("keys", TILE_KEYS * shape.key_size),
                ("values", TILE_KEYS * shape.value_size), ("weights", rows * TILE_KEYS),
                ("corrections", rows * LANES), ("sums", num_rows * LANES), ("largest", num_rows * LANES),
                ("output", num_rows * shape.value_size),
            )
        }  # fmt: skip
        self._fields = {name: function.field("%job", JOB, name) for _, name in JOB}
        number, self._head = item_of(function)
        block = function.row(self._fields["blocks"], number, 4 * len(BLOCK))
        entries = dict(zip(BLOCK, function.counts(block, len(BLOCK)), strict=True))
        self._first, self._key, self._entries = entries["first_token"], entries["key"], entries
        self._pages = function.at(self._fields["pages"], entries["page"], "i32")
        self._rows = function.let(f"mul i64 {entries['num_tokens']}, {shape.num_shared}")
        self._heads = function.let(f"mul i64 {self._fields['key_heads']}, {shape.num_shared}")
        self._first_head = function.let(f"mul i64 {self._head}, {shape.num_shared}")

    def source(self) -> str:
        self._prepare()
        self._go_through_keys()
        if self._shape.rotated_size:
            self._keep_states()
        else:
            self._finish()
        return self._function.source()

    def _prepare(self) -> None:
        """Writes lines that store the scaled queries as float32 and begin the sums; padding queries see no key."""
        function, shape, rows = self._function, self._shape, _rows(self._shape)
        scaling = function.splat(function.float_field("%job", JOB, "scaling"))
        groups = function.let(f"udiv i64 {function.let(f'add i64 {self._rows}, {rows - 1}')}, {rows}")
        with function.loop("prepare", function.let(f"mul i64 {groups}, {rows}")) as names:
            row = names["number"]
            largest = LEAST
            if shape.has_sinks:
                shared = function.let(f"urem i64 {row}, {shape.num_shared}")
                largest = sink_of(function, function.let(f"add i64 {self._first_head}, {shared}"))
            function.store(largest, self._of_row("largest", LANES, row))
            function.store(FIRST_LANE if shape.has_sinks else "zeroinitializer", self._of_row("sums", LANES, row))
            for place in self._parts(self._of_row("output", shape.value_size, row), shape.value_size):
                function.store("zeroinitializer", place)
            queries = self._parts(self._of_row("query", shape.key_size, row), shape.key_size)
            last = self._of_row("last", 1, row)
            token = function.let(f"udiv i64 {row}, {shape.num_shared}")
            is_one = function.let(f"icmp ult i64 {row}, {self._rows}")
            self._add(f"  br i1 {is_one}, label %is_query, label %is_none\nis_query:")
            at = function.let(f"mul i64 {self._number_of(row)}, {shape.key_size * shape.element_bytes}")
            given = function.at(self._fields["query"], at)
            for part, place in enumerate(queries):
                function.store(
                    function.let(f"fmul {FLOATS} {numbers_of(function, shape, given, part)}, {scaling}"), place
                )
            position = function.let(f"trunc i64 {function.let(f'add i64 {self._key}, {token}')} to i32")
            self._add(f"  store i32 {position}, ptr {last}, align 4\n  br label %prepared\nis_none:")
            for place in queries:
                function.store("zeroinitializer", place)
            self._add(f"  store i32 -1, ptr {last}, align 4\n  br label %prepared\nprepared:")

    def _go_through_keys(self) -> None:
        """Writes the loop over the tiles of the piece."""
        function, fields, scratch = self._function, self._fields, self._scratch
        end, softcap = self._entries["end_key"], function.float_field("%job", JOB, "softcap")
        with function.loop("tiles", end, TILE_KEYS, start=self._entries["first_key"]) as names:
            tile = names["number"]
            left = function.let(f"sub i64 {end}, {tile}")
            needed = function.let(f"call i64 @llvm.umin.i64(i64 {left}, i64 {TILE_KEYS})")
            self._read_tile(tile, needed)
            with function.loop("groups", self._rows, _rows(self._shape)) as groups:
                group = groups["number"]
                self._score(group, needed)
                last = self._of_row("last", 1, group)
                sums, largest = (self._of_row(name, LANES, group) for name in ("sums", "largest"))
                self._add(
                    f"  call void @weigh(ptr {scratch['weights']}, ptr {last}, i64 {fields['window']}, i64 {tile}, "
                    f"float {softcap}, ptr {fields['constants']}, ptr {scratch['corrections']}, ptr {sums}, "
                    f"ptr {largest})"
                )
                self._add_values(group, needed)

    def _read_tile(self, tile: str, needed: str) -> None:
        """Writes the copy of a tile to scratch memory, in runs of 16 keys and values, which lie on one page each."""
        function, fields, scratch, shape = self._function, self._fields, self._scratch, self._shape
        first_size = shape.key_size - shape.rotated_size
        with function.loop("runs", needed, LANES) as names:
            run = names["number"]
            slot = slot_of(function, self._pages, function.let(f"add i64 {tile}, {run}"), fields["page_tokens"])
            keys, values = (self._of_slot(name, slot) for name in ("key", "value"))
            to_keys = function.at(scratch["keys"], run, "float")
            to_values = self._of_row("values", shape.value_size, run)
            self._add(f"  call void @transpose_{first_size}(ptr {keys}, i64 {fields['key_slot']}, ptr {to_keys})")
            copied, stride = values, fields["value_slot"]
            if rotated := shape.rotated_size:
                to_rotated = function.at(to_keys, 4 * TILE_KEYS * first_size)
                self._add(f"  call void @transpose_{rotated}(ptr {values}, i64 {stride}, ptr {to_rotated})")
                copied, stride = keys, fields["key_slot"]
            self._add(f"  call void @copy(ptr {copied}, i64 {stride}, ptr {to_values})")

    def _score(self, group: str, needed: str) -> None:
        """Writes the scores of a group of queries. Scores of keys that no query sees may be any number."""
        function, scratch, product, size = self._function, self._scratch, self._scores, self._shape.key_size
        with function.loop("scores", needed, LANES * product.num_vectors) as names:
            query = self._of_row("query", size, group)
            keys, scores = (function.at(scratch[name], names["number"], "float") for name in ("keys", "weights"))
            for row in range(0, _rows(self._shape), product.num_rows):
                queries, sums = function.at(query, 4 * size * row), function.at(scores, 4 * TILE_KEYS * row)
                self._call(product, queries, keys, str(size), sums, "null")

    def _add_values(self, group: str, needed: str) -> None:
        function, size = self._function, self._shape.value_size
        output = self._of_row("output", size, group)
        for row in range(0, _rows(self._shape), _value_rows(self._shape)):
            weights = function.at(self._scratch["weights"], 4 * TILE_KEYS * row)
            corrections = function.at(self._scratch["corrections"], 4 * LANES * row)
            first = 0
            for product in self._values:
                values = function.at(self._scratch["values"], 4 * first)
                self._call(product, weights, values, needed, function.at(output, 4 * (size * row + first)), corrections)
                first += LANES * product.num_vectors

    def _call(self, product: _Product, rows: str, matrix: str, count: str, sums: str, corrections: str) -> None:
        self._add(f"  call void @{product.name}(ptr {rows}, ptr {matrix}, i64 {count}, ptr {sums}, ptr {corrections})")

    def _of_slot(self, name: str, slot: str) -> str:
        function, fields = self._function, self._fields
        base = function.row(fields[f"{name}s"], self._head, fields[f"{name}_head"])
        return function.row(base, slot, fields[f"{name}_slot"])

    def _keep_states(self) -> None:
        """Writes the copy of the queries' states to the places where `merge` finds them."""
        function, shape = self._function, self._shape
        states, heads = self._fields["states"], self._fields["key_heads"]
        with function.loop("keep", self._rows) as names:
            row = names["number"]
            token = function.let(f"udiv i64 {row}, {shape.num_shared}")
            after = function.let(f"mul i64 {token}, {self._entries['token_states']}")
            state = function.let(f"add i64 {self._entries['state']}, {after}")
            number = function.let(f"add i64 {function.let(f'mul i64 {state}, {heads}')}, {self._head}")
            of_heads = function.row(states, number, shape.state_floats, "float")
            shared = function.let(f"urem i64 {row}, {shape.num_shared}")
            target = function.row(of_heads, shared, shape.head_floats, "float")
            kept = self._parts(self._of_row("output", shape.value_size, row), shape.value_size)
            kept += [self._of_row(name, LANES, row) for name in ("sums", "largest")]
            for own, place in zip(kept, self._parts(target, shape.head_floats), strict=True):
                function.store(function.load(FLOATS, own, align=4), place)

    def _finish(self) -> None:
        function, size = self._function, self._shape.value_size
        with function.loop("finish", self._rows) as names:
            row = names["number"]
            totals = function.splat(function.total(function.load(FLOATS, self._of_row("sums", LANES, row), align=4)))
            target = function.row(self._fields["output"], self._number_of(row), size, "float")
            done = self._parts(self._of_row("output", size, row), size)
            for own, place in zip(done, self._parts(target, size), strict=True):
                function.store(function.let(f"fdiv {FLOATS} {function.load(FLOATS, own, align=4)}, {totals}"), place)

    def _of_row(self, name: str, num_floats: int, row: str) -> str:
        """The address of a row in scratch memory."""
        return self._function.row(self._scratch[name], row, num_floats, "float")

    def _number_of(self, row: str) -> str:
        """The number of a row's query among the queries of all tokens and heads."""
        function, shared = self._function, self._shape.num_shared
        token = function.let(f"add i64 {self._first}, {function.let(f'udiv i64 {row}, {shared}')}")
        head = function.let(f"add i64 {self._first_head}, {function.let(f'urem i64 {row}, {shared}')}")
        return function.let(f"add i64 {function.let(f'mul i64 {token}, {self._heads}')}, {head}")

    def _parts(self, base: str, num_floats: int) -> list[str]:
        return [self._function.at(base, 4 * LANES * part) for part in range(num_floats // LANES)]

    def _add(self, lines: str) -> None:
        self._function.lines.append(lines)
