"""A checkpoint: where a model's weights lie, what they are, and whether they can be served at all."""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig, PretrainedConfig

from corolla.chassis.errors import CheckpointError
from corolla.models.demo import DEMO_MODEL, demo_checkpoint
from corolla.models.families import Family, family_of
from corolla.models.weights import find_weights, sample_bytes

# Raise it whenever two releases would not compute the same hidden states or read the same frames.
PROTOCOL_VERSION = 1

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja", "*.txt"]

_SETTINGS_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# Who wrote a file, from where and in which dtype, changes no result.
_NOTES = frozenset(
    {
        "_name_or_path",
        "dtype",
        "is_local",
        "local_files_only",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_SAMPLE_BYTES = 256


def context_length_of(config: PretrainedConfig) -> int:
    """The longest sequence, prompt and answer, in tokens."""
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return 2048


@dataclass(frozen=True)
class Checkpoint:
    """A decoder-only model's folder, checked at opening; weights are read later, and only those needed.

    Attributes:
        name: what the model is called in the interface and the placement.
        folder: with `config.json`, the safetensors shards and the tokenizer.
        config: the model's configuration.
        family: its row in the table of families.
        weight_index: each stored tensor's name and the shard that holds it.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    family: Family
    weight_index: Mapping[str, Path] = field(repr=False)

    @classmethod
    def open(cls, name_or_path: str, *, revision: str | None = None) -> "Checkpoint":
        """Finds and checks a checkpoint.

        Args:
            name_or_path: `"demo"`, a local folder, or a hub id such as `Qwen/Qwen3-0.6B`.
            revision: branch, tag or commit on the hub.

        Raises:
            CheckpointError: it is missing, incomplete, damaged, or holds only pickled weights.
            UnsupportedFamily: no row of the table of families serves it.
        """
        folder, name = _find_folder(name_or_path, revision)
        config = _read_config(folder)
        family = family_of(config)
        checkpoint = cls(name, folder, config, family, find_weights(folder))
        checkpoint._check_blocks()
        return checkpoint

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and answer, in tokens."""
        return context_length_of(self.config)

    def fingerprint(self, dtype: str, quantization: str = "none") -> str:
        """Identifies what a server computes: two servers with the same fingerprint may share a chain.

        The digest covers every tensor's name, dtype, shape and three short samples of its bytes, the configuration, the
        tokenizer's files, `dtype`, `quantization` and the protocol version. Samples suffice because the fingerprint
        guards against mixing revisions, fine-tunes and conversions by mistake, and those change (nearly) every tensor
        throughout; hashing whole weights would read a hundred gigabytes at each start. It is no protection against
        somebody who alters single numbers on purpose.

        Returns:
            16 hexadecimal characters.
        """
        digest = hashlib.sha256(self._content_digest)
        digest.update(f"{dtype} {quantization} {PROTOCOL_VERSION}".encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def _content_digest(self) -> bytes:
        digest = hashlib.sha256()
        for sample in sample_bytes(self.weight_index, _SAMPLE_BYTES):
            digest.update(sample)
        for name in _SETTINGS_FILES:
            path = self.folder / name
            stored = _read_json(path) if path.is_file() else {}
            facts = {key: value for key, value in stored.items() if key not in _NOTES}
            digest.update(f"{name} {json.dumps(facts, sort_keys=True)}\n".encode())
        for name in _VOCABULARY_FILES:
            path = self.folder / name
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.digest()

    def _check_blocks(self) -> None:
        layer = re.compile(rf"(?:^|\.){re.escape(self.family.layers)}\.(\d+)\.")
        held = {int(match[1]) for name in self.weight_index if (match := layer.search(name))}
        absent = sorted(set(range(self.num_blocks)) - held)
        if absent:
            raise CheckpointError(
                f"{self.folder} has no weights for block {absent[0]} although config.json promises {self.num_blocks} "
                "blocks; fetch the checkpoint again."
            )


def _find_folder(name_or_path: str, revision: str | None) -> tuple[Path, str]:
    if name_or_path == DEMO_MODEL:
        folder = demo_checkpoint()
        return folder, folder.name
    if not name_or_path:
        raise CheckpointError(f"No model is named; give {DEMO_MODEL!r}, a local folder or a hub id.")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.exists():
        raise CheckpointError(f"{name_or_path} is a file; point to the folder that holds config.json and the weights.")
    if not _HUB_ID.fullmatch(name_or_path):
        raise CheckpointError(f"There is no folder {name_or_path}; check the path, or give {DEMO_MODEL!r} or a hub id.")
    return _fetch(name_or_path, revision), name_or_path


def _fetch(hub_id: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises many unrelated classes
        raise CheckpointError(
            f"{hub_id!r} is no local folder and cannot be fetched from the Hugging Face hub; check the name, the "
            "network and the access token, or give a local folder."
        ) from error


def _read_config(folder: Path) -> PretrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; point to a complete checkpoint folder.")
    stored = _read_json(path)
    if "quantization_config" in stored:
        raise CheckpointError(
            f"{folder} holds weights that are already quantised; give the original checkpoint and choose the "
            "quantisation when starting the server."
        )
    if stored.get("auto_map") and "model_type" not in stored:
        raise CheckpointError(
            f"{folder} needs code of its own, which is never run; choose a model that transformers knows."
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a foreign model_type, or a field that the family's own checks refuse
        model_type = stored.get("model_type")
        family_of(PretrainedConfig(**({"model_type": model_type} if model_type else {})))
        raise CheckpointError(f"{path} does not describe a model that transformers knows; fetch it again.") from error
    if not isinstance(config, PretrainedConfig):
        raise CheckpointError(f"{path} does not describe a model.")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged; fetch the checkpoint again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged; fetch the checkpoint again.")
    return content
