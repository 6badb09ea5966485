"""torch's flash attention on CPUs, with one call for each run of slots of each row."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corolla.cache.codecs import KVCodec
from corolla.compute.attention.base import AttentionBackend, AttentionBatch, LayerInput
from corolla.compute.attention.partial_attention import Part, flash_cpu, merge, sink


class FlashAttention(AttentionBackend):
    """Attends run by run. The pages of a session form few runs, mostly one.

    Query heads that share a key head are treated as further queries of that head, so that no key is repeated.
    """

    name = "flash"

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        keys, values = batch.write(given.layer, given.key, given.value)
        numbers = range(len(batch.rows))
        if len(given.query) == len(numbers):
            return self._attend_next_tokens(batch, numbers, given, keys, values)
        outputs = [self._attend_row(batch, number, given, keys, values) for number in numbers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_row(
        self, batch: AttentionBatch, number: int, given: LayerInput, keys: Tensor, values: Tensor
    ) -> Tensor:
        row = batch.rows[number]
        own = given if len(batch.rows) == 1 else given.part(row)
        if row.num_tokens == 1:
            return self._attend_next_tokens(batch, (number,), own, keys, values)
        return self._attend_many(batch, number, own, keys, values)

    def _attend_next_tokens(
        self, batch: AttentionBatch, numbers: Sequence[int], own: LayerInput, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attends for rows of one new token each; a token sees all keys within its window, its own included.

        The loop runs for each session and layer, so everything that rows share is made before the loop.
        """
        num_rows, num_heads, head_size = own.query.shape
        grouped = own.query.reshape(num_rows, keys.shape[1], -1, head_size)
        queries = (grouped,) if num_rows == 1 else grouped.unsqueeze(1).unbind(0)
        keys_of, values_of = _runs_of(keys, batch.store.codec), _runs_of(values, batch.store.codec)
        outputs = []
        for number, query in zip(numbers, queries, strict=True):
            end = batch.rows[number].position + 1
            start = 0 if own.window is None else max(0, end - own.window)
            parts = [
                flash_cpu(query, keys_of(*run), values_of(*run), scaling=own.scaling, softcap=own.softcap)
                for run in batch.extents(number, own.layer, start, end)
            ]
            if own.sinks is not None:
                parts.append(sink(own.sinks.view(1, keys.shape[1], -1), parts[0]))
            outputs.append(merge(parts))
        joined = outputs[0] if num_rows == 1 else torch.cat(outputs)
        return joined.reshape(num_rows, num_heads, -1)

    def _attend_many(self, batch: AttentionBatch, number: int, own: LayerInput, keys: Tensor, values: Tensor) -> Tensor:
        """Attends for a chunk, whose tokens see the tokens before the chunk and, causally, each other."""
        if (store := batch.store).codec is not None:
            key, value = (store.decoded(store.encoded(each)) for each in (own.key, own.value))
            own = replace(own, key=key, value=value)
        num_tokens, num_heads, head_size = own.query.shape
        num_key_heads, position, window = keys.shape[1], batch.rows[number].position, own.window
        groups = num_heads // num_key_heads
        by_head = own.query.transpose(0, 1)
        grouped = by_head.reshape(1, num_key_heads, groups * num_tokens, head_size)
        keys_of, values_of = _runs_of(keys, batch.store.codec), _runs_of(values, batch.store.codec)
        parts = []
        first_key = 0 if window is None else max(0, position - window + 1)
        for run in batch.extents(number, own.layer, first_key, position) if position else ():
            bias = None
            if window is not None:
                bias = batch.bias(position, num_tokens, first_key, run[1], window, own.query)
                bias = None if bias is None else bias.repeat(groups, 1)
            parts.append(
                flash_cpu(
                    grouped, keys_of(*run), values_of(*run), scaling=own.scaling, bias=bias, softcap=own.softcap
                )
            )
            first_key += run[1]
        output, log_sum = self._attend_own(batch, position, own)
        parts.append((output.reshape(1, num_key_heads, groups * num_tokens, -1), log_sum.reshape(*grouped.shape[:3])))
        if own.sinks is not None:
            sinks = own.sinks.view(1, num_key_heads, groups).repeat_interleave(num_tokens, dim=2)
            parts.append(sink(sinks, parts[-1]))
        return merge(parts).reshape(num_heads, num_tokens, -1).transpose(0, 1)

    def _attend_own(self, batch: AttentionBatch, position: int, own: LayerInput) -> Part:
        """Attends for a chunk's tokens to the chunk; if `is_causal`, a kernel computes only half of the scores."""
        num_tokens, num_heads, _ = own.query.shape
        groups = num_heads // own.key.shape[1]
        is_causal = own.window is None or num_tokens <= own.window
        return flash_cpu(
            own.query.transpose(0, 1).unsqueeze(0),
            own.key.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
            own.value.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
            scaling=own.scaling,
            bias=None if is_causal else batch.bias(position, num_tokens, position, num_tokens, own.window, own.query),
            is_causal=is_causal,
            softcap=own.softcap,
        )


def _runs_of(tensor: Tensor, codec: KVCodec | None) -> Callable[[int, int], Tensor]:
    """Returns a function that takes a first slot and a number of tokens, and returns that run of `tensor`.

    `tensor` is `[num_slots, heads, head_dim]`. A run is a view `[1, heads, num_tokens, head_dim]`, made by one
    operation instead of three; with a codec, the run is decoded to a tensor of that shape.
    """
    _, num_heads, head_size = tensor.shape
    of_slot, of_head, _ = tensor.stride()
    strides = (0, of_head, of_slot, 1)

    def run(first_slot: int, num_tokens: int) -> Tensor:
        return tensor.as_strided((1, num_heads, num_tokens, head_size), strides, first_slot * of_slot)

    return run if codec is None else lambda first_slot, num_tokens: codec.decode(run(first_slot, num_tokens))
