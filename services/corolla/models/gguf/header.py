"""Reads the header of a GGUF file: its metadata, and the place of each tensor.

All lengths are checked against the length of the file, so a damaged or hostile file cannot make the reader allocate
much more memory than the file has bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from corolla.chassis.errors import CheckpointError
from corolla.models.weights import GGUF_SUFFIX

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_BEGINNING: Final = struct.Struct("<4sIQQ")
_STRING, _ARRAY = 8, 9
_NUMBERS: Final = {
    kind: struct.Struct(form)
    for kind, form in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip
_LENGTH: Final = struct.Struct("<Q")
_KIND: Final = struct.Struct("<I")
_ARRAY_HEAD: Final = struct.Struct("<IQ")
_PLACE: Final = struct.Struct("<IQ")
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_MAX_NAME_BYTES: Final = 256
_MOST_PARTS: Final = 100_000
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<total>\d{5})(?P<ending>\.(?i:gguf))")

# Maps the number of a tensor type to its name, the weights of a block, and the bytes of a block.
TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
PLAIN_TYPES: Final = frozenset({"F32", "F16", "BF16"})
"""The types that are not quantised."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor in a file, and its type.

    Attributes:
        path: the file that holds the tensor; a split model has several files.
        shape: the shape, with dimensions in torch's order.
        type_number: a key of `TYPES`.
        offset: the position of its first byte in the file.
        num_bytes: its length in the file.
    """

    path: Path
    shape: tuple[int, ...]
    type_number: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TYPES[self.type_number][0]

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The merged headers of all files of a model.

    Attributes:
        metadata: the metadata, by the keys of the format.
        tensors: the tensors, by the names of the format.
        digest: SHA-256 of all headers.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    digest: bytes

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a file, or of all parts of a split model; `path` may be any of the parts.

    Raises:
        CheckpointError: a file is missing, damaged, cut short, or has tensors of a type that is not served.
    """
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    digest = hashlib.sha256()
    parts = part_names(path)
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing; all {len(parts)} parts of a split model lie in one folder.")
        own, held, own_digest = _read_part(part)
        digest.update(own_digest)
        count = own.get("split.count")
        if isinstance(count, int) and 1 < count < _MOST_PARTS and count != len(parts):
            raise CheckpointError(
                f"{part} is one of {count} parts of a split model, which its name does not say; give the parts one "
                f"name with the endings -00001-of-{count:05}.gguf and so on, in their order."
            )
        # The first part has the metadata of the model.
        metadata = metadata or own
        if twice := tensors.keys() & held.keys():
            raise CheckpointError(f"{part} holds the tensor {min(twice)!r} once more; fetch the model again.")
        tensors |= held
    promised = metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(f"{path} promises {promised} tensors and has {len(tensors)}; fetch the model again.")
    return GgufHeader(metadata, tensors, digest.digest())


def part_names(path: Path) -> list[Path]:
    """The paths of all parts of a model, in their order, whether they exist or not."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    total = int(match["total"])
    ending = match["ending"]
    return [path.with_name(f"{match['stem']}-{number:05}-of-{total:05}{ending}") for number in range(1, total + 1)]


def is_gguf(path: Path) -> bool:
    """True if the file begins as a GGUF file does, or if its name ends so, since damaged files are refused as such."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC or path.suffix.lower() == GGUF_SUFFIX
    except OSError:
        return path.suffix.lower() == GGUF_SUFFIX


def raw_bytes(tensor: GgufTensor, start: int, num_bytes: int) -> bytes:
    """The stored bytes of a tensor from `start` on, at most `num_bytes`.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    wanted = min(num_bytes, tensor.num_bytes - start)
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset + start)
            content = file.read(wanted)
    except OSError as error:
        raise CheckpointError(f"{tensor.path} cannot be read; check its permissions.") from error
    if len(content) < wanted:
        raise CheckpointError(f"{tensor.path} has become shorter; fetch it again.")
    return content


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], bytes]:
    damaged = CheckpointError(f"{path} is damaged, cut short or not a GGUF file; fetch it again.")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).read()
    except (struct.error, ValueError, UnicodeDecodeError, OverflowError) as error:
        raise damaged from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read; check its permissions.") from error


class _Reader:
    """Reads one file's header.

    It raises struct.error, ValueError or OverflowError for an invalid header, and CheckpointError for a version of the
    format or a type that is not served.
    """

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor], bytes]:
        magic, version, num_tensors, num_entries = self._take(_BEGINNING)
        if magic != _MAGIC:
            raise ValueError("no GGUF file")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path} has version {version} of the format; convert it to version 3.")
        metadata = self._many(num_entries, self._entry)
        places = self._many(num_tensors, self._place)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= len(self._content):
            raise ValueError("an alignment that cannot be")
        start = -(-self._position // alignment) * alignment
        digest = hashlib.sha256(self._content[: self._position]).digest()
        return metadata, {name: self._tensor(name, start, *place) for name, place in places.items()}, digest

    def _many(self, number: int, read: Callable[[], tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(number):
            name, value = read()
            if name in found:
                raise ValueError("a name that occurs twice")
            found[name] = value
        return found

    def _entry(self) -> tuple[str, Any]:
        key = self._string()
        (kind,) = self._take(_KIND)
        return key, self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(kind)
        inner, number = self._take(_ARRAY_HEAD)
        # Every value has at least one byte, so a valid list has at most as many values as the file has bytes.
        if number > len(self._content) - self._position:
            raise ValueError("a list that is longer than the file")
        if inner == _STRING:
            return [self._string() for _ in range(number)]
        form = struct.Struct(f"<{number}{_NUMBERS[inner].format[1:]}") if inner in _NUMBERS else None
        if form is None:
            raise ValueError("a list of lists")
        return list(self._take(form))

    def _number(self, kind: int) -> Any:
        if kind not in _NUMBERS:
            raise ValueError("a value of an unknown type")
        (value,) = self._take(_NUMBERS[kind])
        return value

    def _place(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        (num_dimensions,) = self._take(_KIND)
        if num_dimensions > _MAX_DIMENSIONS or not 0 < len(name) <= _MAX_NAME_BYTES:
            raise ValueError("a tensor that cannot be")
        dimensions = self._take(struct.Struct(f"<{num_dimensions}Q"))
        type_number, offset = self._take(_PLACE)
        return name, (tuple(reversed(dimensions)), type_number, offset)

    def _tensor(self, name: str, start: int, shape: tuple[int, ...], type_number: int, offset: int) -> GgufTensor:
        if type_number not in TYPES:
            known = ", ".join(label for label, *_ in TYPES.values())
            raise CheckpointError(
                f"{self._path} stores {name!r} in a type (number {type_number}) that is not served; take a file of one "
                f"of these: {known}."
            )
        _, block_weights, block_bytes = TYPES[type_number]
        if 0 in shape:
            raise CheckpointError(
                f"{self._path} gives {name!r} the shape {list(shape)}, which holds no weights; convert the model again."
            )
        if not shape or shape[-1] % block_weights:
            raise ValueError("a row that is not a whole number of blocks")
        num_bytes = math.prod(shape) // block_weights * block_bytes
        if start + offset + num_bytes > len(self._content):
            raise ValueError("a tensor that ends behind the file")
        return GgufTensor(self._path, shape, type_number, start + offset, num_bytes)

    def _string(self) -> str:
        (length,) = self._take(_LENGTH)
        end = self._position + length
        if end > len(self._content):
            raise ValueError("a text that ends behind the file")
        text = self._content[self._position : end].decode()
        self._position = end
        return text

    def _take(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._content, self._position)
        self._position += form.size
        return values
