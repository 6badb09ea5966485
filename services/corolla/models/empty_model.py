"""Models of transformers without weights, on the meta device."""

import copy
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import CheckpointError
from corolla.models.families import code_failed

# Classes of transformers that name another place of their base model than the one where it is.
_BASE_MODELS: Final = {"Llama4ForCausalLM": "model"}
# Classes of transformers whose experts have weights that nothing reads; see `_drop_zero_experts`.
_ZERO_EXPERTS: Final = frozenset({"LongcatFlashForCausalLM", "LongcatFlashModel"})
_CUT: Final[dict[type[PreTrainedModel], type[PreTrainedModel]]] = {}


def model_class_of(auto: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that an `AutoModel...` of transformers would build for a configuration."""
    found = cast(type[PreTrainedModel], auto._model_mapping[type(config)])
    if (place := _BASE_MODELS.get(found.__name__)) is not None:
        found.base_model_prefix = place
    if found.__name__ in _ZERO_EXPERTS:
        return _CUT.setdefault(found, cut_class(found, _drop_zero_experts))
    return found


def _drop_zero_experts(model: nn.Module) -> None:
    """Leaves only experts with weights. Others pass their input on, and published files have nothing of them."""
    for module in model.modules():
        if (count := getattr(module, "num_routed_experts", None)) is not None:
            own: Any = module
            own.gate_up_proj = nn.Parameter(own.gate_up_proj.new_empty(count, *own.gate_up_proj.shape[1:]))


def without_weights(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model without weights, on the meta device.

    Raises:
        CheckpointError: the family's code cannot build a model of this configuration.
    """
    try:
        with torch.device("meta"):
            return cast(PreTrainedModel, cast(Any, model_class)(copy.deepcopy(config)))  # building may change it
    except Exception as error:  # such as a KeyError for a kind of layer that the family does not have
        raise CheckpointError(code_failed(config, "cannot build what config.json describes", error)) from error


def cut_class(model_class: type[PreTrainedModel], cut: Callable[[Any], None]) -> type[PreTrainedModel]:
    """Makes a subclass that calls `cut` with each instance once it is built, before any weight is read.

    The subclass keeps the name and module of the family's class, since transformers finds renamed tensors by them.
    """

    def build_and_cut(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        cut(self)

    members = {
        "__init__": build_and_cut,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
    }
    return cast(type[PreTrainedModel], type(model_class.__name__, (model_class,), members))
