"""Writes the attention of single queries to pages of keys and values, as LLVM's text.

Keys are read in tiles of 16, as many as a vector has numbers; each tile begins at a multiple of 16. The softmax is
computed tile by tile: a larger score rescales all earlier sums (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; FlashAttention, Dao et al. 2022). Long rows are cut into pieces at fixed positions, so that
several threads share one row, and pieces are merged by the same rule (Flash-Decoding). So no bit of a query's result
depends on where its pages lie, on the other queries, or on the number of threads.
"""

from typing import Final

from corolla.kernels.attention_text import (
    COMMON_FIELDS,
    LEAST,
    HeadShape,
    bounded,
    exponential_of_difference,
    item_of,
    larger_of,
    largest_of,
    merge,
    numbers_of,
    slot_of,
)
from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, FLOATS, INTS, LANES, Function


def module_source(shape: HeadShape) -> str:
    """LLVM's text of a module with two functions: `piece(job, item)`, and `merge(job, item)`, called after all pieces.

    A job has the fields `JOB`. `piece` has an item for each pair of a piece and a key head, `merge` for each pair of a
    query and a key head. Counts are int64, tables int32.
    """
    sizes = sorted({shape.key_size, shape.value_size})
    parts = [DECLARATIONS, *(_fetch(shape, size) for size in sizes), _tile(shape), _piece(shape), merge(shape)]
    return "\n".join([*parts, ATTRIBUTES])


_LINE_BYTES: Final = 64

JOB: Final = (
    *COMMON_FIELDS,
    ("ptr", "pieces"),  # for each piece: query, first key, end of keys, and index of its row's first page
)


def _lane_sums(function: Function, vectors: list[str]) -> str:
    """Writes the sums of 16 vectors: lane `i` of the result is the sum of vector `i`."""
    distance = 1
    while len(vectors) > 1:
        kept = ", ".join(f"i32 {lane + (LANES if lane & distance else 0)}" for lane in range(LANES))
        moved = ", ".join(f"i32 {(lane ^ distance) + (LANES if lane & distance else 0)}" for lane in range(LANES))
        halved = []
        for left, right in zip(vectors[::2], vectors[1::2], strict=True):
            both = f"{FLOATS} {left}, {FLOATS} {right}"
            first = function.let(f"shufflevector {both}, {INTS} <{kept}>")
            second = function.let(f"shufflevector {both}, {INTS} <{moved}>")
            halved.append(function.let(f"fadd {FLOATS} {first}, {second}"))
        vectors, distance = halved, 2 * distance
    return vectors[0]


def _tile(shape: HeadShape) -> str:
    """Writes `tile`, which adds the keys `[low, high)` of a tile of 16 to the states of some query heads.

    `tile` reads all 16 keys, which lie on the same page, but only the values in `[low, high)`, since values that were
    never written may be NaN.
    """
    function = Function(
        "@tile(ptr noalias %query, ptr noalias %keys, ptr noalias %values, i64 %key_slot, "
        "i64 %value_slot, i64 %low, i64 %high, float %scaling, float %softcap, ptr noalias %constants, "
        "ptr noalias %state)"
    )
    heads, parts = range(shape.num_at_once), range(shape.value_size // LANES)
    weights_at = function.let(f"alloca [{LANES * shape.num_at_once} x float], align 64")
    numbers = ", ".join(f"i32 {lane}" for lane in range(LANES))
    low, high = (function.splat(function.let(f"trunc i64 {end} to i32"), "i32") for end in ("%low", "%high"))
    after = function.let(f"icmp uge {INTS} <{numbers}>, {low}")
    not_after = function.let(f"icmp ult {INTS} <{numbers}>, {high}")
    seen = function.let(f"and <{LANES} x i1> {after}, {not_after}")
    scaling = function.splat("%scaling")
    keys = [function.row("%keys", "%key_slot", number) for number in range(LANES)]
    corrections = [_weigh(function, shape, head, keys, seen, scaling, weights_at) for head in heads]
    states = {
        f"sum_{head}_{part}": function.at("%state", 4 * (head * shape.head_floats + LANES * part))
        for head in heads
        for part in parts
    }
    before = {}
    for head in heads:
        for part in parts:
            loaded = function.load(FLOATS, states[f"sum_{head}_{part}"], align=4)
            before[f"sum_{head}_{part}"] = function.let(f"fmul {FLOATS} {loaded}, {corrections[head]}")
    with function.loop("values", "%high", 1, before, start="%low") as names:
        value = function.row("%values", "%value_slot", names["number"])
        weight_at = function.at(weights_at, names["number"], "float")
        weights = [
            function.splat(function.let(f"load float, ptr {function.at(weight_at, 4 * LANES * head)}"))
            for head in heads
        ]
        for part in parts:
            numbers = numbers_of(function, shape, value, part)
            for head in heads:
                name = f"sum_{head}_{part}"
                names[name] = function.sum_of_product(numbers, weights[head], names[name])
    for name, place in states.items():
        function.store(f"%values_{name}_after", place)
    return function.source()


def _weigh(
    function: Function, shape: HeadShape, head: int, keys: list[str], seen: str, scaling: str, weights_at: str
) -> str:
    """Writes the weights of a tile's keys for one query head, and updates the head's largest score and sum of weights.

    Returns the factor by which the head's earlier sums of values have to be multiplied.
    """
    query = function.at("%query", head * shape.key_size * shape.element_bytes)
    queries = [numbers_of(function, shape, query, index) for index in range(shape.key_size // LANES)]
    products = []
    for key in keys:
        total = "zeroinitializer"
        for index, part in enumerate(queries):
            total = function.sum_of_product(part, numbers_of(function, shape, key, index), total)
        products.append(total)
    scores = function.let(f"fmul {FLOATS} {_lane_sums(function, products)}, {scaling}")
    if shape.has_softcap:
        scores = bounded(function, "%constants", scores, function.splat("%softcap"))
    scores = function.let(f"select <{LANES} x i1> {seen}, {FLOATS} {scores}, {FLOATS} {LEAST}")
    state = function.at("%state", 4 * head * shape.head_floats)
    sums_at = function.at(state, 4 * shape.value_size)
    largest_at = function.at(state, 4 * (shape.value_size + LANES))
    before = function.load(FLOATS, largest_at, align=4)
    of_tile = function.splat(largest_of(function, scores))
    # A NaN score leaves the largest score unchanged, and its weight is NaN, too.
    largest = larger_of(function, of_tile, before)
    correction = exponential_of_difference(function, "%constants", before, largest)
    raised = exponential_of_difference(function, "%constants", scores, largest)
    weights = function.let(f"select <{LANES} x i1> {seen}, {FLOATS} {raised}, {FLOATS} zeroinitializer")
    sums = function.sum_of_product(function.load(FLOATS, sums_at, align=4), correction, weights)
    function.store(largest, largest_at)
    function.store(sums, sums_at)
    function.store(weights, function.at(weights_at, 4 * LANES * head), 64)
    return correction


def _fetch(shape: HeadShape, size: int) -> str:
    """Writes `fetch_SIZE`, which prefetches a head of `size` numbers from each of 16 slots.

    The hardware prefetcher does not detect strides this long.
    """
    function = Function(f"@fetch_{size}(ptr %numbers, i64 %slot_bytes)")
    for number in range(LANES):
        head = function.row("%numbers", "%slot_bytes", number)
        for line in range(0, size * shape.element_bytes, _LINE_BYTES):
            function.lines.append(f"  call void @llvm.prefetch.p0(ptr {function.at(head, line)}, i32 0, i32 3, i32 1)")
    return function.source()


def _piece(shape: HeadShape) -> str:
    """Writes `piece`, which computes the state of one piece of a row's keys for the queries of one key head."""
    function = Function("@piece(ptr %job, i64 %item)", is_internal=False)
    fields = {name: function.field("%job", JOB, name) for _, name in JOB}
    number, head = item_of(function)
    piece = function.row(fields["pieces"], number, 16)
    query, first, end, page_at = function.counts(piece, 4)
    state = function.row(fields["states"], "%item", shape.state_floats, "float")
    for shared in range(shape.num_shared):
        base = function.at(state, 4 * shared * shape.head_floats)
        for index in range(shape.head_floats // LANES):
            is_largest = index == shape.head_floats // LANES - 1
            function.store(LEAST if is_largest else "zeroinitializer", function.at(base, 4 * LANES * index))
    key_heads = fields["key_heads"]
    query_row = function.let(f"add i64 {function.let(f'mul i64 {query}, {key_heads}')}, {head}")
    row_bytes = shape.num_shared * shape.key_size * shape.element_bytes
    queries = function.row(fields["query"], query_row, row_bytes)
    pages = function.at(fields["pages"], page_at, "i32")
    keys, values = (function.row(fields[f"{name}s"], head, fields[f"{name}_head"]) for name in ("key", "value"))
    scaling, softcap = (function.float_field("%job", JOB, name) for name in ("scaling", "softcap"))
    with function.loop("tiles", end, LANES, start=function.let(f"and i64 {first}, {-LANES}")) as names:
        tile = names["number"]
        slot = slot_of(function, pages, tile, fields["page_tokens"])
        tile_keys = function.row(keys, slot, fields["key_slot"])
        tile_values = function.row(values, slot, fields["value_slot"])
        next_tile = function.let(f"add i64 {tile}, {LANES}")
        # The last tile prefetches itself, since there may be no page behind the piece.
        is_one = function.let(f"icmp ult i64 {next_tile}, {end}")
        next_tile = function.let(f"select i1 {is_one}, i64 {next_tile}, i64 {tile}")
        next_slot = slot_of(function, pages, next_tile, fields["page_tokens"])
        for base, name, size in ((keys, "key", shape.key_size), (values, "value", shape.value_size)):
            stride = fields[f"{name}_slot"]
            place = function.row(base, next_slot, stride)
            function.lines.append(f"  call void @fetch_{size}(ptr {place}, i64 {stride})")
        seen = function.let(f"call i64 @llvm.umax.i64(i64 {first}, i64 {tile})")
        low = function.let(f"sub i64 {seen}, {tile}")
        high = function.let(f"call i64 @llvm.umin.i64(i64 {function.let(f'sub i64 {end}, {tile}')}, i64 {LANES})")
        with function.loop("heads", shape.num_shared, shape.num_at_once) as heads:
            query_at = function.let(f"mul i64 {heads['number']}, {shape.key_size * shape.element_bytes}")
            head_query = function.at(queries, query_at)
            head_state = function.row(state, heads["number"], shape.head_floats, "float")
            function.lines.append(
                f"  call void @tile(ptr {head_query}, ptr {tile_keys}, ptr {tile_values}, i64 {fields['key_slot']}, "
                f"i64 {fields['value_slot']}, i64 {low}, i64 {high}, float {scaling}, float {softcap}, "
                f"ptr {fields['constants']}, ptr {head_state})"
            )
    return function.source()
