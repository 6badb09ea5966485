"""The parts that all compiled attention functions share: the shape of heads, the exponential function, job fields."""

from dataclasses import dataclass
from typing import Final

from corolla.kernels.llvm_text import FLOATS, INTS, LANES, Fields, Function

CONSTANTS: Final = (
    -87.0,  # the exponential of a smaller number may be subnormal, with fewer bits
    1.4426950408889634,
    1.5 * 2**23,
    # Cody and Waite's two parts of the logarithm of 2, and the polynomial of Cephes' `expf`.
    -0.693359375,
    2.12194440e-4,
    1.0,
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    0.5,
)
"""The constants of the exponential function, float32."""
LEAST: Final = "splat (float 0xFFF0000000000000)"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of heads for which attention functions are compiled.

    Attributes:
        element: LLVM's type of queries, keys and values: `float`, `bfloat` or `half`.
        key_size: how many numbers a key of one head has, a multiple of 16.
        value_size: how many numbers a value of one head has, a multiple of 16.
        num_shared: how many query heads share a key head.
        max_sums: how many vectors of 16 sums the registers hold; see `compiler.max_sums`.
        rotated_size: how many of a key's numbers, its last ones, lie in the place of a value, as in multi-latent
            attention; the others are the value, too. 0: keys and values lie apart.
        has_softcap: whether scores are bounded.
        has_sinks: whether each query head has a sink, a score without a value.
    """

    element: str
    key_size: int
    value_size: int
    num_shared: int
    max_sums: int
    rotated_size: int = 0
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def element_bytes(self) -> int:
        return 4 if self.element == "float" else 2

    @property
    def state_floats(self) -> int:
        """How many float32 numbers the softmax state of one piece of a row has for one key head.

        For each query head that shares the key head, the state holds the sums of values, then 16 partial sums of
        weights, then the largest score, the same in all 16 lanes.
        """
        return self.num_shared * self.head_floats

    @property
    def head_floats(self) -> int:
        return self.value_size + 2 * LANES

    @property
    def num_at_once(self) -> int:
        """How many query heads a function computes together, so that their sums of values stay in registers."""
        most = max(1, self.max_sums // (self.value_size // LANES))
        return max(each for each in range(1, most + 1) if self.num_shared % each == 0)


COMMON_FIELDS: Final[Fields] = (
    ("ptr", "query"),  # [tokens, heads, key size]
    ("ptr", "keys"),  # [slots, key heads, key size], strided
    ("ptr", "values"),  # [slots, key heads, value size], strided
    ("ptr", "output"),  # float32 [tokens, heads, value size]
    ("ptr", "pages"),
    ("ptr", "constants"),  # see `CONSTANTS`
    ("i64", "key_heads"),
    ("i64", "page_tokens"),  # a multiple of 16
    ("i64", "key_slot"),  # bytes from slot to slot, and from head to head
    ("i64", "key_head"),
    ("i64", "value_slot"),
    ("i64", "value_head"),
    ("i64", "scaling"),  # the bits of a float32
    ("ptr", "states"),  # float32 [pieces, key heads, state_floats]
    ("ptr", "first_pieces"),  # for each query that has pieces: its number, first piece, end of pieces
    ("i64", "softcap"),  # the bits of a float32, the bound of scores
    ("ptr", "sinks"),  # float32 [heads]
)
"""The first fields of every job."""


def slot_of(function: Function, pages: str, key: str, page_tokens: str) -> str:
    """Writes the lookup of a key's slot; `key` is the key's number, counted from the row's first page."""
    page = function.load("i32", function.at(pages, function.let(f"udiv i64 {key}, {page_tokens}"), "i32"), align=4)
    first_slot = function.let(f"mul i64 {function.let(f'zext i32 {page} to i64')}, {page_tokens}")
    return function.let(f"add i64 {first_slot}, {function.let(f'urem i64 {key}, {page_tokens}')}")


def item_of(function: Function) -> tuple[str, str]:
    """Writes the split of an item's number into the number of its piece, merge or block, and that of its key head."""
    key_heads = function.field("%job", COMMON_FIELDS, "key_heads")
    return function.let(f"udiv i64 %item, {key_heads}"), function.let(f"urem i64 %item, {key_heads}")


def exponential_of_difference(function: Function, constants: str, left: str, right: str) -> str:
    """Writes `e` to the power of `left - right`. Each lane's difference must be at most 0, or NaN, which stays NaN.

    Differences below -87 count as -87. The lines are written inline, since the compiler would not inline a function.
    The algorithm is that of Cephes' `expf`, with the range reduction of Cody and Waite.

    Args:
        constants: the address of `CONSTANTS`. If they were literals, each would need an instruction for its address.
    """

    def constant(index: int) -> str:
        return function.splat(function.load("float", constants, 4 * index, 4))

    least, log2_e, to_whole, ln2_high, ln2_low, one, *polynomial = map(constant, range(len(CONSTANTS)))
    given = function.let(f"fsub {FLOATS} {left}, {right}")
    small = function.let(f"fcmp olt {FLOATS} {given}, {least}")
    x = function.let(f"select <{LANES} x i1> {small}, {FLOATS} {least}, {FLOATS} {given}")
    # The sum with so large a number has no fractional bits, so its lowest bits are the rounded whole number.
    shifted = function.sum_of_product(x, log2_e, to_whole)
    whole = function.let(f"fsub {FLOATS} {shifted}, {to_whole}")
    rest = function.sum_of_product(whole, ln2_low, function.sum_of_product(whole, ln2_high, x))
    value = polynomial[0]
    for factor in polynomial[1:]:
        value = function.sum_of_product(value, rest, factor)
    square = function.let(f"fmul {FLOATS} {rest}, {rest}")
    value = function.let(f"fadd {FLOATS} {function.sum_of_product(value, square, rest)}, {one}")
    exponent = function.let(f"shl {INTS} {function.let(f'bitcast {FLOATS} {shifted} to {INTS}')}, splat (i32 23)")
    bits = function.let(f"add {INTS} {exponent}, {function.let(f'bitcast {FLOATS} {one} to {INTS}')}")
    return function.let(f"fmul {FLOATS} {value}, {function.let(f'bitcast {INTS} {bits} to {FLOATS}')}")


def bounded(function: Function, constants: str, scores: str, bound: str) -> str:
    """Writes `bound * tanh(score / bound)` of each lane; `constants` as in `exponential_of_difference`."""
    ratio = function.let(f"fdiv {FLOATS} {scores}, {bound}")
    size = function.let(f"call {FLOATS} @llvm.fabs.v16f32({FLOATS} {ratio})")
    # The exponential of `-2 |x|` cannot overflow.
    twice = function.let(f"fadd {FLOATS} {size}, {size}")
    small = exponential_of_difference(function, constants, "zeroinitializer", twice)
    above, below = (function.let(f"{kind} {FLOATS} splat (float 1.0), {small}") for kind in ("fsub", "fadd"))
    share = function.let(f"fdiv {FLOATS} {above}, {below}")
    signed = function.let(f"call {FLOATS} @llvm.copysign.v16f32({FLOATS} {share}, {FLOATS} {ratio})")
    return function.let(f"fmul {FLOATS} {signed}, {bound}")


def sink_of(function: Function, head: str) -> str:
    """Writes the load of a query head's sink into all lanes."""
    sinks = function.field("%job", COMMON_FIELDS, "sinks")
    return function.splat(function.load("float", function.at(sinks, head, "float"), align=4))


FIRST_LANE: Final = f"<float 1.0{', float 0.0' * (LANES - 1)}>"
"""The partial sums of weights of a sink whose score is the largest one."""


def larger_of(function: Function, vector: str, other: str) -> str:
    """Writes the larger number of each lane; `other` where one of the two is NaN."""
    is_more = function.let(f"fcmp ogt {FLOATS} {vector}, {other}")
    return function.let(f"select <{LANES} x i1> {is_more}, {FLOATS} {vector}, {FLOATS} {other}")


def largest_of(function: Function, vector: str) -> str:
    """Writes the maximum of a vector's numbers; if one of them is NaN, the result may be any of them."""
    return function.let(f"call nnan float @llvm.vector.reduce.fmax.v16f32({FLOATS} {vector})")


def numbers_of(function: Function, shape: HeadShape, base: str, index: int) -> str:
    """Writes the load of the 16 numbers that are vector number `index` of a head, as float32."""
    kind = f"<{LANES} x {shape.element}>"
    stored = function.load(kind, base, index * LANES * shape.element_bytes, shape.element_bytes)
    return stored if shape.element == "float" else function.let(f"fpext {kind} {stored} to {FLOATS}")


def merge(shape: HeadShape) -> str:
    """Writes `merge`, which merges the states of a query's pieces into the output of heads that share a key head."""
    function = Function("@merge(ptr %job, i64 %item)", is_internal=False)
    key_heads, constants = (function.field("%job", COMMON_FIELDS, name) for name in ("key_heads", "constants"))
    number, head = item_of(function)
    row = function.row(function.field("%job", COMMON_FIELDS, "first_pieces"), number, 12)
    query, first, end = function.counts(row, 3)
    query_row = function.let(f"add i64 {function.let(f'mul i64 {query}, {key_heads}')}, {head}")
    outputs, states = (function.field("%job", COMMON_FIELDS, name) for name in ("output", "states"))
    output = function.row(outputs, query_row, shape.num_shared * shape.value_size, "float")
    step = function.let(f"mul i64 {key_heads}, {4 * shape.state_floats}")
    key_head_states = function.row(states, head, shape.state_floats, "float")
    with function.loop("heads", shape.num_shared) as heads:
        shared = heads["number"]
        head_states = function.row(key_head_states, shared, shape.head_floats, "float")
        sink = LEAST
        if shape.has_sinks:
            first_head = function.let(f"mul i64 {head}, {shape.num_shared}")
            sink = sink_of(function, function.let(f"add i64 {first_head}, {shared}"))
        with function.loop("seen", end, 1, {"largest": sink}, start=first) as names:
            state = function.row(head_states, names["number"], step)
            of_piece = function.load(FLOATS, state, 4 * (shape.value_size + LANES), 4)
            names["largest"] = larger_of(function, of_piece, names["largest"])
        parts = range(shape.value_size // LANES)
        sums = dict.fromkeys([*(f"part_{part}" for part in parts), "weights"], "zeroinitializer")
        if shape.has_sinks:
            weight = exponential_of_difference(function, constants, sink, "%seen_largest_after")
            sums["weights"] = function.let(f"fmul {FLOATS} {weight}, {FIRST_LANE}")
        with function.loop("pieces", end, 1, sums, start=first) as names:
            state = function.row(head_states, names["number"], step)
            own_largest = function.load(FLOATS, state, 4 * (shape.value_size + LANES), 4)
            weight = exponential_of_difference(function, constants, own_largest, "%seen_largest_after")
            for index, name in enumerate(sums):
                own = function.load(FLOATS, state, 4 * LANES * index, 4)
                names[name] = function.sum_of_product(own, weight, names[name])
        totals = function.splat(function.total("%pieces_weights_after"))
        target = function.row(output, shared, shape.value_size, "float")
        for part in parts:
            quotient = function.let(f"fdiv {FLOATS} %pieces_part_{part}_after, {totals}")
            function.store(quotient, function.at(target, 4 * LANES * part))
    return function.source()
