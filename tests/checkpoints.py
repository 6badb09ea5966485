"""Makes tiny random checkpoints of every family, complete with tokenizer, on which the whole stack can run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

VOCAB_SIZE = 320
HIDDEN_SIZE = 64
CONTEXT_LENGTH = 512

BOS, EOS, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
}
_HEAD_SIZE = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Short windows, so that short tests run past them.
_WINDOW = {"sliding_window": 12}
_GPT2_SHAPE = {"vocab_size": VOCAB_SIZE, "n_embd": HIDDEN_SIZE, "n_head": 4, "n_positions": CONTEXT_LENGTH}

# Families whose blocks differ in kind; no two spans of the tests begin alike.
_MIXED_FAMILIES = frozenset({"gpt_oss", "qwen2", "gemma2", "gemma3_text", "olmo3", "cohere2"})
_LAYER_TYPES = ("sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention")

# What each family's configuration gets besides `_SHAPE`; together they cover every special case of the families.
_FAMILY_FACTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **_WINDOW},
    "qwen3": _HEAD_SIZE,
    "gemma": _HEAD_SIZE,
    "gemma2": {
        **_HEAD_SIZE,
        **_WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {**_HEAD_SIZE, **_WINDOW, "query_pre_attn_scalar": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": _WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen3_moe": {**_HEAD_SIZE, **_EXPERTS, "mlp_only_layers": [1]},
    "olmo2": {},
    "olmo3": _WINDOW,
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "cohere2": {"logit_scale": 0.5, **_WINDOW},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": _WINDOW,
    "gpt_oss": {
        **_HEAD_SIZE,
        **_WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True},
    "bloom": {"n_head": 4},
    "falcon": {"alibi": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
}


def make_tiny_checkpoint(
    family: str, folder: Path, *, num_blocks: int = 5, seed: int = 0, config_changes: Mapping[str, Any] | None = None
) -> Path:
    """Writes a random checkpoint of a family: hidden size 64, 320 tokens, several shards.

    The weights are drawn wide enough that greedy continuations vary.

    Args:
        family: a `model_type` of the table of families.
        folder: is created; everything goes straight into it.
        num_blocks: transformer blocks.
        seed: of the weights.
        config_changes: further fields of the configuration.

    Returns:
        `folder`.
    """
    facts = {**_SHAPE, "num_hidden_layers": num_blocks, **_FAMILY_FACTS[family]}
    if family in _MIXED_FAMILIES:
        facts = {**facts, "layer_types": [_LAYER_TYPES[block % len(_LAYER_TYPES)] for block in range(num_blocks)]}
    if family == "gpt2":
        facts = {**facts, **_GPT2_SHAPE}
    facts = {**facts, **(config_changes or {})}
    tokenizer = make_tokenizer()
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    library: Any = AutoModelForCausalLM
    model = library.from_config(AutoConfig.for_model(family, **{**facts, **tokens}))
    _draw_weights(model, seed)
    generation: Any = GenerationConfig
    model.generation_config = generation(**{**tokens, "pad_token_id": tokenizer.eos_token_id})
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(num_bytes // 4, 100_000))
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, a few merges, four special tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "t"), ("e", "r"), ("a", "n"), ("o", "n"), ("Ġ", "a")]
    pieces = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = wrapped(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _draw_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = parameter.shape[-1]
                parameter.normal_(0.0, 1.6 * fan_in**-0.5, generator=generator)
            else:
                # Norm weights and biases: near what they were, but none of them trivial.
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
