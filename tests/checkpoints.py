"""Makes tiny random checkpoints of every family, complete with tokenizer, on which the whole stack can run."""

import copy
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from tests.run_folder import made_once

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

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT_LENGTH, "tie_word_embeddings": False,
}  # fmt: skip
_HEAD_SIZE = {"head_dim": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Short windows, so that short tests run past them.
_WINDOW = {"sliding_window": 12}
_SOFTCAPPED = {
    **_HEAD_SIZE, **_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
}  # fmt: skip
# Experts after some dense blocks, in a manner that began with DeepSeek.
_ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
}  # fmt: skip
# Keys and values of different head sizes, made of a short latent.
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
# So many heads that scores of tokens are not all zero, and equal.
_INDEX = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
_DELTA_RULE = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_ALPHA = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_GPT2_SHAPE = {"vocab_size": VOCAB_SIZE, "n_embd": HIDDEN_SIZE, "n_head": 4, "n_positions": CONTEXT_LENGTH}

# Families whose blocks differ in kind; no two spans of the tests begin alike.
_MIXED_FAMILIES = frozenset(
    {
        "afmoe", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe", "flint", "gemma2", "gemma3_text",
        "gemma4_text", "gpt_oss", "granite_swa", "granitemoe_swa", "kolibri1", "laguna", "mellum", "mimo_v2_flash",
        "ministral", "olmo3", "qwen2", "vaultgemma",
    }
)  # fmt: skip
_LAYER_TYPES = ("sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention")
# Blocks with a recurrent state, between those with attention.
_RECURRENT_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "conv"),
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "granitemoehybrid",
            "kimi_linear",
            "olmo_hybrid",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
        ),
        "linear_attention",
    ),
}
RECURRENT_FAMILIES = frozenset(
    {*_RECURRENT_KINDS, "bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h"}
)

# What each family's configuration gets besides `SHAPE`; together they cover every special case of the families.
_FAMILY_FACTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama4_text": {
        **_HEAD_SIZE, **_LOCAL_EXPERTS, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2, "attention_chunk_size": 16, "floor_scale": 48,
    },
    "mistral": _WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **_WINDOW},
    "qwen3": _HEAD_SIZE,
    "gemma": _HEAD_SIZE,
    "gemma2": _SOFTCAPPED,
    "gemma3_text": {**_HEAD_SIZE, **_WINDOW, "query_pre_attn_scalar": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": _WINDOW,
    "mixtral": _LOCAL_EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen3_moe": {**_HEAD_SIZE, **_EXPERTS, "mlp_only_layers": [1]},
    "olmo2": {},
    "olmo3": _WINDOW,
    "granite": _GRANITE,
    "cohere2": {"logit_scale": 0.5, **_WINDOW},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": _WINDOW,
    "gpt_oss": {
        **_HEAD_SIZE, **_WINDOW, **_LOCAL_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True},
    "bloom": {"n_head": 4},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "glm": _HEAD_SIZE,
    "glm4": _HEAD_SIZE,
    "glm4_moe": {**_HEAD_SIZE, **_ROUTED, "use_qk_norm": True, "n_group": 2, "topk_group": 1},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"window_size": 12},
    "gpt_bigcode": {"multi_query": True},
    "mpt": {"d_model": HIDDEN_SIZE, "n_heads": 4, "max_seq_len": CONTEXT_LENGTH, "expansion_ratio": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN_SIZE},
    "exaone4": _WINDOW,
    "nemotron": _HEAD_SIZE,
    "olmo": {"clip_qkv": 2.0},
    "olmoe": {**_EXPERTS, "clip_qkv": 2.0},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "granitemoe": {**_GRANITE, **_LOCAL_EXPERTS},
    "granitemoeshared": {**_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": 48},
    "arcee": _HEAD_SIZE,
    "seed_oss": _HEAD_SIZE,
    "ernie4_5": {**_HEAD_SIZE, "use_bias": True},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1,
        "moe_layer_end_index": 3, "use_bias": True,
    },
    "hunyuan_v1_dense": {**_HEAD_SIZE, **_ALPHA},
    "hunyuan_v1_moe": {**_HEAD_SIZE, **_ALPHA, "num_experts": 4, "moe_topk": 2},
    "dots1": {**_HEAD_SIZE, **_ROUTED, **_WINDOW},
    "helium": _HEAD_SIZE,
    "apertus": {},
    "codegen": {"rotary_dim": 8},
    "xglm": {"d_model": HIDDEN_SIZE, "attention_heads": 4, "ffn_dim": 96},
    "biogpt": {},
    "minimax_m2": {**_HEAD_SIZE, **_LOCAL_EXPERTS, "intermediate_size": 32},
    "minimax_m3_vl_text": {
        **_HEAD_SIZE, **_LOCAL_EXPERTS, "intermediate_size": 32, "dense_intermediate_size": 64,
        "shared_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 24,
        "index_block_size": 8, "index_topk_blocks": 2,
    },
    "deepseek_v2": {**_ROUTED, **_LATENT, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1},
    "deepseek_v32": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, **_INDEX},
    "glm_moe_dsa": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, **_INDEX},
    "mistral4": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1},
    "phimoe": {**_WINDOW, **_LOCAL_EXPERTS, "lm_head_bias": True},
    "persimmon": {},
    "ministral": {**_HEAD_SIZE, **_WINDOW},
    "ministral3": {**_HEAD_SIZE, "rope_parameters": YARN},
    "flex_olmo": _EXPERTS,
    "vaultgemma": _SOFTCAPPED,
    "exaone_moe": {**_EXPERTS, **_WINDOW, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1},
    "jais2": _HEAD_SIZE,
    "youtu": _LATENT,
    "cwm": {**_HEAD_SIZE, **_WINDOW},
    "solar_open": {**_HEAD_SIZE, **_ROUTED, "n_group": 2, "topk_group": 1},
    "bitnet": {},
    "hyperclovax": {**_HEAD_SIZE, **_GRANITE},
    "hy_v3": {**_HEAD_SIZE, **_EXPERTS},
    "gpt_neox_japanese": {
        "intermediate_multiple_size": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "minicpm3": {**_LATENT, "scale_emb": 3, "dim_model_base": 32},
    "cohere2_moe": {
        **_HEAD_SIZE, **_WINDOW, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
        "logit_scale": 0.5, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 64, "intermediate_size": 32,
    },
    "afmoe": {**_HEAD_SIZE, **_EXPERTS, **_WINDOW, "mup_enabled": True, "num_shared_experts": 1},
    "mellum": {**_HEAD_SIZE, **_WINDOW, **_LOCAL_EXPERTS, "moe_intermediate_size": 32},
    "kolibri1": {
        **_HEAD_SIZE, **_WINDOW, **_LOCAL_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    },
    "laguna": {**_HEAD_SIZE, **_WINDOW, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 16, **_LOCAL_EXPERTS},
    "aria_text": {**_HEAD_SIZE, "moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
    "dbrx": {
        "d_model": HIDDEN_SIZE, "n_heads": 4, "max_seq_len": CONTEXT_LENGTH,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": HIDDEN_SIZE, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "longcat_flash": {
        **_LATENT, "head_dim": 8, "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2,
        "moe_topk": 2, "routed_scaling_factor": 2.0,
    },
    "axk1": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1},
    "axk2": {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, **_INDEX, "gated_norm_rank": 4},
    # It keeps all keys of a text. Where it drops some, equal tokens tie, and torch breaks ties by a tensor's shape.
    "doge": {"keep_window_size": 512},
    "granite_swa": {**_GRANITE, **_WINDOW},
    "granitemoe_swa": {**_GRANITE, **_WINDOW, **_LOCAL_EXPERTS, "shared_intermediate_size": 48},
    "flint": {**_HEAD_SIZE, **_WINDOW, **_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "lfm2": {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"conv_L_cache": 3, **_EXPERTS, "num_dense_layers": 1},
    "qwen3_next": {**_HEAD_SIZE, **_EXPERTS, **_DELTA_RULE, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": {**_HEAD_SIZE, **_DELTA_RULE},
    "qwen3_5_moe_text": {**_HEAD_SIZE, **_EXPERTS, **_DELTA_RULE, "shared_expert_intermediate_size": 48},
    "olmo_hybrid": _DELTA_RULE,
    "kimi_linear": {
        **_LATENT, "q_lora_rank": None, "model_max_length": CONTEXT_LENGTH, "linear_head_dim": 16,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
    },
    "bailing_hybrid": {
        **{name: size for name, size in _LATENT.items() if name != "q_lora_rank"}, **_HEAD_SIZE,
        "model_max_length": CONTEXT_LENGTH, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "lfm3": {**_HEAD_SIZE, **_WINDOW, "conv_L_cache": 3},
    "bamba": {**_MAMBA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "granitemoehybrid": {**_MAMBA, **_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": 48},
    "jamba": {
        "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "falcon_h1": {
        **_MAMBA, **_HEAD_SIZE, "mamba_d_ssm": 128, "mamba_d_head": 32, "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "ssm_multipliers": [0.9, 0.8, 0.7, 1.1, 1.2],
        "mlp_multipliers": [0.9, 1.1],
    },
    "mamba": {"state_size": 8, "time_step_rank": 4, "residual_in_fp32": False},
    "mamba2": {
        "state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 16, "residual_in_fp32": False,
    },
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "residual_in_fp32": False},
    "nemotron_h": {
        **_HEAD_SIZE, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 16,
        "n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32, "num_experts_per_tok": 2,
        # Otherwise transformers' answers depend on how a text is cut.
        "time_step_min": 1e-9,
    },
    "mimo_v2_flash": {
        **_HEAD_SIZE, **_WINDOW, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_key_value_heads": 1,
    },
    "gemma4_text": {
        **_HEAD_SIZE, **_WINDOW, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 10.0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "falcon": {"alibi": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
}  # fmt: skip
MIXTURES = frozenset(name for name, facts in _FAMILY_FACTS.items() if "num_experts_per_tok" in facts)
"""Families whose tiny models have experts, of which a token gets some."""


# Beyond so many tokens, texts of `make_long_rope_checkpoint` have the long factors.
LONG_ROPE_LENGTH = 64


def make_long_rope_checkpoint(family: str, folder: Path, **config_changes: Any) -> Path:
    """A tiny checkpoint whose rotary embedding is `longrope`; see `make_tiny_checkpoint`."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * index for index in range(8)],
        "long_factor": [1.5 + index for index in range(8)], "original_max_position_embeddings": LONG_ROPE_LENGTH,
    }  # fmt: skip
    if family == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    if family == "phi3":
        config_changes = {"original_max_position_embeddings": LONG_ROPE_LENGTH, **config_changes}
    return make_tiny_checkpoint(family, folder, config_changes={"rope_parameters": rope, **config_changes})


# These seeds give weights with which an answer does not just repeat a token or two.
_SEEDS: Mapping[str, int] = {"apertus": 1, "gptj": 1, "persimmon": 1}
# Products of these families are multiplied once more by what states are read with: wider weights blow rounding up.
_SPREADS: Mapping[str, float] = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "jamba", "mamba"), 1.0),
    # Its queries and latents are scaled, in twice as many attentions as there are blocks.
    "longcat_flash": 1.3,
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
    facts = f"{family} {num_blocks} {seed} {sorted((config_changes or {}).items())}"
    name = f"tiny-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    made = made_once(name, lambda folder: _write_tiny(family, folder, num_blocks, seed, config_changes or {}))
    # Many tests ask for the same one, and some of them change its files.
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def tiny_config(family: str, num_blocks: int = 5, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny model of a family; see `make_tiny_checkpoint`."""
    facts = {**SHAPE, "num_hidden_layers": num_blocks, **_FAMILY_FACTS[family]}
    if family in _MIXED_FAMILIES:
        facts = {**facts, "layer_types": [_LAYER_TYPES[block % len(_LAYER_TYPES)] for block in range(num_blocks)]}
    if family in _RECURRENT_KINDS:
        kinds = (_RECURRENT_KINDS[family], "full_attention", _RECURRENT_KINDS[family], _RECURRENT_KINDS[family])
        facts = {**facts, "layer_types": [kinds[block % len(kinds)] for block in range(num_blocks)]}
    if family == "nemotron_h":
        blocks = ("moe", "linear_attention", "full_attention", "linear_attention", "mlp")
        facts = {**facts, "layers_block_type": [blocks[block % len(blocks)] for block in range(num_blocks)]}
    if family == "minimax_m3_vl_text":
        picking = ["full_attention", *["minimax_m3_sparse"] * (num_blocks - 1)]
        facts = {**facts, "layer_types": picking, "mlp_layer_types": ["dense", *["sparse"] * (num_blocks - 1)]}
    if family == "longcat_flash":
        # Each block has two attentions, which count as layers.
        facts = {**facts, "num_layers": num_blocks, "num_hidden_layers": 2 * num_blocks}
    if family == "bamba":
        facts = {**facts, "attn_layer_indices": list(range(1, num_blocks, 4))}
    if family in ("gpt2", "gptj", "gpt_bigcode", "codegen"):
        facts = {**facts, **_GPT2_SHAPE}
    if family == "laguna":
        facts = {**facts, "num_attention_heads_per_layer": [(4, 2)[block % 2] for block in range(num_blocks)]}
    if family == "gpt_neo":
        scopes = ("local", "global", "global")
        facts = {**facts, "attention_types": [[[scopes[block % len(scopes)]], 1] for block in range(num_blocks)]}
    library: Any = AutoConfig
    # A configuration may change the tables that it gets.
    return cast(PretrainedConfig, library.for_model(family, **copy.deepcopy({**facts, **changes})))


def _write_tiny(family: str, folder: Path, num_blocks: int, seed: int, config_changes: Mapping[str, Any]) -> None:
    tokenizer = make_tokenizer()
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    library: Any = AutoModelForCausalLM
    model = made_from(library, tiny_config(family, num_blocks, **{**config_changes, **tokens}))
    draw_weights(model, seed + _SEEDS.get(family, 0), _SPREADS.get(family, 1.6))
    generation: Any = GenerationConfig
    model.generation_config = generation(**{**tokens, "pad_token_id": tokenizer.eos_token_id})
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(num_bytes // 4, 100_000))
    tokenizer.save_pretrained(folder)


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


def made_from(library: Any, config: PretrainedConfig) -> Any:
    """A model of one of transformers' libraries; what it draws itself, and `draw_weights` keeps, is always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return library.from_config(config)


def draw_weights(model: torch.nn.Module, seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # No seed draws these otherwise. With values as small as these, a state remembers dozens of tokens.
                parameter.uniform_(-5.0, -2.0, generator=generator)
            elif parameter.dim() >= 2:
                fan_in = parameter.shape[-1]
                parameter.normal_(0.0, spread * fan_in**-0.5, generator=generator)
            else:
                # Norm weights and biases: near what they were, but none of them trivial.
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
