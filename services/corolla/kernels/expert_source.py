"""Writes the chosen experts of a mixture as LLVM's text: gated MLPs, each for the tokens that chose it.

A token and one of its experts are a pair. The inputs of all pairs are put into the order of the experts, so that a
product reads an expert's weights once. A token's results are added in the order of its ranks, in float32. So its
numbers depend neither on the other tokens of the call nor on the number of threads.
"""

from dataclasses import dataclass
from typing import Final

from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, LANES, Fields
from corolla.kernels.phase_source import (
    COUNTER_BYTES,
    NumberFunction,
    NumberTypes,
    Phases,
    await_source,
)

PRODUCTS: Final = ("gate_up", "down")
CALL: Final[Fields] = (
    ("i64", "tokens"),
    ("i64", "chosen"),  # experts of a token
    ("i64", "pairs"),
    ("i64", "hits"),  # experts that have tokens
    ("ptr", "rows"),  # [tokens, hidden] in the type `multiplied`
    ("ptr", "order"),  # int64 [pairs]: the numbers of the pairs in the order of their experts
    ("ptr", "places"),  # int64 [pairs]: the place of each pair in that order
    ("ptr", "experts"),  # int64 [hits]
    ("ptr", "firsts"),  # int64 [hits + 1]: where the pairs of each of these experts begin, and where the last one's end
    ("ptr", "weights"),  # float32 [pairs]: the factors of results
    ("ptr", "gathered"),  # [pairs, hidden] in the type `multiplied`
    ("ptr", "product"),  # float32 [pairs, the larger of hidden and twice gated]
    ("ptr", "gated"),  # [pairs, gated] in the type `multiplied`
    ("ptr", "output"),  # [tokens, hidden]
    *(
        each
        for name in PRODUCTS
        for each in (
            ("ptr", f"{name}_part"),
            ("ptr", f"{name}_panels"),
            ("i64", f"{name}_bytes"),  # of the panels of one expert
            ("i64", f"{name}_size"),  # how many panels of an expert a piece of work has
        )
    ),
    ("ptr", "counters"),  # `COUNTERS_BYTES`, all zero
    ("ptr", "scratch"),  # for products: `scratch_bytes` for each thread
    ("i64", "scratch_bytes"),
    ("i64", "entered"),  # how many threads have entered, 0 at first
    ("ptr", "constants"),  # `CONSTANTS` of the exponential function
)
"""The fields of one call's arguments; 64 bits each."""
COUNTERS_BYTES: Final = 5 * COUNTER_BYTES


@dataclass(frozen=True, slots=True)
class ExpertShape(NumberTypes):
    """The shape of experts for which functions are compiled. All sizes are multiples of 16.

    Attributes:
        hidden_size: the size of hidden states.
        num_gated: how many outputs the gate has.
    """

    hidden_size: int
    num_gated: int


def module_source(shape: ExpertShape, *, pauses: bool) -> str:
    """The text of a module with one public function, `team(call)`, which each of the threads calls; see `CALL`.

    Args:
        pauses: see `await_source`.
    """
    stages = [_gather(shape), _gate(shape), _combine(shape)]
    return "\n".join([DECLARATIONS, *stages, await_source(pauses), _Team(shape).source(), ATTRIBUTES])


def _gather(shape: ExpertShape) -> str:
    """Writes `gather`, which copies the input of the pair at a place."""
    function = NumberFunction(shape, "@gather(ptr %call, i64 %place)")
    pair = _number(function, "order", "%place")
    token = function.let(f"udiv i64 {pair}, {function.field('%call', CALL, 'chosen')}")
    width = shape.hidden_size * shape.multiplied_bytes
    source = function.row(function.field("%call", CALL, "rows"), token, width)
    target = function.row(function.field("%call", CALL, "gathered"), "%place", width)
    with function.loop("columns", shape.hidden_size, LANES) as names:
        function.store_multiplied(function.load_multiplied(source, names["number"]), target, names["number"])
    return function.source()


def _gate(shape: ExpertShape) -> str:
    """Writes `gate`, which multiplies SiLU of the first half of a pair's product by the second half."""
    function = NumberFunction(shape, "@gate(ptr %call, i64 %place)")
    product = function.row(function.field("%call", CALL, "product"), "%place", 2 * shape.num_gated, "float")
    width = shape.num_gated * shape.multiplied_bytes
    target = function.row(function.field("%call", CALL, "gated"), "%place", width)
    constants = function.field("%call", CALL, "constants")
    with function.loop("columns", shape.num_gated, LANES) as names:
        number = names["number"]
        gate = function.rounded(function.load_floats(product, number))
        other = function.rounded(function.load_floats(product, function.let(f"add i64 {number}, {shape.num_gated}")))
        function.store_multiplied(function.product(function.silu(constants, gate), other), target, number)
    return function.source()


def _combine(shape: ExpertShape) -> str:
    """Writes `combine`, which adds the weighed results of a token's experts."""
    function = NumberFunction(shape, "@combine(ptr %call, i64 %token)")
    chosen = function.field("%call", CALL, "chosen")
    first = function.let(f"mul i64 %token, {chosen}")
    after = function.let(f"add i64 {first}, {chosen}")
    results = function.field("%call", CALL, "product")
    weights = function.field("%call", CALL, "weights")
    width = shape.hidden_size * shape.element_bytes
    target = function.row(function.field("%call", CALL, "output"), "%token", width)
    with function.loop("columns", shape.hidden_size, LANES) as names:
        with function.loop("ranks", after, carried={"sum": "zeroinitializer"}, start=first) as ranks:
            pair = ranks["number"]
            result = function.row(results, _number(function, "places", pair), shape.hidden_size, "float")
            weight = function.splat(function.let(f"load float, ptr {function.at(weights, pair, 'float')}"))
            number = function.rounded(function.load_floats(result, names["number"]))
            ranks["sum"] = function.sum_of_product(number, weight, ranks["sum"])
        function.store_numbers("%ranks_sum_after", target, names["number"])
    return function.source()


def _number(function: NumberFunction, name: str, index: str) -> str:
    """An int64 number of a list of the call."""
    return function.let(f"load i64, ptr {function.at(function.field('%call', CALL, name), index, 'i64')}")


class _Team(Phases):
    """Writes `team`, in which each thread goes through all phases."""

    def __init__(self, shape: ExpertShape) -> None:
        function = NumberFunction(shape, "@team(ptr %call)", is_internal=False)
        super().__init__(function, function.field("%call", CALL, "counters"))
        self._shape, self._function = shape, function
        number = function.let(f"atomicrmw add ptr {function.field_at('%call', CALL, 'entered')}, i64 1 monotonic")
        scratch_bytes = function.field("%call", CALL, "scratch_bytes")
        self._scratch = function.row(function.field("%call", CALL, "scratch"), number, scratch_bytes)

    def source(self) -> str:
        """The text of the function."""
        shape, function = self._shape, self.function
        count = function.field("%call", CALL, "pairs")
        self.each("gather", count, "ptr %call")
        self._product("gate_up", "gathered", shape.hidden_size, 2 * shape.num_gated)
        self.each("gate", count, "ptr %call")
        self._product("down", "gated", shape.num_gated, shape.hidden_size)
        self.each("combine", function.field("%call", CALL, "tokens"), "ptr %call")
        return function.source()

    def _product(self, name: str, source: str, num_inputs: int, num_outputs: int) -> None:
        function, num_panels = self._function, num_outputs // LANES
        fields = {each: function.field("%call", CALL, f"{name}_{each}") for each in ("part", "panels", "bytes", "size")}
        rows, product = (function.field("%call", CALL, each) for each in (source, "product"))
        of_expert = self.rounded_up(str(num_panels), fields["size"])
        count = function.let(f"mul i64 {function.field('%call', CALL, 'hits')}, {of_expert}")
        with self.phase(name, count) as piece:
            hit = function.let(f"udiv i64 {piece}, {of_expert}")
            first, end = self.range(function.let(f"urem i64 {piece}, {of_expert}"), fields["size"], str(num_panels))
            begin = _number(function, "firsts", hit)
            after = _number(function, "firsts", function.let(f"add i64 {hit}, 1"))
            num_rows = function.let(f"sub i64 {after}, {begin}")
            panels = function.row(fields["panels"], _number(function, "experts", hit), fields["bytes"])
            own = function.row(rows, begin, num_inputs * self._shape.multiplied_bytes)
            target = function.row(product, begin, num_outputs, "float")
            function.lines.append(
                f"  call void {fields['part']}(ptr {own}, i64 {num_rows}, i64 {num_inputs}, ptr {panels}, "
                f"ptr {target}, i64 {num_panels}, ptr {self._scratch}, i64 {first}, i64 {end})"
            )
