"""What compiled functions that run in phases have in common, as LLVM's text.

A phase consists of pieces of work that threads take one by one. All threads go through all phases. A thread that is
late because another process used its CPU finds the work done and delays no other thread.

Sums are float32. With bfloat16, results are rounded where transformers rounds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from corolla.kernels.attention_text import exponential_of_difference
from corolla.kernels.llvm_text import FLOATS, INTS, LANES, Function

COUNTER_BYTES: Final = 256
"""Bytes of a phase's two counters, of taken pieces and of done pieces; each has a cache line of its own."""
PIECES_OF_THREAD: Final = 6
"""How many pieces a product has for each thread. With fewer, threads wait longer for the last piece; with more, the
inputs are read more often."""
PIECE_TOKENS: Final = 4
"""How many tokens a piece has in phases that go through tokens, such as norms; see `Phases.each`."""

_NUM_BYTES: Final = {"float": 4, "bfloat": 2}


@dataclass(frozen=True, slots=True)
class NumberTypes:
    """The types of numbers for which functions are compiled.

    Attributes:
        element: LLVM's type of hidden states, queries, keys and values: `float` or `bfloat`.
        multiplied: the type of the inputs of products: `element`, or `float` if the processor has no instructions for
            bfloat16; integer instructions round to bfloat16 then.
    """

    element: str
    multiplied: str

    @property
    def element_bytes(self) -> int:
        return _NUM_BYTES[self.element]

    @property
    def multiplied_bytes(self) -> int:
        return _NUM_BYTES[self.multiplied]

    @property
    def rounds(self) -> bool:
        return self.element != "float"


class NumberFunction(Function):
    """A function that loads and stores vectors of its shape's types of numbers."""

    def __init__(self, types: NumberTypes, signature: str, *, is_internal: bool = True) -> None:
        super().__init__(signature, is_internal=is_internal)
        self.types = types

    def load_numbers(self, base: str, index: str) -> str:
        """Loads 16 numbers of the shape's type, from number `index` on, as float32."""
        return self._load(self.types.element, base, index)

    def load_multiplied(self, base: str, index: str) -> str:
        """Loads 16 inputs of products, from number `index` on, as float32."""
        return self._load(self.types.multiplied, base, index)

    def load_floats(self, base: str, index: str) -> str:
        return self._load("float", base, index)

    def _load(self, element: str, base: str, index: str) -> str:
        kind = f"<{LANES} x {element}>"
        stored = self.let(f"load {kind}, ptr {self.at(base, index, element)}, align {_NUM_BYTES[element]}")
        return stored if element == "float" else self.let(f"fpext {kind} {stored} to {FLOATS}")

    def store_numbers(self, value: str, base: str, index: str) -> None:
        """Stores 16 numbers in the shape's type."""
        self._store(self.types.element, value, base, index)

    def store_multiplied(self, value: str, base: str, index: str) -> None:
        """Stores 16 inputs of products, rounded to the shape's type."""
        self._store(self.types.multiplied, self.rounded(value), base, index)

    def _store(self, element: str, value: str, base: str, index: str) -> None:
        kind = FLOATS
        if element != "float":
            value, kind = self._shortened(value)
        place = self.at(base, index, element)
        self.lines.append(f"  store {kind} {value}, ptr {place}, align {_NUM_BYTES[element]}")

    def _shortened(self, value: str) -> tuple[str, str]:
        """Rounds to the shape's type, which is not float32. Returns the vector and the LLVM type to store it as."""
        if self.types.multiplied == self.types.element:
            kind = f"<{LANES} x {self.types.element}>"
            return self.let(f"fptrunc {FLOATS} {value} to {kind}"), kind
        upper = self.let(f"lshr {INTS} {self._rounded_bits(value)}, splat (i32 16)")
        kind = f"<{LANES} x i16>"
        return self.let(f"trunc {INTS} {upper} to {kind}"), kind

    def rounded(self, value: str) -> str:
        """The value rounded to the shape's type, as float32."""
        if not self.types.rounds:
            return value
        if self.types.multiplied == self.types.element:
            short, kind = self._shortened(value)
            return self.let(f"fpext {kind} {short} to {FLOATS}")
        return self.let(f"bitcast {INTS} {self._rounded_bits(value)} to {FLOATS}")

    def _rounded_bits(self, value: str) -> str:
        """The bits of the nearest bfloat16, ties to even, as a float32 with zeros in the lower half."""
        bits = self.let(f"bitcast {FLOATS} {value} to {INTS}")
        last = self.let(f"and {INTS} {self.let(f'lshr {INTS} {bits}, splat (i32 16)')}, splat (i32 1)")
        above = self.let(f"add {INTS} {self.let(f'add {INTS} {bits}, splat (i32 32767)')}, {last}")
        # The sum could turn a NaN into a number, so NaN gets a bit that keeps it NaN.
        none = self.let(f"or {INTS} {bits}, splat (i32 4194304)")
        is_none = self.let(f"fcmp uno {FLOATS} {value}, {value}")
        chosen = self.let(f"select <{LANES} x i1> {is_none}, {INTS} {none}, {INTS} {above}")
        return self.let(f"and {INTS} {chosen}, splat (i32 -65536)")

    def product(self, left: str, right: str) -> str:
        return self.let(f"fmul {FLOATS} {left}, {right}")

    def sum(self, left: str, right: str) -> str:
        return self.let(f"fadd {FLOATS} {left}, {right}")

    def inverse_root(self, squares: str, count: int, epsilon: str) -> str:
        """One over the root of the mean square plus `epsilon`, in all lanes, from 16 partial sums of squares."""
        mean = self.let(f"fdiv float {self.total(squares)}, {float(count)}")
        root = self.let(f"call float @llvm.sqrt.f32(float {self.let(f'fadd float {mean}, {epsilon}')})")
        return self.splat(self.let(f"fdiv float 1.0, {root}"))

    def silu(self, constants: str, value: str) -> str:
        """`x / (1 + e^-x)` of each lane, rounded; `constants` as in `exponential_of_difference`."""
        one = self.splat(self.let("fadd float 1.0, 0.0"))
        # The exponential of `-|x|` cannot overflow.
        size = self.let(f"call {FLOATS} @llvm.fabs.v16f32({FLOATS} {value})")
        small = exponential_of_difference(self, constants, "zeroinitializer", size)
        is_positive = self.let(f"fcmp oge {FLOATS} {value}, zeroinitializer")
        numerator = self.let(f"select <{LANES} x i1> {is_positive}, {FLOATS} {one}, {FLOATS} {small}")
        share = self.let(f"fdiv {FLOATS} {numerator}, {self.sum(small, one)}")
        return self.rounded(self.product(value, share))


class Phases:
    """Writes the phases of a function that each of several threads calls.

    Args:
        function: the function.
        counters: the address of the phases' counters, all zero.

    Attributes:
        function: see above.
        counters: the address from which phases are counted.
        num_phases: how many phases have been written behind it.
    """

    def __init__(self, function: Function, counters: str) -> None:
        self.function, self.counters = function, counters
        self.num_phases = 0

    def counter(self) -> str:
        return self.function.at(self.counters, self.num_phases * COUNTER_BYTES)

    def rounded_up(self, count: str, size: int | str) -> str:
        """Writes the number of pieces of `size` that `count` items make."""
        function = self.function
        less = function.let(f"sub i64 {size}, 1")
        return function.let(f"udiv i64 {function.let(f'add i64 {count}, {less}')}, {size}")

    @contextmanager
    def phase(self, name: str, count: str) -> Iterator[str]:
        """Writes a phase, in which a thread takes pieces while there are any, and then waits for the other threads.

        Yields the name of a piece's number; the work on the piece is written within the context.
        """
        function, lines = self.function, self.function.lines
        counter = self.counter()
        done = function.at(counter, COUNTER_BYTES // 2)
        self.num_phases += 1
        lines.append(
            f"""\
  br label %{name}_take
{name}_take:
  %{name}_piece = atomicrmw add ptr {counter}, i64 1 monotonic
  %{name}_is_any = icmp ult i64 %{name}_piece, {count}
  br i1 %{name}_is_any, label %{name}_work, label %{name}_wait
{name}_work:"""
        )
        yield f"%{name}_piece"
        lines.append(
            f"""\
  %{name}_was = atomicrmw add ptr {done}, i64 1 release
  br label %{name}_take
{name}_wait:
  call void @await(ptr {done}, i64 {count})
  br label %{name}_done
{name}_done:"""
        )

    def each(self, stage: str, count: str, arguments: str) -> None:
        """Writes a phase that calls the function `stage` with each of `count` numbers behind `arguments`."""
        function = self.function
        with self.phase(stage, self.rounded_up(count, PIECE_TOKENS)) as piece:
            first, end = self.range(piece, PIECE_TOKENS, count)
            with function.loop(f"{stage}_each", end, start=first) as names:
                function.lines.append(f"  call void @{stage}({arguments}, i64 {names['number']})")

    def range(self, piece: str, size: int | str, end: str) -> tuple[str, str]:
        """Writes the number of a piece's first item and the end of the piece's items."""
        function = self.function
        first = function.let(f"mul i64 {piece}, {size}")
        after = function.let(f"add i64 {first}, {size}")
        return first, function.let(f"call i64 @llvm.umin.i64(i64 {after}, i64 {end})")


def await_source(pauses: bool) -> str:
    """Writes `await`, which waits until `count` pieces are done. A thread that waits long yields its CPU."""
    return f"""\
{"declare void @llvm.x86.sse2.pause()" if pauses else ""}
declare i32 @sched_yield()
define internal void @await(ptr %done, i64 %count) #0 {{
entry:
  br label %look
look:
  %looks = phi i64 [0, %entry], [%looks_after, %again], [0, %yield]
  %now = load atomic i64, ptr %done acquire, align 8
  %are_done = icmp uge i64 %now, %count
  br i1 %are_done, label %out, label %wait
wait:
  {"call void @llvm.x86.sse2.pause()" if pauses else ""}
  %looks_after = add i64 %looks, 1
  %is_long = icmp ugt i64 %looks_after, 256
  br i1 %is_long, label %yield, label %again
again:
  br label %look
yield:
  %ignored = call i32 @sched_yield()
  br label %look
out:
  ret void
}}"""
