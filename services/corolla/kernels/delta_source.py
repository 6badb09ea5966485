"""Writes a step of the gated delta rule (Yang et al. 2024, "Gated Delta Networks"), as LLVM's text.

A head's state is a matrix with a row for each number of a key. A token lets the state decay, replaces what the state
holds for the token's key by a share of the token's value, and reads the state by its query. Columns of a state do not
depend on each other, and a piece of work is a run of columns of one head of one token. So a token's numbers depend
neither on the other rows of a call nor on the number of threads.
"""

from dataclasses import dataclass
from typing import Final

from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, FLOATS, LANES, Fields, Function

JOB: Final[Fields] = (
    ("ptr", "before"),  # int64 [rows]: the address of each row's state, float32 [heads, key size, value size]
    ("ptr", "after"),  # int64 [rows]: where the new states go, likewise
    ("ptr", "query"),  # float32 [rows, key heads, key size], `query_row` numbers apart
    ("ptr", "key"),  # likewise
    ("ptr", "value"),  # float32 [rows, heads, value size], `value_row` numbers apart
    ("ptr", "decay"),  # float32 [rows, heads], or with a number for each of a key: [rows, heads, key size]
    ("ptr", "rate"),  # float32 [rows, heads]: the share of the value that replaces what the state held
    ("ptr", "output"),  # float32 [rows, heads, value size]
    ("i64", "query_row"),
    ("i64", "value_row"),
    ("i64", "decay_row"),
    ("i64", "rate_row"),
    ("i64", "scaling"),  # the bits of a float32, the factor of queries
)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The shape of states for which a function is compiled.

    Attributes:
        num_heads: how many states a token has.
        num_key_heads: how many keys, and queries, a token has; each serves neighbouring states.
        key_size: the size of a key.
        value_size: the size of a value; a multiple of 16.
        has_wide_decay: whether each row of a state has a decay of its own.
        max_vectors: the most vectors of columns in a piece; a piece needs about three registers for each.
    """

    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int
    has_wide_decay: bool
    max_vectors: int

    @property
    def num_vectors(self) -> int:
        """How many vectors of columns a piece has."""
        vectors = self.value_size // LANES
        return max(each for each in range(1, min(self.max_vectors, vectors) + 1) if vectors % each == 0)

    @property
    def pieces_of_row(self) -> int:
        return self.num_heads * self.value_size // (LANES * self.num_vectors)


def module_source(shape: DeltaShape) -> str:
    """LLVM's text of a module with the function `piece(job, number)`; a job has the fields `JOB`."""
    return "\n".join([DECLARATIONS, _piece(shape), ATTRIBUTES])


def _piece(shape: DeltaShape) -> str:
    function = Function("@piece(ptr %job, i64 %number)", is_internal=False)
    pieces_of_head = shape.pieces_of_row // shape.num_heads
    row = function.let(f"udiv i64 %number, {shape.pieces_of_row}")
    of_row = function.let(f"urem i64 %number, {shape.pieces_of_row}")
    head = function.let(f"udiv i64 {of_row}, {pieces_of_head}")
    piece = function.let(f"urem i64 {of_row}, {pieces_of_head}")
    key_head = function.let(f"udiv i64 {head}, {shape.num_heads // shape.num_key_heads}")
    column = function.let(f"mul i64 {piece}, {LANES * shape.num_vectors}")

    def of_token(name: str, stride: str, part: str, size: int) -> str:
        """The address of a token's numbers for a head."""
        first = function.row(function.field("%job", JOB, name), row, function.field("%job", JOB, stride), "float")
        return function.row(first, part, size, "float")

    def of_state(name: str) -> str:
        """The address of the piece's first column in a state."""
        place = function.let(f"load ptr, ptr {function.at(function.field('%job', JOB, name), row, 'i64')}")
        return function.at(function.row(place, head, shape.key_size * shape.value_size, "float"), column, "float")

    before, after = of_state("before"), of_state("after")
    query, key = (of_token(name, "query_row", key_head, shape.key_size) for name in ("query", "key"))
    value = function.at(of_token("value", "value_row", head, shape.value_size), column, "float")
    decay = of_token("decay", "decay_row", head, shape.key_size if shape.has_wide_decay else 1)
    rate = _number(function, of_token("rate", "rate_row", head, 1), 0)
    outputs = function.row(function.field("%job", JOB, "output"), row, shape.num_heads * shape.value_size, "float")
    output = function.at(function.row(outputs, head, shape.value_size, "float"), column, "float")
    changes = [
        function.let(f"fmul {FLOATS} {function.let(f'fsub {FLOATS} {new}, {held}')}, {rate}")
        for held, new in _held_and_new(function, shape, before, decay, key, value)
    ]
    scaling = function.splat(function.float_field("%job", JOB, "scaling"))
    sums = {f"sum_{each}": "zeroinitializer" for each in range(shape.num_vectors)}
    with function.loop("read", shape.key_size, carried=sums) as names:
        number = names["number"]
        known, asked = _number(function, key, number), _number(function, query, number)
        line = function.row(after, number, shape.value_size, "float")
        for each, numbers in enumerate(_decayed(function, shape, before, decay, number)):
            changed = function.sum_of_product(known, changes[each], numbers)
            function.store(changed, function.at(line, 4 * LANES * each))
            names[f"sum_{each}"] = function.sum_of_product(changed, asked, names[f"sum_{each}"])
    for each in range(shape.num_vectors):
        scaled = function.let(f"fmul {FLOATS} %read_sum_{each}_after, {scaling}")
        function.store(scaled, function.at(output, 4 * LANES * each))
    return function.source()


def _held_and_new(
    function: Function, shape: DeltaShape, before: str, decay: str, key: str, value: str
) -> list[tuple[str, str]]:
    """What the state holds for the key, and the token's value, vector by vector."""
    sums = {f"sum_{each}": "zeroinitializer" for each in range(shape.num_vectors)}
    with function.loop("hold", shape.key_size, carried=sums) as names:
        known = _number(function, key, names["number"])
        for each, numbers in enumerate(_decayed(function, shape, before, decay, names["number"])):
            names[f"sum_{each}"] = function.sum_of_product(numbers, known, names[f"sum_{each}"])
    new = [function.load(FLOATS, value, 4 * LANES * each, 4) for each in range(shape.num_vectors)]
    return [(f"%hold_sum_{each}_after", numbers) for each, numbers in enumerate(new)]


def _decayed(function: Function, shape: DeltaShape, state: str, decay: str, number: str) -> list[str]:
    """A row of the state after its decay, vector by vector."""
    factor = _number(function, decay, number if shape.has_wide_decay else 0)
    line = function.row(state, number, shape.value_size, "float")
    loaded = [function.load(FLOATS, line, 4 * LANES * each, 4) for each in range(shape.num_vectors)]
    return [function.let(f"fmul {FLOATS} {each}, {factor}") for each in loaded]


def _number(function: Function, base: str, number: int | str) -> str:
    """A vector with the same number of a list in all lanes."""
    return function.splat(function.let(f"load float, ptr {function.at(base, number, 'float')}"))
