"""Writes the configuration and tokenizer of a GGUF file to a folder in the form of other checkpoints.

Where a file says nothing of its tokenizer, the defaults of llama.cpp hold. A setting of a tokenizer that is not known
here is refused, since texts would become other tokens.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import transformers
from filelock import FileLock
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

from corolla.chassis.errors import CheckpointError
from corolla.models.cache_folder import default_cache_folder
from corolla.models.gguf.description import END_TEXTS, configuration, end_token_ids, token_id_of
from corolla.models.gguf.header import GgufHeader
from corolla.models.gguf.pre_tokenizers import BEGUN, SPLITS, WHOLE
from corolla.models.tokenizer import tokenizer_of_pieces

# Raise this whenever a release would write other contents for the same file.
_VERSION: Final = 3
_FILE_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o755


def settings_folder(header: GgufHeader) -> Path:
    """The folder with `config.json`, `generation_config.json` and the tokenizer that the file describes.

    The first call makes the folder, within seconds. It builds the folder under another name and renames it, so a folder
    with the final name is complete. Several processes may call this at the same time.

    Raises:
        CheckpointError: the file's model or tokenizer is not served, or the cache folder cannot be written.
    """
    folders = default_cache_folder() / "gguf"
    folder = folders / f"{header.digest.hex()[:32]}-{transformers.__version__}-{_VERSION}"
    if folder.is_dir():
        return folder
    config = configuration(header)
    try:
        folders.mkdir(parents=True, exist_ok=True)
        with FileLock(folders / f".{folder.name}.lock"):
            if not folder.is_dir():
                building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.building-", dir=folders))
                try:
                    _write(header, config, building)
                    building.rename(folder)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"The model's settings cannot be written to {folders}: {error.strerror or 'the folder is not writable'}; "
            "set COROLLA_CACHE to another folder."
        ) from error
    return folder


def _write(header: GgufHeader, config: dict[str, object], folder: Path) -> None:
    ends = end_token_ids(header.metadata)
    generation: dict[str, object] = {
        "eos_token_id": ends or None,
        **{name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config},
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tokenizer(header, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(_FOLDER_MODE if path.is_dir() else _FILE_MODE)


# The types of tokenizers that merge bytes, and those that merge characters by scores.
_TYPES: Final = frozenset({"gpt2", "llama"})
_SPECIAL_TOKENS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# The special tokens of a file with scores that does not name them.
_SPECIAL_IDS_WITH_SCORES: Final = {"bos": 1, "eos": 2, "unknown": 0}
# Keys that change no token of these tokenizers: names of tokens, and settings that only other tokenizers have.
_WITHOUT_EFFECT: Final = re.compile(
    r"ggml\.\w+_token_id|ggml\.token_type_count|ggml\.remove_extra_whitespaces|chat_templates|chat_template\.\w+"
    r"|huggingface\.json|rwkv\.world"
)
_NORMAL_TOKEN, _CONTROL_TOKEN, _TEXT_TOKEN = 1, 3, 4


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat templates to `folder`.

    Raises:
        CheckpointError: the file has no tokenizer, or one that is not known here.
        OSError: the folder cannot be written to.
    """
    settings = {
        key.removeprefix("tokenizer."): value for key, value in header.metadata.items() if key.startswith("tokenizer.")
    }
    _refuse_others(settings)
    described: dict[str, dict[str, Any]] = {
        group: {name: settings[key] for key, name in keys.items() if key in settings}
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    vocabulary, options = described["tokenizer"], described["tokenizer_config"]
    has_scores, cut = vocabulary.get("tokenizer_type") == "llama", vocabulary.get("pre_tokenizer_type")
    options.setdefault("add_bos_token", has_scores or cut in BEGUN)
    vocabulary["token_type"] = _kinds(vocabulary)
    if vocabulary.get("tokenizer_type") not in _TYPES:
        raise _unserved(f"is of the type {vocabulary.get('tokenizer_type')!r}, which is not served")
    if vocabulary["tokenizer_type"] == "gpt2" and cut not in SPLITS:
        raise _unserved(f"cuts texts in a way ({cut!r}) that is not known here, so its tokens would be others")
    if vocabulary["tokenizer_type"] == "gpt2" and not vocabulary.get("merges"):
        raise _unserved("has no merges (tokenizer.ggml.merges), without which it cannot cut texts")
    named = "chat_template."
    if templates := {key.removeprefix(named): text for key, text in settings.items() if key.startswith(named)}:
        options["chat_template"] = {"default": options["chat_template"], **templates}
    try:
        special_ids = _SPECIAL_IDS_WITH_SCORES if has_scores else {}
        for name, key in _SPECIAL_TOKENS.items():
            token_id = token_id_of(header.metadata, f"tokenizer.ggml.{key}_token_id")
            if token_id is None and special_ids.get(key, len(vocabulary["tokens"])) < len(vocabulary["tokens"]):
                token_id = special_ids[key]
            options[name] = None if token_id is None else vocabulary["tokens"][token_id]
        options["add_bos_token"] = options["add_bos_token"] and options["bos_token"] is not None
        is_of_bytes = vocabulary["tokenizer_type"] == "gpt2"
        backend = _byte_level(vocabulary) if is_of_bytes else tokenizer_of_pieces(vocabulary, header.architecture)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options, clean_up_tokenization_spaces=False)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the converter and the Rust tokenizers raise many unrelated classes
        raise _unserved("cannot be read by transformers") from error


def _unserved(why: str) -> CheckpointError:
    return CheckpointError(f"The file's tokenizer {why}; give the model as safetensors with its tokenizer.")


def _refuse_others(settings: Mapping[str, Any]) -> None:
    known = {key for keys in GGUF_TOKENIZER_MAPPING.values() for key in keys}
    # A setting that is false or empty has no effect.
    others = [
        key for key, value in settings.items() if value and key not in known and not _WITHOUT_EFFECT.fullmatch(key)
    ]
    if others:
        raise _unserved(f"has tokenizer.{min(others)}, which would change tokens and is not served")


def _kinds(vocabulary: Mapping[str, Any]) -> list[int]:
    """The kind of each token; those that end an answer are special tokens, also where the file says otherwise."""
    tokens: Sequence[str] = vocabulary.get("tokens", ())
    given = [*vocabulary.get("token_type", ()), *[_NORMAL_TOKEN] * len(tokens)]
    return [_CONTROL_TOKEN if text in END_TEXTS else kind for text, kind in zip(tokens, given, strict=False)]


def _byte_level(vocabulary: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer that merges bytes, as GPT-2's; the file spells special tokens and added tokens as they are in texts.

    transformers' converter spells those as bytes that lie outside of its alphabet, so that no text would match them.
    """
    tokens: Sequence[str] = vocabulary["tokens"]
    cut = vocabulary["pre_tokenizer_type"]
    merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
    numbers = {text: index for index, text in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=numbers, merges=merges, ignore_merges=cut in WHOLE))
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in SPLITS[cut]]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, spelled])
    backend.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL_TOKEN, backend.add_special_tokens), (_TEXT_TOKEN, backend.add_tokens)):
        added = [text for text, its_kind in zip(tokens, vocabulary["token_type"], strict=True) if its_kind == kind]
        add([AddedToken(text, normalized=False, special=kind == _CONTROL_TOKEN) for text in added])
    return backend
