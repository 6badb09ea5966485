"""Experts that files hold one by one, as the one tensor that the model has of them, read piece by piece.

Transformers would read all experts, stack them, and join the stacks, each in memory of the host.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from corolla.kernels.layouts import Layout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.repacking import Panels, empty_panels
from corolla.models.chunked_reads import Room
from corolla.models.quantized.stored_tensors import Unfit
from corolla.models.quantized.tensors import PackedWeight

_OF_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
# Families for whose experts one by one transformers has no conversion, and a family that has the right one.
_CONVERTED_LIKE: Final = {"mistral4": "qwen2_moe"}

# transformers has the conversions of the whole model's files, whose language model has a type of its own.
register_checkpoint_conversion_mapping(
    "minimax_m3_vl_text", get_checkpoint_conversion_mapping("minimax_m3_vl") or [], overwrite=True
)


class MergedExperts:
    """Matrices of files that are one tensor of a model: `[experts, rows, columns]`; the interface is a StoredMatrix's.

    Args:
        experts: for each expert, the matrices that follow each other in its rows.
    """

    def __init__(self, experts: Sequence[Sequence[Any]]) -> None:
        self._experts = experts
        self._heights = [_shape(part)[0] for part in experts[0]]
        self._num_columns = _shape(experts[0][0])[1]

    @property
    def is_plain(self) -> bool:
        parts = [part for parts in self._experts for part in parts]
        return (
            all(getattr(part, "is_plain", False) for part in parts) and len({each.get_dtype() for each in parts}) == 1
        )

    def get_shape(self) -> list[int]:
        return [len(self._experts), sum(self._heights), self._num_columns]

    def __getitem__(self, index: Any) -> Tensor:
        """Reads what is indexed, in the file's dtype, on the CPU; for `[start:end]`, only these experts."""
        if isinstance(index, slice):
            return torch.stack([torch.cat([part[...] for part in parts]) for parts in self._experts[index]])
        return self[:][index]

    def lines(self, start: int, end: int, room: Room) -> Tensor:
        """Reads rows of the experts as if they lay one after another; see `StoredMatrix.lines`.

        Args:
            room: gives the memory into which the rows are read.

        Returns:
            `[end - start, columns]` in the file's dtype, on the CPU.
        """
        read: list[Tensor] = []
        memory: Tensor | None = None
        at = start
        while at < end:
            expert, row = divmod(at, sum(self._heights))
            number = 0
            while row >= self._heights[number]:
                row -= self._heights[number]
                number += 1
            count = min(self._heights[number] - row, end - at)
            first = at - start

            def part_of_room(num_bytes: int, first: int = first, count: int = count) -> Tensor:
                nonlocal memory
                row_bytes = num_bytes // count
                if memory is None:
                    memory = room((end - start) * row_bytes)
                return memory[first * row_bytes : first * row_bytes + num_bytes]

            read.append(self._experts[expert][number].lines(row, row + count, part_of_room))
            at += count
        return cast(Tensor, memory).view(read[0].dtype).view(end - start, self._num_columns)


class MergedPackedExperts(MergedExperts):
    """Packed matrices of files that are one tensor of a model; see MergedExperts, and PackedWeight for attributes."""

    def __init__(self, experts: Sequence[Sequence[PackedWeight]]) -> None:
        super().__init__(experts)
        self.method, self.dtype = experts[0][0].method, experts[0][0].dtype
        self._parts = [part for parts in experts for part in parts]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.get_shape())

    def layout(self) -> Layout:
        """The layout of all experts. Raises Unfit."""
        layouts = {part.layout() for part in self._parts}
        if len(layouts) > 1:
            raise Unfit("has experts of several layouts")
        if any(part.has_order for part in self._parts):
            raise Unfit("has experts with an order of inputs")
        return layouts.pop()

    def panels(self, device: torch.device | None = None) -> Panels:
        """The panels, expert after expert; see `PackedWeight.panels`. Raises Unfit."""
        num_experts, num_rows, num_columns = self.shape
        panels = empty_panels(num_experts * num_rows, num_columns, self.layout(), device)
        first = 0
        for part in self._parts:
            end = first + part.shape[0] // LANES
            panels[first:end] = part.panels(device).panels
            first = end
        return Panels(panels)


def _shape(part: Any) -> tuple[int, ...]:
    return tuple(part.get_shape() if hasattr(part, "get_shape") else part.shape)


def _conversions(model: PreTrainedModel) -> list[Any]:
    others = get_checkpoint_conversion_mapping(_CONVERTED_LIKE.get(str(model.config.model_type), "")) or []
    return [*get_model_conversion_mapping(model), *others]


def renamed_by(model: PreTrainedModel) -> Callable[[str], tuple[str, str | None]]:
    """Returns a function that maps a stored name to the model's, and to the pattern of a conversion.

    Such a conversion makes the model's tensor of this one and others; a tensor that is only renamed has no pattern.
    """
    conversions = _conversions(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state = model.state_dict()

    return lambda stored: rename_source_key(stored, renamings, converters, model.base_model_prefix, state)


def merged(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, of which those that the model has as one tensor become one. What does not fit stays as it is.

    Args:
        model: the model, which may be without weights.
    """
    kept = dict(tensors)
    for target, names in merged_names(model, tensors).items():
        if len({tuple(_shape(tensors[name]) for name in own) for own in names}) != 1:
            continue
        if any(len(_shape(tensors[name])) != 2 for name in names[0]):
            continue
        experts = [[kept.pop(name) for name in own] for own in names]
        are_packed = all(isinstance(part, PackedWeight) for parts in experts for part in parts)
        kept[target] = MergedPackedExperts(experts) if are_packed else MergedExperts(experts)
    return kept


def merged_names(model: PreTrainedModel, stored: Collection[str]) -> dict[str, list[list[str]]]:
    """Maps names of tensors that a model has as one to the stored names of each expert's matrices, in their order.

    Args:
        model: the model, which may be without weights.
        stored: the names of stored tensors.
    """
    if not any(_OF_EXPERT.search(name) for name in stored):
        return {}
    renamed = renamed_by(model)
    converters = {
        pattern: converter
        for converter in _conversions(model)
        if isinstance(converter, WeightConverter) and _only_merges(converter)
        for pattern in converter.source_patterns
    }
    found: defaultdict[str, defaultdict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in stored:
        target, pattern = renamed(name)
        if pattern in converters and (match := re.search(r".*\.(\d+)\.", name)) is not None:
            found[target][pattern][int(match[1])] = name
    names: dict[str, list[list[str]]] = {}
    for target, by_pattern in found.items():
        patterns = converters[next(iter(by_pattern))].source_patterns
        numbers = range(len(by_pattern[patterns[0]]))
        if renamed(target) != (target, None) or any(sorted(by_pattern[each]) != list(numbers) for each in patterns):
            continue
        names[target] = [[by_pattern[pattern][number] for pattern in patterns] for number in numbers]
    return names


def _only_merges(converter: WeightConverter) -> bool:
    """Returns True if a conversion only stacks the matrices of experts, and joins several of one expert by rows."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
