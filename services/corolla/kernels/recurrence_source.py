"""Writes two recurrences over the tokens of a text, as LLVM's text.

The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): a head's state is a matrix with a row for each number
of a key. A token lets the state decay, replaces what the state holds for the token's key by a share of the token's
value, and reads the state by its query.

The state space of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a head's state is a matrix with a row for each
number of a value. A token lets the state decay, adds the product of its value and its key, and reads the state by its
query.

A piece of work is a part of one head of one row: columns in the first recurrence, rows of the state in the second, none
of which depends on another one. It runs through the row's tokens one after the other, and its part of the state stays
in the processor's cache. So a token's numbers depend neither on the other rows of a call, nor on how the text is cut
into calls, nor on the number of threads.
"""

from dataclasses import dataclass
from typing import Final

from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, FLOATS, LANES, Fields, Function

JOB: Final[Fields] = (
    ("ptr", "before"),  # int64 [rows]: the address of each row's state, see the shapes below
    ("ptr", "after"),  # int64 [rows]: where the new states go, likewise
    ("ptr", "bounds"),  # int64 [rows + 1]: the row's first token, and behind the last row the number of tokens
    ("ptr", "query"),  # float32 [tokens, key heads, key size], `query_row` numbers apart
    ("ptr", "key"),  # likewise
    ("ptr", "value"),  # float32 [tokens, heads, value size], `value_row` numbers apart
    ("ptr", "decay"),  # float32 [tokens, heads], or with a number for each of a key: [tokens, heads, key size]
    ("ptr", "rate"),  # float32 [tokens, heads]: the share of the value that replaces what the state held
    ("ptr", "output"),  # float32 [tokens, heads, value size]
    ("i64", "query_row"),
    ("i64", "value_row"),
    ("i64", "decay_row"),
    ("i64", "rate_row"),
    ("i64", "scaling"),  # the bits of a float32, the factor of queries
)

_MAX_PIECE_BYTES: Final = 1 << 15
"""The most bytes of a piece's part of a state, so that a processor's first cache holds it."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes for which a function is compiled.

    Attributes:
        num_heads: how many states a token has.
        num_key_heads: how many keys, and queries, a token has; each serves neighbouring states.
        key_size: the size of a key.
        value_size: the size of a value.
    """

    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """States of the delta rule, float32 `[heads, key size, value size]`; value sizes are multiples of 16.

    Attributes:
        heads: their sizes.
        has_wide_decay: whether each row of a state has a decay of its own.
        max_vectors: the most vectors of columns in a piece; a piece needs about three registers for each.
    """

    heads: HeadSizes
    has_wide_decay: bool
    max_vectors: int

    @property
    def num_vectors(self) -> int:
        """How many vectors of columns a piece has."""
        vectors = self.heads.value_size // LANES
        most = max(1, min(self.max_vectors, vectors, _MAX_PIECE_BYTES // (4 * LANES * self.heads.key_size)))
        return max(each for each in range(1, most + 1) if vectors % each == 0)

    @property
    def pieces_of_head(self) -> int:
        return self.heads.value_size // (LANES * self.num_vectors)


@dataclass(frozen=True, slots=True)
class SpaceShape:
    """States of state spaces, float32 `[heads, value size, key size]`; key sizes are multiples of 16.

    Attributes:
        heads: their sizes.
    """

    heads: HeadSizes

    @property
    def rows_of_piece(self) -> int:
        """How many rows of a state a piece has."""
        most = max(1, min(self.heads.value_size, _MAX_PIECE_BYTES // (4 * self.heads.key_size)))
        return max(each for each in range(1, most + 1) if self.heads.value_size % each == 0)

    @property
    def pieces_of_head(self) -> int:
        return self.heads.value_size // self.rows_of_piece


Shape = DeltaShape | SpaceShape


def module_source(shape: Shape) -> str:
    """LLVM's text of a module with the function `piece(job, number)`; a job has the fields `JOB`."""
    piece = _DeltaPiece(shape) if isinstance(shape, DeltaShape) else _SpacePiece(shape)
    return "\n".join([DECLARATIONS, piece.source(), ATTRIBUTES])


class _Piece:
    """Writes what both functions share: they find the row, head and part of a piece, and loop over the row's tokens."""

    def __init__(self, shape: Shape) -> None:
        self.heads = shape.heads
        self.function = function = Function("@piece(ptr %job, i64 %number)", is_internal=False)
        pieces_of_row = shape.heads.num_heads * shape.pieces_of_head
        self._row = function.let(f"udiv i64 %number, {pieces_of_row}")
        of_row = function.let(f"urem i64 %number, {pieces_of_row}")
        self.head = function.let(f"udiv i64 {of_row}, {shape.pieces_of_head}")
        self.piece = function.let(f"urem i64 {of_row}, {shape.pieces_of_head}")
        self.key_head = function.let(f"udiv i64 {self.head}, {self.heads.num_heads // self.heads.num_key_heads}")

    def source(self) -> str:
        """The text of the function."""
        function = self.function
        before, after = self._state("before"), self._state("after")
        bounds = function.at(function.field("%job", JOB, "bounds"), self._row, "i64")
        first, end = (function.load("i64", bounds, offset, 8) for offset in (0, 8))
        with function.loop("text", end, start=first) as names:
            is_first = function.let(f"icmp eq i64 {names['number']}, {first}")
            state = function.let(f"select i1 {is_first}, ptr {before}, ptr {after}")
            self.write_token(names["number"], state, after)
        return function.source()

    def of_token(self, name: str, stride: str, token: str, part: str, size: int) -> str:
        """The address of a token's numbers for a head."""
        function = self.function
        table = function.field("%job", JOB, name)
        return function.row(
            function.row(table, token, function.field("%job", JOB, stride), "float"), part, size, "float"
        )

    def of_output(self, token: str) -> str:
        """The address of a token's output for the head."""
        sizes = self.heads
        outputs = self.function.row(
            self.function.field("%job", JOB, "output"), token, sizes.num_heads * sizes.value_size, "float"
        )
        return self.function.row(outputs, self.head, sizes.value_size, "float")

    def write_token(self, token: str, state: str, after: str) -> None:
        """Writes what a token does: it reads the piece's part of the state at `state`, and stores it at `after`."""
        raise NotImplementedError

    def first_number(self) -> str:
        """The first number of the piece within a head's state."""
        raise NotImplementedError

    def _state(self, name: str) -> str:
        function, sizes = self.function, self.heads
        place = function.let(f"load ptr, ptr {function.at(function.field('%job', JOB, name), self._row, 'i64')}")
        own = function.row(place, self.head, sizes.key_size * sizes.value_size, "float")
        return function.at(own, self.first_number(), "float")


class _DeltaPiece(_Piece):
    def __init__(self, shape: DeltaShape) -> None:
        super().__init__(shape)
        self._shape = shape
        self._column = self.function.let(f"mul i64 {self.piece}, {LANES * shape.num_vectors}")

    def first_number(self) -> str:
        return self._column

    def write_token(self, token: str, state: str, after: str) -> None:
        function, sizes, num_vectors = self.function, self.heads, self._shape.num_vectors
        query, key = (
            self.of_token(name, "query_row", token, self.key_head, sizes.key_size) for name in ("query", "key")
        )
        value = function.at(
            self.of_token("value", "value_row", token, self.head, sizes.value_size), self._column, "float"
        )
        wide = sizes.key_size if self._shape.has_wide_decay else 1
        decay = self.of_token("decay", "decay_row", token, self.head, wide)
        rate = _number(function, self.of_token("rate", "rate_row", token, self.head, 1), 0)
        sums = {f"sum_{each}": "zeroinitializer" for each in range(num_vectors)}
        with function.loop("hold", sizes.key_size, carried=sums) as names:
            known = _number(function, key, names["number"])
            for each, numbers in enumerate(self._decayed(state, decay, names["number"])):
                names[f"sum_{each}"] = function.sum_of_product(numbers, known, names[f"sum_{each}"])
        changes = []
        for each in range(num_vectors):
            new = function.load(FLOATS, value, 4 * LANES * each, 4)
            missing = function.let(f"fsub {FLOATS} {new}, %hold_sum_{each}_after")
            changes.append(function.let(f"fmul {FLOATS} {missing}, {rate}"))
        with function.loop("read", sizes.key_size, carried=sums) as names:
            number = names["number"]
            known, asked = _number(function, key, number), _number(function, query, number)
            line = function.row(after, number, sizes.value_size, "float")
            for each, numbers in enumerate(self._decayed(state, decay, number)):
                changed = function.sum_of_product(known, changes[each], numbers)
                function.store(changed, function.at(line, 4 * LANES * each))
                names[f"sum_{each}"] = function.sum_of_product(changed, asked, names[f"sum_{each}"])
        output = function.at(self.of_output(token), self._column, "float")
        scaling = function.splat(function.float_field("%job", JOB, "scaling"))
        for each in range(num_vectors):
            scaled = function.let(f"fmul {FLOATS} %read_sum_{each}_after, {scaling}")
            function.store(scaled, function.at(output, 4 * LANES * each))

    def _decayed(self, state: str, decay: str, number: str) -> list[str]:
        """A row of the state after its decay, vector by vector."""
        function = self.function
        factor = _number(function, decay, number if self._shape.has_wide_decay else 0)
        line = function.row(state, number, self.heads.value_size, "float")
        loaded = [function.load(FLOATS, line, 4 * LANES * each, 4) for each in range(self._shape.num_vectors)]
        return [function.let(f"fmul {FLOATS} {each}, {factor}") for each in loaded]


class _SpacePiece(_Piece):
    def __init__(self, shape: SpaceShape) -> None:
        super().__init__(shape)
        self._num_rows = shape.rows_of_piece
        self._first_row = self.function.let(f"mul i64 {self.piece}, {self._num_rows}")

    def first_number(self) -> str:
        return self.function.let(f"mul i64 {self._first_row}, {self.heads.key_size}")

    def write_token(self, token: str, state: str, after: str) -> None:
        function, sizes = self.function, self.heads
        query, key = (
            self.of_token(name, "query_row", token, self.key_head, sizes.key_size) for name in ("query", "key")
        )
        value = function.at(
            self.of_token("value", "value_row", token, self.head, sizes.value_size), self._first_row, "float"
        )
        decay = _number(function, self.of_token("decay", "decay_row", token, self.head, 1), 0)
        output = function.at(self.of_output(token), self._first_row, "float")
        places = [4 * LANES * each for each in range(sizes.key_size // LANES)]
        with function.loop("rows", self._num_rows) as names:
            number = names["number"]
            held, line = (function.row(each, number, sizes.key_size, "float") for each in (state, after))
            factor, read = _number(function, value, number), "zeroinitializer"
            for place in places:
                known, asked, old = (function.load(FLOATS, each, place, 4) for each in (key, query, held))
                kept = function.let(f"fmul {FLOATS} {old}, {decay}")
                changed = function.sum_of_product(known, factor, kept)
                function.store(changed, function.at(line, place))
                read = function.sum_of_product(changed, asked, read)
            function.lines.append(
                f"  store float {function.total(read)}, ptr {function.at(output, number, 'float')}, align 4"
            )


def _number(function: Function, base: str, number: int | str) -> str:
    """A vector with the same number of a list in all lanes."""
    return function.splat(function.let(f"load float, ptr {function.at(base, number, 'float')}"))
