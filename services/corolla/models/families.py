"""The one table of model families.

`config.model_type` names a family. Layers, masks and rotary embeddings are the family's own code in `transformers`; the
table only gives the paths of the parts of the family's base model, so that a server can keep some layers. The paths are
relative to the base model (`LlamaModel`, not `LlamaForCausalLM`).

A span does not include the edges: embedding (with its scale, learned positions or layer norm) before block 0; final
norm, head and logit cap or scale after the last block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import transformers
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corolla.chassis.errors import UnsupportedFamily

# transformers lists the causal model of this family only among those that get texts and images.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("mistral4", "Mistral4ForCausalLM")

# The kinds of layers that keep a recurrent state, and those that keep no keys and values, as configurations name them.
RECURRENT_KINDS = frozenset({"conv", "linear_attention", "hybrid"})
PAGELESS_KINDS = frozenset({"conv", "linear_attention", "mlp", "moe"})

# A rotary embedding with other factors for long texts. transformers chooses factors by the longest position of a call.
LONG_ROPE = "longrope"

# How configurations name the number of a token's experts.
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"
)  # fmt: skip

# Rotary embeddings that remember the longest position of all calls, so that sessions would change each other's output.
STATEFUL_ROPE = frozenset({"dynamic"})


class KeyShape(NamedTuple):
    """What a block keeps of a token: keys, and as many values."""

    num_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class FusedBlocks:
    """How blocks rotate that have the shape which the module `fused` implements.

    Attributes:
        rotates_pairs: whether neighbours in a head are rotated together, not numbers half the rotary size apart.
        has_paired_angles: whether the family's rotary embedding itself repeats each angle for a pair, not for the two
            halves of a head, if it has `rotates_pairs`.
        rotates_windows: whether only layers with a window have a rotary embedding.
        norms_rotated: whether norms of queries and keys follow the rotary embedding.
        scales_queries: whether the rotary embedding's `llama_4_scaling_beta` makes the queries of far tokens larger.
    """

    rotates_pairs: bool = False
    has_paired_angles: bool = False
    rotates_windows: bool = False
    norms_rotated: bool = False
    scales_queries: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """What blocks keep of earlier tokens.

    Attributes:
        caches_latents: whether the cache holds latents, of which keys and values are products; see `attention/latents`.
        picks_tokens: whether a token attends to those that an index picks, whose keys the cache holds, too.
        continues_singly: whether the family's code ignores an earlier recurrent state in a call of several tokens, so
            that tokens after a session's first call run one by one.
        cache_argument: the name of the cache among the arguments of the base model's forward.
        keeps_tokens: whether some blocks keep keys and values.
        keeps_states: whether some blocks keep a recurrent state; see `recurrent_layers`.
        packs_states: whether rows share a call on CPUs although blocks keep states; see `compute/state_blocks`.
        attentions: how many attentions a block has. Each keeps keys and values of its own, and counts as a layer in
            the cache, in the family's numbers of layers, and in `num_hidden_layers`.
    """

    caches_latents: bool = False
    picks_tokens: bool = False
    continues_singly: bool = False
    cache_argument: str = "past_key_values"
    keeps_tokens: bool = True
    keeps_states: bool = False
    packs_states: bool = False
    attentions: int = 1


@dataclass(frozen=True, slots=True)
class Family:
    """The paths of the parts of a family's base model, and the family's properties.

    Attributes:
        model_type: the value of `config.model_type`.
        layers: the ModuleList of blocks.
        embedding: the token embedding; not part of a span.
        norm: the final norm; not part of a span.
        stored_as: what some names in files begin with, and what these begin with in the model; None: they are alike.
        bypassed: further modules that run before block 0 and map hidden states to hidden states; a span skips them.
        learned_positions: the module that is added to the embedding by position, or None.
        unit_scalars: attributes of the base model that multiply the embedding; a span sets them to 1.0.
        unit_settings: flags of the configuration by which the base model scales the embedding; a span unsets them.
        head_scalars: attributes of the base model that multiply the logits.
        packs_rows: whether attention goes through transformers' AttentionInterface, so that rows of different sessions
            may be packed into one call.
        read_weights: names of linear layers whose weights are read without calling the layers, or which see the cached
            latents of earlier tokens, too. They stay plain, and no adapter changes them.
        has_rope_alpha: whether a rotary embedding of the type `dynamic` keeps no state if it has an `alpha`.
        begins_anew: whether `generate()` computes the whole text again once the text is too long for the short factors
            of a longrope embedding. In other families, `generate()` keeps the earlier keys.
        fused: how the module `fused` computes the blocks; None: they have another shape.
        past: what blocks keep of earlier tokens.
        required: the values that fields of the configuration must have, since the other attributes hold only for these.
        set_in_blocks: attributes of modules in blocks that a span sets to fields of the configuration of the same name.
    """

    model_type: str
    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    stored_as: tuple[str, str] | None = None
    bypassed: tuple[str, ...] = ()
    learned_positions: str | None = None
    unit_scalars: tuple[str, ...] = ()
    unit_settings: tuple[str, ...] = ()
    head_scalars: tuple[str, ...] = ()
    packs_rows: bool = True
    read_weights: tuple[str, ...] = ()
    has_rope_alpha: bool = False
    begins_anew: bool = False
    fused: FusedBlocks | None = None
    past: Past = Past()
    required: Mapping[str, Any] = field(default_factory=dict)
    set_in_blocks: tuple[str, ...] = ()


FUSED = FusedBlocks()

_MAMBA = Family(
    "mamba",
    embedding="embeddings",
    norm="norm_f",
    past=Past(cache_argument="cache_params", continues_singly=True, keeps_tokens=False, keeps_states=True),
    read_weights=("dt_proj",),
)

_FAMILIES = (
    *(
        Family(name, fused=FUSED)
        for name in (
            "apertus", "arcee", "cwm", "dots1", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss",
            "hy_v3", "jais2", "llama", "minimax_m2", "ministral", "mistral", "mixtral", "nemotron", "olmo2", "olmo3",
            "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
            "starcoder2", "vaultgemma",
        )
    ),
    *(
        Family(name, fused=FUSED, unit_scalars=("embedding_multiplier",))
        for name in ("granite", "granitemoe", "hyperclovax")
    ),
    *(
        Family(name, fused=FusedBlocks(rotates_pairs=True))
        for name in ("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
    ),
    *(Family(name, fused=FusedBlocks(rotates_windows=True)) for name in ("exaone4", "exaone_moe")),
    Family("afmoe", unit_settings=("mup_enabled",), fused=FusedBlocks(rotates_windows=True)),
    *(
        Family(name, has_rope_alpha=True, fused=FusedBlocks(norms_rotated=True))
        for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    ),
    Family("ministral3", fused=FusedBlocks(scales_queries=True)),
    Family("cohere", fused=FusedBlocks(rotates_pairs=True, has_paired_angles=True)),
    Family("cohere2", fused=FusedBlocks(rotates_pairs=True, has_paired_angles=True, rotates_windows=True)),
    Family("phi", norm="final_layernorm", fused=FUSED),
    *(Family(name, begins_anew=True, fused=FUSED) for name in ("phi3", "phimoe")),
    *(
        Family(name)
        for name in ("aria_text", "bitnet", "cohere2_moe", "flint", "jetmoe", "kolibri1", "laguna", "mellum", "olmo")
    ),
    *(
        Family(name, unit_scalars=("embedding_multiplier",))
        for name in ("granite_swa", "granitemoe_swa", "granitemoeshared")
    ),
    Family("biogpt", norm="layer_norm", learned_positions="embed_positions"),
    Family("dbrx", layers="blocks", embedding="wte", norm="norm_f"),
    Family("gpt_neox", embedding="embed_in", norm="final_layer_norm"),
    *(
        Family(name, layers="h", embedding="wte", norm="ln_f", learned_positions="wpe")
        for name in ("gpt2", "gpt_bigcode")
    ),
    Family(
        "opt",
        layers="decoder.layers",
        embedding="decoder.embed_tokens",
        norm="decoder.final_layer_norm",
        learned_positions="decoder.embed_positions",
        # Checkpoints with other values, such as opt-350m, have no final norm.
        required={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
    ),
    Family("persimmon", norm="final_layernorm"),
    # This family attends within fixed chunks, which only its own masks tell, and asks the cache for positions.
    Family("llama4_text", packs_rows=False),
    # Blocks of these families differ in the heads of their keys; see `key_shapes`.
    Family(
        "gemma4_text",
        packs_rows=False,
        # Otherwise blocks take inputs made from token ids, or keys and values of other blocks.
        required={"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    Family("mimo_v2_flash", packs_rows=False),
    *(Family(name, layers="h", embedding="wte", norm="ln_f", packs_rows=False) for name in ("codegen", "gptj")),
    Family(
        "bloom",
        layers="h",
        embedding="word_embeddings",
        norm="ln_f",
        bypassed=("word_embeddings_layernorm",),
        packs_rows=False,
    ),
    # This family's mask picks the keys that each token sees, and packed calls do not use the mask.
    Family("doge", packs_rows=False),
    Family("falcon", layers="h", embedding="word_embeddings", norm="ln_f", packs_rows=False),
    Family("gpt_neo", layers="h", embedding="wte", norm="ln_f", learned_positions="wpe", packs_rows=False),
    Family("gpt_neox_japanese", embedding="embed_in", norm="final_layer_norm", packs_rows=False),
    Family("mpt", layers="blocks", embedding="wte", norm="norm_f", packs_rows=False),
    Family("xglm", norm="layer_norm", learned_positions="embed_positions", packs_rows=False),
    *(
        Family(name, past=Past(caches_latents=True), read_weights=("kv_b_proj",))
        for name in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", "youtu")
    ),
    # Its router reads the weight of a linear layer without calling it.
    Family("longcat_flash", past=Past(caches_latents=True, attentions=2), read_weights=("kv_b_proj", "classifier")),
    *(
        # Only the family's own code has the index.
        Family(
            name,
            packs_rows=False,
            past=Past(caches_latents=True, picks_tokens=True),
            read_weights=("kv_b_proj",),
        )
        for name in ("axk2", "deepseek_v32", "glm_moe_dsa")
    ),
    Family("minimax_m3_vl_text", packs_rows=False, past=Past(picks_tokens=True)),
    Family(
        "bailing_hybrid",
        stored_as=("model.word_embeddings.", "model.embed_tokens."),
        past=Past(caches_latents=True, keeps_states=True),
        read_weights=("kv_b_proj",),
    ),
    Family(
        "kimi_linear",
        past=Past(caches_latents=True, keeps_states=True, packs_states=True),
        read_weights=("kv_b_proj",),
    ),
    *(
        Family(name, past=Past(keeps_states=True, packs_states=True))
        for name in ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
    ),
    *(
        Family(name, norm="embedding_norm", past=Past(keeps_states=True, packs_states=True))
        for name in ("lfm2", "lfm2_moe", "lfm3")
    ),
    Family("bamba", norm="final_layernorm", past=Past(keeps_states=True, packs_states=True)),
    Family(
        "nemotron_h",
        embedding="embeddings",
        norm="norm_f",
        stored_as=("backbone.", "model."),
        past=Past(keeps_states=True, packs_states=True),
        # transformers holds the time steps of a call to `time_step_min` unless the call has one token, so its answers
        # depend on how a text is cut. The publisher's code has no such bound.
        set_in_blocks=("time_step_limit",),
    ),
    Family(
        "granitemoehybrid",
        unit_scalars=("embedding_multiplier",),
        past=Past(keeps_states=True, packs_states=True),
    ),
    Family(
        "jamba", norm="final_layernorm", past=Past(continues_singly=True, keeps_states=True), read_weights=("dt_proj",)
    ),
    Family(
        "falcon_h1",
        norm="final_layernorm",
        unit_scalars=("embedding_multiplier",),
        head_scalars=("lm_head_multiplier",),
        past=Past(keeps_states=True, packs_states=True),
    ),
    _MAMBA,
    replace(_MAMBA, model_type="falcon_mamba"),
    replace(
        _MAMBA,
        model_type="mamba2",
        past=replace(_MAMBA.past, continues_singly=False, packs_states=True),
        read_weights=(),
    ),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES}

UNSERVED: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma3n_text", "gemma4_unified_text"),
        "blocks take inputs made from token ids, and keys and values of other blocks",
    ),
    **dict.fromkeys(("zamba", "zamba2"), "blocks far apart share one block's weights"),
    "deepseek_v4": "attention to runs of tokens that an index picks, and blocks that hand on several tensors",
    **dict.fromkeys(("minimax", "rwkv", "xlstm"), "a cache of their own kind"),
    **dict.fromkeys(
        ("hrm_text", "hy_v4", "inkling_text", "inkling2_text", "qwen4_exp_text", "zaya"),
        "blocks hand on several tensors, run again, or keep several states",
    ),
    "nanochat": "one norm runs before the first block, too",
    "diffllama": "it draws random numbers as it is built",
    **dict.fromkeys(("ctrl", "openai-gpt", "xlnet"), "no cache, or a unique one"),
    **dict.fromkeys(
        ("blt", "cohere_compass_text", "dots3_note_text", "modernbert-decoder", "recurrent_gemma"), "not tried yet"
    ),
}  # fmt: skip
"""What stands in the way of decoder-only families of transformers."""


def family_of(config: PretrainedConfig) -> Family:
    """The table's row for a configuration.

    Raises:
        UnsupportedFamily: the table has no such row, or a chain cannot serve this configuration.
    """
    model_type = str(config.model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedFamily(why_unsupported(config.to_dict()))
    unknown = sorted(set(rope_types(config)) - {"default", *ROPE_INIT_FUNCTIONS})
    if unknown:
        # All positions of a text are the same in each of its sections.
        advice = "'default', which is the same for text" if unknown[0] == "mrope" else "one that transformers knows"
        raise UnsupportedFamily(
            f"{model_type!r} models of transformers have no rotary embedding of the type {unknown[0][:40]!r}; set "
            f"rope_type in config.json to {advice}."
        )
    stateful = sorted(set(rope_types(config)) & STATEFUL_ROPE)
    if stateful and not (family.has_rope_alpha and config.rope_parameters.get("alpha")):
        raise UnsupportedFamily(
            f"The rotary embedding {stateful[0]!r} keeps state between calls, so sessions would disturb each other; "
            "set another rope_type (for example 'linear' or 'yarn') in config.json."
        )
    for name, value in family.required.items():
        if getattr(config, name, value) != value:
            raise UnsupportedFamily(
                f"Checkpoints of the family {model_type!r} are supported only with {name}={value}; choose another one."
            )
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        raise UnsupportedFamily(
            f"Some blocks of this {model_type} model attend to the tokens that an earlier block has picked "
            "(indexer_types), which is not served; choose another checkpoint."
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedFamily("Only decoder-only models are supported; this checkpoint has an encoder.")
    return family


def why_unsupported(stored: Mapping[str, Any]) -> str:
    """The sentence about a model whose type the table lacks: what its configuration lets its owner do.

    Args:
        stored: the content of `config.json`.
    """
    model_type = str(stored.get("model_type") or "")[:60]
    unsupported = f"Models of type {model_type!r} are not supported"
    if not model_type:
        unsupported = "config.json names no model_type"
    own = [str(each) for each in stored.get("architectures") or () if isinstance(each, str)]
    for name in FAMILIES:
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) in own and name != model_type:
            return (
                f"{unsupported}, but config.json names the architecture of {name!r}; set model_type to it there if its "
                "tensors and settings are the same."
            )
    why = UNSERVED.get(model_type)
    if why is None and model_type and model_type not in CONFIG_MAPPING:
        why = f"transformers {transformers.__version__} has no class for it, though a later release may"
    if why is not None:
        unsupported = f"{unsupported}: {why}"
    return f"{unsupported}; docs/families.md lists the {len(FAMILIES)} types that are."


def packs_rows(family: Family, config: PretrainedConfig) -> bool:
    """Rows of different sessions may be packed into one call of a model with this configuration."""
    is_call_wide = LONG_ROPE in rope_types(config) and not family.begins_anew
    return family.packs_rows and not is_call_wide and not recurrent_layers(config)


def short_factor_length(config: PretrainedConfig) -> int | None:
    """How many tokens a text may have with the short factors of a longrope embedding; None: there is no longrope.

    All tokens of a longer text have the long factors, from the first one on.
    """
    if LONG_ROPE not in rope_types(config):
        return None
    lengths = [
        int(parameters["original_max_position_embeddings"])
        for parameters in (config.rope_parameters, *config.rope_parameters.values())
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == LONG_ROPE
    ]
    return min(lengths)


def stretched_lengths(config: PretrainedConfig, stated: int) -> list[int]:
    """How many tokens each rotary embedding is made for that says by which factor it stretches an original length.

    Families with a rotary embedding for each kind of layer, such as Gemma 3, state their length after `linear` has
    stretched it.

    Args:
        stated: the length that the configuration states; the original one unless the rotary embedding names another.
    """
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    lengths: list[int] = []
    for each in (parameters, *parameters.values()):
        if not isinstance(each, Mapping) or each.get("rope_type") not in ("yarn", "linear"):
            continue
        original, factor = each.get("original_max_position_embeddings", stated), each.get("factor")
        is_usable = isinstance(original, int | float) and isinstance(factor, int | float)
        if is_usable and (each is parameters or each["rope_type"] == "yarn"):
            lengths.append(int(original * factor))
    return lengths


def recurrent_layers(config: PretrainedConfig) -> frozenset[int]:
    """Indices of a configuration's layers that keep a recurrent state; most of these layers have no keys and values.

    A state belongs to one position, so a session of such a model can go back only to positions with a stored state.
    """
    return _layers_of_kinds(config, RECURRENT_KINDS)


def pageless_layers(config: PretrainedConfig) -> frozenset[int]:
    """Indices of a configuration's layers that keep no keys and values."""
    return _layers_of_kinds(config, PAGELESS_KINDS)


def num_blocks(config: PretrainedConfig) -> int:
    """The number of a model's blocks."""
    return int(config.num_hidden_layers) // FAMILIES[str(config.model_type)].past.attentions


def key_shapes(config: PretrainedConfig) -> tuple[KeyShape, ...]:
    """What blocks keep of a token, for each kind of them, where blocks differ in that; otherwise nothing."""
    facts: Mapping[str, Any] = config.to_dict()
    if config.model_type == "mimo_v2_flash":
        # Blocks with a window have twice as many.
        heads, sizes = facts["num_key_value_heads"], (facts["head_dim"], facts["v_head_dim"])
        return KeyShape(heads, *sizes), KeyShape(2 * heads, *sizes)
    others = (facts.get("per_layer_config") or {}).values()
    kinds = ({**facts, **other} for other in ({}, *others)) if others else ()
    return tuple({KeyShape(each["num_key_value_heads"], each["head_dim"], each["head_dim"]): None for each in kinds})


def index_head_size(config: PretrainedConfig) -> int:
    """The size of the heads among which the keys of an index are, where `Past.picks_tokens` holds."""
    facts: Mapping[str, Any] = config.to_dict()
    return max(int(facts.get("qk_rope_head_dim") or facts["head_dim"]), int(facts["index_head_dim"]))


def _layers_of_kinds(config: PretrainedConfig, kinds: frozenset[str]) -> frozenset[int]:
    given = getattr(config, "layer_types", None) or ()
    return frozenset(index for index, kind in enumerate(given) if kind in kinds)


def rope_types(config: PretrainedConfig) -> Iterator[str]:
    """Yields the types of a configuration's rotary embeddings: one, or one for each kind of layer."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for inner in parameters.values():
        if isinstance(inner, Mapping) and "rope_type" in inner:
            yield str(inner["rope_type"])


_MAX_REASON = 200


def short_reason(error: Exception) -> str:
    """What an error of transformers says, in one line that is not long."""
    return " ".join(str(error).split())[:_MAX_REASON]


def code_failed(config: PretrainedConfig, what: str, error: Exception) -> str:
    """The sentence for a configuration with which the family's code fails.

    Args:
        what: what the code does, such as "cannot build what config.json describes".
    """
    return (
        f"The code of {config.model_type} models in transformers {what} "
        f"({type(error).__name__}: {short_reason(error)}); correct it."
    )
