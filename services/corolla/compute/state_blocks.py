"""Blocks with recurrent states: the rows of a step share a call, and no row changes another's bits.

The family's own modules are the reference for the results, and hold the weights; `state_parts` computes with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import Tensor, nn

from corolla.compute.base import Blocks, PackedStep
from corolla.compute.reference import FamilyRows
from corolla.compute.state_parts import KINDS, Part, Rows, made_part, part_of, scaled
from corolla.kernels.compiler import why_unavailable
from corolla.models.adapters.products import AdapterStacks
from corolla.models.rotary_table import RotaryTable, Turn
from corolla.models.span_model import SpanModel

# What stands before and after attention or the state, and before and after the MLP: the names of norms.
_NORMS: Final = (
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "", "pre_ff_layernorm", ""),
    ("operator_norm", "", "ffn_norm", ""),
    ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("norm", "", "", ""),
)
_MIXERS: Final = ("linear_attn", "mamba", "conv", "self_attn", "mixer")
_MLPS: Final = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")
# Falcon-H1 scales the inputs and outputs of its parts by these attributes.
_SCALES: Final[Mapping[str, tuple[str, str]]] = {
    "mamba": ("", "ssm_out_multiplier"),
    "self_attn": ("attention_in_multiplier", "attn_out_multiplier"),
}


class StateBlocks(Blocks):
    """Runs all rows together. If they have adapters, the family's own code runs them.

    Args:
        model: the span; `fits` holds for it.
        stacks: the stacked copies of adapters.
        kinds: the kinds of parts that its blocks have.
        adapted: runs rows with adapters; None: the family's own code, row by row.
    """

    name: str = "states"
    runs_adapters_apart = True

    def __init__(
        self,
        model: SpanModel,
        stacks: AdapterStacks,
        kinds: Sequence[type[Part]] = KINDS,
        adapted: Blocks | None = None,
    ) -> None:
        super().__init__(stacks, model.device)
        self._model = model
        self._adapted = adapted or FamilyRows(model, stacks)
        rotary = model.rotary
        named = () if rotary is None else getattr(rotary, "layer_types", ("",))
        parameters = getattr(model.config, "rope_parameters", None) or {}
        self._tables = {
            kind: RotaryTable(
                cast(nn.Module, rotary),
                model.config,
                scales_queries=parameters.get("llama_4_scaling_beta") is not None,
                kind=kind or None,
            )
            for kind in named
        }
        self._layers = [_Block(layer, index, kinds) for index, layer in enumerate(model.layers[: len(model.span)])]

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. A step without rows and states runs attention only, for one token."""
        if any(row.adapter is not None for row in step.rows):
            return self._adapted.forward(step, hidden, layers)
        turns = {kind: table.turn(step.position_ids, step.end, hidden) for kind, table in self._tables.items()}
        rows = self._rows(step, turns)
        for index in layers:
            hidden = self._layers[index].forward(hidden, rows)
        return hidden

    def _rows(self, step: PackedStep, turns: Mapping[str, Turn]) -> Rows:
        """What all blocks of a step share; see `Rows` for `turns`."""
        return Rows.of(step.rows, step.batch, turns)


def fits(model: SpanModel) -> bool:
    """`StateBlocks` can run the blocks of a span on this CPU."""
    is_known = model.family.past.packs_states and consists_of(model, KINDS)
    return is_known and model.device.type == "cpu" and why_unavailable() is None


def consists_of(model: SpanModel, kinds: Sequence[type[Part]]) -> bool:
    """The blocks of a span consist of parts of these kinds, and of norms."""
    return all(_fits(layer, kinds) for layer in model.layers[: len(model.span)])


def _fits(layer: nn.Module, kinds: Sequence[type[Part]]) -> bool:
    summands = _summands(layer)
    return bool(summands) and all(
        part_of(getattr(layer, name), kinds) is not None for summand in summands for name in summand.parts
    )


@dataclass(frozen=True, slots=True)
class _Summand:
    """What a block adds to hidden states: parts whose outputs are added, between two norms.

    Attributes:
        before: the name of the norm of the parts' input; empty: there is none.
        parts: their names.
        after: the name of the norm of their output; empty: there is none.
    """

    before: str
    parts: Sequence[str]
    after: str


def _summands(layer: nn.Module) -> list[_Summand]:
    """What a block adds to hidden states, in order; empty: it has a part that is not known."""
    names = [name for name, _ in layer.named_children()]
    mixers, mlps = ([name for name in names if name in known] for known in (_MIXERS, _MLPS))
    norms = {*names} - {*mixers, *mlps}
    found = next((each for each in _NORMS if {*each} - {""} == norms), None)
    if found is None or not mixers:
        return []
    own = [_Summand(found[0], mixers, found[1])]
    return [*own, _Summand(found[2], mlps, found[3])] if mlps else own


class _Block:
    """One block, which adds one summand after the other to hidden states.

    Args:
        layer: the family's module.
        index: its index within the span.
        kinds: see `StateBlocks`.
    """

    def __init__(self, layer: nn.Module, index: int, kinds: Sequence[type[Part]]) -> None:
        self._factor: float = getattr(layer, "residual_multiplier", 1.0)
        self._summands = [
            (
                getattr(layer, each.before, None),
                [_ScaledPart(layer, name, index, kinds) for name in each.parts],
                getattr(layer, each.after, None),
            )
            for each in _summands(layer)
        ]

    def forward(self, hidden: Tensor, rows: Rows) -> Tensor:
        for before, parts, after in self._summands:
            normed = hidden if before is None else rows.norm(before, hidden)
            first, *others = (part.forward(normed, rows) for part in parts)
            summand = sum(others, start=first)
            hidden = hidden + scaled(summand if after is None else rows.norm(after, summand), self._factor)
        return hidden


class _ScaledPart:
    def __init__(self, layer: Any, name: str, index: int, kinds: Sequence[type[Part]]) -> None:
        self._part = made_part(getattr(layer, name), index, kinds)
        self._scales = [getattr(layer, each, 1.0) for each in _SCALES.get(name, ("", ""))]

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        before, after = self._scales
        return scaled(self._part.forward(scaled(normed, before), rows), after)
