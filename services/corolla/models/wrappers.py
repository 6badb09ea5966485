"""Finds the language model in a checkpoint of a model that also sees or hears. Pure.

Such a checkpoint has the settings of its language model in a table of `config.json`, and a prefix before the names of
its tensors, which differs by publisher and by the release of transformers that saved it. Here is the one rule for both.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from corolla.chassis.errors import CheckpointError
from corolla.models.families import FAMILIES

ALIASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bailing_moe_v2": {"model_type": "glm4_moe", "use_qk_norm": True},
    "glm4v_moe_text": {"model_type": "glm4_moe", "use_qk_norm": False},
    "kimi_k2": {"model_type": "deepseek_v3"},
    "qwen2_5_vl": {"model_type": "qwen2"},
    "qwen3_omni_moe_text": {"model_type": "qwen3_moe"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_vl_text": {"model_type": "qwen3"},
}
"""Model types whose texts another family's code computes, bit for bit, with that family's settings.

Files of `qwen2_5_vl` may have the settings of the language model in no table of their own. transformers has no class
for `bailing_moe_v2`; its publisher's code computes the same.
"""

# Settings by the names of these types, and by the names of their families.
_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "bailing_moe_v2": {
        "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
    },
}  # fmt: skip
# What settings of these types must be for the family's code to compute the same.
_REQUIRED: Final[Mapping[str, Mapping[str, Any]]] = {
    "bailing_moe_v2": {"score_function": "sigmoid", "use_bias": False, "use_qk_norm": True},
}
# Parts of names in the files of `bailing_moe_v2`.
_BAILING_PARTS: Final = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.key_layernorm.": ".self_attn.k_norm.",
    ".attention.query_layernorm.": ".self_attn.q_norm.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}
# Its files have queries, keys and values as the rows of one tensor.
_JOINED: Final = ".attention.query_key_value."
_JOINED_PARTS: Final = ("q_proj", "k_proj", "v_proj")


class Form(enum.Enum):
    """The form in which files hold the tensors of a language model.

    Attributes:
        USUAL: by the names and in the shapes of transformers, perhaps with a wrapper's prefix.
        MISTRAL: by the names, and with the order of rotated rows, of Mistral's own format.
        JOINED: queries, keys and values in one tensor, by the names of `bailing_moe_v2`; see `split_names`.
        TRANSPOSED: the matrices of experts may be transposed, as transformers' conversion table says.
    """

    USUAL = enum.auto()
    MISTRAL = enum.auto()
    JOINED = enum.auto()
    TRANSPOSED = enum.auto()


_FORMS: Final = {"bailing_moe_v2": Form.JOINED, "qwen3_vl_moe_text": Form.TRANSPOSED}

_TEXT_CONFIGS: Final = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where configurations keep that of the language model."""

# Settings of the whole model that hold for its language model, unless that says otherwise.
_SHARED: Final = (
    "bos_token_id", "compression_config", "eos_token_id", "pad_token_id", "quantization", "quantization_config",
)  # fmt: skip
_MOST_NESTED: Final = 3
# The parts of a name that only say that what follows belongs to the language model.
_PREFIX: Final = re.compile(r"(?:(?:model|thinker|language_model|text_model|language|llm)\.)+")
_INNER_PREFIX: Final = re.compile(r"(?:thinker|language_model|text_model|language|llm)\.")
# No text reaches these parts: they see, hear, speak, or lead from there to the language model.
_OTHER_PART: Final = re.compile(
    r"(?:.*\.)?(visual|vision_tower|vision_model|vision_embed_tokens|vision_embedder|multi_modal_projector"
    r"|mm_projector|patch_merge_mlp|audio_tower|audio_model|embed_vision|embed_audio|connector"
    r"|talker|code2wav|vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\..*"
)


@dataclass(frozen=True, slots=True)
class TextModel:
    """What a configuration says of the language model.

    Attributes:
        settings: the settings of the language model, in the form of its own `config.json`.
        is_wrapped: whether they are those of a larger model, or a part of them.
        is_untied: whether they, or those of the larger model, say that the head is not the embedding, and none that it
            is.
    """

    settings: Mapping[str, Any]
    is_wrapped: bool = False
    is_untied: bool = False

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "TextModel":
        """Finds the language model in the content of `config.json`."""
        inner, tied = stored, [stored.get("tie_word_embeddings")]
        for _ in range(_MOST_NESTED):
            key = next((each for each in _TEXT_CONFIGS if isinstance(inner.get(each), Mapping)), None)
            if key is None or cls(inner).family in FAMILIES:
                break
            shared = {name: inner[name] for name in _SHARED if inner.get(name) is not None}
            own = {name: value for name, value in inner[key].items() if value is not None or name not in shared}
            outer = str(inner.get("model_type") or "")
            tied.append(inner[key].get("tie_word_embeddings"))
            inner = {"model_type": _default_type(outer, key) or outer, **shared, **own}
        is_wrapped = inner is not stored or isinstance(stored.get("vision_config"), Mapping)
        return cls(inner, is_wrapped, is_untied=False in tied and True not in tied)

    @property
    def model_type(self) -> str:
        return str(self.settings.get("model_type") or "")

    @property
    def family(self) -> str:
        """The type of the family by whose code the model is computed, which may not be in the table of families."""
        return str(ALIASES.get(self.model_type, self.settings).get("model_type") or "")

    @property
    def form(self) -> Form:
        """The form of the tensors next to a `config.json`."""
        return _FORMS.get(self.model_type, Form.USUAL)

    def family_settings(self) -> dict[str, Any]:
        """The settings by the names and defaults of the family.

        Raises:
            CheckpointError: the family's code would compute something else.
        """
        for name, value in _REQUIRED.get(self.model_type, {}).items():
            if self.settings.get(name, value) != value:
                raise CheckpointError(f"models of type {self.model_type!r} are served only with {name}={value}")
        renamed = _RENAMED.get(self.model_type, {})
        settings = {renamed.get(name, name): value for name, value in self.settings.items()}
        if self.family != self.model_type and self.model_type in CONFIG_MAPPING:
            own: Any = CONFIG_MAPPING[self.model_type].from_dict(settings)
            shared = {name: settings[name] for name in _SHARED if settings.get(name) is not None}
            settings = {**own.get_text_config(decoder=True).to_dict(), **shared}
        if isinstance(rope := settings.get("rope_parameters"), Mapping):
            # The sections have positions of their own only in images.
            kept = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            settings["rope_parameters"] = kept
        return {**settings, **ALIASES.get(self.model_type, {})}


def _default_type(outer: str, key: str) -> str:
    """The type of a language model whose settings do not name it, as transformers has it for such a wrapper."""
    if outer not in CONFIG_MAPPING:
        return ""
    spec = getattr(CONFIG_MAPPING[outer], "sub_configs_defaults", {}).get(key)
    return str(getattr(spec, "model_type", None) or getattr(getattr(spec, "config_class", None), "model_type", ""))


def text_name(stored: str) -> str:
    """The name that a tensor has in a checkpoint of the language model alone."""
    match = _PREFIX.match(stored)
    if match is None or not _INNER_PREFIX.search(match[0]):
        return stored
    rest = stored[match.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Maps the names of tensors in a checkpoint of the language model alone to the stored ones.

    Raises:
        CheckpointError: two tensors would have one name.
    """
    names: dict[str, str] = {}
    for each in stored:
        name = text_name(each)
        if name in names:
            raise CheckpointError(
                f"The checkpoint holds two tensors for {name}: {names[name]} and {each}; give one that holds one model."
            )
        names[name] = each
    return names


def split_names(stored: Iterable[str]) -> dict[str, str]:
    """Maps the names of glm4_moe's tensors to those in files of `bailing_moe_v2`; three of them may be one."""
    names: dict[str, str] = {}
    for each in stored:
        name = each
        for old, new in _BAILING_PARTS.items():
            name = name.replace(old, new)
        parts = _JOINED_PARTS if _JOINED in name else ("",)
        names |= {name.replace(_JOINED, f".self_attn.{part}."): each for part in parts}
    return names


def joined_rows(name: str, stored: str, num_heads: int, num_key_heads: int, head_size: int) -> tuple[int, int] | None:
    """The rows of a stored tensor that are the one of this name; None: the stored tensor is that one alone."""
    part = next((index for index, each in enumerate(_JOINED_PARTS) if f".{each}." in name), None)
    if part is None or _JOINED not in stored:
        return None
    ends = [num_heads, num_heads + num_key_heads, num_heads + 2 * num_key_heads]
    return (ends[part - 1] if part else 0) * head_size, ends[part] * head_size


def other_part(stored: str) -> str | None:
    """The part of the model that a tensor belongs to, if no text reaches it."""
    match = _OTHER_PART.fullmatch(stored)
    return None if match is None else match[1]
