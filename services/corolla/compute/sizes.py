"""Finds what a checkpoint takes in memory from its configuration and tensor index; it reads no weights."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from corolla.cache.layout import stand_in_bytes
from corolla.cache.states import LayerState
from corolla.chassis.weight_formats import PACKED
from corolla.compute.attention.latents import MAX_EXPANDED_BYTES
from corolla.compute.device_memory import StepSize
from corolla.compute.sizing import BlockSize, ModelSize
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import head_bytes
from corolla.models.families import EXPERTS_PER_TOKEN, index_head_size, key_shapes, pageless_layers
from corolla.models.packed.choice import layouts_of
from corolla.models.quantization import layout_of
from corolla.models.span_model import empty_span, span_tensors
from corolla.models.visible_tokens import attention_windows
from corolla.wire.span import Span

_STEP_TENSORS: Final = 8
"""A block holds this many tensors of a row at a time, each as wide as the hidden state."""


def model_size(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str, kv_cache_dtype: str) -> ModelSize:
    """Reckons the memory that a model takes on servers with these settings.

    Args:
        checkpoint: the model.
        dtype: the dtype of weights that are not quantised, and of keys and values.
        quantization: `none`, `int8`, `int4` or `packed`.
        kv_cache_dtype: `auto`, `fp8` or `int8`.

    Raises:
        SettingsError: the checkpoint has no weights that can stay packed.
    """
    config, whole = checkpoint.config, Span(0, checkpoint.num_blocks)
    model = empty_span(checkpoint, whole)
    pageless, windows = pageless_layers(config), attention_windows(model, checkpoint.family)
    token_bytes = _token_bytes(checkpoint, dtype, kv_cache_dtype)
    weights, loading = _block_bytes(checkpoint, model, whole, dtype, quantization)
    states = state_sizes(checkpoint, dtype)
    blocks = tuple(
        BlockSize(
            weights[index], loading[index], 0 if index in pageless else token_bytes, windows[index], states[index]
        )
        for index in range(checkpoint.num_blocks)
    )
    return ModelSize(
        name=checkpoint.name,
        blocks=blocks,
        embedding_bytes=checkpoint.vocab_size * checkpoint.hidden_size * dtype.itemsize,
        head_bytes=head_bytes(checkpoint, dtype, quantization),
        has_tied_edges=checkpoint.has_tied_edges,
        step=step_size(checkpoint, dtype),
        hidden_bytes=checkpoint.hidden_size * dtype.itemsize,
        context_length=checkpoint.context_length,
    )


def _token_bytes(checkpoint: Checkpoint, dtype: torch.dtype, kv_cache_dtype: str) -> int:
    """The bytes of one token's keys and values in a block that keeps them."""
    if kv_cache_dtype == "auto":
        return _cache_numbers(checkpoint) * dtype.itemsize
    return _cache_numbers(checkpoint, more_of_a_head=int(kv_cache_dtype == "int8"))


def cache_bytes_per_token(checkpoint: Checkpoint, dtype: torch.dtype, kv_cache_dtype: str) -> int:
    """The bytes of one token's keys and values in one block; if no block keeps any, what stands for its states."""
    if len(pageless_layers(checkpoint.config)) < checkpoint.num_blocks:
        return _token_bytes(checkpoint, dtype, kv_cache_dtype)
    return stand_in_bytes(max(state_sizes(checkpoint, dtype)))


def step_size(checkpoint: Checkpoint, dtype: torch.dtype) -> StepSize:
    """Reckons what a step takes next to weights, keys and values.

    Args:
        dtype: the dtype of hidden states.
    """
    return StepSize(
        (_STEP_TENSORS * checkpoint.hidden_size + _mlp_numbers(checkpoint)) * dtype.itemsize,
        checkpoint.vocab_size,
        MAX_EXPANDED_BYTES if checkpoint.family.past.caches_latents else 0,
    )


@torch.inference_mode()
def state_sizes(checkpoint: Checkpoint, dtype: torch.dtype) -> list[int]:
    """The bytes of each block's recurrent states of one session at one position.

    The family's own code computes one token on the meta device, which has shapes and no numbers. It runs the whole
    model, since some families ask a block with keys and values for the position.
    """
    sizes = [0] * checkpoint.num_blocks
    if not checkpoint.family.past.keeps_states:
        return sizes
    model: Any = empty_span(checkpoint, Span(0, checkpoint.num_blocks), dtype)
    model.config._attn_implementation = "sdpa"
    model.config._experts_implementation = "batched_mm"
    cache = DynamicCache(config=model.config)
    hidden = torch.zeros(1, 1, checkpoint.hidden_size, dtype=dtype, device="meta")
    model(inputs_embeds=hidden, use_cache=True, **{checkpoint.family.past.cache_argument: cache})
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            sizes[index] = LayerState.from_layer(layer).nbytes
    return sizes


def _mlp_numbers(checkpoint: Checkpoint) -> int:
    """How many numbers of one row an MLP holds at a time: gate, up and their product, for each of a token's experts."""
    config, hidden_size = checkpoint.config, checkpoint.hidden_size
    inner = max(_integers(config, "intermediate_size", "ffn_dim", "n_inner"), default=4 * hidden_size)
    num_chosen = _first(config, *EXPERTS_PER_TOKEN, default=0)
    width = _first(config, "moe_intermediate_size", "intermediate_size", default=inner)
    return max(3 * inner, num_chosen * max(3 * width, width + hidden_size))


def _cache_numbers(checkpoint: Checkpoint, more_of_a_head: int = 0) -> int:
    """How many numbers a block keeps of one token.

    Args:
        more_of_a_head: further numbers of each head, such as a scale.
    """
    config = checkpoint.config
    if checkpoint.family.past.picks_tokens:
        # The keys of the index are one more head next to those of values, or to the rotated part of the latents.
        is_latent, size = checkpoint.family.past.caches_latents, index_head_size(config) + more_of_a_head
        heads = 1 if is_latent else int(config.num_key_value_heads)
        key = (config.kv_lora_rank if is_latent else config.head_dim) + more_of_a_head
        return int(heads * key + (heads + 1) * size)
    if checkpoint.family.past.caches_latents:
        numbers = int(config.kv_lora_rank + config.qk_rope_head_dim) + 2 * more_of_a_head
        return checkpoint.family.past.attentions * numbers
    if shapes := key_shapes(config):
        # A slot has room for the block that keeps most.
        keys = max(heads * (size + more_of_a_head) for heads, size, _ in shapes)
        return keys + max(heads * (size + more_of_a_head) for heads, _, size in shapes)
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    key_heads = _key_heads(config, heads)
    size = _first(config, "head_dim", "attention_head_dim", "kv_channels", default=checkpoint.hidden_size // heads)
    value_size = _first(config, "v_head_dim", default=size)
    return key_heads * (size + value_size + 2 * more_of_a_head)


def _key_heads(config: Any, heads: int) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    # Dbrx has a configuration of its own for attention.
    default = _first(getattr(config, "attn_config", config), "kv_n_heads", default=heads)
    found = _first(config, "num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=default)
    # Each of a token's experts has a query head for every key head, and gets a copy of the key.
    return found * int(config.num_experts_per_tok) if config.model_type == "jetmoe" else found


def _first(config: Any, *names: str, default: int = 1) -> int:
    return next(iter(_integers(config, *names)), default)


def _integers(config: Any, *names: str) -> list[int]:
    """The positive ones among these fields; a field that the family's configuration does not know has no effect."""
    known = type(config)
    found = [getattr(config, name, None) for name in names if hasattr(known, name) or name in known.attribute_map]
    return [value for value in found if isinstance(value, int) and value > 0]


def _block_bytes(
    checkpoint: Checkpoint, model: PreTrainedModel, span: Span, dtype: torch.dtype, quantization: str
) -> tuple[list[int], list[int]]:
    """The bytes of each block's weights once they are loaded, and while they are read."""
    names = span_tensors(checkpoint, span)
    # The device does not change what a packed weight takes.
    layouts = layouts_of(checkpoint, names, quantization, torch.device("cpu"), lambda: model)
    linears = _linear_weights(model, checkpoint.family.read_weights)
    layer = re.compile(rf"{re.escape(checkpoint.family.layers)}\.(\d+)\.")
    loaded, read = [0] * len(span), [0] * len(span)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (match := layer.match(name)) is None:
            continue
        block, plain = (
            int(match[1]),
            tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize),
        )
        held = plain
        if quantization == PACKED and name in layouts:
            held = plain = layouts[name].num_bytes(math.prod(tensor.shape[:-1]), tensor.shape[-1])
        elif name in linears and (layout := layout_of(quantization, tensor.shape[1], dtype)) is not None:
            held = layout.num_bytes(*tensor.shape)
        loaded[block] += held
        read[block] += plain
    return loaded, read


def _linear_weights(model: nn.Module, kept: tuple[str, ...]) -> Mapping[str, nn.Linear]:
    layers = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    return {f"{path}.weight": module for path, module in layers.items() if path.rpartition(".")[2] not in kept}
