"""Published models as tiny checkpoints of the same structure, and the table of docs/models.md that says what each does.

    python -m tests.published        writes the table anew

Names, shapes and layouts of tensors are those that transformers' own classes and its conversion table write when they
save a model, unless a row names another source. Numbers are random.
"""

import copy
import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from corolla.chassis.errors import CorollaError
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.loading import LOADING
from corolla.models.span_model import load_span
from corolla.models.tokenizer import load_tokenizer
from corolla.models.wrappers import ALIASES
from corolla.wire.span import Span
from tests.bailing import bailing_logits, write_bailing
from tests.checkpoints import SHAPE, VOCAB_SIZE, YARN, draw_weights, made_from, make_tokenizer, tiny_config
from tests.quantized_checkpoints import FORMATS, INDEX, edit_config, mxfp4, pack_checkpoint
from tests.vocabularies import tekken_folder, tiktoken_folder

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "models.md"
NUM_BLOCKS: Final = 5
NUM_PROMPT_TOKENS: Final = 20
NUM_NEW_TOKENS: Final = 12
_HEADING: Final = "| model | `model_type` | weights | whole blocks | smallest cut | what is missing |"
# What the writer of a configuration says of itself.
_NOTES: Final = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version"})
# Parts whose linear layers publishers leave as they are.
_SEEING: Final = ("visual", "vision", "projector")

_SIGLIP: Final = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN2_VISION: Final = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_QWEN_VISION: Final = {**_QWEN2_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_GLM_VISION: Final = {**_QWEN2_VISION, "image_size": 28}
_PIXTRAL: Final = {"model_type": "pixtral", **_SIGLIP}


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections), **more}}


_INTERLEAVED: Final = {"mrope_interleaved": True}
_QWEN3_5: Final = _sections(2, 1, 1, partial_rotary_factor=0.5, **_INTERLEAVED)


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
        name: as its publisher writes it.
        family: the family of `tests.checkpoints` whose tiny facts its language model has; empty: `text` has them.
        model_type: that of `config.json`; empty: the family's.
        text: further settings of the language model.
        vision: the settings of the part that sees; None: there is none.
        outer: further settings of the whole model.
        weights: how the table names the format of the weights.
        made: a key of FORMATS, or `mxfp4`; None: the weights are plain.
        plain: parts of the names of modules that the publisher left plain.
        vocabulary: writes the file that the publisher gives in place of a `tokenizer.json`.
        rewrite: writes a checkpoint that transformers saved in the published form, which its class does not read.
        logits: the publisher's code, if transformers has none: the next token's logits for a checkpoint and token ids.
        change: changes the folder after it was saved, where the published files differ from what transformers saves.
    """

    name: str
    family: str
    model_type: str = ""
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] | None = None
    weights: str = "bfloat16"
    made: str | None = None
    plain: tuple[str, ...] = ()
    vocabulary: Callable[[Path], Path] | None = None
    change: Callable[[Path], None] | None = None
    rewrite: Callable[[Path, Path], None] | None = None
    logits: Callable[[Path, list[int]], Tensor] | None = None
    outer: Mapping[str, Any] = field(default_factory=dict)


def _kimi(folder: Path) -> None:
    # transformers reads tensors of `layers`, and saves them as those of `blocks`, by the inverse of a renaming.
    _change(folder, lambda name, tensor: {name.replace(".model.blocks.", ".model.layers."): tensor})


def _single_experts(folder: Path) -> None:
    """The experts one by one, as in published FP8 (transformers' table reads both)."""

    def split(name: str, tensor: Tensor) -> dict[str, Tensor]:
        start, _, which = name.rpartition(".experts.")
        if which == "down_proj":
            return {f"{start}.experts.{index}.down_proj.weight": each for index, each in enumerate(tensor)}
        if which != "gate_up_proj":
            return {name: tensor}
        halves = {"gate_proj": tensor.chunk(2, dim=1)[0], "up_proj": tensor.chunk(2, dim=1)[1]}
        return {
            f"{start}.experts.{index}.{half}.weight": each
            for half, experts in halves.items()
            for index, each in enumerate(experts)
        }

    _change(folder, split)


def _write_longcat(source: Path, folder: Path) -> None:
    """Writes what the publisher stores: none for experts that pass their input on, and a block that predicts further.

    The names are those that transformers' class leaves unread, and those of the publisher's own code.
    """
    shutil.copytree(source, folder)
    count = json.loads((source / "config.json").read_text())["n_routed_experts"]

    def keep(name: str, tensor: Tensor) -> dict[str, Tensor]:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is not None and int(expert[1]) >= count:
            return {}
        return {name: tensor, "model.mtp.norm.weight": torch.ones(64)}

    _change(folder, keep)


def _further_block(folder: Path) -> None:
    """Adds the block that predicts further tokens, whose number follows those of the model's blocks."""

    def add(name: str, tensor: Tensor) -> dict[str, Tensor]:
        start, last, rest = name.partition(f".layers.{NUM_BLOCKS - 1}.")
        if not last:
            return {name: tensor}
        further = f"{start}.layers.{NUM_BLOCKS}."
        own = {f"{further}{part}.weight": torch.ones(64) for part in ("enorm", "hnorm", "shared_head.norm")}
        return {name: tensor, f"{further}{rest}": tensor, **own}

    _change(folder, add)


def _write_omni(source: Path, folder: Path) -> None:
    """Writes what thinks as a part of a model that also speaks."""
    shutil.copytree(source, folder)
    thinker = json.loads((source / "config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": {}, "code2wav_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))

    def prefixed(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {f"thinker.{name.removeprefix('thinker.')}": tensor, "talker.model.norm.weight": torch.ones(64)}

    _change(folder, prefixed)


# Public code that reads Mistral's files: mistral-inference (transformer_layers.py), vLLM (configs/mistral.py,
# models/mistral_large_3.py), and TensorRT-LLM, whose test has Mistral-Large-3's params.json.
_MISTRAL_NAMES: Final = {
    "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "lm_head": "output", "norm": "norm",
    "mlp.down_proj": "feed_forward.w2", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.gate": "gate", "post_attention_layernorm": "ffn_norm", "self_attn.k_proj": "attention.wk",
    "self_attn.o_proj": "attention.wo", "self_attn.q_proj": "attention.wq", "self_attn.v_proj": "attention.wv",
    "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_a_layernorm": "attention.q_a_norm", "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa", "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.shared_experts.down_proj": "shared_experts.w2", "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
}  # fmt: skip
_FLOAT8_SCALE: Final = 2.0**-6


def _round_to_float8(folder: Path) -> None:
    """Rounds the weights of all blocks to numbers that a float of eight bits has, times a scale."""

    def rounded(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if ".layers." not in name or tensor.dim() < 2:
            return {name: tensor}
        return {name: _float8(tensor).to(tensor.dtype) * _FLOAT8_SCALE}

    _change(folder, rounded)


def _float8(tensor: Tensor) -> Tensor:
    return (tensor / _FLOAT8_SCALE).to(torch.float8_e4m3fn)


def _write_consolidated(source: Path, folder: Path) -> None:
    """Writes a checkpoint of transformers in Mistral's own format, with a part that sees; mixtures in eight bits."""
    config = json.loads((source / "config.json").read_text())
    rope = config["rope_parameters"]
    params: dict[str, Any] = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"], "rope_theta": rope["rope_theta"], "tied_embeddings": False,
        "max_position_embeddings": config["max_position_embeddings"], "vision_encoder": {"hidden_size": 32},
        "sliding_window": config.get("sliding_window"),
    }  # fmt: skip
    if rope["rope_type"] == "yarn":
        length = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
        params["yarn"] = {
            "factor": rope["factor"], "alpha": rope["beta_slow"], "beta": rope["beta_fast"], "apply_scale": False,
            **length,
        }  # fmt: skip
        params["llama_4_scaling"] = {"beta": rope["llama_4_scaling_beta"], **length}
    is_mixture = "n_routed_experts" in config
    if is_mixture:
        params |= {name: config[name] for name in _LATENT_SIZES}
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
        params["moe"] = {
            "num_experts": config["n_routed_experts"], "num_experts_per_tok": config["num_experts_per_tok"],
            "num_shared_experts": config["n_shared_experts"], "expert_hidden_dim": config["moe_intermediate_size"],
            "first_k_dense_replace": config["first_k_dense_replace"], "route_every_n": 1, "routed_scale": 1.0,
            "num_expert_groups": config["n_group"], "num_expert_groups_per_tok": config["topk_group"],
        }  # fmt: skip
    tensors = {"vision_encoder.ln_pre.weight": torch.ones(32), "patch_merger.merging_layer.weight": torch.ones(2, 2)}
    for shard in source.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            for module, weight in _mistral_weights(name, tensor, config["head_dim"]):
                is_octets = is_mixture and module.startswith("layers.") and weight.dim() == 2
                tensors[f"{module}.weight"] = _float8(weight) if is_octets else weight
                if is_octets:
                    tensors[f"{module}.qscale_weight"] = torch.tensor(_FLOAT8_SCALE)
                    tensors[f"{module}.qscale_act"] = torch.tensor(1.0)
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    names, weight_map = sorted(tensors), dict[str, str]()
    for number, held in enumerate((names[::2], names[1::2]), 1):
        shard_name = f"consolidated-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in held}, folder / shard_name)
        weight_map |= dict.fromkeys(held, shard_name)
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _mistral_weights(name: str, tensor: Tensor, head_size: int) -> Iterator[tuple[str, Tensor]]:
    """The modules and weights that Mistral's files have for one tensor of transformers."""
    match = re.fullmatch(r"(?:model\.)?(layers\.\d+\.)?(.+?)(?:\.weight)?", name)
    layer, part = cast(re.Match[str], match).groups("")
    if part == "mlp.experts.down_proj":
        yield from ((f"{layer}experts.{index}.w2", each.contiguous()) for index, each in enumerate(tensor))
    elif part == "mlp.experts.gate_up_proj":
        for index, expert in enumerate(tensor):
            yield from (
                (f"{layer}experts.{index}.{which}", half.contiguous())
                for which, half in zip(("w1", "w3"), expert.chunk(2), strict=True)
            )
    else:
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = tensor.view(-1, 2, head_size // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        yield f"{layer}{_MISTRAL_NAMES[part]}", tensor


def _flat(folder: Path) -> None:
    """The settings of the language model next to those of the whole, which transformers reads, too."""
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config.pop("text_config").items() if name != "model_type"}
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (folder / "config.json").write_text(json.dumps({**text, **config}))


def _change(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Replaces each tensor of a checkpoint by one or several others."""
    weight_map: dict[str, str] = {}
    for shard in folder.glob("*.safetensors"):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(shard).items():
            tensors |= {new: each.contiguous().clone() for new, each in change(name, tensor).items()}
        save_file(tensors, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    if (folder / INDEX).exists():
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


_KIMI_VISION: Final = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_ALL_BUT_EXPERTS: Final = ("self_attn", "shared_experts", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")
_LLAMA3: Final = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}  # fmt: skip
_LLAMA4: Final = {
    "model_type": "llama4_text", "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
    "attention_chunk_size": 16, "floor_scale": 8,
}  # fmt: skip
_LLAMA4_VISION: Final = {
    **_SIGLIP, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32
}  # fmt: skip
_LATENT_SIZES: Final = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OMNI: Final = {
    "vision_start_token_id": VOCAB_SIZE - 1,
    "audio_config": {
        "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16,
        "downsample_hidden_size": 8, "output_dim": 64, "max_source_positions": 64,
    },
}  # fmt: skip
_GEMMA4_VISION: Final = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
# Sizes of latents that blocks of 32 fill.
_WHOLE_BLOCKS: Final = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16,
}  # fmt: skip
_INDEXED: Final = {**_WHOLE_BLOCKS, "index_head_dim": 32}
_SINGLE_EXPERTS_ONLY: Final[Mapping[str, Any]] = {"mlp_only_layers": []}
_WIDER_SHARED: Final = {"shared_expert_intermediate_size": 64}

PUBLISHED: Final[tuple[Published, ...]] = (
    Published("Llama-3.1-8B", "llama", text=_LLAMA3),
    Published("Llama-3.3-70B", "llama", text=_LLAMA3),
    Published("Llama-3.3-70B-Instruct-FP4", "llama", weights="NVFP4", made="nvfp4"),
    Published("Llama-4-Scout", "", "llama4", _LLAMA4, _LLAMA4_VISION),
    Published(
        "Llama-4-Maverick-FP8", "", "llama4", _LLAMA4, _LLAMA4_VISION, "FP8 (compressed-tensors)", "ct-fp8-outputs"
    ),
    Published("Qwen2.5-72B-AWQ", "qwen2", weights="AWQ", made="awq"),
    Published(
        "Qwen2.5-VL-72B", "qwen2", "qwen2_5_vl", {"model_type": "qwen2_5_vl_text", **_sections(4, 2, 2)},
        _QWEN2_VISION, change=_flat,
    ),
    Published("Qwen3-32B", "qwen3"),
    Published("Qwen3-30B-A3B", "qwen3_moe", text=_SINGLE_EXPERTS_ONLY),
    Published("Qwen3-30B-A3B-FP4", "qwen3_moe", text=_SINGLE_EXPERTS_ONLY, weights="NVFP4", made="nvfp4"),
    Published("Qwen3-235B-A22B-FP8", "qwen3_moe", text=_SINGLE_EXPERTS_ONLY, weights="FP8", made="fp8-blocks"),
    Published("Qwen3-Coder-480B-A35B-FP8", "qwen3_moe", text=_SINGLE_EXPERTS_ONLY, weights="FP8", made="fp8-blocks"),
    Published("Qwen3-Next-80B-A3B-FP8", "qwen3_next", text=_WIDER_SHARED, weights="FP8", made="fp8-blocks"),
    Published(
        "Qwen3-VL-235B-A22B", "qwen3_moe", "qwen3_vl_moe",
        {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 24, **_sections(4, 2, 2, **_INTERLEAVED)},
        _QWEN_VISION,
    ),
    Published(
        "Qwen3-VL-32B", "qwen3", "qwen3_vl",
        {"model_type": "qwen3_vl_text", **_sections(4, 2, 2, **_INTERLEAVED)}, _QWEN_VISION,
    ),
    Published(
        "Qwen3-Omni-30B-A3B", "qwen3_moe", "qwen3_omni_moe_thinker",
        {
            "model_type": "qwen3_omni_moe_text", "num_experts": 4, "mlp_only_layers": [],
            **_sections(4, 2, 2, **_INTERLEAVED),
        },
        {**_QWEN_VISION, "deepstack_visual_indexes": []}, rewrite=_write_omni, outer=_OMNI,
    ),
    Published("Qwen3.5-27B", "qwen3_5_text", "qwen3_5", _QWEN3_5, _QWEN_VISION),
    Published("Qwen3.5-27B-FP8", "qwen3_5_text", "qwen3_5", _QWEN3_5, _QWEN_VISION, "FP8", "fp8-blocks"),
    Published("Qwen3.5-397B-A17B", "qwen3_5_moe_text", "qwen3_5_moe", _QWEN3_5, _QWEN_VISION),
    Published(
        "Qwen3.5-397B-A17B-FP8", "qwen3_5_moe_text", "qwen3_5_moe", {**_WIDER_SHARED, **_QWEN3_5}, _QWEN_VISION,
        "FP8", "fp8-blocks", change=_single_experts,
    ),
    Published(
        "Qwen3.5-397B-A17B, saved by AutoModelForCausalLM", "qwen3_5_moe_text", text=_QWEN3_5
    ),
    Published("DeepSeek-V2-Lite", "deepseek_v2", text={"q_lora_rank": None, "topk_method": "greedy"}),
    Published(
        "DeepSeek-R1", "deepseek_v3", text={**_WHOLE_BLOCKS, "rope_parameters": YARN}, weights="FP8",
        made="fp8-blocks", change=_further_block,
    ),
    Published(
        "DeepSeek-V3.2", "deepseek_v32", text={**_INDEXED, "rope_parameters": YARN}, weights="FP8", made="fp8-blocks",
        plain=("weights_proj",), change=_further_block,
    ),
    Published(
        "Kimi-K2-Instruct", "deepseek_v3", "kimi_k2", _WHOLE_BLOCKS, weights="FP8", made="fp8-blocks",
        vocabulary=tiktoken_folder,
    ),
    Published(
        "Kimi-K2-Thinking", "deepseek_v3", "kimi_k2", weights="int4 (compressed-tensors)", made="w4a16",
        plain=_ALL_BUT_EXPERTS, vocabulary=tiktoken_folder,
    ),
    Published(
        "Kimi-K2.5", "deepseek_v3", "kimi_k25", {"model_type": "kimi_k2"}, _KIMI_VISION,
        "int4 (compressed-tensors)", "w4a16", _ALL_BUT_EXPERTS, tiktoken_folder, _kimi,
    ),
    Published("Kimi-Linear-48B", "kimi_linear", vocabulary=tiktoken_folder),
    Published("GLM-4.5-Air", "glm4_moe", text={"use_qk_norm": False}),
    Published(
        "GLM-4.5V", "glm4_moe", "glm4v_moe",
        {"model_type": "glm4v_moe_text", **_sections(2, 1, 1, partial_rotary_factor=0.5)}, _GLM_VISION,
    ),
    Published("GLM-4.6-FP8", "glm4_moe", weights="FP8 (compressed-tensors)", made="ct-fp8-outputs"),
    Published("GLM-4.7-Flash", "glm4_moe_lite"),
    Published(
        "GLM-5-FP8", "glm_moe_dsa", text=_INDEXED, weights="FP8", made="fp8-blocks", plain=("weights_proj",),
        change=_further_block,
    ),
    Published("LongCat-Flash-Chat", "longcat_flash", rewrite=_write_longcat),
    Published("MiniMax-M2.5", "minimax_m2", weights="FP8", made="fp8-blocks"),
    Published("MiniMax-M3", "minimax_m3_vl_text", "minimax_m3_vl", vision=_SIGLIP),
    Published("gpt-oss-20b", "gpt_oss", weights="MXFP4", made="mxfp4"),
    Published("gpt-oss-120b", "gpt_oss", weights="MXFP4", made="mxfp4"),
    Published("Mistral-Small-3.2", "mistral", "mistral3", vision=_PIXTRAL, vocabulary=tekken_folder),
    Published(
        "Magistral-Small, in Mistral's own files", "mistral", text={"head_dim": 32}, vocabulary=tekken_folder,
        rewrite=_write_consolidated,
    ),
    Published(
        "Ministral-3-14B-BF16, in Mistral's own files", "ministral3", vocabulary=tekken_folder,
        rewrite=_write_consolidated,
    ),
    Published(
        "Mistral-Large-3", "mistral4",
        text={"n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, "mscale_all_dim": 0, "attention_factor": 1.0}},
        weights="FP8", vocabulary=tekken_folder, change=_round_to_float8, rewrite=_write_consolidated,
    ),
    Published("Ministral-3-14B", "ministral3", "mistral3", {}, _PIXTRAL, "FP8", "fp8-one-scale"),
    Published("Devstral-2-123B", "ministral3", weights="FP8", made="fp8-one-scale"),
    Published("Mistral-Small-4", "mistral4", "mistral3", vision=_PIXTRAL),
    Published("Mixtral-8x22B", "mixtral"),
    Published("Gemma-3-27B", "gemma3_text", "gemma3", {"tie_word_embeddings": True}, _SIGLIP),
    Published(
        "Gemma-4-31B", "gemma4_text", "gemma4",
        {"tie_word_embeddings": True, "pad_token_id": 0, "enable_moe_block": False}, _GEMMA4_VISION,
    ),
    Published("Phi-4", "phi3", text={"sliding_window": None}),
    Published("Nemotron-3-Super", "nemotron_h"),
    Published("ERNIE-4.5-300B-A47B", "ernie4_5_moe"),
    Published(
        "MiMo-V2-Flash", "mimo_v2_flash", text={"num_key_value_heads": 2, "v_head_dim": 16}, weights="FP8",
        made="fp8-blocks", plain=("o_proj",), change=_single_experts,
    ),
    Published(
        "Ling-1T", "glm4_moe", "bailing_moe_v2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.25}},
        rewrite=write_bailing, logits=bailing_logits,
    ),
    Published("Ling-3.0-Flash", "bailing_hybrid"),
    Published("Hunyuan-A13B", "hunyuan_v1_moe"),
    Published("A.X-K2-Light", "axk2", text={"n_group": None, "topk_group": None}),
)  # fmt: skip


class Row:
    """A published model made small, and what Corolla does with it.

    Args:
        folder: an empty one; it gets the checkpoint, and one of the same numbers that transformers reads, if need be.

    Attributes:
        folder: the checkpoint in the structure of the published one.
    """

    def __init__(self, published: Published, folder: Path) -> None:
        self.published = published
        self.folder = self._expanded = folder / "source"
        self._write()
        if published.made is not None:
            packed, self._expanded = folder / "packed", folder / "expanded"
            made = mxfp4() if published.made == "mxfp4" else FORMATS[published.made]()
            pack_checkpoint(self.folder, packed, self._expanded, made, plain=(*_SEEING, *published.plain))
            self.folder = packed
        if published.rewrite is not None:
            self.folder = folder / "published"
            published.rewrite(self._expanded, self.folder)
        if published.vocabulary is not None:
            (self.folder / "tokenizer.json").unlink(missing_ok=True)
            published.vocabulary(self.folder)
        if self._model_type in ALIASES:
            edit_config(self.folder, model_type=self._model_type)

    @property
    def prompt(self) -> list[int]:
        """Token ids."""
        drawn: list[int] = torch.randint(
            4, 256, (NUM_PROMPT_TOKENS,), generator=torch.Generator().manual_seed(7)
        ).tolist()
        return drawn

    @property
    def _model_type(self) -> str:
        return self.published.model_type or self.published.family

    @property
    def _library(self) -> Any:
        return AutoModelForCausalLM if self.published.vision is None else AutoModelForImageTextToText

    def _write(self) -> None:
        published, library = self.published, cast(Any, AutoConfig)
        facts = {**SHAPE, "num_hidden_layers": NUM_BLOCKS}
        if published.family:
            own = {name: value for name, value in published.text.items() if name != "model_type"}
            facts = tiny_config(published.family, NUM_BLOCKS, **own).to_dict()
        settings = {name: value for name, value in facts.items() if name not in _NOTES}
        tokenizer = make_tokenizer()
        tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        settings |= {
            "model_type": published.family,
            "pad_token_id": None,
            **tokens,
            **copy.deepcopy(dict(published.text)),
        }
        if self._model_type not in {*CONFIG_MAPPING, *ALIASES}:
            self.folder.mkdir()
            (self.folder / "config.json").write_text(json.dumps({**settings, "model_type": self._model_type}))
            return
        if published.vision is None:
            # transformers has no class for a type that is another one's alias.
            of_class = ALIASES.get(self._model_type, {}).get("model_type", self._model_type)
            config = library.for_model(**{**settings, "model_type": of_class})
        else:
            tied = settings["tie_word_embeddings"]
            config = library.for_model(
                self._model_type, text_config=settings, vision_config=dict(published.vision), tie_word_embeddings=tied,
                **published.outer,
            )  # fmt: skip
        model = made_from(self._library, config)
        draw_weights(model, 0, 1.6)
        if settings["tie_word_embeddings"]:
            with torch.no_grad():  # otherwise each token is followed by itself
                model.get_input_embeddings().weight.mul_(0.05)
        ends: Any = GenerationConfig
        model.generation_config = ends(**tokens)
        model.to(torch.bfloat16 if published.made is None else torch.float32).save_pretrained(
            self.folder, max_shard_size=200_000
        )
        tokenizer.save_pretrained(self.folder)
        if published.change is not None:
            published.change(self.folder)

    def unsplit(self) -> list[int]:
        """What transformers, or the publisher's code, answers to the prompt."""
        if self.published.logits is not None:
            tokens = self.prompt
            for _ in range(NUM_NEW_TOKENS):
                tokens = [*tokens, int(self.published.logits(self.folder, tokens).argmax())]
            return tokens[NUM_PROMPT_TOKENS:]
        with LOADING:
            model = self._library.from_pretrained(self._expanded, dtype=torch.float32).eval()
        prompt = torch.tensor([self.prompt])
        answer: list[int] = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, NUM_PROMPT_TOKENS:].tolist()  # fmt: skip
        return answer

    @functools.cached_property
    def refusal(self) -> str | None:
        """Why Corolla refuses the checkpoint; None: it does not."""
        try:
            Checkpoint.from_pretrained(str(self.folder))
        except CorollaError as error:
            return error.message
        return None

    @functools.cached_property
    def _chain(self) -> tuple[Any, list[SpanRunner]]:
        checkpoint = Checkpoint.from_pretrained(str(self.folder))
        spans = [Span(block, block + 1) for block in range(checkpoint.num_blocks)]
        runners = [SpanRunner(load_span(checkpoint, span, dtype=torch.float32), page_tokens=8) for span in spans]
        return load_edges(checkpoint, dtype=torch.float32), runners

    def answer(self) -> list[int]:
        """What a chain of one block for each hop answers to the prompt."""
        edges, runners = self._chain
        caches = [runner.new_cache() for runner in runners]
        for cache in caches:
            cache.allocate(NUM_PROMPT_TOKENS + NUM_NEW_TOKENS)
        position, new, tokens = 0, self.prompt, list[int]()
        while len(tokens) < NUM_NEW_TOKENS:
            hidden = edges.embed(torch.tensor(new), torch.arange(position, position + len(new)))
            for runner, cache in zip(runners, caches, strict=True):
                hidden = runner.forward([RowWork(cache, position, len(new))], hidden, runner.span)
            position, new = position + len(new), [int(edges.head(hidden[-1:])[0].argmax())]
            tokens += new
        return tokens

    def line(self) -> str:
        """The row of the table."""
        published, refusal = self.published, self.refusal
        config = self.folder / "config.json"
        model_type = f"`{json.loads(config.read_text())['model_type']}`" if config.is_file() else ""
        cells = [published.name, model_type, published.weights]
        if refusal is None:
            is_whole = all(runner.model.fused is not None for runner in self._chain[1])
            load_tokenizer(self.folder)
            cells += ["yes" if is_whole else "no", "1 block", "images" if published.vision is not None else ""]
        else:
            cells += ["", "", re.sub(r"^[^:]*: |; .*$", "", refusal)]
        return f"| {' | '.join(cells)} |"


def table_lines() -> list[str]:
    """The lines of the page's table, without its two heading lines."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(_HEADING) + 2
    return lines[first : lines.index("", first)]


def main() -> int:
    made = []
    for published in PUBLISHED:
        with tempfile.TemporaryDirectory() as folder:
            made.append(Row(published, Path(folder)).line())
    page = PAGE.read_text(encoding="utf-8")
    head = page.index(_HEADING)
    start, end = page.index("\n", page.index("\n", head) + 1) + 1, page.index("\n\n", head) + 1
    PAGE.write_text(page[:start] + "".join(f"{line}\n" for line in made) + page[end:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
