"""The table of GGUF's architectures: one row for each, with what its metadata and its tensors mean in transformers.

A row follows llama.cpp: its converter (`conversion/`) says what became of a checkpoint, and its loader (`src/models/`)
what a file leaves out. Rows name the inverse of what the converter did to a tensor; `transforms` has the inverses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final


class Transform(StrEnum):
    """What makes a tensor of transformers from stored ones. Without any, the rows of several follow one another."""

    QUERIES = "queries"
    """Rows of the first and the second half of a head alternate in the file."""
    KEYS = "keys"
    """The same of heads of keys."""
    LESS_ONE = "less one"
    """The file has one more."""
    LOGARITHM = "logarithm"
    """The file has minus the exponential."""
    LATENTS = "latents"
    """A matrix for keys and values of latents is two in the file; that for keys is transposed in each head."""
    COLUMNS = "columns"
    """Experts are transposed, and columns of several stored ones alternate."""
    HEADS = "heads"
    """The model has queries, keys, values and gates next to one another for each head of keys. The file has all
    queries, all keys and all values in a tensor, and all gates in another one; older files have one, as the model.
    """
    TILED = "tiled"
    """Heads of values stand together by their heads of keys, and by their numbers at each of these in the file."""
    TILED_VALUES = "tiled values"
    """TILED, for the rows that follow the queries and keys."""
    TILED_COLUMNS = "tiled columns"
    """TILED, for columns."""
    TILED_LOGARITHM = "tiled logarithm"
    """TILED, and then LOGARITHM."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the metadata and the tensors of an architecture mean.

    Attributes:
        model_type: the family of transformers.
        settings: fields of its configuration, by keys of the metadata, in addition to `SETTINGS`. Where a field is
            empty, the shapes of tensors say the same.
        implied: fields of its configuration, and their values in all files.
        unless_said: fields of its configuration, and their values in files that do not say them.
        names: paths in a block, by names of stored tensors, in addition to `NAMES`. A name that ends with `.bias`
            stands for a bias alone.
        transforms: how weights are made from stored ones, by paths in a block, or in the model.
        biases: names of stored tensors, by settings that are true if one of these has a bias in the file, else false.
        presences: as `biases`, for the tensors themselves.
        variants: rows for some files of this architecture: the first whose test of the file's settings is true.
        has_windows: whether blocks may have a window.
        pattern: every so many blocks, one has no window. None: all blocks have the same.
        scales_whole: whether only the rotary embedding of blocks without a window is scaled.
        rotates_part: whether a rotary embedding may rotate only some numbers of a head.
        gating: the number of the function that makes experts' weights from scores, in llama.cpp; None: its graph has
            just one.
        kinds: the kinds of blocks without and with keys and values, if there are both.
        joins_queries: whether queries, keys and values are the rows of one stored tensor and several of the model.
    """

    model_type: str
    settings: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    unless_said: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    presences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variants: tuple[tuple[Callable[[Mapping[str, Any]], bool], "Architecture"], ...] = ()
    has_windows: bool = False
    pattern: int | None = None
    scales_whole: bool = False
    rotates_part: bool = False
    gating: int | None = None
    kinds: tuple[str, str] | None = None
    joins_queries: bool = False

    @property
    def epsilon(self) -> str:
        """The field with the epsilon of norms, empty where the family has one epsilon for all models."""
        own = {**{_EPSILON: SETTINGS[_EPSILON]}, **self.settings}
        return own.get(_LAYER_EPSILON, own[_EPSILON])

    def variant(self, settings: Mapping[str, Any]) -> "Architecture":
        """The row for a file with these settings."""
        return next((row for is_one, row in self.variants if is_one(settings)), self)


_EPSILON: Final = "attention.layer_norm_rms_epsilon"
_LAYER_EPSILON: Final = "attention.layer_norm_epsilon"
SETTINGS: Final[Mapping[str, str]] = {
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", _EPSILON: "rms_norm_eps", "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "rope.freq_base": "rope_theta", "vocab_size": "vocab_size",
}  # fmt: skip
"""Fields of a configuration, by the keys that all architectures have."""
NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_sinks": "self_attn.sinks", "post_attention_norm":
    "post_attention_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj",
}  # fmt: skip
"""Paths in a block, by names of stored tensors. Where several stored ones make one, this is their order."""

_QKV: Final = ("attn_q", "attn_k", "attn_v")
_ATTENTION_BIAS: Final[Mapping[str, tuple[str, ...]]] = {"attention_bias": (*_QKV, "attn_output")}
_MLP_BIAS: Final[Mapping[str, tuple[str, ...]]] = {"mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}
_BIASES: Final = {**_ATTENTION_BIAS, **_MLP_BIAS}
_INTERLEAVED: Final = {"self_attn.q_proj": Transform.QUERIES, "self_attn.k_proj": Transform.KEYS}
_SOFTMAX: Final = 1
_SIGMOID: Final = 2

_EXPERTS: Final = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_LOCAL_EXPERTS: Final = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# Experts after some dense blocks, in a manner that began with DeepSeek.
_ROUTED: Final = {
    **_EXPERTS, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "expert_shared_feed_forward_length": "",
}  # fmt: skip
_ROUTED_UNLESS_SAID: Final = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "first_k_dense_replace": 0,
    "n_shared_experts": 0,
}  # fmt: skip
_YARN: Final = dict.fromkeys((f"rope.scaling.yarn_{name}" for name in ("log_multiplier", "beta_fast", "beta_slow")), "")
_LATENTS: Final = {
    "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank", "attention.key_length": "",
    "attention.key_length_mla": "", "attention.value_length": "", "attention.value_length_mla": "v_head_dim",
}  # fmt: skip
_LAYER_NORMS: Final = {_LAYER_EPSILON: "layer_norm_eps"}
_SHARED_EXPERT: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_SCALES: Final = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_FOUR_NORMS: Final = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS: Final = dict.fromkeys(
    ("input_layernorm", "post_attention_layernorm", "model.norm", "pre_feedforward_layernorm",
     "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    Transform.LESS_ONE,
)  # fmt: skip

_MISTRAL: Final = Architecture("mistral", transforms=_INTERLEAVED, has_windows=True)
_MIXTRAL: Final = Architecture(
    "mixtral", {**_LOCAL_EXPERTS, "expert_feed_forward_length": ""}, transforms=_INTERLEAVED, has_windows=True,
    unless_said={"sliding_window": None},
)  # fmt: skip
_LLAMA: Final = Architecture(
    "llama", transforms=_INTERLEAVED, biases=_BIASES,
    variants=(
        (lambda settings: "expert_count" in settings, _MIXTRAL),
        (lambda settings: "attention.sliding_window" in settings, _MISTRAL),
    ),
)  # fmt: skip
_DEEPSEEK_V2: Final = Architecture(
    "deepseek_v2", {**_ROUTED, **_LATENTS, **_YARN}, unless_said={**_ROUTED_UNLESS_SAID, "q_lora_rank": None},
    transforms={"self_attn.kv_b_proj": Transform.LATENTS}, gating=_SOFTMAX,
)  # fmt: skip
_DEEPSEEK_V3: Final = replace(_DEEPSEEK_V2, model_type="deepseek_v3", gating=_SIGMOID)
_KIMI_LINEAR: Final = Architecture(
    "kimi_linear",
    {
        **_ROUTED, **_LATENTS, "expert_count": "num_experts", "expert_used_count": "num_experts_per_token",
        "expert_shared_count": "num_shared_experts", "expert_group_count": "num_expert_group",
        "expert_weights_norm": "moe_renormalize", "kda.head_dim": "linear_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
    },
    unless_said={
        "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0, "num_shared_experts": 0, "q_lora_rank": None,
    },
    names={
        **{f"ssm_conv1d_{name}": "self_attn.conv1d" for name in "qkv"}, "ssm_norm": "self_attn.o_norm",
        "ssm_f_a": "self_attn.forget_gate.f_a_proj", "ssm_f_b": "self_attn.forget_gate.f_b_proj",
        "ssm_a": "self_attn.forget_gate.A_log", "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
        "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj", "ssm_beta": "self_attn.b_proj",
    },
    transforms={
        "self_attn.kv_b_proj": Transform.LATENTS, "self_attn.forget_gate.A_log": Transform.LOGARITHM,
    },
    gating=_SIGMOID, kinds=("linear_attention", "full_attention"),
)  # fmt: skip
_GRANITE_MOE_NAMES: Final = {
    "ffn_gate_inp": "block_sparse_moe.router", "ffn_gate_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_up_exps": "block_sparse_moe.experts.gate_up_proj", "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear", "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
_GRANITE_MOE: Final = Architecture(
    "granitemoe", {**_SCALES, **_LOCAL_EXPERTS}, names=_GRANITE_MOE_NAMES, transforms=_INTERLEAVED,
    biases=_ATTENTION_BIAS,
)  # fmt: skip
_LFM2: Final = Architecture(
    "lfm2", {_EPSILON: "norm_eps", "shortconv.l_cache": "conv_L_cache"}, {"block_auto_adjust_ff_dim": False},
    names={
        "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm", "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
    },
    kinds=("conv", "full_attention"),
)  # fmt: skip
_QWEN3_NEXT: Final = Architecture(
    "qwen3_next",
    {
        **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads", "ssm.inner_size": "",
    },
    {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    biases=_ATTENTION_BIAS,
    names={
        **_SHARED_EXPERT, "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
        "ssm_ba": "linear_attn.in_proj_ba",
        **dict.fromkeys(("ssm_in", "attn_qkv", "attn_gate"), "linear_attn.in_proj_qkvz"),
    },
    transforms={
        **_GEMMA_NORMS, "linear_attn.A_log": Transform.LOGARITHM, "linear_attn.in_proj_qkvz": Transform.HEADS,
    },
    rotates_part=True,
    kinds=("linear_attention", "full_attention"),
)  # fmt: skip
_QWEN3_5_MOE: Final = replace(
    _QWEN3_NEXT, model_type="qwen3_5_moe_text", implied={},
    names={
        **_QWEN3_NEXT.names, "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
        "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    },
    transforms={
        **_GEMMA_NORMS, "linear_attn.A_log": Transform.TILED_LOGARITHM, "linear_attn.in_proj_qkv":
        Transform.TILED_VALUES, "linear_attn.conv1d": Transform.TILED_VALUES, "linear_attn.out_proj":
        Transform.TILED_COLUMNS,
        **dict.fromkeys((f"linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "in_proj_z", "dt_bias")),
                        Transform.TILED),
    },
)  # fmt: skip
_OLMO2: Final = Architecture("olmo2", names={"post_ffw_norm": "post_feedforward_layernorm"}, biases=_ATTENTION_BIAS)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
        names=_SHARED_EXPERT,
    ),
    "qwen3": Architecture("qwen3", biases=_ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "qwen3_moe", _EXPERTS, {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        biases=_ATTENTION_BIAS,
    ),
    "qwen3next": _QWEN3_NEXT,
    "qwen35": replace(
        _QWEN3_5_MOE, model_type="qwen3_5_text",
        settings={key: name for key, name in _QWEN3_NEXT.settings.items() if not key.startswith("expert_")},
    ),
    "qwen35moe": _QWEN3_5_MOE,
    "gemma": Architecture("gemma", transforms=_GEMMA_NORMS, biases=_ATTENTION_BIAS),
    "gemma2": Architecture(
        "gemma2",
        {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        unless_said={"attn_logit_softcapping": None, "final_logit_softcapping": None},
        names=_FOUR_NORMS, transforms=_GEMMA_NORMS, biases=_ATTENTION_BIAS, has_windows=True, pattern=2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        names=_FOUR_NORMS, transforms=_GEMMA_NORMS, biases=_ATTENTION_BIAS, has_windows=True, pattern=6,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", {**_LOCAL_EXPERTS, "expert_feed_forward_length": ""},
        names={
            "ffn_gate_inp": "mlp.router", "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        transforms=dict.fromkeys(
            ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"), Transform.COLUMNS
        ),
        unless_said={"rope_scaling": {"rope_type": "default"}}, has_windows=True, pattern=2,
    ),
    "deepseek2": replace(
        _DEEPSEEK_V3,
        variants=((lambda settings: "expert_count" in settings and settings.get("expert_gating_func", 1) == _SOFTMAX,
                   _DEEPSEEK_V2),),
    ),
    "glm4": Architecture(
        "glm4",
        names={
            "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        biases={"attention_bias": _QKV}, rotates_part=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe", _ROUTED, unless_said=_ROUTED_UNLESS_SAID, biases={"attention_bias": _QKV},
        presences={"use_qk_norm": ("attn_q_norm",)}, rotates_part=True, gating=_SIGMOID,
    ),
    "bailingmoe2": Architecture(
        "glm4_moe", _ROUTED, {"use_qk_norm": True}, unless_said=_ROUTED_UNLESS_SAID, biases={"attention_bias": _QKV},
        rotates_part=True, gating=_SIGMOID, joins_queries=True,
    ),
    "phi3": Architecture(
        "phi3", unless_said={"sliding_window": None}, rotates_part=True, has_windows=True,
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "command-r": Architecture(
        "cohere", {**_LAYER_NORMS, "logit_scale": "logit_scale"}, unless_said={"logit_scale": 1.0},
        biases=_ATTENTION_BIAS, presences={"use_qk_norm": ("attn_q_norm",)},
    ),
    "cohere2": Architecture(
        "cohere2", {**_LAYER_NORMS, "logit_scale": "logit_scale"}, unless_said={"logit_scale": 1.0},
        biases=_ATTENTION_BIAS, has_windows=True, pattern=4,
    ),
    "granite": Architecture("granite", _SCALES, transforms=_INTERLEAVED, biases=_BIASES),
    "granitemoe": replace(
        _GRANITE_MOE,
        variants=((lambda settings: "expert_shared_feed_forward_length" in settings,
                   replace(_GRANITE_MOE, model_type="granitemoeshared", settings={
                       **_GRANITE_MOE.settings, "expert_shared_feed_forward_length": "shared_intermediate_size"
                   })),),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {
            **_SCALES, **_LOCAL_EXPERTS, "expert_shared_feed_forward_length": "shared_intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads", "ssm.inner_size": "",
        },
        unless_said={"num_local_experts": 0, "num_experts_per_tok": 0},
        names={
            **_GRANITE_MOE_NAMES, "ffn_gate": "shared_mlp.input_linear", "ffn_up": "shared_mlp.input_linear",
            "ffn_down": "shared_mlp.output_linear", "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d",
            "ssm_dt.bias": "mamba.dt_bias", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        transforms={**_INTERLEAVED, "mamba.A_log": Transform.LOGARITHM}, biases=_ATTENTION_BIAS,
        kinds=("linear_attention", "full_attention"),
    ),
    "olmo": Architecture(
        "olmo", {"attention.clamp_kqv": "clip_qkv", _LAYER_EPSILON: ""}, transforms=_INTERLEAVED,
    ),
    "olmo2": replace(
        _OLMO2,
        variants=((lambda settings: "attention.sliding_window" in settings,
                   replace(_OLMO2, model_type="olmo3", has_windows=True, pattern=4, scales_whole=True)),),
    ),
    "olmoe": Architecture("olmoe", _EXPERTS, {"norm_topk_prob": False}),
    "smollm3": Architecture(
        "smollm3", implied={"no_rope_layer_interval": 4, "use_sliding_window": False}, transforms=_INTERLEAVED,
        biases=_BIASES,
    ),
    "seed_oss": Architecture(
        "seed_oss", biases={"attention_bias": _QKV, "attention_out_bias": ("attn_output",), **_MLP_BIAS}
    ),
    "exaone4": Architecture(
        "exaone4", unless_said={"sliding_window": None}, names={"post_ffw_norm": "post_feedforward_layernorm"},
        has_windows=True, pattern=4,
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        {**_ROUTED, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts"},
        unless_said=_ROUTED_UNLESS_SAID, has_windows=True, pattern=4, gating=_SIGMOID,
    ),
    "mistral3": Architecture(
        "mistral", unless_said={"sliding_window": None}, transforms=_INTERLEAVED,
        variants=((lambda settings: "attention.temperature_scale" in settings,
                   Architecture("ministral3", {"attention.temperature_scale": "", **_YARN}, transforms=_INTERLEAVED)),),
    ),
    "minimax-m2": Architecture(
        "minimax_m2", {**_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"}, rotates_part=True, gating=_SIGMOID,
    ),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": (*_QKV, "attn_output", "ffn_up")}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index", "interleave_moe_layer_step": "moe_layer_interval",
            "expert_shared_feed_forward_length": "",
        },
        {"moe_layer_end_index": -1},
        unless_said={"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
        names={"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
        biases={"use_bias": (*_QKV, "attn_output", "ffn_up")},
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", biases=_ATTENTION_BIAS, rotates_part=False,
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {"expert_count": "num_experts", "expert_used_count": "moe_topk", "expert_feed_forward_length":
         "intermediate_size", "expert_shared_feed_forward_length": "", "expert_shared_count": ""},
        biases=_ATTENTION_BIAS,
        names={
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2, model_type="lfm2_moe",
        settings={**_LFM2.settings, **_EXPERTS, "leading_dense_block_count": "num_dense_layers"},
        implied={"norm_topk_prob": True, "use_expert_bias": True}, unless_said={"num_dense_layers": 0},
        names={
            **_LFM2.names, "ffn_gate_inp": "feed_forward.gate", "ffn_gate_exps": "feed_forward.experts.gate_up_proj",
            "ffn_up_exps": "feed_forward.experts.gate_up_proj", "ffn_down_exps": "feed_forward.experts.down_proj",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        gating=_SIGMOID,
    ),
    "kimi-linear": _KIMI_LINEAR,
    "arcee": Architecture("arcee", transforms=_INTERLEAVED, biases=_BIASES),
    "starcoder2": Architecture(
        "starcoder2", {_LAYER_EPSILON: "norm_epsilon"}, unless_said={"sliding_window": None},
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases={"use_bias": (*_QKV, "attn_output", "ffn_up")},
    ),
    "dots1": Architecture(
        "dots1", _ROUTED, unless_said={**_ROUTED_UNLESS_SAID, "sliding_window": None}, biases=_ATTENTION_BIAS,
        gating=_SIGMOID,
    ),
}  # fmt: skip
"""The rows, by llama.cpp's names of architectures."""
