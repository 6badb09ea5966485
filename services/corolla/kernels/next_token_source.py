"""Attention of single queries to pages of keys and values, as LLVM's text: what a compiler would make of loops in C.

Keys are taken in tiles of 16, as many as a vector has numbers; each begins at a multiple of 16. The softmax goes along:
a tile's scores change the largest one so far, and with it the weight of all sums before (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"; flash attention). Long rows are cut into pieces at fixed positions, so that
several threads share one row, and pieces become one by the same rule (Flash-Decoding). So a query's result is the same
in every bit wherever its pages lie, whichever other queries there are, and however many threads compute.
"""

from typing import Final

from corolla.kernels.attention_text import (
    COMMON_FIELDS,
    HEAD,
    LEAST,
    HeadShape,
    exponential_of_difference,
    field,
    field_place,
    items_source,
    largest_of,
    numbers_of,
    slot_of,
)
from corolla.kernels.llvm_text import ATTRIBUTES, FLOATS, FMA, INTS, LANES, OPENMP, Function


def module_source(shape: HeadShape, *, has_threads: bool) -> str:
    """A module with three functions, whose counts are int64 and whose tables are int32:

    `attend(job, threads)`, where a job is numbers of 64 bits, see `JOB`, and is written to.

    `piece(job, number, key_head)` and, once all pieces are done, `merge(job, number of a query, key_head)`: what
    `attend` consists of. They write to no job.
    """
    sizes = sorted({shape.key_size, shape.value_size})
    parts = [HEAD, OPENMP if has_threads else "", *(_fetch(shape, size) for size in sizes)]
    parts += [_tile(shape), _piece(shape), _merge(shape)]
    parts += [items_source("piece", has_threads=has_threads), items_source("merge", has_threads=False)]
    return "\n".join([*parts, _attend(), ATTRIBUTES])


_LINE_BYTES: Final = 64

JOB: Final = (
    *COMMON_FIELDS,
    ("ptr", "states"),  # float32 [pieces, key heads, state_floats]
    ("ptr", "pieces"),  # of each piece: its query, first key, end, and where its row's pages begin
    ("ptr", "first_pieces"),  # of each query that is computed: its number, first piece and end
    ("i64", "merges"),  # queries times key heads
)


def _lane_sums(function: Function, vectors: list[str]) -> str:
    """The sum of each of 16 vectors, in the lane of its number."""
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
    """Some query heads and the keys `[low, high)` of a tile of 16, to their state.

    All 16 keys are read, since they lie on the same page; of the values only those that are seen, since what was never
    written may be anything.
    """
    function = Function()
    lines = function.lines
    lines.append(
        "define internal void @tile(ptr noalias %query, ptr noalias %keys, ptr noalias %values, i64 %key_slot, "
        "i64 %value_slot, i64 %low, i64 %high, float %scaling, ptr noalias %constants, ptr noalias %state) #0 {\nentry:"
    )
    heads, parts = range(shape.num_at_once), range(shape.value_size // LANES)
    weights_at = function.let(f"alloca [{LANES * shape.num_at_once} x float], align 64")
    numbers = ", ".join(f"i32 {lane}" for lane in range(LANES))
    low, high = (function.splat(function.let(f"trunc i64 {end} to i32"), "i32") for end in ("%low", "%high"))
    after = function.let(f"icmp uge {INTS} <{numbers}>, {low}")
    before = function.let(f"icmp ult {INTS} <{numbers}>, {high}")
    seen = function.let(f"and <{LANES} x i1> {after}, {before}")
    scaling = function.splat("%scaling")
    keys = [function.at("%keys", function.let(f"mul i64 %key_slot, {number}")) for number in range(LANES)]
    corrections = [_weigh(function, shape, head, keys, seen, scaling, weights_at) for head in heads]
    places = [(head, part) for head in heads for part in parts]
    states = {
        (head, part): function.at("%state", 4 * (head * shape.head_floats + LANES * part)) for head, part in places
    }
    before_loop = {}
    for place in places:
        loaded = function.load(FLOATS, states[place], align=4)
        before_loop[place] = function.let(f"fmul {FLOATS} {loaded}, {corrections[place[0]]}")
    lines.append("  br label %loop\nloop:\n  %number = phi i64 [%low, %entry], [%next, %loop]")
    for head, part in places:
        start = before_loop[head, part]
        lines.append(f"  %sum_{head}_{part} = phi {FLOATS} [{start}, %entry], [%new_{head}_{part}, %loop]")
    value = function.at("%values", function.let("mul i64 %value_slot, %number"))
    weight_at = function.at(weights_at, "%number", "float")
    weights_of = [
        function.splat(function.let(f"load float, ptr {function.at(weight_at, 4 * LANES * head)}")) for head in heads
    ]
    for part in parts:
        numbers = numbers_of(function, shape, value, part)
        for head in heads:
            arguments = f"{FLOATS} {numbers}, {FLOATS} {weights_of[head]}, {FLOATS} %sum_{head}_{part}"
            lines.append(f"  %new_{head}_{part} = call {FLOATS} @{FMA}({arguments})")
    lines.append("  %next = add i64 %number, 1\n  %is_more = icmp ult i64 %next, %high")
    lines.append("  br i1 %is_more, label %loop, label %done\ndone:")
    lines += [f"  store {FLOATS} %new_{head}_{part}, ptr {states[head, part]}, align 4" for head, part in places]
    lines.append("  ret void\n}")
    return "\n".join(lines)


def _weigh(
    function: Function, shape: HeadShape, head: int, keys: list[str], seen: str, scaling: str, weights_at: str
) -> str:
    """Stores how much one query head weighs the tile's keys, and adds that to its state; gives what its sums so far are
    to be multiplied by."""
    query = function.at("%query", head * shape.key_size * shape.element_bytes)
    queries = [numbers_of(function, shape, query, index) for index in range(shape.key_size // LANES)]
    products = []
    for key in keys:
        total = "zeroinitializer"
        for index, part in enumerate(queries):
            total = function.sum_of_product(part, numbers_of(function, shape, key, index), total)
        products.append(total)
    scores = function.let(f"fmul {FLOATS} {_lane_sums(function, products)}, {scaling}")
    scores = function.let(f"select <{LANES} x i1> {seen}, {FLOATS} {scores}, {FLOATS} {LEAST}")
    state = function.at("%state", 4 * head * shape.head_floats)
    sums_at = function.at(state, 4 * shape.value_size)
    largest_at = function.at(state, 4 * (shape.value_size + LANES))
    before = function.load(FLOATS, largest_at, align=4)
    of_tile = function.splat(largest_of(function, scores))
    # Of what is not a number the largest stays as it was, and the weights are none either.
    is_more = function.let(f"fcmp ogt {FLOATS} {of_tile}, {before}")
    largest = function.let(f"select <{LANES} x i1> {is_more}, {FLOATS} {of_tile}, {FLOATS} {before}")
    correction = exponential_of_difference(function, "%constants", before, largest)
    raised = exponential_of_difference(function, "%constants", scores, largest)
    weights = function.let(f"select <{LANES} x i1> {seen}, {FLOATS} {raised}, {FLOATS} zeroinitializer")
    sums = function.sum_of_product(function.load(FLOATS, sums_at, align=4), correction, weights)
    for value, place in ((largest, largest_at), (sums, sums_at)):
        function.lines.append(f"  store {FLOATS} {value}, ptr {place}, align 4")
    function.lines.append(f"  store {FLOATS} {weights}, ptr {function.at(weights_at, 4 * LANES * head)}, align 64")
    return correction


def _fetch(shape: HeadShape, size: int) -> str:
    """Has the processor bring 16 heads of so many numbers to its caches: it does not foresee steps as long as these."""
    function = Function()
    function.lines.append(f"define internal void @fetch_{size}(ptr %numbers, i64 %slot_bytes) #0 {{\nentry:")
    for number in range(LANES):
        head = function.at("%numbers", function.let(f"mul i64 %slot_bytes, {number}"))
        for line in range(0, size * shape.element_bytes, _LINE_BYTES):
            function.lines.append(f"  call void @llvm.prefetch.p0(ptr {function.at(head, line)}, i32 0, i32 3, i32 1)")
    return "\n".join([*function.lines, "  ret void\n}"])


def _piece(shape: HeadShape) -> str:
    """A piece of a row's keys, for the queries of one key head: a state, whatever was there before."""
    function = Function()
    lines = function.lines
    lines.append("define void @piece(ptr %job, i64 %number, i64 %head) #0 {\nentry:")
    key_heads, page_tokens = field(function, JOB, "key_heads"), field(function, JOB, "page_tokens")
    piece = function.at(field(function, JOB, "pieces"), function.let("mul i64 %number, 16"))
    query, first, end, page_at = (
        function.let(f"zext i32 {function.load('i32', piece, 4 * index, 4)} to i64") for index in range(4)
    )
    state_number = function.let(f"add i64 {function.let(f'mul i64 %number, {key_heads}')}, %head")
    state = function.at(
        field(function, JOB, "states"), function.let(f"mul i64 {state_number}, {shape.state_floats}"), "float"
    )
    for head in range(shape.num_shared):
        base = function.at(state, 4 * head * shape.head_floats)
        for index in range(shape.head_floats // LANES):
            is_largest = index == shape.head_floats // LANES - 1
            value = LEAST if is_largest else "zeroinitializer"
            lines.append(f"  store {FLOATS} {value}, ptr {function.at(base, 4 * LANES * index)}, align 4")
    query_row = function.let(f"add i64 {function.let(f'mul i64 {query}, {key_heads}')}, %head")
    queries = function.at(
        field(function, JOB, "query"),
        function.let(f"mul i64 {query_row}, {shape.num_shared * shape.key_size * shape.element_bytes}"),
    )
    pages = function.at(field(function, JOB, "pages"), page_at, "i32")
    key_slot, value_slot = field(function, JOB, "key_slot"), field(function, JOB, "value_slot")
    keys = function.at(field(function, JOB, "keys"), function.let(f"mul i64 %head, {field(function, JOB, 'key_head')}"))
    values = function.at(
        field(function, JOB, "values"), function.let(f"mul i64 %head, {field(function, JOB, 'value_head')}")
    )
    bits = function.let(f"trunc i64 {field(function, JOB, 'scaling')} to i32")
    scaling = function.let(f"bitcast i32 {bits} to float")
    constants = field(function, JOB, "constants")
    first_tile = function.let(f"and i64 {first}, {-LANES}")
    lines.append("  br label %tiles\ntiles:")
    lines.append(f"  %tile = phi i64 [{first_tile}, %entry], [%tile_after, %tile_done]")
    slot = slot_of(function, pages, "%tile", page_tokens)
    tile_keys = function.at(keys, function.let(f"mul i64 {slot}, {key_slot}"))
    tile_values = function.at(values, function.let(f"mul i64 {slot}, {value_slot}"))
    next_tile = function.let(f"add i64 %tile, {LANES}")
    # Behind the piece there may be no page.
    is_one = function.let(f"icmp ult i64 {next_tile}, {end}")
    next_tile = function.let(f"select i1 {is_one}, i64 {next_tile}, i64 %tile")
    next_slot = slot_of(function, pages, next_tile, page_tokens)
    for base, stride, size in ((keys, key_slot, shape.key_size), (values, value_slot, shape.value_size)):
        place = function.at(base, function.let(f"mul i64 {next_slot}, {stride}"))
        lines.append(f"  call void @fetch_{size}(ptr {place}, i64 {stride})")
    seen = function.let(f"call i64 @llvm.umax.i64(i64 {first}, i64 %tile)")
    low = function.let(f"sub i64 {seen}, %tile")
    high = function.let(f"call i64 @llvm.umin.i64(i64 {function.let(f'sub i64 {end}, %tile')}, i64 {LANES})")
    lines.append("  br label %heads\nheads:\n  %shared = phi i64 [0, %tiles], [%shared_after, %heads]")
    head_query = function.at(queries, function.let(f"mul i64 %shared, {shape.key_size * shape.element_bytes}"))
    head_state = function.at(state, function.let(f"mul i64 %shared, {shape.head_floats}"), "float")
    lines.append(
        f"  call void @tile(ptr {head_query}, ptr {tile_keys}, ptr {tile_values}, i64 {key_slot}, i64 {value_slot}, "
        f"i64 {low}, i64 {high}, float {scaling}, ptr {constants}, ptr {head_state})"
    )
    lines.append(
        f"""\
  %shared_after = add i64 %shared, {shape.num_at_once}
  %are_more = icmp ult i64 %shared_after, {shape.num_shared}
  br i1 %are_more, label %heads, label %tile_done
tile_done:
  %tile_after = add i64 %tile, {LANES}
  %is_more = icmp ult i64 %tile_after, {end}
  br i1 %is_more, label %tiles, label %done
done:
  ret void
}}"""
    )
    return "\n".join(lines)


def _merge(shape: HeadShape) -> str:
    """The output of a query's heads that share a key head, from the states of its pieces."""
    function = Function()
    lines = function.lines
    lines.append("define void @merge(ptr %job, i64 %number, i64 %head) #0 {\nentry:")
    key_heads = field(function, JOB, "key_heads")
    constants = field(function, JOB, "constants")
    row = function.at(field(function, JOB, "first_pieces"), function.let("mul i64 %number, 12"))
    query, first, end = (
        function.let(f"zext i32 {function.load('i32', row, 4 * index, 4)} to i64") for index in range(3)
    )
    query_row = function.let(f"add i64 {function.let(f'mul i64 {query}, {key_heads}')}, %head")
    output = function.at(
        field(function, JOB, "output"),
        function.let(f"mul i64 {query_row}, {shape.num_shared * shape.value_size}"),
        "float",
    )
    step = function.let(f"mul i64 {key_heads}, {4 * shape.state_floats}")
    head_states = function.at(
        field(function, JOB, "states"), function.let(f"mul i64 %head, {shape.state_floats}"), "float"
    )
    lines.append("  br label %heads\nheads:\n  %shared = phi i64 [0, %entry], [%shared_after, %head_done]")
    states = function.at(head_states, function.let(f"mul i64 %shared, {shape.head_floats}"), "float")
    lines.append("  br label %largest_of\nlargest_of:")
    lines.append(f"  %seen = phi i64 [{first}, %heads], [%seen_after, %largest_of]")
    lines.append(f"  %so_far = phi {FLOATS} [{LEAST}, %heads], [%largest, %largest_of]")
    state = function.at(states, function.let(f"mul i64 %seen, {step}"))
    of_piece = function.load(FLOATS, state, 4 * (shape.value_size + LANES), 4)
    is_larger = function.let(f"fcmp ogt {FLOATS} {of_piece}, %so_far")
    lines.append(f"  %largest = select <{LANES} x i1> {is_larger}, {FLOATS} {of_piece}, {FLOATS} %so_far")
    lines.append(f"  %seen_after = add i64 %seen, 1\n  %are_unseen = icmp ult i64 %seen_after, {end}")
    lines.append("  br i1 %are_unseen, label %largest_of, label %pieces\npieces:")
    names = [*(f"part_{part}" for part in range(shape.value_size // LANES)), "weights"]
    lines.append(f"  %piece = phi i64 [{first}, %largest_of], [%piece_after, %pieces]")
    lines += [f"  %{name} = phi {FLOATS} [zeroinitializer, %largest_of], [%{name}_now, %pieces]" for name in names]
    state = function.at(states, function.let(f"mul i64 %piece, {step}"))
    own_largest = function.load(FLOATS, state, 4 * (shape.value_size + LANES), 4)
    weight = exponential_of_difference(function, constants, own_largest, "%largest")
    for index, name in enumerate(names):
        arguments = f"{FLOATS} {function.load(FLOATS, state, 4 * LANES * index, 4)}, {FLOATS} {weight}"
        lines.append(f"  %{name}_now = call {FLOATS} @{FMA}({arguments}, {FLOATS} %{name})")
    lines.append(f"  %piece_after = add i64 %piece, 1\n  %are_more_pieces = icmp ult i64 %piece_after, {end}")
    lines.append("  br i1 %are_more_pieces, label %pieces, label %head_done\nhead_done:")
    total = function.let(f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {FLOATS} %weights_now)")
    totals = function.splat(total)
    target = function.at(output, function.let(f"mul i64 %shared, {shape.value_size}"), "float")
    for part, name in enumerate(names[:-1]):
        quotient = function.let(f"fdiv {FLOATS} %{name}_now, {totals}")
        lines.append(f"  store {FLOATS} {quotient}, ptr {function.at(target, 4 * LANES * part)}, align 4")
    lines.append(
        f"""\
  %shared_after = add i64 %shared, 1
  %are_more = icmp ult i64 %shared_after, {shape.num_shared}
  br i1 %are_more, label %heads, label %done
done:
  ret void
}}"""
    )
    return "\n".join(lines)


def _attend() -> str:
    """All pieces, by so many threads, and then their merges, which are little work, by one."""
    function = Function()
    lines = function.lines
    lines.append("define void @attend(ptr %job, i64 %threads) #0 {\nentry:")
    lines.append("  call void @piece_all(ptr %job, i64 %threads)")
    for name, value in (("taken", "0"), ("items", field(function, JOB, "merges"))):
        lines.append(f"  store i64 {value}, ptr {field_place(function, JOB, name)}")
    lines.append("  call void @merge_all(ptr %job, i64 1)\n  ret void\n}")
    return "\n".join(lines)
