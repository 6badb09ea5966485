"""Attention that goes through the runs of slots of each row, one kernel call for each run."""

import torch
from torch import Tensor

from corolla.block_server.kv.attention import AttentionBatch, LayerInput
from corolla.block_server.kv.kernels import Kernel, Part, merge


class RunAttention:
    """Works on every device, with every kernel. The pages of a session form few runs, mostly one.

    The queries that share a key head count as more queries of that head, so that no key is repeated.
    """

    def __init__(self, name: str, kernel: Kernel) -> None:
        self.name = name
        self._kernel = kernel

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        written = batch.write(given.layer, given.key, given.value)
        outputs = []
        for number, row in enumerate(batch.rows):
            own = given if len(batch.rows) == 1 else given.part(row)
            attend = self._attend_one if row.num_tokens == 1 else self._attend_many
            outputs.append(attend(batch, number, own, *written))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_one(self, batch: AttentionBatch, number: int, own: LayerInput, keys: Tensor, values: Tensor) -> Tensor:
        """The next token, which sees all keys of its window, its own among them."""
        num_key_heads, end = keys.shape[1], batch.rows[number].position + 1
        start = 0 if own.window is None else max(0, end - own.window)
        grouped = own.query.reshape(1, num_key_heads, -1, own.query.shape[-1])
        parts = [
            self._kernel(grouped, _run(keys, *run), _run(values, *run), scaling=own.scaling, softcap=own.softcap)
            for run in batch.extents(number, own.layer, start, end)
        ]
        return merge(parts).reshape(1, own.query.shape[1], -1)

    def _attend_many(self, batch: AttentionBatch, number: int, own: LayerInput, keys: Tensor, values: Tensor) -> Tensor:
        """A chunk: its tokens see the ones before the chunk, and each other as far as they are not later."""
        num_tokens, num_heads, head_size = own.query.shape
        num_key_heads, position, window = keys.shape[1], batch.rows[number].position, own.window
        groups = num_heads // num_key_heads
        by_head = own.query.transpose(0, 1)
        grouped = by_head.reshape(1, num_key_heads, groups * num_tokens, head_size)
        parts = []
        first_key = 0 if window is None else max(0, position - window + 1)
        for run in batch.extents(number, own.layer, first_key, position) if position else ():
            bias = None
            if window is not None:
                bias = batch.bias(position, num_tokens, first_key, run[1], window, own.query)
                bias = None if bias is None else bias.repeat(groups, 1)
            parts.append(
                self._kernel(
                    grouped, _run(keys, *run), _run(values, *run), scaling=own.scaling, bias=bias, softcap=own.softcap
                )
            )
            first_key += run[1]
        output, log_sum = self._attend_own(batch, position, own)
        parts.append((output.reshape(1, num_key_heads, groups * num_tokens, -1), log_sum.reshape(*grouped.shape[:3])))
        return merge(parts).reshape(num_heads, num_tokens, -1).transpose(0, 1)

    def _attend_own(self, batch: AttentionBatch, position: int, own: LayerInput) -> Part:
        """The chunk's tokens among each other; a kernel that knows causality computes half of the square."""
        num_tokens, num_heads, _ = own.query.shape
        groups = num_heads // own.key.shape[1]
        is_causal = own.window is None or num_tokens <= own.window
        return self._kernel(
            own.query.transpose(0, 1).unsqueeze(0),
            own.key.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
            own.value.transpose(0, 1).repeat_interleave(groups, dim=0).unsqueeze(0),
            scaling=own.scaling,
            bias=None if is_causal else batch.bias(position, num_tokens, position, num_tokens, own.window, own.query),
            is_causal=is_causal,
            softcap=own.softcap,
        )


def _run(tensor: Tensor, first_slot: int, num_tokens: int) -> Tensor:
    """`[1, heads, num_tokens, head_dim]`: a run of slots of `[num_slots, heads, head_dim]`, as it lies.

    One operation instead of three, which counts at one token and every layer.
    """
    _, num_heads, head_size = tensor.shape
    of_slot, of_head, _ = tensor.stride()
    shape, strides = (1, num_heads, num_tokens, head_size), (0, of_head, of_slot, 1)
    return tensor.as_strided(shape, strides, first_slot * of_slot)
