"""Models of transformers without weights, on the meta device."""

import copy
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import CheckpointError
from corolla.models.families import code_failed


def model_class_of(auto: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that an `AutoModel...` of transformers would build for a configuration."""
    return cast(type[PreTrainedModel], auto._model_mapping[type(config)])


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
