"""Models of transformers without weights, on the meta device."""

import copy
from typing import Any, Final, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import CheckpointError
from corolla.models.families import code_failed

# Classes of transformers that name another place of their base model than the one where it is.
_BASE_MODELS: Final = {"Llama4ForCausalLM": "model"}


def model_class_of(auto: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that an `AutoModel...` of transformers would build for a configuration."""
    found = cast(type[PreTrainedModel], auto._model_mapping[type(config)])
    if (place := _BASE_MODELS.get(found.__name__)) is not None:
        found.base_model_prefix = place
    return found


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
