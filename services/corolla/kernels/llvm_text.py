"""Writes LLVM's text (LLVM IR), with the vector types that all compiled functions use."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

LANES: Final = 16
"""How many numbers a vector has. On processors with smaller registers, LLVM uses several registers for one vector."""

FLOATS: Final = f"<{LANES} x float>"
INTS: Final = f"<{LANES} x i32>"
FMA: Final = "llvm.fma.v16f32"

# LLVM must keep a vector of 16 float32 numbers in one register of 512 bits where the processor has such registers.
ATTRIBUTES: Final = 'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }\n'

DECLARATIONS: Final = f"""\
declare {FLOATS} @{FMA}({FLOATS}, {FLOATS}, {FLOATS})
declare {FLOATS} @llvm.fabs.v16f32({FLOATS})
declare {FLOATS} @llvm.copysign.v16f32({FLOATS}, {FLOATS})
declare float @llvm.vector.reduce.fmax.v16f32({FLOATS})
declare float @llvm.vector.reduce.fadd.v16f32(float, {FLOATS})
declare float @llvm.sqrt.f32(float)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
"""LLVM's own functions that modules call."""

Fields = Sequence[tuple[str, str]]
"""The fields of a structure that functions read: the kind, `ptr` or `i64`, and name of each. A field has 64 bits."""


class Function:
    """A function without a result, to which methods add lines; most of them return LLVM's name of the new value.

    Args:
        signature: the function's name and arguments.
        is_internal: whether only functions of the same module can call it.
    """

    def __init__(self, signature: str, *, is_internal: bool = True) -> None:
        self.lines = [f"define {'internal ' if is_internal else ''}void {signature} #0 {{\nentry:"]
        self._count = 0

    def source(self) -> str:
        """The text of the whole function."""
        return "\n".join([*self.lines, "  ret void\n}"])

    def let(self, value: str) -> str:
        """Adds a line that gives a value a new name. Returns the name."""
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {value}")
        return name

    def at(self, base: str, offset: int | str, element: str = "i8") -> str:
        """The address of element number `offset` behind `base`. Elements are bytes unless `element` names a type."""
        return base if offset == 0 else self.let(f"getelementptr {element}, ptr {base}, i64 {offset}")

    def row(self, table: str, number: int | str, size: int | str, element: str = "i8") -> str:
        """The address of row `number` of a table whose rows are `size` elements apart."""
        return self.at(table, self.let(f"mul i64 {number}, {size}"), element)

    def counts(self, base: str, number: int) -> list[str]:
        """The first int32 numbers behind `base`, which are not negative, as i64."""
        return [self.let(f"zext i32 {self.load('i32', base, 4 * index, 4)} to i64") for index in range(number)]

    def load(self, kind: str, base: str, offset: int = 0, align: int = LANES) -> str:
        return self.let(f"load {kind}, ptr {self.at(base, offset)}, align {align}")

    def sum_of_product(self, left: str, right: str, addend: str) -> str:
        return self.let(f"call {FLOATS} @{FMA}({FLOATS} {left}, {FLOATS} {right}, {FLOATS} {addend})")

    def splat(self, number: str, kind: str = "float") -> str:
        """A vector with the same number, a float or an i32, in all lanes."""
        vector = f"<{LANES} x {kind}>"
        lane = self.let(f"insertelement {vector} poison, {kind} {number}, i32 0")
        return self.let(f"shufflevector {vector} {lane}, {vector} poison, {INTS} zeroinitializer")

    def neighbours(self, vector: str) -> str:
        """The vector of floats in which each even lane and the next one have changed places."""
        lanes = ", ".join(f"i32 {lane ^ 1}" for lane in range(LANES))
        return self.let(f"shufflevector {FLOATS} {vector}, {FLOATS} poison, {INTS} <{lanes}>")

    def field_at(self, base: str, fields: Fields, name: str) -> str:
        """The address of a field."""
        return self.at(base, 8 * [each for _, each in fields].index(name))

    def field(self, base: str, fields: Fields, name: str) -> str:
        """The value of a field."""
        kind = next(kind for kind, each in fields if each == name)
        return self.let(f"load {kind}, ptr {self.field_at(base, fields, name)}")

    def float_field(self, base: str, fields: Fields, name: str) -> str:
        """The float32 whose bits a field holds."""
        return self.let(f"bitcast i32 {self.let(f'trunc i64 {self.field(base, fields, name)} to i32')} to float")

    @contextmanager
    def loop(
        self, label: str, end: int | str, step: int = 1, carried: Mapping[str, str] = {}, *, start: int | str = 0
    ) -> Iterator[dict[str, str]]:
        """Writes a loop over integers, which runs at least once; the caller writes the body within the context.

        Args:
            label: the prefix of the loop's labels and names.
            end: the end of the integers, itself not included.
            step: the distance from one integer to the next.
            carried: maps the name of each vector that a round passes to the next one to the vector's first value.
            start: the first integer.

        Yields:
            A dictionary from `number`, `step` and the name of each carried vector to LLVM's names of their values in a
            round. The body replaces a vector's entry by the new value, and may replace `step`. After the loop,
            `%LABEL_NAME_after` is the last value of the vector NAME.
        """
        self.lines.append(f"  br label %{label}_start\n{label}_start:\n  br label %{label}_loop\n{label}_loop:")
        self.lines.append(f"  %{label}_number = phi i64 [{start}, %{label}_start], [%{label}_next, %{label}_end]")
        names = {"number": f"%{label}_number", "step": str(step)}
        for name, first in carried.items():
            names[name] = f"%{label}_{name}"
            after = f"%{label}_{name}_after"
            self.lines.append(f"  {names[name]} = phi {FLOATS} [{first}, %{label}_start], [{after}, %{label}_end]")
        yield names
        self.lines.append(f"  br label %{label}_end\n{label}_end:")
        for name in carried:
            self.lines.append(f"  %{label}_{name}_after = freeze {FLOATS} {names[name]}")
        self.lines.append(f"  %{label}_next = add i64 %{label}_number, {names['step']}")
        self.lines.append(f"  %{label}_is_more = icmp ult i64 %{label}_next, {end}")
        self.lines.append(f"  br i1 %{label}_is_more, label %{label}_loop, label %{label}_done\n{label}_done:")

    def total(self, vector: str) -> str:
        """The sum of a vector's 16 numbers."""
        return self.let(f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {FLOATS} {vector})")

    def store(self, value: str, place: str, align: int = 4) -> None:
        """Stores a vector of float32 numbers."""
        self.lines.append(f"  store {FLOATS} {value}, ptr {place}, align {align}")
