"""A small model that a family's own code builds from a checkpoint's configuration, with every kind of its layers."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import keep_layers_of_config, make_up
from corolla.models.empty_model import model_class_of
from corolla.models.families import EXPERTS_PER_TOKEN
from corolla.models.span_model import SpanModel, empty_span
from corolla.wire.span import Span

# A small model is cut in two.
_MIN_BLOCKS: Final = 2
_MAX_HEADS: Final = 4
_MAX_WIDTH: Final = 256
_MAX_VOCABULARY: Final = 512
# Experts of which a token gets a part.
_MIN_EXPERTS_PER_GROUP: Final = 4
# Fields of a configuration that are widths inside of an MLP, whose names say nothing of that.
_INNER_WIDTHS: Final = frozenset({"expert_ffn_hidden_size", "ffn_dim", "n_inner", "ffn_hidden_size"})
# transformers computes linear attention slowly on a processor: a chunk of 64 tokens takes 2 MB of each head.
_LINEAR_HEADS: Final = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
_SPECIAL_TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")


def small_config(checkpoint: Checkpoint, window: int) -> PretrainedConfig:
    """A copy of a checkpoint's configuration: few blocks with every kind of layer, small widths, short windows.

    What is not known to be a width stays as it is, so a copy of some families is not small.

    Args:
        window: longer attention windows become this long.

    Raises:
        UnsupportedFamily: see `attention_windows`.
    """
    span = Span(0, checkpoint.num_blocks)
    whole = SpanModel(empty_span(checkpoint, span), span, checkpoint.family)
    config = copy.deepcopy(checkpoint.config)
    num_blocks = max(_MIN_BLOCKS, max(whole.first_of_kinds) + 1)
    keep_layers_of_config(config, range(min(num_blocks, checkpoint.num_blocks)))
    _shorten_windows(config, {each for each in whole.windows if each is not None and each > window}, window)
    _narrow(config)
    return config


def _shorten_windows(config: PretrainedConfig, windows: set[int], to: int) -> None:
    for name, value in vars(config).items():
        if type(value) is int and value in windows and "position" not in name:
            setattr(config, name, to)


def _narrow(config: Any) -> None:
    hidden_size = int(config.hidden_size)
    config.hidden_size = _narrow_hidden_size(config, hidden_size)
    for name, value in [*vars(config).items()]:
        if type(value) is not int:
            continue
        if "intermediate" in name or name in _INNER_WIDTHS:
            setattr(config, name, min(value, _MAX_WIDTH))
        elif name.endswith("experts") and "shared" not in name:
            setattr(config, name, min(value, _num_experts(config)))
        elif value == hidden_size and name.endswith(("_dim", "_size")):
            setattr(config, name, config.hidden_size)
    _narrow_recurrent_layers(config)
    config.vocab_size = min(int(config.vocab_size), _MAX_VOCABULARY)
    for name in _SPECIAL_TOKENS:
        given = getattr(config, name, None)
        if isinstance(given, list) or (isinstance(given, int) and given >= config.vocab_size):
            setattr(config, name, 0)


def _narrow_hidden_size(config: Any, hidden_size: int) -> int:
    """The hidden size of the copy; where heads follow from it, there are fewer heads, of the same size."""
    if config.is_heterogeneous:
        return min(hidden_size, 2 * _MAX_WIDTH)
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int):
        return min(hidden_size, 2 * _MAX_WIDTH)
    if heads <= _MAX_HEADS:
        return hidden_size
    if getattr(config, "num_attention_heads_per_layer", None) is not None:
        return min(hidden_size, 2 * _MAX_WIDTH)
    config.num_attention_heads = _MAX_HEADS
    if isinstance(key_heads, int):
        config.num_key_value_heads = min(key_heads, _MAX_HEADS if key_heads == heads else 2)
    return hidden_size // heads * _MAX_HEADS


def _narrow_recurrent_layers(config: Any) -> None:
    """Leaves linear attention few heads, and fits Mamba's inner width, a multiple of the hidden size, to the copy's."""
    given = vars(config)
    heads = {name: given[name] for name in _LINEAR_HEADS if type(given.get(name)) is int}
    if heads and (most := max(heads.values())) > _MAX_HEADS:
        # Each key has the same number of values as before.
        keys = math.gcd(*heads.values())
        for name, value in heads.items():
            setattr(config, name, value // keys * max(1, _MAX_HEADS * keys // most))
    if "mamba_n_heads" in given and "mamba_expand" in given and "mamba_d_ssm" not in given:
        config.mamba_n_heads = config.mamba_expand * config.hidden_size // config.mamba_d_head
    if "state_size" in given and "expand" in given:
        config.intermediate_size = config.expand * config.hidden_size
        if "num_heads" in given:
            config.num_heads = config.intermediate_size // config.head_dim


def _num_experts(config: Any) -> int:
    groups = int(getattr(config, "n_group", None) or 1)
    given = (getattr(config, name, None) for name in EXPERTS_PER_TOKEN)
    chosen = max((each for each in given if type(each) is int), default=1)
    return groups * max(_MIN_EXPERTS_PER_GROUP, -(-2 * chosen // groups))


@dataclass(frozen=True)
class SmallCopy(Checkpoint):
    """A checkpoint in memory: the weights of `unsplit`, which the family's own code computes with.

    Attributes:
        unsplit: the family's own model, float32, on the CPU.
    """

    unsplit: PreTrainedModel = field(kw_only=True)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, config: PretrainedConfig) -> Self:
        """A random model of the checkpoint's family, of this small configuration."""
        unsplit = make_up(model_class_of(AutoModelForCausalLM, config), config, dtype=torch.float32)
        _draw(unsplit)
        facts = {name: getattr(checkpoint, name) for name in ("name", "folder", "family")}
        return cls(
            **facts, config=config, shards=dict.fromkeys(unsplit.state_dict(), checkpoint.folder), unsplit=unsplit
        )

    @contextlib.contextmanager
    def open_tensors(self, names: Mapping[str, str], dtype: Any = None) -> Iterator[dict[str, Any]]:
        stored = self.unsplit.state_dict()
        yield {name: stored[own] for name, own in names.items()}


def _draw(model: nn.Module) -> None:
    """Draws weights wide enough that each part of a model shows in its output."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.empty_like(parameter).normal_(generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
        elif name.endswith("weight"):
            parameter.copy_(1 + 0.1 * drawn)
        else:
            parameter.copy_(0.1 * drawn)
