"""Chooses a server's attention at start, and checks it against the definition of attention in float64."""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Final

import torch
from torch import Tensor

from corolla.cache.codecs import KVCodec
from corolla.cache.store import KVStore
from corolla.chassis.errors import StartupError
from corolla.compute.attention.base import AttentionBackend, AttentionBatch, AttentionShape, LayerInput, PackedRow
from corolla.compute.attention.compiled_attention import CompiledAttention
from corolla.compute.attention.latents import sums_of_latents
from corolla.compute.attention.paged_triton import PagedTriton
from corolla.compute.attention.sdpa import SdpaAttention
from corolla.kernels.kernel_trial import failure_of, too_far

log = logging.getLogger(__name__)

BACKENDS: Final[Mapping[str, Callable[[], AttentionBackend]]] = {
    "compiled": CompiledAttention,
    "sdpa": SdpaAttention,
    "triton": PagedTriton,
}
_BY_DEVICE: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("compiled", "sdpa"),
    "cuda": ("triton", "sdpa"),
}
TOLERANCES: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""The largest absolute error allowed in a result, for inputs that are standard normal numbers."""
# A GPU merges the pages of a text in groups, so a trial there has more pages than a group, as far as tokens allow.
_PAGES_OF_TRIAL: Final = 40
_TOKENS_OF_TRIAL: Final = 3072
# Tokens of a chunk that are compared, counted from its end.
_COMPARED_TOKENS: Final = 64
# What trials have found. They use no weights, so a GPU needs each only once, and a server tries one block first.
_DIFFERENCES: Final[dict[Hashable, float]] = {}


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    page_tokens: int,
    *,
    shapes: Collection[AttentionShape] = (),
    codec: KVCodec | None = None,
) -> AttentionBackend:
    """The fastest attention that gives correct results on this device.

    Args:
        name: `auto`, or a key of BACKENDS.
        device: the device of keys, values and queries.
        dtype: the dtype of queries, and of keys and values as they are computed.
        page_tokens: tokens of a page.
        shapes: what the layers of the span ask for, each of which is tried; empty: one of ordinary sizes.
        codec: encodes keys and values; None: they are stored as computed.

    Raises:
        StartupError: no attention that `name` allows works on this device.
    """
    names = _BY_DEVICE.get(device.type, ("sdpa",)) if name == "auto" else (name,)
    for each in names:
        backend, failure = _tried(each, device, dtype, page_tokens, shapes or (AttentionShape(),), codec)
        if backend is not None:
            log.info("attention chosen", extra={"backend": each, "device": str(device)})
            return backend
        log.warning("an attention kernel does not work on this device", extra={"backend": each, "failure": failure})
    raise StartupError(
        f"COROLLA_ATTENTION={name} does not work on {device} with {dtype} and pages of {page_tokens} tokens: {failure}"
    )


def _tried(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    page_tokens: int,
    shapes: Collection[AttentionShape],
    codec: KVCodec | None,
) -> tuple[AttentionBackend | None, str]:
    """A backend that gave correct results for a small batch of each shape, or None and why it cannot be used."""
    pages = 1 if device.type == "cpu" else max(1, min(_PAGES_OF_TRIAL, _TOKENS_OF_TRIAL // page_tokens))
    made: list[AttentionBackend] = []

    def trial() -> str | None:
        made.append(BACKENDS[name]())
        for shape in shapes:
            key = (BACKENDS[name], device, dtype, page_tokens, shape, codec and codec.name)
            if device.type == "cpu" or key not in _DIFFERENCES:
                _DIFFERENCES[key] = largest_difference(
                    made[0], device, dtype, page_tokens, shape, codec=codec, pages_of_text=pages
                )
            if (failure := too_far(_DIFFERENCES[key], TOLERANCES[dtype])) is not None:
                return failure
        return None

    failure = failure_of(trial)
    return (made[0], "") if failure is None else (None, failure)


@torch.inference_mode()
def largest_difference(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    page_tokens: int,
    shape: AttentionShape,
    *,
    codec: KVCodec | None = None,
    pages_of_text: int = 1,
) -> float:
    """The largest difference between a backend's results and those of the definition in float64.

    The backend attends for chunks and single tokens of two sessions, with inputs in `dtype` on `device`. A window that
    is longer than a page is cut to a page, so that it hides keys. With a codec, the definition has decoded keys and
    values. NaN is infinite. The first session begins with so many full pages. Where `scaling` is large, queries are
    smaller, so that scores have the size that other models have.
    """
    generator = torch.Generator().manual_seed(0)
    window = None if shape.window is None else min(shape.window, page_tokens)
    query_scale = min(1.0, shape.key_size**-0.5 / shape.scaling)

    def draw(num_tokens: int, heads: int, size: int) -> Tensor:
        return torch.randn(num_tokens, heads, size, generator=generator).to(device=device, dtype=dtype)

    sinks = draw(1, shape.num_heads, 1).flatten() if shape.has_sinks else None
    lengths = (pages_of_text * page_tokens + 3, 5)
    num_pages = sum(-(-(length + 3) // page_tokens) for length in lengths)
    store = KVStore(num_pages, page_tokens, [window], max_step_tokens=max(lengths), codec=codec)
    caches = [store.new_cache() for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        cache.reserve(length + 3)
    texts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in lengths]
    difference = 0.0
    for new_tokens in (lengths, (1, 2), (1, 1)):
        rows: list[PackedRow] = []
        for cache, num_tokens, text in zip(caches, new_tokens, texts, strict=True):
            start = rows[-1].end if rows else 0
            cache.prepare(cache.num_tokens, num_tokens)
            rows.append(PackedRow(cache, cache.num_tokens, start, start + num_tokens))
            query, key = (
                draw(num_tokens, shape.num_heads, shape.key_size) * query_scale,
                draw(num_tokens, shape.num_key_heads, shape.key_size - shape.rotated_size),
            )
            value_size = shape.rotated_size or shape.value_size
            text.append((query, key, draw(num_tokens, shape.num_key_heads, value_size)))
        query, key, value = (torch.cat([text[-1][part] for text in texts]) for part in range(3))
        batch, _ = backend.batch(store, rows, device)
        if shape.rotated_size:
            batch.write(0, key, value)
            output = sums_of_latents(batch, 0, query, shape.scaling)
        else:
            output = batch.attend(
                0, query, key, value, scaling=shape.scaling, window=window, softcap=shape.softcap, sinks=sinks
            )
        for row, text in zip(rows, texts, strict=True):
            keys, values = (store.decoded(store.encoded(torch.cat([step[part] for step in text]))) for part in (1, 2))
            if shape.rotated_size:
                keys, values = torch.cat((keys, values), dim=-1), keys
            compared = min(row.num_tokens, _COMPARED_TOKENS)
            expected = _definition(text[-1][0][-compared:], keys, values, shape, window, sinks)
            own = (output[row.end - compared : row.end] - expected).abs().max().nan_to_num(torch.inf)
            difference = max(difference, float(own))
            row.cache.commit(row.position + row.num_tokens)
    return difference


def _definition(
    query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, window: int | None, sinks: Tensor | None
) -> Tensor:
    """The attention of a text's last `T` tokens by its definition, float64 `[T, heads, value head size]`."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(groups, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * shape.scaling
    if shape.softcap is not None:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    positions = torch.arange(len(keys), device=keys.device)
    distance = positions[-len(query) :, None] - positions[None, :]
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(keys)], values)


class ShapeProbe(AttentionBackend):
    """An attention backend that notes what layers ask for, and computes nothing.

    Attributes:
        shapes: what the layers asked for, in the order of their first calls.
    """

    name = "probe"

    def __init__(self) -> None:
        self.shapes: dict[AttentionShape, None] = {}

    def attend(self, _batch: AttentionBatch, given: LayerInput) -> Tensor:
        """Returns zeros; see `AttentionBatch.attend`."""
        num_tokens, num_heads, key_size = given.query.shape
        num_key_heads, value_size = given.value.shape[1:]
        sizes = (num_heads, num_key_heads, key_size, value_size)
        self.shapes[AttentionShape(*sizes, given.scaling, given.window, given.softcap, given.sinks is not None)] = None
        return given.query.new_zeros(num_tokens, num_heads, value_size)
