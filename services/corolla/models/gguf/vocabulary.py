"""Converts a GGUF file's tokenizer to the files of transformers."""

from pathlib import Path
from typing import Any, Final, cast

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from corolla.chassis.errors import CheckpointError
from corolla.models.gguf.header import GgufHeader

_SPECIAL_TOKENS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# The names of the ways in which byte-level tokenizers split a text before they merge bytes: as GPT-2 does, with each
# digit alone, and the ways that transformers' converter knows.
_AS_GPT2: Final = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais"})
_SINGLE_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r"})
_CUTS: Final = _AS_GPT2 | _SINGLE_DIGITS | GGUF_PRE_TOKENIZER_SPLITS.keys()


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template to `folder`.

    Raises:
        CheckpointError: the file has no tokenizer, or one that transformers does not know.
        OSError: the folder cannot be written to.
    """
    described = {
        group: {
            name: header.metadata[f"tokenizer.{key}"]
            for key, name in keys.items()
            if f"tokenizer.{key}" in header.metadata
        }
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    vocabulary, options = described["tokenizer"], described["tokenizer_config"]
    if vocabulary.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # as llama.cpp does where a file does not say
    cut = vocabulary.get("pre_tokenizer_type")
    if vocabulary.get("tokenizer_type") == "gpt2" and cut not in _CUTS:
        raise CheckpointError(
            f"The file's tokenizer cuts texts in a way ({cut!r}) that is not known here, so its tokens would be others;"
            " give the model as safetensors with its tokenizer."
        )
    try:
        for name, key in _SPECIAL_TOKENS.items():
            token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
            options[name] = None if token_id is None else vocabulary["tokens"][token_id]
        backend = _backend(header.architecture, vocabulary)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the converter and the Rust tokenizers raise many unrelated classes
        raise CheckpointError(
            "The file's tokenizer cannot be read by transformers; give the model as safetensors with its tokenizer."
        ) from error


def _backend(architecture: str, vocabulary: dict[str, Any]) -> Tokenizer:
    convert: Any = convert_gguf_tokenizer  # untyped in transformers
    backend, _ = convert(architecture, vocabulary)
    if vocabulary.get("pre_tokenizer_type") in _SINGLE_DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return cast(Tokenizer, backend)
