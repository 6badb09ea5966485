"""Blocks with recurrent states on CPUs: rows of one token each share a call, and no row changes another's bits.

The family's own modules are the reference for the results, and hold the weights; `row_parts` computes with them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from corolla.compute.attention.base import AttentionBatch, PackedRow
from corolla.compute.base import Blocks, PackedStep, RowWork
from corolla.compute.reference import FamilyRows
from corolla.compute.row_parts import MIXERS, MLPS, Rows, part_of
from corolla.kernels.compiler import why_unavailable
from corolla.models.adapters.products import AdapterStacks
from corolla.models.rotary_table import RotaryTable
from corolla.models.span_model import SpanModel

# The norm before attention or the state, that part, the norm before the MLP, and the MLP, as families name them.
_NAMES: Final = (
    ("input_layernorm", "linear_attn", "post_attention_layernorm", "mlp"),
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("operator_norm", "conv", "ffn_norm", "feed_forward"),
    ("operator_norm", "self_attn", "ffn_norm", "feed_forward"),
)


class SingleRows(Blocks):
    """Runs rows of one token each together, and other rows by the family's own code.

    These others are prompts, rows that begin, and rows with adapters.

    Args:
        model: the span; `fits` holds for it.
        stacks: the stacked copies of adapters.
    """

    name: Final = "rows"

    def __init__(self, model: SpanModel, stacks: AdapterStacks) -> None:
        super().__init__(stacks, model.device)
        self._model = model
        self._others = FamilyRows(model, stacks)
        self._rotary = None if model.rotary is None else RotaryTable(model.rotary, model.config)
        self._layers = [_Block(_parts_of(layer), index) for index, layer in enumerate(model.layers)]

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. A step without rows runs attention only, for one token."""
        ends = list(accumulate(row.num_tokens for row in step.rows))
        singles = [number for number, row in enumerate(step.rows) if _is_single(row)]
        if len(singles) == len(step.rows):
            return self._together(step, step.batch, hidden, layers)
        output = torch.empty_like(hidden)
        for are_single in (True, False):
            numbers = [number for number, row in enumerate(step.rows) if _is_single(row) == are_single]
            if not numbers:
                continue
            rows = [step.rows[number] for number in numbers]
            places = torch.cat(
                [torch.arange(ends[number] - step.rows[number].num_tokens, ends[number]) for number in numbers]
            )
            part = PackedStep(rows, step.position_ids[places], step.end, step.batch)
            if are_single:
                packed = [PackedRow(row.cache, row.position, place, place + 1) for place, row in enumerate(rows)]
                batch = AttentionBatch(step.batch.store, packed, step.batch.backend)
                output[places] = self._together(part, batch, hidden[places], layers)
            else:
                output[places] = self._others.forward(part, hidden[places], layers)
        return output

    def _together(self, step: PackedStep, batch: AttentionBatch, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        self._model.adapters = None  # those of a step belong to the other rows
        turn = None if self._rotary is None else self._rotary.rows(step.position_ids, step.end, hidden)
        rows = Rows(step.rows, batch, turn)
        for index in layers:
            hidden = self._layers[index].forward(hidden, rows)
        return hidden


def fits(model: SpanModel) -> bool:
    """`SingleRows` can run the blocks of a span."""
    return (
        model.family.past.packs_singles
        and model.device.type == "cpu"
        and why_unavailable() is None
        and all(_fits(layer, has_rotary=model.rotary is not None) for layer in model.layers)
    )


def _is_single(row: RowWork) -> bool:
    return bool(row.position) and row.num_tokens == 1 and row.adapter is None


def _parts_of(layer: nn.Module) -> tuple[nn.Module, ...]:
    """The parts of a block, in the order of `_NAMES`; empty: it has others."""
    parts = dict(layer.named_children())
    names = next((each for each in _NAMES if set(each) == set(parts)), ())
    return tuple(parts[name] for name in names)


def _fits(layer: nn.Module, *, has_rotary: bool) -> bool:
    parts = _parts_of(layer)
    if not parts or part_of(parts[3], MLPS) is None:
        return False
    mixer = part_of(parts[1], MIXERS)
    return mixer is not None and (has_rotary or not mixer.rotates)


class _Block:
    """One block: a norm, attention or a state, a sum; a norm, an MLP or a mixture, a sum."""

    def __init__(self, parts: Sequence[nn.Module], index: int) -> None:
        self._mixer_norm, mixer, self._mlp_norm, mlp = parts
        self._mixer, self._mlp = (
            kind(module, index) for module, kinds in ((mixer, MIXERS), (mlp, MLPS)) if (kind := part_of(module, kinds))
        )

    def forward(self, hidden: Tensor, rows: Rows) -> Tensor:
        hidden = hidden + self._mixer.forward(self._mixer_norm(hidden), rows)
        return hidden + self._mlp.forward(self._mlp_norm(hidden), rows)
