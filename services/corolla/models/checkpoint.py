"""Finds and checks a model's checkpoint, and reads its configuration, fingerprint and weights."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from corolla.chassis.errors import CheckpointError, UnsupportedFamily
from corolla.models.config_checks import check_factors, check_ranges, check_sizes
from corolla.models.demo import DEMO_MODEL, demo_checkpoint
from corolla.models.families import (
    FAMILIES,
    Family,
    family_of,
    num_blocks,
    pageless_layers,
    short_factor_length,
    short_reason,
    stretched_lengths,
    why_unsupported,
)
from corolla.models.gguf.description import FACTORS, with_queries
from corolla.models.gguf.folder import settings_folder
from corolla.models.gguf.header import is_gguf, part_names
from corolla.models.gguf.header import read_header as read_header_of_gguf
from corolla.models.gguf.weights import GgufWeights
from corolla.models.hub import Hub, HubSnapshot
from corolla.models.mistral_format import PARAMS_FILE, is_rotated, model_names, settings_of
from corolla.models.quantized.description import (
    DESCRIPTION_FILES,
    QUANTIZATION_KEYS,
    Quantization,
    quantization_of,
)
from corolla.models.shared_files import SharedFiles
from corolla.models.tokenizer import PROCESSOR_TEMPLATE_FILE, TEKKEN_FILE, TIKTOKEN_FILE
from corolla.models.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    find_weights,
    no_weights,
    read_header,
    sample_bytes,
)
from corolla.models.wrappers import Form, TextModel, joined_rows, other_part, split_names, text_names

log = logging.getLogger(__name__)

# Raise this whenever two releases would not compute the same hidden states or read the same frames.
PROTOCOL_VERSION = 8

# The attribute of a configuration that names the GGUF file; `name_or_path` names the folder made from that file.
GGUF_FILE = "gguf_file"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILE = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)/(?P<file>[\w.-]+\.(?i:gguf))")
# The end of the path of a revision in the cache of huggingface_hub.
_REVISION_FOLDER = re.compile(r".*/models--(?P<owner>[^/]+?)(?:--(?P<model>[^/]+))?/snapshots/[^/]+")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_GENERATION_FILE = "generation_config.json"
_CONFIG_FILE = "config.json"
_SETTINGS_FILES = (_CONFIG_FILE, "tokenizer_config.json", _GENERATION_FILE)
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# Files of some publishers only.
_PUBLISHED_FILES = (TIKTOKEN_FILE, TEKKEN_FILE, PROCESSOR_TEMPLATE_FILE)
# Fields that do not change any result: a file's writer, its origin and its dtype.
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
# What wrappers of training put before the names of a model's tensors.
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "base_model.model.")
_SAMPLE_BYTES = 256
_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")


def context_length_of(config: PretrainedConfig) -> int:
    """The longest sequence, prompt and answer together, in tokens.

    The rotary embeddings `yarn` and `linear` make the context longer by their factor; many checkpoints' configurations
    still have the length before that.
    A longrope embedding limits sequences to the length of its short factors, unless the family begins anew: a longer
    sequence would mix keys of short factors and of long ones.
    """
    names = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
    lengths = [length for name in names if isinstance(length := getattr(config, name, None), int) and length > 0]
    stated = lengths[0] if lengths else 2048
    length = max([stated, *stretched_lengths(config, stated)])
    short, family = short_factor_length(config), FAMILIES.get(str(config.model_type))
    return length if short is None or (family is not None and family.begins_anew) else min(length, short)


def end_token_ids_of(config: GenerationConfig) -> tuple[int, ...]:
    """The tokens that end an answer, in the order of the configuration."""
    given = config.eos_token_id
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a decoder-only model. `from_pretrained` checks it; weights are read later, as needed.

    Attributes:
        name: the model's name in requests and in the placement.
        folder: the folder with `config.json`, the tokenizer, and the safetensors shards that were needed so far. The
            weights of a GGUF file are not in it.
        config: the model's configuration.
        family: the model's row in the table of families.
        shards: maps each stored tensor's name to its shard; empty for a GGUF file.
        snapshot: the source of further shards; None: all shards are in the folder.
        shared: the source of tensors that this machine lacks; None: it lacks none, or the hub has them.
        gguf: the weights of a GGUF file; None: they are safetensors.
        quantization: how the stored weights are quantised; None: they are not.
        unread: the parts of the model next to its language model, such as a vision tower, which are not read.
        form: in which form files hold the tensors.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    family: Family
    shards: Mapping[str, Path] = field(repr=False)
    snapshot: HubSnapshot | None = field(default=None, repr=False)
    shared: SharedFiles | None = field(default=None, repr=False)
    gguf: GgufWeights | None = field(default=None, repr=False)
    quantization: Quantization | None = None
    unread: tuple[str, ...] = ()
    form: Form = Form.USUAL

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        revision: str | None = None,
        hub: Hub | None = None,
        shared: SharedFiles | None = None,
    ) -> "Checkpoint":
        """Finds and checks a checkpoint. Weights on the hub are fetched when they are opened.

        Args:
            name_or_path: `"demo"`, a local folder, a GGUF file (any part of a split one), a hub id such as
                `Qwen/Qwen3-0.6B`, or a hub id followed by `/` and the name of a GGUF file there.
            shared: the files at that path, if other machines give this one what it lacks of them.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged, or has only pickled weights.
            UnsupportedFamily: the table of families has no row for the model.
            HubUnavailable: the hub cannot be reached.
        """
        found = _find(name_or_path)
        if isinstance(found, str) and (match := _HUB_FILE.fullmatch(found)):
            found = _fetched_gguf(hub or Hub(), match["repository"], match["file"], revision)
        if isinstance(found, Path) and found.is_file():
            return cls._of_gguf(found, shared)
        snapshot = HubSnapshot.pin(hub or Hub(), found, revision) if isinstance(found, str) else None
        if snapshot is not None and not {_CONFIG_FILE, PARAMS_FILE} & set(snapshot.manifest.files):
            raise CheckpointError(no_weights(snapshot.repository, snapshot.manifest.files))
        folder = snapshot.folder if snapshot is not None else Path(found)
        config, quantization, text = _read_config(folder)
        family = family_of(config)
        stored = snapshot.weight_index() if snapshot is not None else find_weights(folder)
        name = snapshot.repository if snapshot is not None else _name_of(folder)
        if shared is not None:
            name = shared.manifest.root
        index = {each: shard for each, shard in stored.items() if other_part(each) is None}
        unread = tuple(sorted({part for each in stored if (part := other_part(each)) is not None}))
        if text.is_wrapped:
            # Wrappers say in several places, or by a default, whether the head is tied; a stored head is not.
            has_head = any(each.startswith("lm_head.") for each in text_names(index))
            if not has_head and text.is_untied:
                raise CheckpointError(
                    f"{folder} has no head (lm_head), and its config.json says that the head is not the embedding; set "
                    "tie_word_embeddings to true there if it is, or give the whole checkpoint."
                )
            config.tie_word_embeddings = not has_head
        checkpoint = cls(
            name, folder, config, family, index, snapshot, shared,
            quantization=quantization, unread=unread, form=Form.MISTRAL if _is_mistral_format(folder) else text.form,
        )  # fmt: skip
        if unread:
            log.info("serving the language model alone", extra={"model": name, "unread": ", ".join(unread)})
        checkpoint._check_blocks()
        checkpoint._check_packed()
        return checkpoint

    @classmethod
    def _of_gguf(cls, path: Path, shared: SharedFiles | None) -> "Checkpoint":
        header = with_queries(read_header_of_gguf(path))
        if shared is not None:
            read = [tensor for name, tensor in header.tensors.items() if name in FACTORS]
            shared.fetch((tensor.path, tensor.offset, tensor.num_bytes) for tensor in read)
        folder = settings_folder(header)
        config, _, _ = _read_config(folder)
        setattr(config, GGUF_FILE, str(path))
        weights = GgufWeights(path, header, config)
        return cls(weights.name, folder, config, family_of(config), {}, shared=shared, gguf=weights)

    @property
    def weight_index(self) -> Mapping[str, Path]:
        """Maps each stored tensor's name to the file that holds it."""
        return self.shards if self.gguf is None else self.gguf.index

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """Maps each tensor's name in the language model to the stored one, which may have a wrapper's prefix."""
        found = {Form.JOINED: split_names, Form.MISTRAL: model_names}.get(self.form, text_names)(self.weight_index)
        if getattr(self.config, "zero_expert_num", None):
            # transformers saves weights for experts that pass their input on, which nothing reads.
            count = int(self.config.n_routed_experts)
            experts = ((name, _EXPERT.search(name)) for name in found)
            found = {name: found[name] for name, expert in experts if expert is None or int(expert[1]) < count}
        if self.family.stored_as is None:
            return found
        old, new = self.family.stored_as
        return {re.sub(rf"^{re.escape(old)}", new, name): stored for name, stored in found.items()}

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.config)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def has_tied_edges(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @functools.cached_property
    def largest_blocks(self) -> tuple[int, ...]:
        """Two blocks: the first of the largest ones with keys and values, and the first of the largest ones without.

        If a model has no block of one kind, only the other is there. A plan that fits the larger of the two fits every
        block.
        """
        pageless = pageless_layers(self.config)
        kinds = sorted(set(range(self.num_blocks)) - pageless), sorted(pageless)
        return tuple(max(blocks, key=self._sizes.__getitem__) for blocks in kinds if blocks)

    @property
    def largest_block(self) -> int:
        """The largest of all blocks."""
        return max(self.largest_blocks, key=self._sizes.__getitem__)

    @functools.cached_property
    def _sizes(self) -> Sequence[int]:
        """How many weights each block has."""
        from transformers import AutoModel

        from corolla.models.empty_model import model_class_of, without_weights

        base: Any = without_weights(model_class_of(AutoModel, self.config), self.config)
        blocks = base.get_submodule(self.family.layers)
        return [sum(weight.numel() for weight in block.parameters()) for block in blocks]

    def _stored_blocks(self) -> set[int]:
        """Returns the numbers of the blocks that have tensors.

        A checkpoint may have several lists of blocks, such as one that predicts further tokens; the model's blocks are
        the longest list.
        """
        layer = re.compile(rf"((?:.*\.)?){re.escape(self.family.layers)}\.(\d+)\..*")
        lists: dict[str, set[int]] = {}
        for match in filter(None, map(layer.fullmatch, self.names)):
            lists.setdefault(match[1], set()).add(int(match[2]))
        return max(lists.values(), key=len, default=set())

    def head_blocks(self) -> float:
        """How many blocks of the largest size have as many weights as the head.

        This is also the ratio of the times that head and block take for one row, since a row costs the time of reading
        the weights.
        """
        return self.vocab_size * self.hidden_size / max(self._sizes)

    def generation_config(self) -> GenerationConfig:
        """The default settings of answers: the checkpoint's, otherwise those that follow from its configuration.

        Raises:
            CheckpointError: `generation_config.json` cannot be read.
        """
        try:
            return GenerationConfig.from_pretrained(self.folder)
        except OSError:
            return GenerationConfig.from_model_config(self.config)
        except ValueError:
            raise CheckpointError(f"{self.folder}/generation_config.json cannot be read; repair or remove it") from None

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        return context_length_of(self.config)

    @property
    def short_factor_length(self) -> int | None:
        """How many tokens a text may have with the short factors of a longrope embedding; None: no text has others."""
        short = short_factor_length(self.config)
        return short if short is not None and short < self.context_length else None

    def fetch(self, names: Iterable[str] | None = None) -> None:
        """Fetches the shards that hold these tensors into the folder, and checks them; None: all shards.

        Raises:
            CheckpointError: a shard cannot be fetched.
            HubUnavailable: the hub cannot be reached.
        """
        if self.snapshot is not None:
            wanted = self.weight_index if names is None else names
            self.snapshot.fetch({self.weight_index[name].name for name in wanted})
        if self.shared is not None:
            self.shared.fetch(self._places(self.weight_index if names is None else names))

    def _places(self, names: Iterable[str]) -> Iterator[tuple[Path, int, int]]:
        """Yields file, first byte and length of each of these tensors, by their stored names."""
        if self.gguf is not None:
            for name in names:
                yield from ((each.path, each.offset, each.num_bytes) for each in self.gguf.tensors.stored(name))
        else:
            for name, held in self.stored(names).items():
                yield self.weight_index[name], held.offset, held.num_bytes

    def stored(self, names: Iterable[str]) -> dict[str, StoredTensor]:
        """The places of those tensors whose safetensors files are here and can be read, by their stored names."""
        if self.gguf is not None:
            return {}
        headers: dict[Path, Mapping[str, StoredTensor]] = {}
        found: dict[str, StoredTensor] = {}
        for name in names:
            shard = self.weight_index[name]
            if shard not in headers:
                headers[shard] = {}
                # A file of the cache that is cut short is fetched again when it is opened.
                with contextlib.suppress(CheckpointError):
                    headers[shard] = read_header(shard)
            if name in headers[shard]:
                held = headers[shard][name]
                found[name] = held.transposed() if self._is_transposed(name, held.shape) else held
        return found

    def _is_transposed(self, stored: str, shape: Sequence[int]) -> bool:
        """A file holds the matrices of experts transposed; transformers, too, looks at their shape."""
        if self.form is not Form.TRANSPOSED or len(shape) != 3:
            return False
        if stored.endswith(".experts.gate_up_proj"):
            return shape[2] != self.hidden_size
        return stored.endswith(".experts.down_proj") and shape[1] != self.hidden_size

    @contextlib.contextmanager
    def open_tensors(self, names: Mapping[str, str], dtype: Any = None) -> Iterator[dict[str, Any]]:
        """Fetches some tensors' shards and opens the tensors; see `chunked_reads.open_tensors`.

        A packed weight has the name of the ordinary weight, and is expanded when it is read.

        Args:
            names: maps new names to stored names.
            dtype: the torch dtype to which packed weights are expanded; None: float32.

        Raises:
            CheckpointError: as `fetch`; or parts of packed weights are missing, or do not fit each other.
            HubUnavailable: as `fetch`.
        """
        self.fetch(names.values())
        if self.gguf is not None:
            yield {name: self.gguf.tensors[stored] for name, stored in names.items()}
            return
        from corolla.models.chunked_reads import HalvesOfPairs, Transposed, open_tensors
        from corolla.models.quantized.tensors import packed_weights, refuse_packed

        with open_tensors(self.weight_index, names) as tensors:
            for name, stored in names.items():
                if self._is_transposed(stored, tensors[name].get_shape()):
                    tensors[name] = Transposed(tensors[name])
                elif self.form is Form.JOINED and (rows := self._rows_of(name, stored)) is not None:
                    tensors[name] = tensors[name].rows(*rows)
                elif self.form is Form.MISTRAL and is_rotated(stored):
                    tensors[name] = HalvesOfPairs(tensors[name], int(self.config.head_dim))
            if self.quantization is None:
                refuse_packed(tensors)
            else:
                tensors = packed_weights(self.quantization, tensors, dtype)
            yield tensors

    def _rows_of(self, name: str, stored: str) -> tuple[int, int] | None:
        config: Any = self.config
        return joined_rows(name, stored, config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    def fingerprint(self, dtype: str, quantization: str = "none", kv_cache_dtype: str = "auto") -> str:
        """Identifies what a server computes: two servers with the same fingerprint may share a chain.

        The digest covers the weights, the configuration, the tokenizer's files, all arguments and the protocol version.
        For weights on the hub, it covers the checksums of all files, which are known without the files. For weights in
        a folder, it covers every tensor's name, dtype, shape and three short samples of its bytes. Samples are enough
        to keep revisions, fine-tunes and conversions from being mixed by mistake, since these change nearly all numbers
        of nearly every tensor; hashing whole weights could read a hundred gigabytes at each start. The fingerprint does
        not protect from an attacker who changes single numbers.

        Returns:
            16 hexadecimal characters.
        """
        digest = hashlib.sha256(self._content[0])
        digest.update(f"{dtype} {quantization} {PROTOCOL_VERSION}".encode())
        if self.quantization is not None:
            digest.update(f" from {self.quantization}".encode())
        if kv_cache_dtype != "auto":
            digest.update(f" with keys and values in {kv_cache_dtype}".encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def _content(self) -> tuple[bytes, Mapping[str, int]]:
        """The digest of weights and settings, and of each vocabulary file a checksum, from one reading of the files.

        The checksum only tells people which file differs, so a fast one is enough.
        """
        digest = hashlib.sha256()
        checksums: dict[str, int] = {}
        digest.update(self.weights_identity)
        if self.gguf is not None:
            return digest.digest(), checksums
        for name in _SETTINGS_FILES:
            digest.update(f"{name} {json.dumps(self._facts_of(name), sort_keys=True)}\n".encode())
        published = [name for name in _PUBLISHED_FILES if (self.folder / name).is_file()]
        for name in (*_VOCABULARY_FILES, *published):
            path = self.folder / name
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
            checksums[name] = zlib.crc32(content)
        return digest.digest(), checksums

    @functools.cached_property
    def weights_identity(self) -> bytes:
        """The digest that identifies the weights; in a GGUF file, also configuration, tokenizer and template."""
        if self.shared is not None:
            return bytes.fromhex(self.shared.manifest.identity)
        facts: Iterable[bytes]
        if self.gguf is not None:
            # The folder is made from the GGUF file, so facts about the file cover the folder.
            facts = self.gguf.facts(_SAMPLE_BYTES)
        elif self.snapshot is not None:
            facts = self.snapshot.identity(self.weight_index)
        else:
            facts = sample_bytes(self.weight_index, _SAMPLE_BYTES)
        digest = hashlib.sha256()
        for fact in facts:
            digest.update(fact)
        return digest.digest()

    @property
    def is_of_hub(self) -> bool:
        """The weights come from the hub, now or earlier into its cache."""
        return self.snapshot is not None or _REVISION_FOLDER.fullmatch(self.files_folder.as_posix()) is not None

    @property
    def files_folder(self) -> Path:
        """The folder of the files as they were given, the GGUF file's included."""
        return self.folder if self.gguf is None else self.gguf.path.parent

    def _facts_of(self, name: str) -> dict[str, Any]:
        """What a settings file says that changes results; defaults of sampling do not, since callers choose."""
        path = self.folder / name
        stored: Mapping[str, Any] = _read_json(path) if path.is_file() else {}
        if name == _CONFIG_FILE:
            stored = TextModel.of(_read_settings(self.folder)[1]).settings
        if name == _GENERATION_FILE:
            stored = {key: value for key, value in stored.items() if key.endswith("_token_id") or key.startswith("_")}
        return {key: value for key, value in stored.items() if key not in _NOTES}

    def fingerprint_parts(self, dtype: str, quantization: str = "none", kv_cache_dtype: str = "auto") -> dict[str, str]:
        """What the fingerprint stands for, by name: settings by their values, the rest by digests.

        So a caller whose fingerprint no server has learns what differs.
        """
        tokenizer = dict(self._facts_of("tokenizer_config.json"))
        template = tokenizer.pop("chat_template", None)
        contents = dict(self._content[1])
        stored_template = contents.pop("chat_template.jinja", 0)
        parts = {
            "weights": self.weights_identity.hex(),
            "configuration": self._facts_of("config.json"),
            "tokenizer": [tokenizer, contents],
            "template": [template, stored_template],
            "generation_defaults": self._facts_of(_GENERATION_FILE),
            "release": PROTOCOL_VERSION,
        }
        if self.gguf is not None:
            parts = {"weights": parts["weights"], "release": PROTOCOL_VERSION}
        digests = {
            name: hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()[:8]
            for name, each in parts.items()
        }
        return {**digests, "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}

    def _check_packed(self) -> None:
        if self.quantization is not None and self.form is Form.JOINED:
            raise CheckpointError(
                f"{self.folder} holds quantised weights, of which queries, keys and values are one; give the original "
                "checkpoint."
            )
        if self.quantization is not None and self.has_tied_edges:
            # A quantised head and the embedding have different numbers, and nothing says which of them are right.
            heads = [name for name in self.names if name.startswith(("lm_head.", "embed_out."))]
            if odd := next((name for name in heads if not name.endswith((".weight", ".bias"))), None):
                raise CheckpointError(
                    f"{self.folder} holds a quantised head ({odd}), which config.json ties to the embedding; set "
                    "tie_word_embeddings to false there, or give the original checkpoint."
                )

    def _check_blocks(self) -> None:
        for wrapper in _WRAPPERS:
            if self.weight_index and all(name.startswith(wrapper) for name in self.weight_index):
                raise CheckpointError(
                    f"{self.folder} has names that all begin with {wrapper!r}, which torch.compile, DDP, FSDP or PEFT "
                    "put there in training; save the model without that wrapper, or take the beginning off the names."
                )
        promised, held = self.num_blocks, self._stored_blocks()
        if not held:
            raise CheckpointError(
                f"{self.folder} has no tensors named as the blocks of a {self.family.model_type} model "
                f"({self.family.layers}.0.…); {min(self.weight_index, default='none')!r} is among its names. Correct "
                "model_type in config.json, or give a checkpoint in the layout of transformers."
            )
        absent = next((block for block in range(promised) if block not in held), None)
        if absent is not None and absent == len(held):
            field = self.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
            if self.family.past.attentions > 1:
                field = "num_layers"
            raise CheckpointError(
                f"{self.folder} has weights of {len(held)} blocks where config.json promises {promised}; set "
                f"{field} to {len(held)} if the model was cut, or give the whole checkpoint."
            )
        if absent is not None:
            raise CheckpointError(
                f"{self.folder} has no weights of block {absent}, and config.json promises {promised} blocks; give the "
                "whole checkpoint."
            )


def _find(name_or_path: str) -> Path | str:
    """The path of a local folder or GGUF file, or the hub id as it was given if neither exists."""
    if name_or_path == DEMO_MODEL:
        return demo_checkpoint()
    if not name_or_path:
        raise CheckpointError(f"No model is named; give {DEMO_MODEL!r}, a local folder or a hub id.")
    path = Path(name_or_path).expanduser()
    # Links are kept: the cache of the hub has links to files whose names are digests, without the part's number.
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return Path(os.path.abspath(path))
    if path.exists():
        raise CheckpointError(
            f"{name_or_path} is not a GGUF file; point to one, or to the folder that holds config.json and the weights."
        )
    if not _HUB_ID.fullmatch(name_or_path) and not _HUB_FILE.fullmatch(name_or_path):
        raise CheckpointError(f"There is no folder {name_or_path}; check the path, or give {DEMO_MODEL!r} or a hub id.")
    return name_or_path


def _name_of(folder: Path) -> str:
    """The name of a folder, or the hub id if it is a revision in the cache of huggingface_hub."""
    match = _REVISION_FOLDER.fullmatch(folder.as_posix())
    return folder.name if match is None else "/".join(part for part in (match["owner"], match["model"]) if part)


def _fetched_gguf(hub: Hub, repository: str, file: str, revision: str | None) -> Path:
    """Fetches a GGUF file from the hub, with all its parts. Returns its path."""
    snapshot = HubSnapshot.pin(hub, repository, revision)
    parts = [part.name for part in part_names(Path(file))]
    absent = sorted(set(parts) - set(snapshot.manifest.files))
    if absent:
        raise CheckpointError(f"{repository!r} has no file {absent[0]}; look for its name on the hub.")
    snapshot.fetch(parts)
    return snapshot.folder / file


def _read_config(folder: Path) -> tuple[PretrainedConfig, Quantization | None, TextModel]:
    """The configuration, how weights are quantised, and what config.json says of the language model.

    The configuration lacks the fields of the quantisation, since models get expanded weights.
    """
    path, whole = _read_settings(folder)
    check_ranges(path, whole)
    _check_files(folder, whole)
    text = TextModel.of(whole)
    stored = text.settings
    described = {name: _read_json(folder / name) for name in DESCRIPTION_FILES if (folder / name).is_file()}
    quantization = quantization_of(stored, described)
    if stored.get("auto_map") and "model_type" not in stored:
        raise CheckpointError(
            f"{folder} needs code of its own, which is never run; choose a model that transformers knows."
        )
    try:
        settings = text.family_settings()
        if text.family in FAMILIES:
            check_sizes(path, settings, CONFIG_MAPPING[text.family])
        if text.is_wrapped or path.name != _CONFIG_FILE or text.family != text.model_type:
            config = AutoConfig.for_model(text.family).from_dict(settings, name_or_path=str(folder))
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a foreign model_type, or a field that the family's own checks refuse
        if text.family not in FAMILIES:
            raise UnsupportedFamily(why_unsupported(stored)) from None
        raise CheckpointError(
            f"{path} does not describe a model that transformers knows; correct it: {short_reason(error)}"
        ) from error
    check_factors(path, config)
    for name in QUANTIZATION_KEYS:
        if hasattr(config, name):
            delattr(config, name)
    return config, quantization, text


def _read_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with the model's settings, and what it says in the form of `config.json`."""
    path = folder / _CONFIG_FILE
    if path.is_file():
        return path, _read_json(path)
    if _is_mistral_format(folder):
        path = folder / PARAMS_FILE
        return path, settings_of(_read_json(path))
    raise _no_config(folder)


def _is_mistral_format(folder: Path) -> bool:
    """The folder holds a model in Mistral's own format alone."""
    return not (folder / _CONFIG_FILE).is_file() and (folder / PARAMS_FILE).is_file()


def _no_config(folder: Path) -> CheckpointError:
    if (folder / _ADAPTER_FILES[0]).is_file():
        return CheckpointError(
            f"{folder} holds an adapter and no model; give its base model, and add it by `corolla adapters add`."
        )
    if gguf := next((each.name for each in sorted(folder.iterdir()) if is_gguf(each)), None):
        return CheckpointError(no_weights(str(folder), [gguf]))
    return CheckpointError(f"{folder} has no config.json; point to a complete checkpoint folder.")


def _check_files(folder: Path, stored: Mapping[str, Any]) -> None:
    """Refuses files that transformers would read in addition to, or in place of, those that are read here."""
    if all((folder / name).is_file() for name in _ADAPTER_FILES):
        raise CheckpointError(
            f"{folder} holds an adapter ({_ADAPTER_FILES[0]}) next to a model, to which transformers would apply it; "
            "move it elsewhere, and add it by `corolla adapters add`."
        )
    if (weights_file := stored.get("transformers_weights")) not in (None, SINGLE_FILE, INDEX_FILE):
        raise CheckpointError(
            f"config.json names the weights' file in transformers_weights ({str(weights_file)[:40]!r}), which is not "
            f"served; rename the file to {SINGLE_FILE}, and remove that field."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is no JSON from line {error.lineno} on; correct it there, or fetch the checkpoint again."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read; fetch the checkpoint again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no table of settings; give the file that save_pretrained writes.")
    return content
