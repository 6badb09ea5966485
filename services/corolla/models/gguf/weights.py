"""The weights of a GGUF file for a checkpoint: their names, sizes and identity.

Only `GgufWeights.tensors` and `GgufWeights.index` import torch and the package `gguf`.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from corolla.models.gguf.header import GgufHeader, part_names, raw_bytes

if TYPE_CHECKING:
    from corolla.models.gguf.tensors import GgufTensors

_DIGEST = re.compile(r"(sha256[-:])?[0-9a-f]{40,}")


class GgufWeights:
    """The weights of one model.

    Args:
        path: the file, or any part of a split model.
    """

    def __init__(self, path: Path, header: GgufHeader, config: PretrainedConfig) -> None:
        self.path = path
        self.header = header
        self._config = config

    @property
    def name(self) -> str:
        """The model's name: the file's name without its ending and the number of a part.

        Some programs name files by their digests; then it is the name that the file gives itself, if it does.
        """
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", part_names(self.path)[0].stem)
        given = re.sub(r"[^\w.-]+", "-", str(self.header.metadata.get("general.name", ""))).strip("-")
        return given if given and _DIGEST.fullmatch(stem) else stem

    @functools.cached_property
    def index(self) -> Mapping[str, Path]:
        """Maps transformers' name of each tensor to the file that holds it; for a bias that is zero, to `path`."""
        stored = {name: self.tensors.stored(name) for name in self.tensors}
        return {name: held[0].path if held else self.path for name, held in stored.items()}

    @functools.cached_property
    def tensors(self) -> "GgufTensors":
        """All weights by transformers' names. Raises as `GgufTensors` does."""
        from corolla.models.gguf.tensors import GgufTensors

        return GgufTensors(self.header, self._config)

    def facts(self, num_bytes: int) -> Iterator[bytes]:
        """Yields bytes that identify the file without reading all of it.

        These are the digest of its header, and `num_bytes` from each of the beginning, middle and end of every tensor.
        """
        yield self.header.digest
        for name in sorted(self.header.tensors):
            tensor = self.header.tensors[name]
            last = max(0, tensor.num_bytes - num_bytes)
            for start in (0, last // 2, last):
                yield raw_bytes(tensor, start, num_bytes)
