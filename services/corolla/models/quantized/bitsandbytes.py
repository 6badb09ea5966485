"""bitsandbytes' formats: NF4 (QLoRA, Dettmers et al. 2023), FP4, and the int8 of LLM.int8() (Dettmers et al. 2022).

NF4 and FP4 have one scale for each block of the flattened weight, int8 one for each output.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.format import Format
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, need, shape_of

_STATES: Final = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NESTED: Final = ("nested_absmax", "nested_quant_map")
_BYTES_OF: Final = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}
_MAX_STATE_BYTES: Final = 4096
_INT8_UNIT: Final = 7.874015718698502e-3  # as bitsandbytes writes 1/127


@dataclass(frozen=True, slots=True)
class _State:
    """The settings of a weight of four bits, from its JSON text `quant_state`."""

    shape: tuple[int, int]
    block_size: int
    nested_block_size: int
    nested_offset: float


class BitsAndBytes(Format):
    """bitsandbytes stores a weight in four bits or in int8.

    A weight of four bits has `weight` (the bytes, whatever their type), `absmax` with the scale of each block,
    `quant_map` float32 `[16]` and a small JSON text; `absmax` may be quantised in turn. A weight of int8 has `weight`
    `[out, in]` and `SCB` `[out]`.
    """

    endings: ClassVar[Mapping[str, str]] = {
        **{f".weight.{role}": ".weight" for role in ("absmax", "quant_map", *_NESTED, *_STATES)},
        ".SCB": ".weight",
        ".weight_format": ".weight",
    }
    # A byte holds two numbers, and a row may have an odd number of them.
    step = 2

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        if "SCB" in stored:
            shape = shape_of(stored, "weight", {"I8"}, 2)
            allow(stored, "weight", "SCB", "weight_format")
            expect(stored, "SCB", {"F32"}, (shape[0],))
            if "weight_format" in stored:
                expect(stored, "weight_format", {"U8"}, (), (1,))
                if int(stored["weight_format"][...]) != 0:
                    raise Unfit("has numbers in the order of a kernel")
            return shape
        allow(stored, "weight", "absmax", "quant_map", *_NESTED, *_STATES)
        state = _read_state(stored)
        num_weights = math.prod(state.shape)
        stored_shape = shape_of(stored, "weight", _BYTES_OF)
        if math.prod(stored_shape) * _BYTES_OF[stored["weight"].get_dtype()] != -(-num_weights // 2):
            raise Unfit(f"is {list(state.shape)} by its quant_state, and has as many bytes as another shape")
        num_blocks = -(-num_weights // state.block_size)
        expect(stored, "quant_map", {"F32"}, (16,))
        if "nested_absmax" in stored:
            expect(stored, "absmax", {"U8"}, (num_blocks,))
            expect(stored, "nested_quant_map", {"F32"}, (256,))
            expect(stored, "nested_absmax", {"F32"}, (-(-num_blocks // state.nested_block_size),))
        else:
            expect(stored, "absmax", FLOATS, (num_blocks,))
        return state.shape

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        if "SCB" in tensors:
            return tensors["weight"][start:end].float().mul_(tensors["SCB"][start:end].view(-1, 1)).mul_(_INT8_UNIT)
        state = _state_of(bytes(next(tensors[role] for role in _STATES if role in tensors).tolist()))
        num_inputs = state.shape[1]
        first, last = start * num_inputs, end * num_inputs
        octets = tensors["weight"].view(torch.uint8).flatten()[first // 2 : -(-last // 2)]
        # The upper four bits come first.
        numbers = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()[: last - first]
        # A row may begin within a block. Scales are picked by index, since a file may claim blocks of any size.
        first_block = first // state.block_size
        scales = _scales(tensors, state, first_block, -(-last // state.block_size))
        of_numbers = scales[torch.arange(first, last) // state.block_size - first_block]
        return tensors["quant_map"][numbers.int()].mul_(of_numbers).view(-1, num_inputs)


def _scales(tensors: Mapping[str, Tensor], state: _State, start: int, end: int) -> Tensor:
    scales = tensors["absmax"][start:end]
    if "nested_absmax" not in tensors:
        return scales.float()
    nested = tensors["nested_absmax"][torch.arange(start, end) // state.nested_block_size]
    return tensors["nested_quant_map"][scales.int()] * nested + state.nested_offset


def _read_state(stored: StoredTensors) -> _State:
    named = [role for role in _STATES if role in stored]
    if len(named) != 1:
        raise Unfit("has no quant_state, or several")
    need(stored, "absmax", "quant_map")
    if ("nested_absmax" in stored) != ("nested_quant_map" in stored):
        raise Unfit("has a part of its nested scales only")
    (num_bytes,) = shape_of(stored, named[0], {"U8"}, 1)
    if num_bytes > _MAX_STATE_BYTES:
        raise Unfit(f"has a quant_state of {num_bytes} bytes")
    state = _state_of(bytes(stored[named[0]][...].tolist()))
    if "nested_absmax" in stored and not (state.nested_block_size and math.isfinite(state.nested_offset)):
        raise Unfit("has a quant_state that does not say how its scales are nested")
    return state


def _state_of(text: bytes) -> _State:
    """Reads a `quant_state`. Raises Unfit where it is not valid."""
    try:
        read: Any = json.loads(text)
        num_outputs, num_inputs = read["shape"]
        block_size, nested_block_size = read["blocksize"], read.get("nested_blocksize", 0)
        sizes = (num_outputs, num_inputs, block_size, nested_block_size)
        if not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes) or 0 in sizes[:3]:
            raise ValueError
        return _State((num_outputs, num_inputs), block_size, nested_block_size, float(read.get("nested_offset", 0.0)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Unfit("has a quant_state that makes no sense") from None
