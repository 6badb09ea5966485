"""Lines of LLVM's text, and the vectors that all compiled functions use."""

from typing import Final

LANES: Final = 16
"""Numbers of a vector. On processors with smaller registers LLVM uses several for it."""

FLOATS: Final = f"<{LANES} x float>"
INTS: Final = f"<{LANES} x i32>"
FMA: Final = "llvm.fma.v16f32"

# What is broken up into 16 numbers must stay one register where the machine has such.
ATTRIBUTES: Final = 'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }\n'

OPENMP: Final = """\
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
"""


class Function:
    """Lines of a function that is being written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def let(self, value: str) -> str:
        """A new name for a value."""
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {value}")
        return name

    def at(self, base: str, offset: int | str, element: str = "i8") -> str:
        """`base` and so many elements, in bytes unless another type is named."""
        return base if offset == 0 else self.let(f"getelementptr {element}, ptr {base}, i64 {offset}")

    def load(self, kind: str, base: str, offset: int = 0, align: int = LANES) -> str:
        return self.let(f"load {kind}, ptr {self.at(base, offset)}, align {align}")

    def sum_of_product(self, left: str, right: str, addend: str) -> str:
        return self.let(f"call {FLOATS} @{FMA}({FLOATS} {left}, {FLOATS} {right}, {FLOATS} {addend})")

    def splat(self, number: str, kind: str = "float") -> str:
        """A vector of one number, float or i32."""
        vector = f"<{LANES} x {kind}>"
        lane = self.let(f"insertelement {vector} poison, {kind} {number}, i32 0")
        return self.let(f"shufflevector {vector} {lane}, {vector} poison, {INTS} zeroinitializer")
