"""Finds or fetches an adapter's folder, and reads it in one pass: its table of contents, its digest, and a span's part.

This module does not import torch, so a process that only registers adapters does not need torch.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from corolla.chassis.errors import AdapterError
from corolla.models.adapters.config import CONFIG_FILE, MAX_CONFIG_BYTES, AdapterConfig
from corolla.models.hub import Hub, HubSnapshot

WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_HEADER_BYTES: Final = 8 << 20
MAX_FILE_BYTES: Final = 16 << 30

_HEADER_LENGTH: Final = struct.Struct("<Q")
_BYTES_OF_DTYPES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_PASS_BYTES: Final = 1 << 20
# Layers of some families: latents become keys by the first, and states continue by the second (`Family.read_weights`).
_NOT_CALLED: Final = ("kv_b_proj", "dt_proj")
_NAME: Final = re.compile(
    r"base_model\.model\.(?P<name>(?:[a-z_]+\.){0,2}(?P<layers>[a-z_]+)\.(?P<block>\d{1,4})\.(?P<module>[\w.]+))"
    r"\.lora_(?P<part>[AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class ProductPart:
    """One of the two factors of a module's product, as the file stores it.

    Attributes:
        name: the module's name in the adapter; the configuration gives ranks and strengths by the ends of names.
        block: the number of the module's block.
        module: the module's path within the block.
        part: `A`, the factor `[rank, in]`, or `B`, the factor `[out, rank]`.
        dtype: safetensors' name of the element type.
        shape: the factor's shape.
        start: the offset of the factor's first byte in the data of the file.
        end: the offset behind the factor's last byte.
    """

    name: str
    block: int
    module: str
    part: str
    dtype: str
    shape: tuple[int, int]
    start: int
    end: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


Wanted = Callable[[ProductPart], bool]


@dataclass(frozen=True, slots=True)
class AdapterContents:
    """An adapter's folder as it was read, with the bytes of some parts.

    Attributes:
        config: the configuration.
        digest: SHA-256 of configuration and weights, 64 hexadecimal characters.
        parts: all parts of the weights file, in the file's order.
        data: the bytes of the wanted parts.
    """

    config: AdapterConfig
    digest: str
    parts: tuple[ProductPart, ...]
    data: Mapping[ProductPart, bytearray]


def read_adapter(
    folder: Path, wanted: Wanted, check_size: Callable[[int], None] = lambda num_values: None
) -> AdapterContents:
    """Reads a whole adapter once, computes its digest, and keeps the wanted parts.

    The digest covers the very bytes that are kept, even if the files change meanwhile.

    Args:
        folder: the folder that PEFT wrote.
        wanted: returns whether a part is to be kept.
        check_size: is called with the number of values to be kept, before memory is allocated; may raise.

    Raises:
        AdapterError: the folder holds no adapter that can be served, or a damaged one.
    """
    config_text = _read_config(folder)
    config = AdapterConfig.parse(config_text)
    digest = hashlib.sha256(f"{len(config_text)}\n".encode())
    digest.update(config_text)
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            header, parts = _read_parts(file, config)
            digest.update(_HEADER_LENGTH.pack(len(header)))
            digest.update(header)
            check_size(sum(part.num_values for part in parts if wanted(part)))
            data = _read_data(file, parts, wanted, digest)
    except OSError:
        raise _no_weights() from None
    return AdapterContents(config, digest.hexdigest(), parts, data)


def read_parts(folder: Path) -> tuple[ProductPart, ...]:
    """Reads and checks only an adapter's configuration and table of contents; raises as `read_adapter` does."""
    config = AdapterConfig.parse(_read_config(folder))
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            return _read_parts(file, config)[1]
    except OSError:
        raise _no_weights() from None


def digest_of(folder: Path) -> str:
    """The digest of an adapter. Raises AdapterError if the adapter cannot be served."""
    return read_adapter(folder, lambda part: False).digest


def _read_config(folder: Path) -> bytes:
    try:
        with (folder / CONFIG_FILE).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError:
        raise AdapterError(f"there is no {CONFIG_FILE}; give the folder that PEFT's save_pretrained wrote") from None


def _no_weights() -> AdapterError:
    return AdapterError(
        f"there is no {WEIGHTS_FILE} that can be read; pickled weights are never loaded; save them with safetensors"
    )


def _read_parts(file: IO[bytes], config: AdapterConfig) -> tuple[bytes, tuple[ProductPart, ...]]:
    """Reads and checks the table of contents. Returns its bytes, and the parts that it lists."""
    header = _read_header(file)
    parts = _parts(header, os.fstat(file.fileno()).st_size - _HEADER_LENGTH.size - len(header))
    _check(config, parts)
    return header, parts


def _read_header(file: IO[bytes]) -> bytes:
    start = file.read(_HEADER_LENGTH.size)
    if len(start) < _HEADER_LENGTH.size:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short")
    (num_bytes,) = _HEADER_LENGTH.unpack(start)
    num_file_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > MAX_HEADER_BYTES or num_bytes > num_file_bytes or num_file_bytes > MAX_FILE_BYTES:
        raise AdapterError(f"{WEIGHTS_FILE} is not a safetensors file, or larger than what is served")
    header = file.read(num_bytes)
    if len(header) < num_bytes:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short")
    return header


def _parts(header: bytes, num_data_bytes: int) -> tuple[ProductPart, ...]:
    """The parts in the order of the file. Raises AdapterError unless they cover the data without gap or overlap."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise AdapterError(f"the table of contents of {WEIGHTS_FILE} is damaged")
    parts = sorted(
        (_part(str(name), entry) for name, entry in entries.items() if name != "__metadata__"),
        key=lambda part: part.start,
    )
    end = 0
    for part in parts:
        if part.start != end:
            raise AdapterError(f"the table of contents of {WEIGHTS_FILE} has gaps or overlaps")
        end = part.end
    if not parts or end != num_data_bytes:
        raise AdapterError(f"{WEIGHTS_FILE} is cut short, or longer than its table of contents says")
    return tuple(parts)


def _part(name: str, entry: Any) -> ProductPart:
    match = _NAME.fullmatch(name)
    if match is None or "experts" in match["module"] or match["module"].endswith(_NOT_CALLED):
        raise AdapterError(_why_not(name))
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        num_rows, num_columns = shape
        sizes = (num_rows, num_columns, start, end)
        is_sound = all(type(size) is int and size >= 0 for size in sizes) and min(num_rows, num_columns) > 0
        is_sound = is_sound and end - start == num_rows * num_columns * _BYTES_OF_DTYPES[dtype]
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise AdapterError(f"{name[:128]} has no shape, type and place that fit each other")
    module, part = match["module"], match["part"]
    return ProductPart(match["name"], int(match["block"]), module, part, dtype, (num_rows, num_columns), start, end)


def _why_not(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "it is a DoRA adapter, which normalises the base weights; merge it into the checkpoint"
    if "experts" in name:
        return "it changes experts, each of which sees some of the tokens only; merge it into the checkpoint"
    if "_orig_mod." in name or name.startswith("module."):
        return "its names have the beginning of a wrapper (torch.compile or DDP); save it from the model without that"
    if odd := next((each for each in _NOT_CALLED if f".{each}." in name), None):
        return f"it changes {odd}, whose weights are read without a call of the layer; merge it, or train it without"
    if "lora_embedding" in name or "embed" in name or "lm_head" in name:
        return "it changes embedding or head; merge it into the checkpoint, or train it on the blocks only"
    return f"{name[:128]} is no product of a linear layer in a block"


def _check(config: AdapterConfig, parts: tuple[ProductPart, ...]) -> None:
    """Raises AdapterError unless each module is a target, and has both factors, of the configured rank."""
    by_module: dict[tuple[int, str], dict[str, ProductPart]] = {}
    for part in parts:
        by_module.setdefault((part.block, part.module), {})[part.part] = part
    if 2 * len(by_module) != len(parts):
        raise AdapterError("a module has one factor of a product and not the other, or one of them twice")
    for factors in by_module.values():
        down, up = factors["A"], factors["B"]
        if not (down.shape[0] == up.shape[1] == config.rank_of(down.name)) or down.name != up.name:
            raise AdapterError(f"{down.name[:128]} has another rank than {CONFIG_FILE} says")
        if not config.targets_module(down.name):
            raise AdapterError(f"{down.name[:128]} is not among target_modules")


def _read_data(
    file: IO[bytes], parts: tuple[ProductPart, ...], wanted: Wanted, digest: Any
) -> dict[ProductPart, bytearray]:
    data: dict[ProductPart, bytearray] = {}
    passing = memoryview(bytearray(_PASS_BYTES))
    for part in parts:
        if wanted(part):
            kept = data[part] = bytearray(part.end - part.start)
            _fill(file, memoryview(kept))
            digest.update(kept)
            continue
        for start in range(part.start, part.end, _PASS_BYTES):
            piece = passing[: min(_PASS_BYTES, part.end - start)]
            _fill(file, piece)
            digest.update(piece)
    return data


def _fill(file: IO[bytes], piece: memoryview) -> None:
    if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
        raise AdapterError(f"{WEIGHTS_FILE} is cut short")


_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


def adapter_folder(source: str, revision: str, root: Path | None = None, hub: Hub | None = None) -> Path:
    """Finds the folder of an adapter; fetches it first if it is on the hub.

    Args:
        source: a hub id if there is a `revision`, otherwise a folder, relative to `root` if that is given.
        revision: branch, tag or commit on the hub; empty: `source` is a folder.
        root: the folder that must contain the adapter's folder; None: the adapter may be in any folder.
        hub: the hub's client; None: one with default settings.

    Raises:
        AdapterError: the folder is missing or outside of `root`, or the hub's files are missing, too large or damaged.
        HubUnavailable: the hub cannot be reached.
    """
    if revision:
        snapshot = HubSnapshot.pin(hub or Hub(), source, revision)
        absent = sorted(set(_FILES) - set(snapshot.manifest.files))
        if absent:
            raise AdapterError(
                f"{source!r} has no {absent[0]}; only adapters that PEFT saved as safetensors are served"
            )
        if snapshot.manifest.files[WEIGHTS_FILE].num_bytes > MAX_FILE_BYTES:
            raise AdapterError(f"{source!r} has a larger {WEIGHTS_FILE} than is served")
        snapshot.fetch(_FILES)
        return snapshot.folder
    folder = Path(source).expanduser()
    if root is not None:
        folder = (root / folder).resolve()
        if not folder.is_relative_to(root.resolve()):
            raise AdapterError("the adapter's folder is outside of COROLLA_ADAPTERS_DIR")
    if not folder.is_dir():
        raise AdapterError("the adapter's folder is not there; name the one that PEFT wrote")
    return folder
