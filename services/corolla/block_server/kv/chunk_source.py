"""Attention of a chunk of a prompt to pages of keys and values, as LLVM's text.

An item is a block of queries, some tokens of the query heads that share a key head, and goes through all keys that they
see in tiles of 32. A tile is transposed once, so that scores of 12 queries are two vectors of sums each, and weighs the
values as it is; the softmax goes along (see `next_token_source`). All is computed in float32. A query's result is the
same in every bit wherever its pages lie and however many threads compute; it depends on its block, and so on where its
chunk begins.
"""

from typing import Final

from corolla.block_server.kv.attention_text import (
    COMMON_FIELDS,
    HEAD,
    LEAST,
    MAX_SUMS,
    HeadShape,
    exponential_of_difference,
    field,
    items_source,
    largest_of,
    numbers_of,
    slot_of,
)
from corolla.models.llvm_text import ATTRIBUTES, FLOATS, FMA, INTS, LANES, OPENMP, Function

HALVES: Final = 2
TILE_KEYS: Final = HALVES * LANES
_ROWS: Final = 12
"""Queries whose scores of a tile are computed at once: with two vectors each they fit 32 registers."""
_BLOCK_ROWS: Final = 48

JOB: Final = (
    *COMMON_FIELDS,
    # Of each block: its first token, how many, the key of the first one, and where its row's pages begin.
    ("ptr", "blocks"),
    ("i64", "window"),  # how many keys a token sees, its own included
)


def block_tokens(shape: HeadShape) -> int:
    """Tokens of a block; a chunk's last one may have fewer."""
    return max(1, _BLOCK_ROWS // shape.num_shared)


def module_source(shape: HeadShape, *, has_threads: bool) -> str:
    """A module with two functions, whose counts are int64 and whose tables are int32:

    `attend(job, threads)`, where a job is numbers of 64 bits, see `JOB`, and is written to.

    `block(job, number, key_head)`: what it consists of. That writes to no job.
    """
    parts = [HEAD, OPENMP if has_threads else "", _transpose(shape), _scores(shape), _values(shape)]
    return "\n".join(
        [*parts, _Block(shape).source(), items_source("block", has_threads=has_threads), _ATTEND, ATTRIBUTES]
    )


def _num_rows(shape: HeadShape) -> int:
    """Of a block, filled up."""
    return -(-block_tokens(shape) * shape.num_shared // _ROWS) * _ROWS


def _num_value_rows(shape: HeadShape) -> int:
    """Queries whose sums of values are computed at once."""
    most = max(1, MAX_SUMS // (shape.value_size // LANES))
    return max(each for each in range(1, min(most, _ROWS) + 1) if _ROWS % each == 0)


def _transpose(shape: HeadShape) -> str:
    """16 keys, to the vectors of each of their numbers, two of which lie side by side."""
    function = Function()
    lines = function.lines
    lines.append("define internal void @transpose(ptr noalias %keys, i64 %key_slot, ptr noalias %to) #0 {\nentry:")
    keys = [function.at("%keys", function.let(f"mul i64 %key_slot, {number}")) for number in range(LANES)]
    for part in range(shape.key_size // LANES):
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
            place = function.at("%to", 4 * TILE_KEYS * (LANES * part + number))
            lines.append(f"  store {FLOATS} {vector}, ptr {place}, align 4")
    lines.append("  ret void\n}")
    return "\n".join(lines)


def _scores(shape: HeadShape) -> str:
    """How much each of 12 queries weighs the keys of a tile, and what its sums so far are to be multiplied by."""
    function = Function()
    lines = function.lines
    lines.append(
        "define internal void @scores(ptr noalias %query, ptr noalias %keys, ptr noalias %last, i64 %window, "
        "i64 %tile, ptr noalias %constants, ptr noalias %weights, ptr noalias %corrections, ptr noalias %sums, "
        "ptr noalias %largest) #0 {\n"
        "entry:\n  br label %loop\nloop:\n  %number = phi i64 [0, %entry], [%next, %loop]"
    )
    places = [(row, half) for row in range(_ROWS) for half in range(HALVES)]
    for row, half in places:
        lines.append(f"  %sum_{row}_{half} = phi {FLOATS} [zeroinitializer, %entry], [%new_{row}_{half}, %loop]")
    at = function.at("%keys", function.let(f"mul i64 %number, {4 * TILE_KEYS}"))
    keys = [function.load(FLOATS, at, 4 * LANES * half, 4) for half in range(HALVES)]
    query = function.at("%query", "%number", "float")
    for row in range(_ROWS):
        one = function.splat(function.let(f"load float, ptr {function.at(query, 4 * shape.key_size * row)}, align 4"))
        for half in range(HALVES):
            arguments = f"{FLOATS} {one}, {FLOATS} {keys[half]}, {FLOATS} %sum_{row}_{half}"
            lines.append(f"  %new_{row}_{half} = call {FLOATS} @{FMA}({arguments})")
    lines.append(f"  %next = add i64 %number, 1\n  %is_more = icmp ult i64 %next, {shape.key_size}")
    lines.append("  br i1 %is_more, label %loop, label %weigh\nweigh:")
    numbers = ", ".join(f"i32 {lane}" for lane in range(LANES))
    tile = function.splat(function.let("trunc i64 %tile to i32"), "i32")
    window = function.let("trunc i64 %window to i32")
    positions = []
    for half in range(HALVES):
        from_tile = function.let(f"add {INTS} {tile}, <{numbers}>")
        positions.append(function.let(f"add {INTS} {from_tile}, splat (i32 {LANES * half})"))
    for row in range(_ROWS):
        _weigh(function, row, positions, window)
    lines.append("  ret void\n}")
    return "\n".join(lines)


def _weigh(function: Function, row: int, positions: list[str], window: str) -> None:
    last_one = function.load("i32", "%last", 4 * row, 4)
    last = function.splat(last_one, "i32")
    before = function.splat(function.let(f"sub i32 {last_one}, {window}"), "i32")
    seen, scores = [], []
    for half, position in enumerate(positions):
        not_later = function.let(f"icmp sle {INTS} {position}, {last}")
        in_window = function.let(f"icmp sgt {INTS} {position}, {before}")
        seen.append(function.let(f"and <{LANES} x i1> {not_later}, {in_window}"))
        scores.append(function.let(f"select <{LANES} x i1> {seen[half]}, {FLOATS} %new_{row}_{half}, {FLOATS} {LEAST}"))
    largest_at, sums_at = function.at("%largest", 4 * LANES * row), function.at("%sums", 4 * LANES * row)
    largest_before = function.load(FLOATS, largest_at, align=4)
    first_is_more = function.let(f"fcmp ogt {FLOATS} {scores[0]}, {scores[1]}")
    larger = function.let(f"select <{LANES} x i1> {first_is_more}, {FLOATS} {scores[0]}, {FLOATS} {scores[1]}")
    of_tile = function.splat(largest_of(function, larger))
    is_more = function.let(f"fcmp ogt {FLOATS} {of_tile}, {largest_before}")
    largest = function.let(f"select <{LANES} x i1> {is_more}, {FLOATS} {of_tile}, {FLOATS} {largest_before}")
    # A query that has seen no key yet has no sums that could be corrected.
    has_seen = function.let(f"fcmp one {FLOATS} {largest_before}, {LEAST}")
    raised = exponential_of_difference(function, "%constants", largest_before, largest)
    correction = function.let(f"select <{LANES} x i1> {has_seen}, {FLOATS} {raised}, {FLOATS} zeroinitializer")
    total = function.let(f"fmul {FLOATS} {function.load(FLOATS, sums_at, align=4)}, {correction}")
    for half in range(HALVES):
        raised = exponential_of_difference(function, "%constants", scores[half], largest)
        weights = function.let(f"select <{LANES} x i1> {seen[half]}, {FLOATS} {raised}, {FLOATS} zeroinitializer")
        total = function.let(f"fadd {FLOATS} {total}, {weights}")
        place = function.at("%weights", 4 * (TILE_KEYS * row + LANES * half))
        function.lines.append(f"  store {FLOATS} {weights}, ptr {place}, align 4")
    for value, place in (
        (largest, largest_at), (total, sums_at), (correction, function.at("%corrections", 4 * LANES * row)),
    ):  # fmt: skip
        function.lines.append(f"  store {FLOATS} {value}, ptr {place}, align 4")


def _values(shape: HeadShape) -> str:
    """Adds the weighed values `[0, count)` of a half to the sums of some queries, which are corrected before."""
    function = Function()
    lines = function.lines
    lines.append(
        "define internal void @values(ptr noalias %weights, ptr noalias %corrections, ptr noalias %values, "
        "i64 %value_slot, i64 %count, ptr noalias %sums) #0 {\nentry:"
    )
    rows, parts = range(_num_value_rows(shape)), range(shape.value_size // LANES)
    places = [(row, part) for row in rows for part in parts]
    sums_at = {(row, part): function.at("%sums", 4 * (shape.value_size * row + LANES * part)) for row, part in places}
    corrections = [function.load(FLOATS, "%corrections", 4 * LANES * row, 4) for row in rows]
    first = {
        place: function.let(f"fmul {FLOATS} {function.load(FLOATS, sums_at[place], align=4)}, {corrections[place[0]]}")
        for place in places
    }
    lines.append("  br label %loop\nloop:\n  %number = phi i64 [0, %entry], [%next, %loop]")
    for row, part in places:
        lines.append(f"  %sum_{row}_{part} = phi {FLOATS} [{first[row, part]}, %entry], [%new_{row}_{part}, %loop]")
    value = function.at("%values", function.let("mul i64 %value_slot, %number"))
    weight = function.at("%weights", "%number", "float")
    numbers = [numbers_of(function, shape, value, part) for part in parts]
    for row in rows:
        one = function.splat(function.let(f"load float, ptr {function.at(weight, 4 * TILE_KEYS * row)}, align 4"))
        for part in parts:
            arguments = f"{FLOATS} {numbers[part]}, {FLOATS} {one}, {FLOATS} %sum_{row}_{part}"
            lines.append(f"  %new_{row}_{part} = call {FLOATS} @{FMA}({arguments})")
    lines.append("  %next = add i64 %number, 1\n  %is_more = icmp ult i64 %next, %count")
    lines.append("  br i1 %is_more, label %loop, label %done\ndone:")
    lines += [f"  store {FLOATS} %new_{row}_{part}, ptr {sums_at[row, part]}, align 4" for row, part in places]
    lines.append("  ret void\n}")
    return "\n".join(lines)


class _Block:
    """Writes what becomes of a block of queries of one key head."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._function = function = Function()
        self._num_rows = num_rows = _num_rows(shape)
        function.lines.append("define void @block(ptr %job, i64 %number, i64 %head) #0 {\nentry:")
        self._scratch = {
            name: function.let(f"alloca [{floats} x float], align 64")
            for name, floats in (
                ("query", num_rows * shape.key_size), ("last", num_rows), ("keys", TILE_KEYS * shape.key_size),
                ("weights", _ROWS * TILE_KEYS), ("corrections", _ROWS * LANES), ("ones", _ROWS * LANES),
                ("sums", num_rows * LANES), ("largest", num_rows * LANES), ("output", num_rows * shape.value_size),
            )
        }  # fmt: skip
        self._fields = {name: field(function, JOB, name) for _, name in JOB}
        block = function.at(self._fields["blocks"], function.let("mul i64 %number, 16"))
        self._first, self._count, self._key, page_at = (
            function.let(f"zext i32 {function.load('i32', block, 4 * index, 4)} to i64") for index in range(4)
        )
        self._pages = function.at(self._fields["pages"], page_at, "i32")
        self._rows = function.let(f"mul i64 {self._count}, {shape.num_shared}")
        self._heads = function.let(f"mul i64 {self._fields['key_heads']}, {shape.num_shared}")
        self._first_head = function.let(f"mul i64 %head, {shape.num_shared}")

    def source(self) -> str:
        self._prepare()
        self._go_through_keys()
        self._finish()
        return "\n".join(self._function.lines)

    def _prepare(self) -> None:
        """Queries are scaled, and widened; what fills the block up sees nothing."""
        function, shape = self._function, self._shape
        ones = [function.at(self._scratch["ones"], 4 * LANES * row) for row in range(_ROWS)]
        self._store_all(ones, "splat (float 1.0)")
        bits = function.let(f"trunc i64 {self._fields['scaling']} to i32")
        scaling = function.splat(function.let(f"bitcast i32 {bits} to float"))
        self._add("  br label %prepare\nprepare:\n  %row = phi i64 [0, %entry], [%row_after, %prepared]")
        self._store_all([self._of_row("sums", LANES, "%row")], "zeroinitializer")
        self._store_all([self._of_row("largest", LANES, "%row")], LEAST)
        self._store_all(self._parts(self._of_row("output", shape.value_size, "%row"), shape.value_size))
        queries = self._parts(self._of_row("query", shape.key_size, "%row"), shape.key_size)
        last = self._of_row("last", 1, "%row")
        token = function.let(f"udiv i64 %row, {shape.num_shared}")
        is_one = function.let(f"icmp ult i64 %row, {self._rows}")
        self._add(f"  br i1 {is_one}, label %is_query, label %is_none\nis_query:")
        at = function.let(f"mul i64 {self._number_of('%row')}, {shape.key_size * shape.element_bytes}")
        given = function.at(self._fields["query"], at)
        for part, place in enumerate(queries):
            scaled = function.let(f"fmul {FLOATS} {numbers_of(function, shape, given, part)}, {scaling}")
            self._store_all([place], scaled)
        position = function.let(f"trunc i64 {function.let(f'add i64 {self._key}, {token}')} to i32")
        self._add(f"  store i32 {position}, ptr {last}, align 4\n  br label %prepared\nis_none:")
        self._store_all(queries)
        self._add(f"  store i32 -1, ptr {last}, align 4\n  br label %prepared\nprepared:")
        self._add(f"  %row_after = add i64 %row, 1\n  %more_rows = icmp ult i64 %row_after, {self._num_rows}")
        self._add("  br i1 %more_rows, label %prepare, label %begin\nbegin:")

    def _go_through_keys(self) -> None:
        """From the tile with the first key that the first token sees to that of the last token."""
        function, fields, scratch = self._function, self._fields, self._scratch
        end = function.let(f"add i64 {self._key}, {self._count}")
        start = function.let(f"sub i64 {function.let(f'add i64 {self._key}, 1')}, {fields['window']}")
        start = function.let(f"call i64 @llvm.smax.i64(i64 {start}, i64 0)")
        start = function.let(f"and i64 {start}, {-TILE_KEYS}")
        self._add(f"  br label %tiles\ntiles:\n  %tile = phi i64 [{start}, %begin], [%tile_after, %tile_done]")
        halves = [self._transposed(half, end) for half in range(HALVES)]
        self._add("  br label %groups\ngroups:\n  %group = phi i64 [0, %tiles], [%group_after, %group_done]")
        query, last = self._of_row("query", self._shape.key_size, "%group"), self._of_row("last", 1, "%group")
        sums, largest = (self._of_row(name, LANES, "%group") for name in ("sums", "largest"))
        output = self._of_row("output", self._shape.value_size, "%group")
        self._add(
            f"  call void @scores(ptr {query}, ptr {scratch['keys']}, ptr {last}, i64 {fields['window']}, i64 %tile, "
            f"ptr {fields['constants']}, ptr {scratch['weights']}, ptr {scratch['corrections']}, ptr {sums}, "
            f"ptr {largest})"
        )
        # A tile corrects the sums before once.
        self._add_values(0, *halves[0], scratch["corrections"], output)
        is_any = function.let(f"icmp ne i64 {halves[1][1]}, 0")
        self._add(f"  br i1 {is_any}, label %second, label %group_done\nsecond:")
        self._add_values(1, *halves[1], scratch["ones"], output)
        self._add(
            f"""\
  br label %group_done
group_done:
  %group_after = add i64 %group, {_ROWS}
  %more_groups = icmp ult i64 %group_after, {self._rows}
  br i1 %more_groups, label %groups, label %tile_done
tile_done:
  %tile_after = add i64 %tile, {TILE_KEYS}
  %more_tiles = icmp ult i64 %tile_after, {end}
  br i1 %more_tiles, label %tiles, label %finish"""
        )

    def _transposed(self, half: int, end: str) -> tuple[str, str]:
        """Has 16 keys transposed; gives where their values begin, and how many of these there are."""
        function, fields = self._function, self._fields
        position = function.let(f"add i64 %tile, {LANES * half}")
        # Behind the newest key there may be no page; what is read instead is seen by nobody.
        held = function.let(f"call i64 @llvm.umin.i64(i64 {position}, i64 {function.let(f'sub i64 {end}, 1')})")
        held = function.let(f"and i64 {held}, {-LANES}")
        slot = slot_of(function, self._pages, held, fields["page_tokens"])
        keys, values = (self._of_slot(name, slot) for name in ("key", "value"))
        left = function.let(f"call i64 @llvm.smax.i64(i64 {function.let(f'sub i64 {end}, {position}')}, i64 0)")
        place = function.at(self._scratch["keys"], 4 * LANES * half)
        self._add(f"  call void @transpose(ptr {keys}, i64 {fields['key_slot']}, ptr {place})")
        return values, function.let(f"call i64 @llvm.umin.i64(i64 {left}, i64 {LANES})")

    def _of_slot(self, name: str, slot: str) -> str:
        function, fields = self._function, self._fields
        base = function.at(fields[f"{name}s"], function.let(f"mul i64 %head, {fields[f'{name}_head']}"))
        return function.at(base, function.let(f"mul i64 {slot}, {fields[f'{name}_slot']}"))

    def _add_values(self, half: int, values: str, count: str, corrections: str, output: str) -> None:
        function = self._function
        for row in range(0, _ROWS, _num_value_rows(self._shape)):
            weights = function.at(self._scratch["weights"], 4 * (TILE_KEYS * row + LANES * half))
            correction = function.at(corrections, 4 * LANES * row)
            sums = function.at(output, 4 * self._shape.value_size * row)
            self._add(
                f"  call void @values(ptr {weights}, ptr {correction}, ptr {values}, i64 {self._fields['value_slot']}, "
                f"i64 {count}, ptr {sums})"
            )

    def _finish(self) -> None:
        function, shape = self._function, self._shape
        self._add("finish:\n  %done = phi i64 [0, %tile_done], [%done_after, %finish]")
        sums = function.load(FLOATS, self._of_row("sums", LANES, "%done"), align=4)
        total = function.let(f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {FLOATS} {sums})")
        totals = function.splat(total)
        target = function.at(
            self._fields["output"], function.let(f"mul i64 {self._number_of('%done')}, {shape.value_size}"), "float"
        )
        done = self._parts(self._of_row("output", shape.value_size, "%done"), shape.value_size)
        for own, place in zip(done, self._parts(target, shape.value_size), strict=True):
            self._store_all([place], function.let(f"fdiv {FLOATS} {function.load(FLOATS, own, align=4)}, {totals}"))
        self._add(
            f"""\
  %done_after = add i64 %done, 1
  %more_done = icmp ult i64 %done_after, {self._rows}
  br i1 %more_done, label %finish, label %out
out:
  ret void
}}"""
        )

    def _of_row(self, name: str, num_floats: int, row: str) -> str:
        """Where a row has its place in scratch memory."""
        return self._function.at(self._scratch[name], self._function.let(f"mul i64 {row}, {num_floats}"), "float")

    def _number_of(self, row: str) -> str:
        """A row's number among the queries of all tokens and heads."""
        function, shared = self._function, self._shape.num_shared
        token = function.let(f"add i64 {self._first}, {function.let(f'udiv i64 {row}, {shared}')}")
        head = function.let(f"add i64 {self._first_head}, {function.let(f'urem i64 {row}, {shared}')}")
        return function.let(f"add i64 {function.let(f'mul i64 {token}, {self._heads}')}, {head}")

    def _parts(self, base: str, num_floats: int) -> list[str]:
        return [self._function.at(base, 4 * LANES * part) for part in range(num_floats // LANES)]

    def _store_all(self, places: list[str], vector: str = "zeroinitializer") -> None:
        for place in places:
            self._add(f"  store {FLOATS} {vector}, ptr {place}, align 4")

    def _add(self, lines: str) -> None:
        self._function.lines.append(lines)


_ATTEND: Final = """\
define void @attend(ptr %job, i64 %threads) #0 {
  call void @block_all(ptr %job, i64 %threads)
  ret void
}
"""
