"""Multi-latent attention over rows of different sessions.

Families with it (DeepSeek-V2, 2024) cache for each token a short latent and the rotated part of its key, in one head
each. The keys and values of all heads are products of the latents and a weight. There are two ways to attend to them:

- A row of few new tokens multiplies its queries by the weight of the keys and attends to the latents themselves, which
  all heads share; the outputs, which are sums of latents, are multiplied by the weight of the values (2.1.2 there).
- For a row of many new tokens, the family's own code expands the latents, in one product for as many rows as fit into
  memory; then each row attends to its own session's part.

If a row alone does not fit into memory, it attends piece by piece, and the outputs of the pieces are merged (see
`partial_attention`).

All tensors of a call are on the device of the pages, in the model's dtype.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from corolla.compute.attention.base import CALLED, SHORT_ROW, AttentionBatch, AttentionShape, PackedRow
from corolla.compute.attention.partial_attention import Part, attend, merge

LATENT: Final = "corolla_latent"
PICKED: Final = "corolla_picked"
"""An index picks the tokens that a token attends to."""
EXPANDED: Final = "corolla_expanded"
"""All rows attend to expanded latents: the results have the bits of transformers."""

MAX_EXPANDED_BYTES: Final = 1 << 30
"""The most bytes that latents, what they expand to, and the scores over them may take in one layer."""

# Bytes of one query's score in one head and of its intermediate results: a few float32 numbers.
_SCORE_BYTES: Final = 16
_FLOAT32_BYTES: Final = 4


def reads_latents(config: PretrainedConfig, num_queries: int) -> bool:
    """Whether this many queries attend to the latents themselves, since that takes fewer multiplications. Pure.

    For each key and head, a query multiplies two latents instead of a key and a value. A row's own number of tokens
    decides, so that the other rows of a step do not change how it rounds.
    """
    expanded: int = config.qk_nope_head_dim + config.v_head_dim
    return num_queries * (2 * int(config.kv_lora_rank) - expanded) < int(config.kv_lora_rank) * expanded


def bytes_of_latent(query: Tensor, num_queries: int) -> int:
    """Bytes that one token's latent and rotated key take in one layer while torch attends to them.

    The sum includes the scores and a copy of both in float32; see `bytes_of_key`.

    Args:
        query: see `sums_of_latents`.
        num_queries: how many of its tokens attend at once.
    """
    _, num_heads, numbers = query.shape
    return numbers * (query.itemsize + _FLOAT32_BYTES) + num_heads * num_queries * _SCORE_BYTES


def _bytes_of_queries(num_heads: int, numbers: int, num_queries: int) -> int:
    """Bytes that projected queries, and the sums of latents of two pieces while they are merged, take in one layer."""
    return 6 * num_heads * num_queries * numbers * _FLOAT32_BYTES


def _bytes_of_parts(num_heads: int, numbers: int, row: PackedRow, page_tokens: int) -> int:
    """Bytes that the results of pages, or of larger pieces, take in one layer, where single tokens have them."""
    num_pages = -(-(row.position + row.num_tokens) // page_tokens)
    return row.num_tokens * num_pages * num_heads * numbers * _FLOAT32_BYTES if row.num_tokens <= SHORT_ROW else 0


def bytes_of_key(config: PretrainedConfig, like: Tensor, num_queries: int) -> int:
    """Bytes that one token's keys and values of all heads take in one layer while `num_queries` attend to them.

    The sum includes the product that keys and values are made from, the scores and, on CPUs, the copies that torch
    makes. If keys and values differ in head size, torch's attention converts both to float32 and scales the keys. Its
    product copies strided values if the processor has instructions for the dtype.

    Args:
        like: a tensor of any shape with the dtype and device of the computation.
    """
    product = config.qk_nope_head_dim + config.v_head_dim
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    copied = (2 * key + config.v_head_dim) * _FLOAT32_BYTES if like.device.type == "cpu" else 0
    return int(config.num_attention_heads * ((product + key) * like.itemsize + copied + num_queries * _SCORE_BYTES))


def runs_within(costs: Sequence[int], most: int) -> Iterator[slice]:
    """Cuts rows into runs whose costs add up to at most `most`; a row that costs more is a run by itself. Pure."""
    start = total = 0
    for index, cost in enumerate(costs):
        if index > start and total + cost > most:
            yield slice(start, index)
            start, total = index, 0
        total += cost
    yield slice(start, len(costs))


def leave_latents(modules: Iterable[nn.Module]) -> None:
    """Makes attention modules pass latents on unexpanded, since `latent_attention` reads them from pages."""
    for module in modules:
        if hasattr(module, "expand_kv"):
            cast(Any, module).expand_kv = _as_they_are


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


class PackedLatents(Cache):
    """The transformers `Cache` that the family's code gets; it stores the latents of all rows' new tokens."""

    def __init__(self, batch: AttentionBatch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the latents `key_states` and rotated keys `value_states` of the new tokens, `[1, 1, N, size]` each.

        Returns:
            Both, unchanged, `[1, 1, N, size]` each.
        """
        self._batch.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states


def latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    expands_all: bool = False,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for the rows of the batch `CALLED`.

    `PackedLatents` has stored their latents.

    Args:
        module: the family's attention module, which expands latents.
        query: `[1, heads, N, head_dim]` in the model's dtype.
        key: unused, as `value` is; every row's latents are read from its pages.
        attention_mask: unused; transformers makes no mask for functions that it does not know.
        scaling: the factor of the scores; None: one over the square root of the head size.
        expands_all: whether short rows, too, attend to expanded latents.

    Returns:
        The output `[1, N, heads, value head size]` in the query's dtype, and None.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    config: PretrainedConfig = cast(Any, module).config
    batch = CALLED.get()
    are_short = [not expands_all and reads_latents(config, row.num_tokens) for row in batch.rows]
    short, long = (list(itertools.compress(batch.rows, each)) for each in (are_short, [not each for each in are_short]))
    of_short = attend_to_latents(module, query, short, batch, scaling)
    of_long = _attend_to_expanded(module, query, long, batch, scaling)
    outputs = [next(of_short if each else of_long) for each in are_short]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def attend_to_latents(
    module: nn.Module, query: Tensor, rows: Sequence[PackedRow], batch: AttentionBatch, scaling: float
) -> Iterator[Tensor]:
    """Attends to the latents themselves, which are one key head of all heads.

    No product has numbers of two rows. So a row has the same bits alone and next to others.

    Args:
        module: the family's attention module.
        query: `[1, heads, N, head_dim]`, already rotated.
        rows: the rows that attend, whose latents are stored.
        batch: the batch that has the rows.
        scaling: the factor of the scores.

    Yields:
        Each row's output `[1, num_tokens, heads, value head size]` in the query's dtype.
    """
    weights, config = _Weights(module), cast(Any, module).config
    sizes = (query.shape[1], int(config.kv_lora_rank + config.qk_rope_head_dim))
    page_tokens = batch.store.pool.page_tokens
    costs = [_bytes_of_queries(*sizes, row.num_tokens) + _bytes_of_parts(*sizes, row, page_tokens) for row in rows]
    for run in runs_within(costs, MAX_EXPANDED_BYTES):
        ends = [0, *itertools.accumulate(row.num_tokens for row in rows[run])]
        placed = tuple(
            replace(row, start=start, end=end)
            for row, (start, end) in zip(rows[run], itertools.pairwise(ends), strict=True)
        )
        queries = query.new_empty(ends[-1], *sizes)
        for row, place in zip(rows[run], placed, strict=True):
            own = weights.queries(query[0, :, row.start : row.end])
            queries[place.start : place.end] = own.transpose(0, 1)
        part = batch.part(placed, query.device)
        summed = sums_of_latents(part, cast(Any, module).layer_idx, queries, scaling)
        for place in placed:
            yield weights.outputs(summed[place.start : place.end].transpose(0, 1).to(query.dtype))


class _Weights:
    """The weights that expand latents, which project queries and sums of latents instead.

    Args:
        module: the family's attention module.
    """

    def __init__(self, module: nn.Module) -> None:
        config: PretrainedConfig = cast(Any, module).config
        self._sizes = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        of_heads = cast(Any, module).kv_b_proj.weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        self._of_keys, self._of_values = torch.split(of_heads, [config.qk_nope_head_dim, config.v_head_dim], dim=1)

    def queries(self, query: Tensor) -> Tensor:
        """Projects queries, `[heads, T, head_dim]`: `[heads, T, latent size + rotated size]` in the same dtype."""
        plain, rotated = torch.split(query, self._sizes, dim=-1)
        return torch.cat((torch.bmm(plain, self._of_keys), rotated), dim=-1)

    def outputs(self, summed: Tensor) -> Tensor:
        """Projects sums of latents, `[heads, T, latent size]`: `[1, T, heads, value head size]` in the same dtype."""
        return torch.bmm(summed, self._of_values.transpose(1, 2)).transpose(0, 1).unsqueeze(0)


def sums_of_latents(batch: AttentionBatch, layer: int, query: Tensor, scaling: float) -> Tensor:
    """The attention of all heads to stored latents, by the backend's function, or by torch where it has none.

    Args:
        batch: the rows.
        layer: the layer's index within the span.
        query: `[N, heads, latent size + rotated size]` in the model's dtype, contiguous.
        scaling: the factor of the scores.

    Returns:
        The sums of latents, `[N, heads, latent size]` in float32 or the query's dtype.
    """
    found = batch.backend.attend_to_latents(batch, layer, query, scaling)
    if found is not None:
        return found
    outputs, (_, num_heads, numbers) = list[Tensor](), query.shape
    for row in batch.rows:
        own = query[row.start : row.end].transpose(0, 1).float() * scaling
        most = MAX_EXPANDED_BYTES - _bytes_of_queries(num_heads, numbers, row.num_tokens)
        piece_tokens = max(1, most // bytes_of_latent(query, row.num_tokens))

        def attended(start: int, num_keys: int, row: PackedRow = row, own: Tensor = own) -> Part:
            latents, rotated = row.gather(layer, start, start + num_keys)
            bias = batch.bias(row.position, row.num_tokens, start, num_keys, query)
            return _shared_keys(own, latents[0].float(), rotated[0].float(), bias)

        outputs.append(_in_pieces(attended, piece_tokens, row)[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def shapes_of_latents(modules: Iterable[nn.Module]) -> set[AttentionShape]:
    """What attention modules that expand latents ask of attention when they attend to these themselves."""
    shapes = set()
    for module in modules:
        if hasattr(module, "expand_kv"):
            config: PretrainedConfig = cast(Any, module).config
            size, rotated = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
            scaling = float(cast(Any, module).scaling)
            shapes.add(
                AttentionShape(config.num_attention_heads, 1, size + rotated, size, scaling, rotated_size=rotated)
            )
    return shapes


def _shared_keys(queries: Tensor, latents: Tensor, rotated_keys: Tensor, bias: Tensor | None) -> Part:
    """The attention of all heads to one run of latents, which are keys and values; all tensors are float32.

    Args:
        queries: `[heads, num_tokens, latent size + rotated size]`, scaled.
        latents: `[keys, latent size]`.
        rotated_keys: `[keys, rotated size]`.
        bias: `[num_tokens, keys]`, 0 or minus infinity; None: 0.
    """
    projected, rotated = torch.split(queries, [latents.shape[-1], rotated_keys.shape[-1]], dim=-1)
    scores = torch.mm(projected.flatten(0, 1), latents.T)
    scores = scores.addmm_(rotated.flatten(0, 1), rotated_keys.T).view(*projected.shape[:2], -1)
    if bias is not None:
        scores += bias
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(log_sum.unsqueeze(-1)).exp_()
    if bias is not None:
        weights.nan_to_num_(0.0)  # the query sees no key of this run
    return torch.mm(weights.flatten(0, 1), latents).view_as(projected).unsqueeze(0), log_sum.unsqueeze(0)


def _attend_to_expanded(
    module: nn.Module, query: Tensor, rows: Sequence[PackedRow], batch: AttentionBatch, scaling: float
) -> Iterator[Tensor]:
    """Yields each row's output `[1, num_tokens, heads, value head size]`; the family's code expands the latents."""
    key_bytes = [bytes_of_key(cast(Any, module).config, query, row.num_tokens) for row in rows]
    costs = [each * (row.position + row.num_tokens) for each, row in zip(key_bytes, rows, strict=True)]
    for run in runs_within(costs, MAX_EXPANDED_BYTES):
        if costs[run.start] > MAX_EXPANDED_BYTES:
            piece_tokens = max(1, MAX_EXPANDED_BYTES // key_bytes[run.start])
            yield _attend_in_pieces(module, query, rows[run.start], batch, scaling, piece_tokens)
        else:
            yield from _attend_together(module, query, rows[run], batch, scaling)


def _attend_together(
    module: nn.Module, query: Tensor, rows: Sequence[PackedRow], batch: AttentionBatch, scaling: float
) -> Iterator[Tensor]:
    """Yields each row's output `[1, num_tokens, heads, value head size]`; one product expands all rows' latents."""
    num_keys = [row.position + row.num_tokens for row in rows]
    keys, values = _expanded(module, [_latents(module, row, 0, end) for row, end in zip(rows, num_keys, strict=True)])
    parts = zip(rows, torch.split(keys, num_keys, dim=2), torch.split(values, num_keys, dim=2), strict=True)
    for row, own_keys, own_values in parts:
        own_query = query[:, :, row.start : row.end]
        # If it gets no mask, the function assumes that the first of several queries is at the first key's position.
        starts_later = row.position > 0 and row.num_tokens > 1
        mask = batch.bias(row.position, row.num_tokens, 0, own_keys.shape[2], query) if starts_later else None
        yield sdpa_attention_forward(module, own_query, own_keys, own_values, mask, scaling=scaling)[0]


def _attend_in_pieces(
    module: nn.Module, query: Tensor, row: PackedRow, batch: AttentionBatch, scaling: float, piece_tokens: int
) -> Tensor:
    """The output `[1, num_tokens, heads, value head size]` of one row; `piece_tokens` latents are expanded at a time.

    A piece is a run of tokens, not of heads: the layouts of packed or quantised linear layers cannot be cut by outputs.
    """
    own_query = query[:, :, row.start : row.end]

    def attended(start: int, num_keys: int) -> Part:
        # This is a function so that a piece's keys and values are freed before the next piece is expanded.
        keys, values = _expanded(module, [_latents(module, row, start, start + num_keys)])
        bias = batch.bias(row.position, row.num_tokens, start, num_keys, query)
        return attend(own_query, keys, values, scaling=scaling, bias=bias)

    return _in_pieces(attended, piece_tokens, row).to(query.dtype).transpose(1, 2)


def _in_pieces(attended: Callable[[int, int], Part], piece_tokens: int, row: PackedRow) -> Tensor:
    """The output of a row's attention to runs of `piece_tokens` keys; `attended` gets a run's start and length."""
    end = row.position + row.num_tokens
    whole = attended(0, min(piece_tokens, end))
    for start in range(piece_tokens, end, piece_tokens):
        whole = merge(whole, attended(start, min(piece_tokens, end - start)))
    return whole[0]


def _latents(module: nn.Module, row: PackedRow, start: int, end: int) -> tuple[Tensor, Tensor]:
    """The latents and rotated keys of a row's positions `[start, end)`, `[1, end - start, size]` each."""
    return row.gather(cast(Any, module).layer_idx, start, end)


def _expanded(module: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Expands latents by the family's own code into keys and values `[1, heads, all parts' tokens, head size]`."""
    latents, rotated = (torch.cat(tensors, dim=1).unsqueeze(0) for tensors in zip(*parts, strict=True))
    expand: Any = type(module)
    keys, values = expand.expand_kv(module, latents, rotated)
    return keys, values


def picked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    indices: Tensor,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for one row whose tokens attend to those that an index picks.

    A row of few new tokens attends to the latents of those alone, so that a step does not read the whole text. So does
    one whose text would take too much memory if it were expanded.

    Args:
        module: the family's attention module, which expands latents.
        query: `[1, heads, T, head_dim]` in the model's dtype.
        key: `[1, 1, tokens, latent size]`, the latents of all tokens of the text.
        value: `[1, 1, tokens, rotated size]`, the rotated parts of their keys.
        attention_mask: bool `[1, 1, T, tokens]`: which tokens a token may attend to.
        scaling: the factor of the scores.
        indices: int32 `[1, T, picked]`: the tokens that the index picks, also such as the mask leaves out.

    Returns:
        The output `[1, T, heads, value head size]` in the query's dtype, and None.
    """
    picked, config, num_queries = indices[0].long(), cast(Any, module).config, query.shape[2]
    expanded_bytes = bytes_of_key(config, query, num_queries) * key.shape[2]
    if not reads_latents(config, num_queries) and expanded_bytes <= MAX_EXPANDED_BYTES:
        expand: Any = type(module)
        keys, values = expand.expand_kv(module, key, value)
        mask = attention_mask & torch.zeros_like(attention_mask).scatter(-1, picked[None, None], True)
        output, _ = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)
        return output, None
    weights, latents, rotated, is_seen = _Weights(module), key[0, 0], value[0, 0], attention_mask[0, 0]
    bytes_of_query = _bytes_of_queries(query.shape[1], latents.shape[-1] + rotated.shape[-1], 1)
    outputs, num_at_once = list[Tensor](), max(1, MAX_EXPANDED_BYTES // bytes_of_query)
    for part in (slice(start, start + num_at_once) for start in range(0, num_queries, num_at_once)):
        own = weights.queries(query[0, :, part]).float() * scaling
        if picked.shape[1] == len(latents):
            (summed,), _ = _shared_keys(own, latents.float(), rotated.float(), _bias_of(is_seen[part]))
        else:
            of_tokens = (
                _shared_keys(own[:, at, None], latents[seen].float(), rotated[seen].float(), _bias_of(sees[None, seen]))
                for at, (seen, sees) in enumerate(zip(picked[part], is_seen[part], strict=True))
            )
            summed = torch.cat([output[0] for output, _ in of_tokens], dim=1)
        outputs.append(weights.outputs(summed.to(query.dtype)))
    return torch.cat(outputs, dim=1), None


def _bias_of(is_seen: Tensor) -> Tensor:
    return torch.zeros_like(is_seen, dtype=torch.float32).masked_fill_(~is_seen, -torch.inf)


AttentionMaskInterface.register(PICKED, sdpa_mask)
AttentionInterface.register(PICKED, picked_attention)
AttentionInterface.register(LATENT, latent_attention)
AttentionInterface.register(EXPANDED, functools.partial(latent_attention, expands_all=True))
