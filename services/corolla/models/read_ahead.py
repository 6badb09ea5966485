"""Reads the files of tensors into the system's cache before their weights are loaded."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from corolla.chassis.errors import CheckpointError
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import edge_tensors
from corolla.models.mtp import mtp_tensors
from corolla.models.span_model import span_tensors
from corolla.models.weights import read_header
from corolla.wire.span import Span

# Reading leaves Python to other threads, but each call waits for it once.
_CHUNK_BYTES: Final = 16 << 20
_NUM_THREADS: Final = 4
# Otherwise the cache could displace what was just read.
_SHARE_OF_MEMORY: Final = 2


def tensors_of(checkpoint: Checkpoint, span: Span, *, has_mtp: bool = False) -> list[str]:
    """The stored names of the tensors that a server of a span loads, ends of the model included.

    Args:
        has_mtp: whether the server of the last block loads the multi-token prediction block, too.
    """
    has_head = span.end == checkpoint.num_blocks
    has_mtp = has_mtp and has_head
    has_embedding = span.start == 0 or has_mtp or (has_head and checkpoint.has_tied_edges)
    ends = edge_tensors(checkpoint, has_embedding=has_embedding, has_head=has_head) if has_embedding or has_head else {}
    mtp = mtp_tensors(checkpoint) if has_mtp else {}
    read = Span(span.start, span.end + 1) if has_mtp else span
    return [*span_tensors(checkpoint, read).values(), *ends.values(), *mtp.values()]


def parts_of(weight_index: Mapping[str, Path], names: Iterable[str]) -> dict[Path, list[tuple[int, int]]]:
    """The parts of files that hold these tensors: `(start, end)` in bytes. Neighbours are one part.

    Args:
        weight_index: maps each stored tensor's name to its safetensors file.
        names: stored names; tensors of files that are not there are left out.

    Raises:
        CheckpointError: a file is damaged.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(weight_index[name], []).append(name)
    found: dict[Path, list[tuple[int, int]]] = {}
    for file, stored in by_file.items():
        if not file.is_file():
            continue
        header, parts = read_header(file), found.setdefault(file, [])
        for tensor in sorted((header[name] for name in stored), key=lambda each: each.offset):
            end = tensor.offset + tensor.num_bytes
            if parts and parts[-1][1] == tensor.offset:
                parts[-1] = (parts[-1][0], end)
            else:
                parts.append((tensor.offset, end))
    return found


class ReadAhead:
    """Reads tensors' bytes in threads. The system's cache keeps them.

    It reports nothing: what cannot be read now fails again when it is loaded.

    Args:
        weight_index: maps each stored tensor's name to its safetensors file.
        names: stored names, in the order in which they are read.
        available_bytes: the memory that is available; at most half of it is filled. None: it is not known.
    """

    def __init__(
        self, weight_index: Mapping[str, Path], names: Sequence[str], available_bytes: int | None = None
    ) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._chunks = _chunks(weight_index, names, available_bytes)
        self._threads = [
            threading.Thread(target=self._read, name="read_ahead", daemon=True) for _ in range(_NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the reading after the chunks that are being read."""
        self._stopped.set()

    def wait(self) -> None:
        """Waits until nothing more is read."""
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        memory = bytearray(_CHUNK_BYTES)
        while not self._stopped.is_set():
            try:
                with self._lock:
                    file, start, num_bytes = next(self._chunks)
                with file.open("rb", buffering=0) as opened:
                    os.preadv(opened.fileno(), [memoryview(memory)[:num_bytes]], start)
            except (StopIteration, CheckpointError, OSError):
                return


def _chunks(
    weight_index: Mapping[str, Path], names: Sequence[str], available_bytes: int | None
) -> Iterator[tuple[Path, int, int]]:
    """Yields file, first byte and number of bytes of what is read at a time."""
    left = None if available_bytes is None else available_bytes // _SHARE_OF_MEMORY
    for file, parts in parts_of(weight_index, names).items():
        for start, end in parts:
            for at in range(start, end, _CHUNK_BYTES):
                num_bytes = min(_CHUNK_BYTES, end - at)
                if left is not None:
                    left -= num_bytes
                    if left < 0:
                        return
                yield file, at, num_bytes
