"""Writes whole decoder blocks as LLVM's text: norms, projections, rotary embedding, attention and gated MLP.

One call runs several blocks over the new tokens of all rows. Activations stay in the CPU's cache between the large
products. Python does not run in between, since weights would evict its data from the cache each time. Other modules
write the functions for products and attention; a `LAYER` holds their addresses.

Sums are float32. With bfloat16, results are rounded where transformers rounds them. A token's numbers depend only on
its own text, not on the other rows of the call or the number of threads.

A block is a list of phases; see `phase_source`.
"""

import struct
from dataclasses import dataclass
from typing import Final

from corolla.kernels.attention_text import COMMON_FIELDS
from corolla.kernels.llvm_text import ATTRIBUTES, DECLARATIONS, FLOATS, LANES, Fields
from corolla.kernels.phase_source import (
    COUNTER_BYTES,
    PIECES_OF_THREAD,
    NumberFunction,
    NumberTypes,
    Phases,
    await_source,
)
from corolla.kernels.products import LEAST_PRODUCTS_OF_THREADS

PROJECTIONS: Final = ("query_key_value", "output", "gate_up", "down")
_PIECE_MERGES: Final = 16
"""How many merges a piece has in the phase that merges pieces of attention."""
_MAX_PHASES: Final = 12
"""The most phases of a block."""

STEP: Final[Fields] = (
    ("i64", "tokens"),
    ("ptr", "hidden"),  # [tokens, hidden]: the input, which the output replaces
    ("ptr", "normed"),  # [tokens, hidden] in the type `multiplied`
    ("ptr", "product"),  # float32 [tokens, outputs of the widest projection]
    ("ptr", "query"),  # [tokens, heads, head size]
    ("ptr", "attended"),  # float32 [tokens, heads, head size]
    ("ptr", "input"),  # [tokens, the larger of all heads and gated] in the type `multiplied`
    ("ptr", "rotary"),  # [rows, 2, rotary size] in the type `rotary_element`: cosines and signed sines
    ("ptr", "rotary_rows"),  # int64 [tokens]
    ("ptr", "query_factors"),  # float32 [tokens]
    ("ptr", "groups"),  # see `GROUP`
    ("ptr", "adapters"),  # [tokens]: address of the `PLACE`s of each token's adapter, or 0; null if all would be 0
    ("ptr", "end"),  # the address behind the last `LAYER`
    ("ptr", "counters"),  # `counter_bytes`, all zero
    ("ptr", "scratch"),  # for products: `scratch_bytes` for each thread
    ("i64", "scratch_bytes"),
    ("i64", "threads"),
    ("ptr", "constants"),  # `CONSTANTS` of the exponential function
)
"""The fields of one call's arguments; 64 bits each."""

GROUP: Final[Fields] = (
    ("ptr", "slots"),  # int64 [tokens]: the slots of new keys and values
    ("ptr", "next_tokens"),  # the job of rows with few new tokens, or 0; each layer sets its keys and values
    ("ptr", "chunks"),  # the job of rows with many new tokens, or 0; each layer sets its keys and values
    ("i64", "pieces"),  # pieces of `next_tokens`, times key heads
    ("i64", "merges"),  # queries of `next_tokens`, times key heads
    ("i64", "blocks"),  # blocks of `chunks`, times key heads
)
"""The fields of a group of layers with the same window."""

FACTOR: Final[Fields] = (
    ("ptr", "up"),  # [rank, width]
    ("i64", "rank"),
    ("i64", "width"),
    ("i64", "column"),  # the projection's first output that the factor changes
)
"""The fields of one product of low rank, which changes `width` outputs of a projection."""
MAX_FACTORS: Final = 3
PLACE: Final[Fields] = (
    ("ptr", "down"),  # [ranks of all factors, inputs], in the order of the factors
    ("i64", "factors"),
    *((kind, f"{name}_{number}") for number in range(MAX_FACTORS) for kind, name in FACTOR),
)
"""The fields of the products that an adapter adds to a projection. An adapter has a `PLACE` for each projection of the
first layer, then those of the next layer, and so on."""

LAYER: Final[Fields] = (
    ("i64", "places"),  # offset of the layer's first `PLACE` among an adapter's, in bytes
    ("i64", "group"),  # offset of the layer's `GROUP`, in bytes
    ("ptr", "keys"),  # [slots, key heads, head size], strided; values likewise
    ("ptr", "values"),
    ("i64", "key_slot"),  # bytes from slot to slot, and from head to head
    ("i64", "key_head"),
    ("i64", "value_slot"),
    ("i64", "value_head"),
    ("ptr", "attend_piece"),  # functions of `next_token_source` and `chunk_source`
    ("ptr", "attend_merge"),
    ("ptr", "attend_block"),
    ("ptr", "attention_norm"),  # float32 [hidden]; an epsilon is the bits of a float32
    ("i64", "attention_epsilon"),
    ("ptr", "mlp_norm"),
    ("i64", "mlp_epsilon"),
    ("ptr", "query_norm"),  # float32 [head size]
    ("i64", "query_epsilon"),
    ("ptr", "key_norm"),
    ("i64", "key_epsilon"),
    *(
        each
        for name in PROJECTIONS
        for each in (
            ("ptr", f"{name}_part"),
            ("ptr", f"{name}_panels"),
            ("ptr", f"{name}_bias"),  # float32 [outputs]
        )
    ),
)


LAYER_BYTES: Final = 8 * len(LAYER)
PLACE_BYTES: Final = 8 * len(PLACE)
FACTOR_BYTES: Final = 8 * len(FACTOR)


@dataclass(frozen=True, slots=True)
class BlockShape(NumberTypes):
    """The shape of a block for which functions are compiled. All sizes are multiples of 16.

    Attributes:
        hidden_size: the size of hidden states.
        head_size: the size of a head.
        num_gated: how many outputs the gate has; 0: the block ends before its MLP.
        has_bias: for each of `PROJECTIONS`, whether it has a bias.
        norms_heads: whether queries and keys are normalised.
        norms_rotated: whether they are normalised after the rotary embedding.
        rotary_size: how many of the first numbers of queries and keys are rotated; 0: none. Halves are multiples of 16.
        rotates_pairs: whether a number is rotated with its neighbour, not with the one half the rotary size away.
        rotary_element: LLVM's type of cosines and sines: `element`, or `float`, which rounds only what was rotated.
        scales_queries: whether each token's queries have a factor.
        residual_multiplier: the factor of the outputs of attention and MLP when they are added to hidden states.
    """

    hidden_size: int
    num_heads: int
    num_key_heads: int
    head_size: int
    num_gated: int
    has_bias: tuple[bool, ...]
    norms_heads: bool
    norms_rotated: bool
    rotary_size: int
    rotates_pairs: bool
    rotary_element: str
    scales_queries: bool
    residual_multiplier: float

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The input and output size of each projection."""
        attended = self.num_heads * self.head_size
        sizes = {
            "query_key_value": (self.hidden_size, attended + 2 * self.num_key_heads * self.head_size),
            "output": (attended, self.hidden_size),
        }
        if not self.num_gated:
            return sizes
        return {**sizes, "gate_up": (self.hidden_size, 2 * self.num_gated), "down": (self.num_gated, self.hidden_size)}

    @property
    def attended_buffer(self) -> str:
        """The buffer that the output projection reads: attention's output, rounded to the shape's type."""
        return "input" if self.rounds else "attended"


def counter_bytes(num_layers: int) -> int:
    """Bytes of the counters of all phases of a call."""
    return (1 + num_layers * _MAX_PHASES) * COUNTER_BYTES


def module_source(shape: BlockShape, *, pauses: bool) -> str:
    """The text of a module with one public function, `team(call)`, which each of the threads calls.

    A call is three numbers of 64 bits: the address of a `STEP`, the address of the first `LAYER`, and the number of
    threads that have entered, 0 at first.

    Args:
        pauses: whether the processor has an instruction for waiting loops, such as `pause` of x86.
    """
    writers = [_normalise, _prepare_heads, _add_attention]
    if shape.num_gated:
        writers += [_gate, _add_mlp]
    if shape.rounds:
        writers.append(_round_attended)
    stages = [_adapt(shape), *(each(shape) for each in writers)]
    return "\n".join([DECLARATIONS, *stages, await_source(pauses), _Team(shape).source(), ATTRIBUTES])


class _BlockFunction(NumberFunction):
    """A function of a block."""

    def __init__(self, shape: BlockShape, signature: str, *, is_internal: bool = True) -> None:
        super().__init__(shape, signature, is_internal=is_internal)
        self.shape = shape

    def token_row(self, name: str, size: int, num_bytes: int) -> str:
        """The address of the token's numbers in the step's buffer `name`, which has `size` numbers for each token."""
        return self.row(self.field("%step", STEP, name), "%token", size * num_bytes)


def _adapt(shape: BlockShape) -> str:
    """Writes `adapt`, which adds the products of an adapter to a token's projection, rank by rank, in float32."""
    function = _BlockFunction(shape, "@adapt(ptr %place, ptr %input, i64 %inputs, ptr %product)")
    lines = function.lines
    down, count = function.field("%place", PLACE, "down"), function.field("%place", PLACE, "factors")
    down_bytes = function.let(f"mul i64 %inputs, {shape.element_bytes}")
    factors = function.at("%place", 8 * [name for _, name in PLACE].index("up_0"))
    lines.append(f"  %down_at = alloca ptr\n  store ptr {down}, ptr %down_at")
    lines.append(f"  %is_any = icmp ugt i64 {count}, 0\n  br i1 %is_any, label %some, label %none\nsome:")
    with function.loop("factors", count) as names:
        factor = function.row(factors, names["number"], FACTOR_BYTES)
        up, rank, width, column = (function.field(factor, FACTOR, name) for _, name in FACTOR)
        target = function.at("%product", column, "float")
        with function.loop("ranks", rank) as ranks:
            row = function.let("load ptr, ptr %down_at")
            with function.loop("down", "%inputs", LANES, {"sum": "zeroinitializer"}) as names:
                number = function.load_multiplied("%input", names["number"])
                factor_numbers = function.load_numbers(row, names["number"])
                names["sum"] = function.sum_of_product(number, factor_numbers, names["sum"])
            inner = function.rounded(function.splat(function.total("%down_sum_after")))
            own_up = function.row(up, ranks["number"], width, shape.element)
            with function.loop("up", width, LANES) as names:
                at = function.at(target, names["number"], "float")
                numbers = function.load_numbers(own_up, names["number"])
                changed = function.sum_of_product(numbers, inner, function.load(FLOATS, at, align=4))
                function.store(changed, at)
            lines.append(f"  store ptr {function.at(row, down_bytes)}, ptr %down_at")
    lines.append("  br label %none\nnone:")
    return function.source()


def _apply_adapter(function: _BlockFunction, projection: str, source: str) -> None:
    """Writes the call of `adapt` for the token's adapter, if it has one; `source` is the projection's input buffer."""
    shape, lines = function.shape, function.lines
    num_inputs, num_outputs = shape.sizes[projection]
    adapters = function.field("%step", STEP, "adapters")
    are_any = function.let(f"icmp ne ptr {adapters}, null")
    lines.append(f"  br i1 {are_any}, label %look, label %adapted\nlook:")
    adapter = function.let(f"load ptr, ptr {function.at(adapters, '%token', 'ptr')}")
    has_one = function.let(f"icmp ne ptr {adapter}, null")
    lines.append(f"  br i1 {has_one}, label %adapt, label %adapted\nadapt:")
    offset = function.let(
        f"add i64 {function.field('%layer', LAYER, 'places')}, {PROJECTIONS.index(projection) * PLACE_BYTES}"
    )
    place = function.at(adapter, offset)
    row = function.token_row(source, num_inputs, shape.multiplied_bytes)
    product = function.token_row("product", num_outputs, 4)
    lines.append(f"  call void @adapt(ptr {place}, ptr {row}, i64 {num_inputs}, ptr {product})")
    lines.append("  br label %adapted\nadapted:")


def _begin(shape: BlockShape, name: str) -> _BlockFunction:
    return _BlockFunction(shape, f"@{name}(ptr %step, ptr %layer, i64 %token)")


def _normalise(shape: BlockShape) -> str:
    """Writes `normalise`, which normalises the token's hidden states for attention."""
    function = _begin(shape, "normalise")
    hidden = function.token_row("hidden", shape.hidden_size, shape.element_bytes)
    with function.loop("squares", shape.hidden_size, LANES, {"sum": "zeroinitializer"}) as names:
        number = function.load_numbers(hidden, names["number"])
        names["sum"] = function.sum_of_product(number, number, names["sum"])
    _store_normed(function, hidden, "%squares_sum_after", "%layer", "attention")
    return function.source()


def _store_normed(function: _BlockFunction, hidden: str, squares: str, layer: str, norm: str) -> None:
    shape = function.shape
    normed = function.token_row("normed", shape.hidden_size, shape.multiplied_bytes)
    weight = function.field(layer, LAYER, f"{norm}_norm")
    epsilon = function.float_field(layer, LAYER, f"{norm}_epsilon")
    inverse = function.inverse_root(squares, shape.hidden_size, epsilon)
    with function.loop("norm", shape.hidden_size, LANES) as names:
        number = function.load_numbers(hidden, names["number"])
        scaled = function.rounded(function.product(number, inverse))
        weighed = function.product(scaled, function.load_floats(weight, names["number"]))
        function.store_multiplied(weighed, normed, names["number"])


def _prepare_heads(shape: BlockShape) -> str:
    """Writes `prepare_heads`, which normalises and rotates the token's queries and keys, and stores keys and values."""
    function = _begin(shape, "prepare_heads")
    lines, size = function.lines, shape.head_size
    lines.append(f"  %head = alloca [{size} x float], align 64")
    num_outputs = shape.sizes["query_key_value"][1]
    _apply_adapter(function, "query_key_value", "normed")
    product = function.token_row("product", num_outputs, 4)
    bias = function.field("%layer", LAYER, "query_key_value_bias") if shape.has_bias[0] else ""
    group = function.at(function.field("%step", STEP, "groups"), function.field("%layer", LAYER, "group"))
    _fill_jobs(function, group)
    slot_at = function.at(function.field(group, GROUP, "slots"), "%token", "i64")
    slot = function.let(f"load i64, ptr {slot_at}")
    row_at = function.at(function.field("%step", STEP, "rotary_rows"), "%token", "i64")
    row = function.let(f"load i64, ptr {row_at}")
    rotary = function.row(function.field("%step", STEP, "rotary"), row, 2 * shape.rotary_size, shape.rotary_element)
    factor = ""
    if shape.scales_queries:
        factor_at = function.at(function.field("%step", STEP, "query_factors"), "%token", "float")
        factor = function.splat(function.let(f"load float, ptr {factor_at}"))
    query = function.token_row("query", shape.num_heads * size, shape.element_bytes)
    parts = [("query", shape.num_heads, query, str(size * shape.element_bytes))]
    for name in ("key", "value"):
        base = function.field("%layer", LAYER, f"{name}s")
        slot_bytes = function.field("%layer", LAYER, f"{name}_slot")
        target = function.row(base, slot, slot_bytes)
        parts.append((name, shape.num_key_heads, target, function.field("%layer", LAYER, f"{name}_head")))
    first = 0
    for name, num_heads, target, head_bytes in parts:
        with function.loop(f"{name}_heads", num_heads) as heads:
            number = heads["number"]
            offset = function.let(f"add i64 {function.let(f'mul i64 {number}, {size}')}, {first}")
            source = function.at(product, offset, "float")
            own_bias = function.at(bias, offset, "float") if bias else ""
            place = function.row(target, number, head_bytes)
            if name == "value":
                with function.loop("value", size, LANES) as names:
                    value = _projected(function, source, own_bias, names["number"])
                    function.store_numbers(value, place, names["number"])
            else:
                _prepare_head(function, name, source, own_bias, rotary, place, factor if name == "query" else "")
        first += num_heads * size
    return function.source()


def _fill_jobs(function: _BlockFunction, group: str) -> None:
    """Writes lines that set keys and values of the group's jobs to the layer's; they run for the first token only."""
    lines = function.lines
    lines.append("  %is_first = icmp eq i64 %token, 0\n  br i1 %is_first, label %fill, label %filled\nfill:")
    for name in ("next_tokens", "chunks"):
        job = function.field(group, GROUP, name)
        is_any = function.let(f"icmp ne ptr {job}, null")
        lines.append(f"  br i1 {is_any}, label %fill_{name}, label %filled_{name}\nfill_{name}:")
        for each in ("keys", "values"):
            place = function.field_at(job, COMMON_FIELDS, each)
            lines.append(f"  store ptr {function.field('%layer', LAYER, each)}, ptr {place}")
        lines.append(f"  br label %filled_{name}\nfilled_{name}:")
    lines.append("  br label %filled\nfilled:")


def _projected(function: _BlockFunction, product: str, bias: str, index: str) -> str:
    """Loads 16 outputs of a projection, adds the bias and rounds them."""
    value = function.load_floats(product, index)
    if bias:
        value = function.sum(value, function.load_floats(bias, index))
    return function.rounded(value)


def _prepare_head(
    function: _BlockFunction, name: str, product: str, bias: str, rotary: str, place: str, factor: str
) -> None:
    """Writes lines that normalise and rotate a head on the stack, and store it times `factor`, if there is one."""
    shape, size = function.shape, function.shape.head_size
    with function.loop(f"{name}_squares", size, LANES, {"sum": "zeroinitializer"}) as names:
        value = _projected(function, product, bias, names["number"])
        names["sum"] = function.sum_of_product(value, value, names["sum"])
        at = function.at("%head", names["number"], "float")
        function.store(value, at, 64)
    if shape.norms_heads and not shape.norms_rotated:
        _norm_head(function, name, f"%{name}_squares_sum_after")
    if shape.rotary_size:
        (_turn_pairs if shape.rotates_pairs else _turn_halves)(function, name, rotary)
    if shape.norms_heads and shape.norms_rotated:
        with function.loop(f"{name}_turned", size, LANES, {"sum": "zeroinitializer"}) as names:
            value = function.load_floats("%head", names["number"])
            names["sum"] = function.sum_of_product(value, value, names["sum"])
        _norm_head(function, name, f"%{name}_turned_sum_after")
    with function.loop(f"{name}_store", size, LANES) as names:
        value = function.load_floats("%head", names["number"])
        function.store_numbers(function.product(value, factor) if factor else value, place, names["number"])


def _norm_head(function: _BlockFunction, name: str, squares: str) -> None:
    size = function.shape.head_size
    weight = function.field("%layer", LAYER, f"{name}_norm")
    inverse = function.inverse_root(squares, size, function.float_field("%layer", LAYER, f"{name}_epsilon"))
    with function.loop(f"{name}_norm", size, LANES) as names:
        at = function.at("%head", names["number"], "float")
        value = function.rounded(function.product(function.load(FLOATS, at), inverse))
        value = function.rounded(function.product(value, function.load_floats(weight, names["number"])))
        function.store(value, at, 64)


def _turn_halves(function: _BlockFunction, name: str, rotary: str) -> None:
    """Writes lines that rotate a head on the stack: the first half of its rotary size with the second."""
    half = function.shape.rotary_size // 2
    with function.loop(f"{name}_turn", half, LANES) as names:
        lower = names["number"]
        upper = function.let(f"add i64 {lower}, {half}")
        numbers = {index: function.load_floats("%head", index) for index in (lower, upper)}
        for index, other in ((lower, upper), (upper, lower)):
            _turn(function, rotary, index, numbers[index], numbers[other])


def _turn_pairs(function: _BlockFunction, name: str, rotary: str) -> None:
    """Writes lines that rotate a head on the stack: each even number of its rotary size with the next one."""
    with function.loop(f"{name}_turn", function.shape.rotary_size, LANES) as names:
        numbers = function.load_floats("%head", names["number"])
        _turn(function, rotary, names["number"], numbers, function.neighbours(numbers))


def _turn(function: _BlockFunction, rotary: str, index: str, numbers: str, others: str) -> None:
    """Writes lines that rotate the 16 numbers of a head at `index` with `others`."""
    shape = function.shape
    load = function.load_numbers if shape.rotary_element == shape.element else function.load_floats
    sine = load(rotary, function.let(f"add i64 {index}, {shape.rotary_size}"))
    straight = function.product(numbers, load(rotary, index))
    if shape.rotary_element == shape.element:
        straight = function.rounded(straight)
    turned = function.rounded(function.sum_of_product(others, sine, straight))
    function.store(turned, function.at("%head", index, "float"), 64)


def _round_attended(shape: BlockShape) -> str:
    """Writes `round_attended`, which rounds attention's output for the output projection."""
    function = _begin(shape, "round_attended")
    size = shape.num_heads * shape.head_size
    source = function.token_row("attended", size, 4)
    target = function.token_row("input", size, shape.multiplied_bytes)
    with function.loop("round", size, LANES) as names:
        function.store_multiplied(function.load_floats(source, names["number"]), target, names["number"])
    return function.source()


def _add_attention(shape: BlockShape) -> str:
    """Writes `add_attention`, which adds attention's output to the hidden states and normalises them for the MLP."""
    function = _begin(shape, "add_attention")
    hidden, squares = _add(function, "output")
    _store_normed(function, hidden, squares, "%layer", "mlp")
    return function.source()


def _add_mlp(shape: BlockShape) -> str:
    """Writes `add_mlp`, which adds the MLP's output to the hidden states and normalises them for the next block."""
    function = _begin(shape, "add_mlp")
    hidden, squares = _add(function, "down")
    after = function.at("%layer", LAYER_BYTES)
    is_more = function.let(f"icmp ult ptr {after}, {function.field('%step', STEP, 'end')}")
    function.lines.append(f"  br i1 {is_more}, label %more, label %last\nlast:\n  ret void\nmore:")
    _store_normed(function, hidden, squares, after, "attention")
    return function.source()


def _add(function: _BlockFunction, projection: str) -> tuple[str, str]:
    """Adds a projection's output to the hidden states. Returns their address and the partial sums of their squares."""
    shape = function.shape
    _apply_adapter(function, projection, "input" if projection == "down" else shape.attended_buffer)
    hidden = function.token_row("hidden", shape.hidden_size, shape.element_bytes)
    product = function.token_row("product", shape.hidden_size, 4)
    has_bias = shape.has_bias[PROJECTIONS.index(projection)]
    bias = function.field("%layer", LAYER, f"{projection}_bias") if has_bias else ""
    with function.loop("add", shape.hidden_size, LANES, {"sum": "zeroinitializer"}) as names:
        change = _projected(function, product, bias, names["number"])
        if shape.residual_multiplier != 1.0:
            factor = function.let(f"fadd float 0.0, {_literal(shape.residual_multiplier)}")
            change = function.rounded(function.product(change, function.splat(factor)))
        after = function.rounded(function.sum(function.load_numbers(hidden, names["number"]), change))
        function.store_numbers(after, hidden, names["number"])
        names["sum"] = function.sum_of_product(after, after, names["sum"])
    return hidden, "%add_sum_after"


def _literal(number: float) -> str:
    """A float32 in LLVM's text: the bits of the float64 with the same value."""
    (single,) = struct.unpack("f", struct.pack("f", number))
    return f"0x{struct.unpack('Q', struct.pack('d', single))[0]:016X}"


def _gate(shape: BlockShape) -> str:
    """Writes `gate`, which multiplies SiLU, `x / (1 + e^-x)`, of the first half of `gate_up`'s output by the second."""
    function = _begin(shape, "gate")
    _apply_adapter(function, "gate_up", "normed")
    product = function.token_row("product", 2 * shape.num_gated, 4)
    target = function.token_row("input", shape.num_gated, shape.multiplied_bytes)
    bias = function.field("%layer", LAYER, "gate_up_bias") if shape.has_bias[2] else ""
    constants = function.field("%step", STEP, "constants")
    with function.loop("gate", shape.num_gated, LANES) as names:
        number = names["number"]
        gate = _projected(function, product, bias, number)
        other = _projected(function, product, bias, function.let(f"add i64 {number}, {shape.num_gated}"))
        function.store_multiplied(function.product(function.silu(constants, gate), other), target, number)
    return function.source()


class _Team(Phases):
    """Writes `team`, in which each thread goes through all phases of all layers."""

    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape
        function = _BlockFunction(shape, "@team(ptr %call)", is_internal=False)
        step, layers = (function.let(f"load ptr, ptr {function.at('%call', 8 * index)}") for index in range(2))
        self._step = step
        names = ("tokens", "threads", "normed", "product", "attended", "input", "groups", "scratch", "scratch_bytes")
        self._fields = {name: function.field(step, STEP, name) for name in (*names, "end", "counters")}
        super().__init__(function, self._fields["counters"])
        number = function.let(f"atomicrmw add ptr {function.at('%call', 16)}, i64 1 monotonic")
        offset = function.let(f"mul i64 {number}, {self._fields['scratch_bytes']}")
        self._scratch = function.at(self._fields["scratch"], offset)
        self._layer = layers
        self._tokens("normalise")
        first_counters = self.counter()
        function.lines.append(
            f"""\
  br label %layers
layers:
  %layer = phi ptr [{layers}, %normalise_done], [%layer_after, %layers_end]
  %counters = phi ptr [{first_counters}, %normalise_done], [%counters_after, %layers_end]"""
        )
        self._layer, self.counters, self.num_phases = "%layer", "%counters", 0

    def source(self) -> str:
        function, lines = self.function, self.function.lines
        self._product("query_key_value", "normed")
        self._tokens("prepare_heads")
        group = function.at(self._fields["groups"], function.field("%layer", LAYER, "group"))
        self._attention("piece", "next_tokens", function.field(group, GROUP, "pieces"), 1)
        self._attention("merge", "next_tokens", function.field(group, GROUP, "merges"), _PIECE_MERGES)
        self._attention("block", "chunks", function.field(group, GROUP, "blocks"), 1)
        if self._shape.rounds:
            self._tokens("round_attended")
        self._product("output", self._shape.attended_buffer)
        self._tokens("add_attention")
        if self._shape.num_gated:
            self._product("gate_up", "normed")
            self._tokens("gate")
            self._product("down", "input")
            self._tokens("add_mlp")
        lines.append(
            f"""\
  br label %layers_end
layers_end:
  %layer_after = getelementptr i8, ptr %layer, i64 {LAYER_BYTES}
  %counters_after = getelementptr i8, ptr %counters, i64 {self.num_phases * COUNTER_BYTES}
  %is_more = icmp ult ptr %layer_after, {self._fields["end"]}
  br i1 %is_more, label %layers, label %done
done:
  ret void
}}"""
        )
        return "\n".join(lines)

    def _tokens(self, stage: str) -> None:
        self.each(stage, self._fields["tokens"], f"ptr {self._step}, ptr {self._layer}")

    def _product(self, name: str, source: str) -> None:
        function, fields = self.function, self._fields
        num_inputs, num_outputs = self._shape.sizes[name]
        num_panels = num_outputs // LANES
        products = function.let(f"mul i64 {fields['tokens']}, {num_inputs * num_outputs}")
        are_many = function.let(f"icmp uge i64 {products}, {LEAST_PRODUCTS_OF_THREADS}")
        are_several = function.let(f"icmp ugt i64 {fields['threads']}, 1")
        is_shared = function.let(f"and i1 {are_many}, {are_several}")
        pieces = function.let(f"mul i64 {fields['threads']}, {PIECES_OF_THREAD}")
        # A piece has a multiple of four panels, since a product multiplies up to four at once.
        fours = self.rounded_up(str(-(-num_panels // 4)), pieces)
        size = function.let(f"select i1 {is_shared}, i64 {function.let(f'mul i64 {fours}, 4')}, i64 {num_panels}")
        part, panels = (function.field("%layer", LAYER, f"{name}_{each}") for each in ("part", "panels"))
        with self.phase(name, self.rounded_up(str(num_panels), size)) as piece:
            first, end = self.range(piece, size, str(num_panels))
            function.lines.append(
                f"  call void {part}(ptr {fields[source]}, i64 {fields['tokens']}, i64 {num_inputs}, ptr {panels}, "
                f"ptr {fields['product']}, i64 {num_panels}, ptr {self._scratch}, i64 {first}, i64 {end})"
            )

    def _attention(self, name: str, job: str, count: str, size: int) -> None:
        """Writes a phase of attention. Threads take the last items first, since these see the most keys of a chunk."""
        function = self.function
        group = function.at(self._fields["groups"], function.field("%layer", LAYER, "group"))
        job_at = function.field(group, GROUP, job)
        attend = function.field("%layer", LAYER, f"attend_{name}")
        with self.phase(name, self.rounded_up(count, size)) as piece:
            first, end = self.range(piece, size, count)
            with function.loop(f"{name}_each", end, start=first) as names:
                item = function.let(f"sub i64 {function.let(f'sub i64 {count}, 1')}, {names['number']}")
                function.lines.append(f"  call void {attend}(ptr {job_at}, i64 {item})")
