"""Writes tiny GGUF files, as llama.cpp's converter would make them of tiny checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from corolla.models.loading import LOADING
from tests.checkpoints import SPECIAL_TOKENS, make_tiny_checkpoint, make_tokenizer

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
# A file cannot say which of its blocks have a window, so they are those that the family's configuration gives.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "gemma2": {"layer_types": None, "tie_word_embeddings": True},
    "gemma3_text": {"layer_types": None},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True, "hidden_size": 64},
}


def make_tiny_gguf(
    family: str, folder: Path, *, kind: str = "F32", num_blocks: int = 4, changes: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """A tiny checkpoint of a family, and the GGUF file that is made of it.

    Args:
        kind: the type of the matrices, a name of `gguf.GGMLQuantizationType` that the package can write.
        changes: further fields of the configuration.

    Returns:
        The checkpoint's folder and the file.
    """
    changes = {**_CHANGES.get(family, {}), **(changes or {})}
    source = make_tiny_checkpoint(family, folder / "source", num_blocks=num_blocks, config_changes=changes)
    library: Any = AutoModelForCausalLM
    with LOADING:
        model = library.from_pretrained(source, dtype=torch.float32)
    path = folder / f"tiny-{family}.{kind}.gguf"
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, model.config)
    processor_class: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = processor_class(config=model.config.to_dict())
    weights_map: Any = get_gguf_hf_weights_map
    state = model.state_dict()
    wanted = gguf.GGMLQuantizationType[kind]
    for name, source_name in weights_map(model, processor, architecture).items():
        if source_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = state[source_name].float().numpy()
        for part, array in _as_stored(architecture, name, values, model.config).items():
            is_matrix = array.ndim >= 2 and "_norm" not in part and "gate_inp" not in part
            stored = gguf.quants.quantize(array, wanted) if is_matrix else array
            writer.add_tensor(part, stored, raw_dtype=wanted if is_matrix else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source, path


def _as_stored(architecture: str, name: str, values: Any, config: Any) -> dict[str, Any]:
    """What llama.cpp's converter makes of a tensor."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if name.endswith("ffn_gate_exps") and values.ndim == 3:
        gate, _up = np.split(values, 2, axis=1)
        return {f"{name}.weight": np.ascontiguousarray(gate)}
    if name.endswith("ffn_up_exps") and values.ndim == 3:
        _gate, up = np.split(values, 2, axis=1)
        return {f"{name}.weight": np.ascontiguousarray(up)}
    if name.endswith("ffn_down_exps"):
        return {f"{name}.weight": values}
    return {name: np.ascontiguousarray(values)}


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            writer.add_float32(f"{writer.arch}.{name}", getattr(config, name))
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    tokenizer = make_tokenizer()
    backend = tokenizer.backend_tokenizer
    texts = [str(backend.id_to_token(token_id)) for token_id in range(len(tokenizer))]
    # The model's vocabulary may be larger than the tokenizer's.
    texts += [f"[PAD{number}]" for number in range(len(texts), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([3 if text in SPECIAL_TOKENS else 5 if text.startswith("[PAD") else 1 for text in texts])
    writer.add_token_merges([f"{left} {right}" for left, right in _merges(backend)])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(str(tokenizer.chat_template))


def _merges(backend: Any) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def add_setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a setting with the type that llama.cpp expects; its integers have no sign."""
    kinds = gguf.GGUFValueType
    writer.add_key_value(key, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))


def rewrite_gguf(
    path: Path,
    target: Path,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Writes a file once more with other settings and tensors of floats; None leaves one out. Returns `target`.

    With `max_tensors`, the file is split into parts of so many tensors, whose names follow from `target`.
    """
    settings, tensors = settings or {}, tensors or {}
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=max_tensors)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in settings:
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for key, value in settings.items():
        if value is not None:
            add_setting(writer, key, value)
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
