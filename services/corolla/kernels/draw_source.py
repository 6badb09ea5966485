"""Writes the draw of a token, as LLVM's text.

Top-p needs no sorted row. A token whose probability times the number of tokens is at most the share is excluded for
certain, so it takes no part in the race, and tokens get random numbers only next to one that does. If the winner is one
that top-p excludes, so are all tokens before it in the order of probability and id, and the rest race again.
"""

import struct
from collections.abc import Sequence
from typing import Final

from corolla.kernels.llvm_text import Fields
from corolla.kernels.philox import (
    EVEN_TERMS,
    FRACTION,
    KEY_STEPS,
    LN2_HIGH,
    LN2_LOW,
    MULTIPLIERS,
    NUMBER_BITS,
    ODD_TERMS,
    ONE,
    PROBABILITY_BITS,
    ROUNDS,
    SQUARE_ROOT_OF_HALF,
)

JOB: Final[Fields] = (
    ("ptr", "probabilities"),  # float32 [rows, width]
    ("ptr", "keys"),  # int64 [rows]
    ("ptr", "positions"),  # int64 [rows]
    ("ptr", "shares"),  # int64 [rows], in units of probability
    ("ptr", "least"),  # float32 [rows]
    ("ptr", "tokens"),  # int64 [rows]
    ("i64", "width"),
)

_PAIRS: Final = 8
"""How many pairs of an even and an odd token a round takes."""
_TOKENS: Final = 2 * _PAIRS
_I32, _I64, _I1 = (f"<{_PAIRS} x {kind}>" for kind in ("i32", "i64", "i1"))
_FLOATS, _DOUBLES = f"<{_PAIRS} x float>", f"<{_PAIRS} x double>"
_WIDE_I64, _WIDE_FLOATS = f"<{_TOKENS} x i64>", f"<{_TOKENS} x float>"
_NOTHING: Final = f"{_WIDE_FLOATS} zeroinitializer"
_LOAD: Final = f"llvm.masked.load.v{_TOKENS}f32.p0"
_UNIT: Final = float(1 << PROBABILITY_BITS)
_MAGIC: Final = 0x4330000000000000  # the bits of 2^52 as float64: integers below that are the lower bits of their sum
# A number E is at least u, but for its rounding. So a token with less than this share of the best quotient times u
# cannot win, and needs no logarithm.
_LEAST_PART: Final = (1 - 2**-20) * 2.0**-NUMBER_BITS
# All probabilities of a row are a larger share than this, whatever their roundings.
_CERTAIN_SHARE: Final = int(_UNIT * (1 - 2**-10))


class _Lines:
    """Lines of a function; `let` names a value, by numbers from `first` on."""

    def __init__(self, first: int = 0) -> None:
        self.lines: list[str] = []
        self._first = first

    def let(self, value: str) -> str:
        name = f"%v{self._first + len(self.lines)}"
        self.lines.append(f"  {name} = {value}")
        return name

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def module_source() -> str:
    """LLVM's text of a module with the function `draw(job, row)`; a job has the fields `JOB`."""
    return "\n".join([_HEAD, _sum(), _race(), _draw()])


_HEAD: Final = f"""\
declare {_WIDE_FLOATS} @{_LOAD}(ptr, i32, <{_TOKENS} x i1>, {_WIDE_FLOATS})
declare {_DOUBLES} @llvm.floor.v{_PAIRS}f64({_DOUBLES})
declare double @llvm.vector.reduce.fadd.v{_PAIRS}f64(double, {_DOUBLES})
declare float @llvm.vector.reduce.fmax.v{_TOKENS}f32({_WIDE_FLOATS})
declare i1 @llvm.vector.reduce.or.v{_PAIRS}i1({_I1})
declare i16 @llvm.cttz.i16(i16, i1)
"""


def _double(number: float) -> str:
    return f"0x{_bits_of(number):016X}"


def _bits_of(number: float) -> int:
    bits: int = struct.unpack("Q", struct.pack("d", number))[0]
    return bits


def _all(number: float) -> str:
    return f"splat (double {_double(number)})"


def _splat(name: str, kind: str, value: str, lanes: int = _PAIRS) -> str:
    vector = f"<{lanes} x {kind}>"
    return (
        f"  %{name}_one = insertelement {vector} poison, {kind} {value}, i32 0\n"
        f"  %{name} = shufflevector {vector} %{name}_one, {vector} poison, <{lanes} x i32> zeroinitializer"
    )


def _counted(kind: str, count: int, start: int = 0, step: int = 1) -> str:
    return f"<{', '.join(f'{kind} {start + step * number}' for number in range(count))}>"


_SIDES: Final = "even", "odd"
_ENTRY: Final = "\n".join(
    [
        _splat("ends", "i64", "%width", _TOKENS),
        _splat("bounds", "double", "%bound"),
        _splat("bound_ids", "i64", "%bound_id"),
    ]
)


def _loop_head(latch: str, *carried: str) -> str:
    """The head of a loop over a row's tokens: whether each even and each odd token is behind `%bound`.

    That is so if its probability in units, `%x_even` or `%x_odd`, is larger, or equal, and its id is larger than
    `%bound_id`. The probability of tokens behind the row's end is 0. The body follows, and ends in `latch`.

    Args:
        carried: the values that a round passes to the next one.
    """
    lines = [
        "  br label %loop",
        "loop:",
        f"  %at = phi i64 [0, %entry], [%at_next, %{latch}]",
        *(f"  {each}" for each in carried),
        _splat("at_all", "i64", "%at", _TOKENS),
        f"  %ids = add {_WIDE_I64} %at_all, {_counted('i64', _TOKENS)}",
        f"  %are_in = icmp ult {_WIDE_I64} %ids, %ends",
        "  %place = getelementptr float, ptr %row, i64 %at",
        f"  %p = call {_WIDE_FLOATS} @{_LOAD}(ptr %place, i32 4, <{_TOKENS} x i1> %are_in, {_NOTHING})",
    ]
    for start, side in enumerate(_SIDES):
        lanes = _counted("i32", _PAIRS, start, 2)
        lines += [
            f"  %ids_{side} = shufflevector {_WIDE_I64} %ids, {_WIDE_I64} poison, {_I32} {lanes}",
            f"  %p_{side} = shufflevector {_WIDE_FLOATS} %p, {_WIDE_FLOATS} poison, {_I32} {lanes}",
            f"  %double_{side} = fpext {_FLOATS} %p_{side} to {_DOUBLES}",
            f"  %x_{side} = fmul {_DOUBLES} %double_{side}, {_all(_UNIT)}",
            f"  %is_more_{side} = fcmp ogt {_DOUBLES} %x_{side}, %bounds",
            f"  %is_equal_{side} = fcmp oeq {_DOUBLES} %x_{side}, %bounds",
            f"  %is_later_{side} = icmp sgt {_I64} %ids_{side}, %bound_ids",
            f"  %is_next_{side} = and {_I1} %is_equal_{side}, %is_later_{side}",
            f"  %is_behind_{side} = or {_I1} %is_more_{side}, %is_next_{side}",
        ]
    return "\n".join(lines)


_NEXT: Final = f"""\
  %at_next = add i64 %at, {_TOKENS}
  %goes_on = icmp ult i64 %at_next, %width
  br i1 %goes_on, label %loop, label %done"""


def _sum() -> str:
    """Writes `sum_up_to`, the probability of the tokens up to a bound, in units: an integer that float64 holds."""
    lines = []
    for side, before in (("even", "%sums"), ("odd", "%with_even")):
        lines += [
            f"  %units_{side} = call {_DOUBLES} @llvm.floor.v{_PAIRS}f64({_DOUBLES} %x_{side})",
            f"  %counted_{side} = select {_I1} %is_behind_{side}, {_DOUBLES} zeroinitializer, {_DOUBLES} %units_{side}",
            f"  %with_{side} = fadd {_DOUBLES} {before}, %counted_{side}",
        ]
    return f"""\
define internal i64 @sum_up_to(ptr %row, i64 %width, double %bound, i64 %bound_id) nounwind {{
entry:
{_ENTRY}
{_loop_head("loop", f"%sums = phi {_DOUBLES} [zeroinitializer, %entry], [%with_odd, %loop]")}
{chr(10).join(lines)}
{_NEXT}
done:
  %sum = call reassoc double @llvm.vector.reduce.fadd.v{_PAIRS}f64(double 0.0, {_DOUBLES} %with_odd)
  %units = fptosi double %sum to i64
  ret i64 %units
}}
"""


def _numbers(lines: _Lines, keys: Sequence[tuple[str, str]]) -> Sequence[str]:
    """Writes Philox for the pairs of tokens in `%pairs`. Returns the numbers of even and odd tokens, 52 bits as i64."""
    mask = "splat (i64 4294967295)"
    c = ["%counter", "%pairs", "zeroinitializer", "zeroinitializer"]
    for k0, k1 in keys:
        products = [lines.let(f"mul {_I64} {c[2 * at]}, splat (i64 {MULTIPLIERS[at]})") for at in range(2)]
        high = [lines.let(f"lshr {_I64} {each}, splat (i64 32)") for each in products]
        low = [lines.let(f"and {_I64} {each}, {mask}") for each in products]
        first = lines.let(f"xor {_I64} {lines.let(f'xor {_I64} {high[1]}, {c[1]}')}, {k0}")
        second = lines.let(f"xor {_I64} {lines.let(f'xor {_I64} {high[0]}, {c[3]}')}, {k1}")
        c = [first, low[1], second, low[0]]
    found = []
    for first_word, second_word in (c[:2], c[2:]):
        upper = lines.let(f"shl {_I64} {first_word}, splat (i64 20)")
        found.append(lines.let(f"or {_I64} {upper}, {lines.let(f'lshr {_I64} {second_word}, splat (i64 12)')}"))
    return found


def _exponential(lines: _Lines, numbers: str) -> str:
    """Writes the numbers that `philox.exponential_of` makes, as float32."""

    def of(operation: str, left: str, right: str) -> str:
        return lines.let(f"{operation} {_DOUBLES} {left}, {right}")

    def polynomial(terms: Sequence[float]) -> str:
        value = _all(terms[-1])
        for term in reversed(terms[:-1]):
            value = of("fadd", _all(term), of("fmul", w, value))
        return value

    twice = lines.let(f"shl {_I64} {numbers}, splat (i64 1)")
    left = lines.let(f"sub {_I64} splat (i64 {(1 << (NUMBER_BITS + 1)) - 1}), {twice}")
    whole = lines.let(f"sitofp {_I64} {left} to {_DOUBLES}")
    shifted = lines.let(f"bitcast {_DOUBLES} {whole} to {_I64}")
    bits = lines.let(f"add {_I64} {shifted}, splat (i64 {ONE - SQUARE_ROOT_OF_HALF})")
    scale = lines.let(f"lshr {_I64} {bits}, splat (i64 52)")
    exponent = lines.let(
        f"sitofp {_I64} {lines.let(f'sub {_I64} {scale}, splat (i64 {1024 + NUMBER_BITS})')} to {_DOUBLES}"
    )
    fraction = lines.let(f"and {_I64} {bits}, splat (i64 {FRACTION})")
    mantissa = lines.let(f"add {_I64} {fraction}, splat (i64 {SQUARE_ROOT_OF_HALF})")
    f = of("fsub", lines.let(f"bitcast {_I64} {mantissa} to {_DOUBLES}"), _all(1.0))
    s = of("fdiv", f, of("fadd", f, _all(2.0)))
    z = of("fmul", s, s)
    w = of("fmul", z, z)
    even, odd = of("fmul", w, polynomial(EVEN_TERMS)), of("fmul", z, polynomial(ODD_TERMS))
    half = of("fmul", of("fmul", f, f), _all(0.5))
    first = of("fmul", s, of("fadd", half, of("fadd", odd, even)))
    low = of("fsub", of("fadd", first, of("fmul", exponent, _all(LN2_LOW))), half)
    logarithm = of("fadd", of("fadd", low, f), of("fmul", exponent, _all(LN2_HIGH)))
    return lines.let(f"fptrunc {_DOUBLES} {lines.let(f'fneg {_DOUBLES} {logarithm}')} to {_FLOATS}")


def _race() -> str:
    """Writes `race`, which returns the token behind a bound with the largest quotient, or -1."""
    keys, scalars = [], []
    for number in range(ROUNDS):
        names = []
        for at, word in enumerate(("%low_word", "%high_word")):
            step = KEY_STEPS[at] * number & 0xFFFFFFFF
            scalars.append(f"  %sum{number}_{at} = add i64 {word}, {step}")
            scalars.append(f"  %word{number}_{at} = and i64 %sum{number}_{at}, 4294967295")
            scalars.append(_splat(f"key{number}_{at}", "i64", f"%word{number}_{at}"))
            names.append(f"%key{number}_{at}")
        keys.append((names[0], names[1]))
    lines = _Lines()
    numbers = _numbers(lines, keys)
    racing = []
    for side, drawn in zip(_SIDES, numbers, strict=True):
        as_double = lines.let(f"bitcast {_I64} {lines.let(f'or {_I64} {drawn}, splat (i64 {_MAGIC})')} to {_DOUBLES}")
        bar = lines.let(f"fmul {_DOUBLES} {lines.let(f'fsub {_DOUBLES} {as_double}, {_all(2.0**52 - 0.5)}')}, %part")
        may_win = lines.let(f"fcmp oge {_DOUBLES} %double_{side}, {bar}")
        racing.append(lines.let(f"and {_I1} {may_win}, %is_behind_{side}"))
    some = lines.let(f"or {_I1} {racing[0]}, {racing[1]}")
    is_some = lines.let(f"call i1 @llvm.vector.reduce.or.v{_PAIRS}i1({_I1} {some})")
    judged = _Lines(len(lines.lines))
    quotients = []
    for side, drawn in zip(_SIDES, numbers, strict=True):
        quotient = judged.let(f"fdiv {_FLOATS} %p_{side}, {_exponential(judged, drawn)}")
        quotients.append(judged.let(f"select {_I1} %is_behind_{side}, {_FLOATS} {quotient}, {_FLOATS} zeroinitializer"))
    order = ", ".join(f"i32 {number // 2 + _PAIRS * (number % 2)}" for number in range(_TOKENS))
    both = judged.let(f"shufflevector {_FLOATS} {quotients[0]}, {_FLOATS} {quotients[1]}, <{_TOKENS} x i32> <{order}>")
    largest = judged.let(f"call float @llvm.vector.reduce.fmax.v{_TOKENS}f32({_WIDE_FLOATS} {both})")
    is_better = judged.let(f"fcmp ogt float {largest}, %best")
    carried = (
        "%best = phi float [0.0, %entry], [%best_next, %latch]", "%token = phi i64 [-1, %entry], [%token_next, %latch]",
    )  # fmt: skip
    return f"""\
define internal i64 @race(ptr %row, i64 %width, i64 %key, i64 %position, double %bound, i64 %bound_id) nounwind {{
entry:
{_ENTRY}
  %low_word = and i64 %key, 4294967295
  %high_word = lshr i64 %key, 32
  %counter_word = and i64 %position, 4294967295
{_splat("counter", "i64", "%counter_word")}
{chr(10).join(scalars)}
{_loop_head("latch", *carried)}
  %are_behind = or {_I1} %is_behind_even, %is_behind_odd
  %some_are_behind = call i1 @llvm.vector.reduce.or.v{_PAIRS}i1({_I1} %are_behind)
  br i1 %some_are_behind, label %number, label %latch
number:
  %pairs = lshr {_I64} %ids_even, splat (i64 1)
  %best_double = fpext float %best to double
  %least_part = fmul double %best_double, {_double(_LEAST_PART)}
{_splat("part", "double", "%least_part")}
{lines.text}
  br i1 {is_some}, label %judge, label %latch
judge:
{judged.text}
  br i1 {is_better}, label %better, label %latch
better:
{_splat("largest", "float", largest, _TOKENS)}
  %are_best = fcmp oeq {_WIDE_FLOATS} {both}, %largest
  %mask = bitcast <{_TOKENS} x i1> %are_best to i{_TOKENS}
  %lane = call i{_TOKENS} @llvm.cttz.i{_TOKENS}(i{_TOKENS} %mask, i1 true)
  %offset = zext i{_TOKENS} %lane to i64
  %found = add i64 %at, %offset
  br label %latch
latch:
  %best_next = phi float [%best, %loop], [%best, %number], [%best, %judge], [{largest}, %better]
  %token_next = phi i64 [%token, %loop], [%token, %number], [%token, %judge], [%found, %better]
{_NEXT}
done:
  ret i64 %token_next
}}
"""


def _field(name: str) -> str:
    number, kind = next((number, kind) for number, (kind, each) in enumerate(JOB) if each == name)
    return f"  %{name}_at = getelementptr i64, ptr %job, i64 {number}\n  %{name} = load {kind}, ptr %{name}_at"


def _of_row(name: str, kind: str) -> str:
    place = f"%{name}_place"
    return f"  {place} = getelementptr {kind}, ptr %{name}, i64 %item\n  %own_{name} = load {kind}, ptr {place}"


def _draw() -> str:
    """Writes `draw(job, row)`."""
    own = (("keys", "i64"), ("positions", "i64"), ("shares", "i64"), ("least", "float"))
    unit, tiny = _double(_UNIT), _double(2.0**-149 * _UNIT)
    return f"""\
define void @draw(ptr %job, i64 %item) nounwind {{
entry:
{chr(10).join(_field(name) for _, name in JOB)}
{chr(10).join(_of_row(*each) for each in own)}
  %row_at = mul i64 %item, %width
  %row = getelementptr float, ptr %probabilities, i64 %row_at
  %out = getelementptr i64, ptr %tokens, i64 %item
  %least_double = fpext float %own_least to double
  %least_x = fmul double %least_double, {unit}
  %has_least = fcmp ogt double %least_x, {tiny}
  %floor_x = select i1 %has_least, double %least_x, double {tiny}
  %has_share = icmp sge i64 %own_shares, 0
  %is_certain = icmp slt i64 %own_shares, {_CERTAIN_SHARE}
  %excludes = and i1 %has_share, %is_certain
  %each = sdiv i64 %own_shares, %width
  %next = add i64 %each, 1
  %next_x = sitofp i64 %next to double
  %is_over = fcmp ogt double %next_x, %floor_x
  %is_bound = and i1 %excludes, %is_over
  %first_bound = select i1 %is_bound, double %next_x, double %floor_x
  br label %run
run:
  %bound = phi double [%first_bound, %entry], [%token_x, %confirm]
  %bound_id = phi i64 [-1, %entry], [%token, %confirm]
  %token = call i64 @race(ptr %row, i64 %width, i64 %own_keys, i64 %own_positions, double %bound, i64 %bound_id)
  store i64 %token, ptr %out
  %is_found = icmp sge i64 %token, 0
  %is_doubtful = and i1 %has_share, %is_found
  br i1 %is_doubtful, label %check, label %done
check:
  %token_at = getelementptr float, ptr %row, i64 %token
  %token_p = load float, ptr %token_at
  %token_double = fpext float %token_p to double
  %token_x = fmul double %token_double, {unit}
  %up_to = call i64 @sum_up_to(ptr %row, i64 %width, double %token_x, i64 %token)
  %is_within = icmp sle i64 %up_to, %own_shares
  br i1 %is_within, label %confirm, label %done
confirm:
  ; The last token stays, however large the share is.
  %total = call i64 @sum_up_to(ptr %row, i64 %width, double 0x7FF0000000000000, i64 -1)
  %is_excluded = icmp slt i64 %up_to, %total
  br i1 %is_excluded, label %run, label %done
done:
  ret void
}}
"""
