"""Writes the draw of a token, as LLVM's text.

Top-p needs no sorted row. A token whose probability times the number of tokens that are left is at most what is left of
the share is excluded for certain. A few passes over ever fewer tokens find all but a few of those that top-p excludes,
and only the tokens that are left get random numbers. If the winner is one that top-p excludes, so are all tokens before
it in the order of probability and id, and the rest race again.
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

LANES: Final = 8
"""How many tokens a pass takes together. A list of tokens needs room for so many behind its end."""

JOB: Final[Fields] = (
    ("ptr", "probabilities"),  # float32 [rows, width]
    ("ptr", "keys"),  # int64 [rows]
    ("ptr", "positions"),  # int64 [rows]
    ("ptr", "shares"),  # int64 [rows], in units of probability
    ("ptr", "least"),  # float32 [rows]
    ("ptr", "lists"),  # int32 [rows, stride]
    ("ptr", "tokens"),  # int64 [rows]
    ("i64", "width"),
    ("i64", "stride"),  # at least width + LANES
)

_I32, _I64, _I1 = (f"<{LANES} x {kind}>" for kind in ("i32", "i64", "i1"))
_FLOATS, _DOUBLES = f"<{LANES} x float>", f"<{LANES} x double>"
_LOAD_F32, _LOAD_I32 = (f"llvm.masked.load.v{LANES}{kind}.p0" for kind in ("f32", "i32"))
_GATHER: Final = f"llvm.masked.gather.v{LANES}f32.v{LANES}p0"
_NONE: Final = f"{_FLOATS} zeroinitializer"
_UNIT: Final = float(1 << PROBABILITY_BITS)
_MAGIC: Final = 0x4330000000000000  # the bits of 2^52 as float64: integers below that are the lower bits of their sum
# A number E is at least u, but for its rounding. So a token with less than this share of the best quotient times u
# cannot win, and needs no logarithm.
_LEAST_PART: Final = (1 - 2**-20) * 2.0**-NUMBER_BITS


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
    return "\n".join([_HEAD, _keep(), _sum(), _race(), _draw()])


_HEAD: Final = f"""\
declare {_FLOATS} @{_LOAD_F32}(ptr, i32, {_I1}, {_FLOATS})
declare {_I32} @{_LOAD_I32}(ptr, i32, {_I1}, {_I32})
declare {_FLOATS} @{_GATHER}(<{LANES} x ptr>, i32, {_I1}, {_FLOATS})
declare {_DOUBLES} @llvm.floor.v{LANES}f64({_DOUBLES})
declare double @llvm.vector.reduce.fadd.v{LANES}f64(double, {_DOUBLES})
declare float @llvm.vector.reduce.fmax.v{LANES}f32({_FLOATS})
declare i1 @llvm.vector.reduce.or.v{LANES}i1({_I1})
declare i8 @llvm.cttz.i8(i8, i1)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
"""

_COUNTED: Final = f"<{', '.join(f'i64 {lane}' for lane in range(LANES))}>"


def _double(number: float) -> str:
    return f"0x{_bits_of(number):016X}"


def _bits_of(number: float) -> int:
    bits: int = struct.unpack("Q", struct.pack("d", number))[0]
    return bits


def _all(number: float) -> str:
    return f"splat (double {_double(number)})"


def _loop_head(latch: str, *carried: str) -> str:
    """The head of a loop over a row's tokens, LANES at a time: their ids, as i64, and probabilities; 0 behind the end.

    `%source` lists the tokens' ids; if it is null, they are all tokens. The body follows, and ends in `latch`.

    Args:
        carried: the values that a round passes to the next one.
    """
    return f"""\
  br label %loop
loop:
  %at = phi i64 [0, %entry], [%at_next, %{latch}]
{chr(10).join(f"  {each}" for each in carried)}
  %at_one = insertelement {_I64} poison, i64 %at, i32 0
  %at_all = shufflevector {_I64} %at_one, {_I64} poison, {_I32} zeroinitializer
  %places = add {_I64} %at_all, {_COUNTED}
  %is_in = icmp ult {_I64} %places, %ends
  br i1 %is_whole, label %direct, label %listed
direct:
  %direct_at = getelementptr float, ptr %row, i64 %at
  %direct_p = call {_FLOATS} @{_LOAD_F32}(ptr %direct_at, i32 4, {_I1} %is_in, {_NONE})
  br label %body
listed:
  %list_at = getelementptr i32, ptr %source, i64 %at
  %short = call {_I32} @{_LOAD_I32}(ptr %list_at, i32 4, {_I1} %is_in, {_I32} zeroinitializer)
  %long = zext {_I32} %short to {_I64}
  %where = getelementptr float, ptr %row, {_I64} %long
  %listed_p = call {_FLOATS} @{_GATHER}(<{LANES} x ptr> %where, i32 4, {_I1} %is_in, {_NONE})
  br label %body
body:
  %ids = phi {_I64} [%places, %direct], [%long, %listed]
  %p = phi {_FLOATS} [%direct_p, %direct], [%listed_p, %listed]
  %p_double = fpext {_FLOATS} %p to {_DOUBLES}"""  # fmt: skip


_ENDS: Final = f"""\
  %is_whole = icmp eq ptr %source, null
  %end_one = insertelement {_I64} poison, i64 %count, i32 0
  %ends = shufflevector {_I64} %end_one, {_I64} poison, {_I32} zeroinitializer"""


def _splat(name: str, kind: str, value: str) -> str:
    vector = f"<{LANES} x {kind}>"
    return (
        f"  %{name}_one = insertelement {vector} poison, {kind} {value}, i32 0\n"
        f"  %{name} = shufflevector {vector} %{name}_one, {vector} poison, {_I32} zeroinitializer"
    )


# Whether a token is behind the bound in the order of probability and id.
_IS_ABOVE: Final = f"""\
  %x = fmul {_DOUBLES} %p_double, {_all(_UNIT)}
  %is_more = fcmp ogt {_DOUBLES} %x, %bounds
  %is_equal = fcmp oeq {_DOUBLES} %x, %bounds
  %is_later = icmp sgt {_I64} %ids, %bound_ids
  %is_later_equal = and {_I1} %is_equal, %is_later
  %is_above = or {_I1} %is_more, %is_later_equal"""

_BOUNDS: Final = "\n".join([_ENDS, _splat("bounds", "double", "%bound"), _splat("bound_ids", "i64", "%bound_id")])

_NEXT: Final = f"""\
  %at_next = add i64 %at, {LANES}
  %goes_on = icmp ult i64 %at_next, %count"""


def _keep() -> str:
    """Writes `keep`, which lists the tokens above a bound, and returns how many they are. It may write to `%source`."""
    appended, count = [], "%kept"
    for lane in range(LANES):
        appended.append(
            f"  %id{lane} = extractelement {_I64} %ids, i32 {lane}\n  %cut{lane} = trunc i64 %id{lane} to i32\n"
            f"  %place{lane} = getelementptr i32, ptr %list, i64 {count}\n  store i32 %cut{lane}, ptr %place{lane}\n"
            f"  %stays{lane} = extractelement {_I1} %stays, i32 {lane}\n  %one{lane} = zext i1 %stays{lane} to i64\n"
            f"  %kept{lane} = add i64 {count}, %one{lane}"
        )
        count = f"%kept{lane}"
    head = _loop_head("latch", "%kept = phi i64 [0, %entry], [%kept_next, %latch]")
    return f"""\
define internal i64 @keep(ptr %row, ptr %source, ptr %list, i64 %count, double %bound, i64 %bound_id) nounwind {{
entry:
{_BOUNDS}
{head}
{_IS_ABOVE}
  %stays = and {_I1} %is_above, %is_in
  %some_stay = call i1 @llvm.vector.reduce.or.v{LANES}i1({_I1} %stays)
  br i1 %some_stay, label %append, label %latch
append:
{chr(10).join(appended)}
  br label %latch
latch:
  %kept_next = phi i64 [%kept, %body], [{count}, %append]
{_NEXT}
  br i1 %goes_on, label %loop, label %done
done:
  ret i64 %kept_next
}}
"""


def _sum() -> str:
    """Writes `sum_up_to`, the probability of the tokens up to a bound, in units: an integer that float64 holds."""
    head = _loop_head("body", f"%sums = phi {_DOUBLES} [zeroinitializer, %entry], [%sums_next, %body]")
    return f"""\
define internal double @sum_up_to(ptr %row, ptr %source, i64 %count, double %bound, i64 %bound_id) nounwind {{
entry:
{_BOUNDS}
{head}
{_IS_ABOVE}
  %units = call {_DOUBLES} @llvm.floor.v{LANES}f64({_DOUBLES} %x)
  %counted = select {_I1} %is_above, {_DOUBLES} zeroinitializer, {_DOUBLES} %units
  %sums_next = fadd {_DOUBLES} %sums, %counted
{_NEXT}
  br i1 %goes_on, label %loop, label %done
done:
  %sum = call reassoc double @llvm.vector.reduce.fadd.v{LANES}f64(double 0.0, {_DOUBLES} %sums_next)
  ret double %sum
}}
"""


def _numbers(lines: _Lines, keys: Sequence[tuple[str, str]]) -> str:
    """Writes Philox for the lanes' `%pairs`, at `%position`; returns the numbers of `%ids`, 52 bits as i64."""
    mask = "splat (i64 4294967295)"
    c = ["%counter", "%pairs", "zeroinitializer", "zeroinitializer"]
    for k0, k1 in keys:
        products = [lines.let(f"mul {_I64} {c[2 * at]}, splat (i64 {MULTIPLIERS[at]})") for at in range(2)]
        high = [lines.let(f"lshr {_I64} {each}, splat (i64 32)") for each in products]
        low = [lines.let(f"and {_I64} {each}, {mask}") for each in products]
        first = lines.let(f"xor {_I64} {lines.let(f'xor {_I64} {high[1]}, {c[1]}')}, {k0}")
        second = lines.let(f"xor {_I64} {lines.let(f'xor {_I64} {high[0]}, {c[3]}')}, {k1}")
        c = [first, low[1], second, low[0]]
    words = [lines.let(f"select {_I1} %are_odd, {_I64} {c[at + 2]}, {_I64} {c[at]}") for at in range(2)]
    upper = lines.let(f"shl {_I64} {words[0]}, splat (i64 20)")
    return lines.let(f"or {_I64} {upper}, {lines.let(f'lshr {_I64} {words[1]}, splat (i64 12)')}")


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
    """Writes `race`, which returns the token with the largest quotient of probability and number, or -1."""
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
    as_double = lines.let(f"bitcast {_I64} {lines.let(f'or {_I64} {numbers}, splat (i64 {_MAGIC})')} to {_DOUBLES}")
    least = lines.let(f"fsub {_DOUBLES} {as_double}, {_all(2.0**52 - 0.5)}")
    bar = lines.let(f"fmul {_DOUBLES} {least}, %part")
    may_win = lines.let(f"fcmp oge {_DOUBLES} %p_double, {bar}")
    racing = lines.let(f"and {_I1} {may_win}, %is_in")
    some = lines.let(f"call i1 @llvm.vector.reduce.or.v{LANES}i1({_I1} {racing})")
    judged = _Lines(len(lines.lines))
    drawn = _exponential(judged, numbers)
    quotients = judged.let(f"fdiv {_FLOATS} %p, {drawn}")
    largest = judged.let(f"call float @llvm.vector.reduce.fmax.v{LANES}f32({_FLOATS} {quotients})")
    is_better = judged.let(f"fcmp ogt float {largest}, %best")
    head = _loop_head(
        "latch",
        "%best = phi float [0.0, %entry], [%best_next, %latch]",
        "%token = phi i64 [-1, %entry], [%token_next, %latch]",
    )
    return f"""\
define internal i64 @race(ptr %row, ptr %source, i64 %count, i64 %key, i64 %position) nounwind {{
entry:
{_ENDS}
  %low_word = and i64 %key, 4294967295
  %high_word = lshr i64 %key, 32
  %counter_word = and i64 %position, 4294967295
{_splat("counter", "i64", "%counter_word")}
{chr(10).join(scalars)}
{head}
  %pairs = lshr {_I64} %ids, splat (i64 1)
  %are_odd = trunc {_I64} %ids to {_I1}
  %best_double = fpext float %best to double
  %least_part = fmul double %best_double, {_double(_LEAST_PART)}
{_splat("part", "double", "%least_part")}
{lines.text}
  br i1 {some}, label %judge, label %latch
judge:
{judged.text}
  br i1 {is_better}, label %better, label %latch
better:
{_splat("largest", "float", largest)}
  %are_best = fcmp oeq {_FLOATS} {quotients}, %largest
  %mask = bitcast {_I1} %are_best to i8
  %lane = call i8 @llvm.cttz.i8(i8 %mask, i1 true)
  %found = extractelement {_I64} %ids, i8 %lane
  br label %latch
latch:
  %best_next = phi float [%best, %body], [%best, %judge], [{largest}, %better]
  %token_next = phi i64 [%token, %body], [%token, %judge], [%found, %better]
{_NEXT}
  br i1 %goes_on, label %loop, label %done
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
  %list_at = mul i64 %item, %stride
  %list = getelementptr i32, ptr %lists, i64 %list_at
  %out = getelementptr i64, ptr %tokens, i64 %item
  %least_double = fpext float %own_least to double
  %least_x = fmul double %least_double, {unit}
  %has_least = fcmp ogt double %least_x, {tiny}
  %floor_x = select i1 %has_least, double %least_x, double {tiny}
  %has_share = icmp sge i64 %own_shares, 0
  br i1 %has_share, label %measure, label %unmeasured
unmeasured:
  br i1 %has_least, label %barred, label %open
open:
  %open_token = call i64 @race(ptr %row, ptr null, i64 %width, i64 %own_keys, i64 %own_positions)
  store i64 %open_token, ptr %out
  ret void
barred:
  %barred_count = call i64 @keep(ptr %row, ptr null, ptr %list, i64 %width, double %floor_x, i64 -1)
  br label %races
measure:
  %total = call double @sum_up_to(ptr %row, ptr null, i64 %width, double 0x7FF0000000000000, i64 -1)
  %is_there = fcmp ogt double %total, 0.0
  br i1 %is_there, label %bounded, label %nothing
nothing:
  store i64 -1, ptr %out
  ret void
bounded:
  %total_units = fptosi double %total to i64
  %most = sub i64 %total_units, 1
  %share = call i64 @llvm.smin.i64(i64 %own_shares, i64 %most)
  br label %narrow
narrow:
  %source = phi ptr [null, %bounded], [%list, %narrowed]
  %count = phi i64 [%width, %bounded], [%kept, %narrowed]
  %below = phi i64 [0, %bounded], [%kept_below, %narrowed]
  %left = sub i64 %share, %below
  %part = sdiv i64 %left, %count
  %next = add i64 %part, 1
  %next_least = call i64 @llvm.smax.i64(i64 %next, i64 1)
  %next_x = sitofp i64 %next_least to double
  %is_over = fcmp ogt double %next_x, %floor_x
  %bound = select i1 %is_over, double %next_x, double %floor_x
  %kept = call i64 @keep(ptr %row, ptr %source, ptr %list, i64 %count, double %bound, i64 -1)
  %has_some = icmp ugt i64 %kept, 0
  br i1 %has_some, label %narrowed, label %nothing
narrowed:
  %kept_sum = call double @sum_up_to(ptr %row, ptr %list, i64 %kept, double 0x7FF0000000000000, i64 -1)
  %kept_units = fptosi double %kept_sum to i64
  %kept_below = sub i64 %total_units, %kept_units
  %eighth = lshr i64 %count, 3
  %limit = sub i64 %count, %eighth
  %is_fewer = icmp ult i64 %kept, %limit
  br i1 %is_fewer, label %narrow, label %races
races:
  %source_r = phi i64 [%barred_count, %barred], [%kept, %narrowed], [%left_count, %again]
  %below_r = phi i64 [0, %barred], [%kept_below, %narrowed], [%up_to, %again]
  %share_r = phi i64 [-1, %barred], [%share, %narrowed], [%share_r, %again]
  %has_racers = icmp ugt i64 %source_r, 0
  br i1 %has_racers, label %run, label %nothing
run:
  %token = call i64 @race(ptr %row, ptr %list, i64 %source_r, i64 %own_keys, i64 %own_positions)
  store i64 %token, ptr %out
  %is_filtered = icmp sge i64 %share_r, 0
  %is_found = icmp sge i64 %token, 0
  %is_doubtful = and i1 %is_filtered, %is_found
  br i1 %is_doubtful, label %check, label %done
check:
  %token_at = getelementptr float, ptr %row, i64 %token
  %token_p = load float, ptr %token_at
  %token_double = fpext float %token_p to double
  %token_x = fmul double %token_double, {unit}
  %up_to_sum = call double @sum_up_to(ptr %row, ptr %list, i64 %source_r, double %token_x, i64 %token)
  %up_to_units = fptosi double %up_to_sum to i64
  %up_to = add i64 %below_r, %up_to_units
  %is_excluded = icmp sle i64 %up_to, %share_r
  br i1 %is_excluded, label %again, label %done
again:
  %left_count = call i64 @keep(ptr %row, ptr %list, ptr %list, i64 %source_r, double %token_x, i64 %token)
  br label %races
done:
  ret void
}}
"""
