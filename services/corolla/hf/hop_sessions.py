"""The sessions that the rows of a batch have on the hops of a chain."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from corolla.chain.identity import SessionIdentity
from corolla.chain.reservations import OpenOptions
from corolla.chassis.errors import HopSessionLost
from corolla.hf.connection import Connection
from corolla.hf.row_group import RowGroup, RowStep
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.frames import Buffer
from corolla.wire.page_hashes import TextDigests
from corolla.wire.span import Span
from corolla.wire.tensors import describe_prompts, to_payload


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Consecutive blocks of one model, with all that is needed to open sessions over them.

    Attributes:
        connection: the connection to the model's servers.
        span: the blocks.
        hidden_size: width of hidden states.
        dtype: the dtype of hidden states that are sent.
        tenant: the tenant that owns the sessions.
        context_length: the longest sequence that the model takes.
        reuses_prefixes: whether the tenant's sequences share what hops computed for equal beginnings of texts.
        cache_salt: the salt with which the digests of the tenant's texts begin.
        adapter: the adapter of new sessions, if any.
    """

    connection: Connection
    span: Span
    hidden_size: int
    dtype: torch.dtype
    tenant: str
    context_length: int
    reuses_prefixes: bool = False
    cache_salt: bytes = b""
    adapter: AdapterVersion | None = None


class HopSessions:
    """One session on every hop for each row. The class does not know the rows' tokens.

    To get more room, the class opens the rows again on the same hops in the next epoch; the hops keep the tokens. Each
    opening sends the rows' trained prompts.

    Args:
        prompts: the trained prompts of each sequence of a batch, `[blocks, P, H]` on the CPU in the dtype of the
            blocks.
    """

    def __init__(self, blocks: RemoteSpan, prompts: Sequence[Tensor] | None = None) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._group: RowGroup | None = None
        self._capacity = 0
        self._num_cached_tokens = 0
        self._origins: tuple[int, ...] = ()

    def fit(self, origins: Sequence[int], num_positions: int) -> bool:
        """The open sessions have room for `num_positions`, and each one has the prompts of its row's origin.

        Args:
            origins: for each row, the index of its sequence in `prompts`.
        """
        return num_positions <= self._capacity and self._origins[: len(origins)] == tuple(origins)

    @property
    def num_cached_tokens(self) -> int:
        """The number of each row's tokens that the hops had in their caches at the first opening."""
        return self._num_cached_tokens

    def reserve(self, origins: Sequence[int], capacity: int, texts: Sequence[Sequence[int]] | None = None) -> None:
        """Opens a session on every hop for each row without one, and gives all sessions the same capacity.

        Args:
            origins: for each row, the index of its sequence in `prompts`.
            capacity: the number of positions of each session; it never shrinks.
            texts: the tokens that each row will hold, from its beginning, if they are known.
        """
        if self._group is not None or not self._blocks.reuses_prefixes:
            texts = None
        capacity = max(capacity, self._capacity)
        self._origins = (*origins, *self._origins[len(origins) :])
        prompts = None if self._prompts is None else [partial(_sent, self._prompts[origin]) for origin in self._origins]
        options = OpenOptions(
            max_tokens=capacity, transient=True, blocks=self._blocks.span, prompts=prompts,
            texts=None if texts is None else list(map(TextDigests, texts)), cache_salt=self._blocks.cache_salt,
            adapter=self._blocks.adapter,
        )  # fmt: skip
        num_open = len(self._group.identities) if self._group is not None else 0
        new = [
            SessionIdentity(secrets.token_bytes(16), 1, self._blocks.tenant)
            for _ in range(len(self._origins) - num_open)
        ]
        self._blocks.connection.call(self._reserve(new, options))
        self._capacity = capacity

    def inputs(self, row: int, position: int) -> Tensor:
        """The inputs of the first block for a row's positions before `position`, `[position, H]` on the CPU."""
        return self._open_group.inputs(row, position)

    def step(self, steps: Sequence[RowStep]) -> list[Tensor]:
        """See `RowGroup.step`."""
        return self._blocks.connection.call(self._open_group.step(steps))

    @property
    def _open_group(self) -> RowGroup:
        if self._group is None:
            raise HopSessionLost("the session was not opened")
        return self._group

    def free(self) -> None:
        self._blocks.connection.post(self._close_group)

    # --- in the connection's thread ---------------------------------------------------------------------------------

    async def _reserve(self, new: Sequence[SessionIdentity], options: OpenOptions) -> None:
        # The group is stored here, in the thread, since an interrupted caller does not get the result.
        group = self._group = await self._blocks.connection.open_rows(new, options, self._group)
        self._num_cached_tokens = max(self._num_cached_tokens, group.num_cached_tokens)

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()


def _sent(prompts: Tensor, start: int, end: int) -> tuple[pb.BlockPrompts, Buffer]:
    """Trained prompts `[blocks, P, H]` of some blocks in the form that a chain sends."""
    part = prompts[start:end]
    return describe_prompts(part), to_payload(part)


def require_prompts(prompts: object, blocks: RemoteSpan) -> None:
    """Checks trained embeddings that come before a text: they must be `[P, H]`.

    Raises:
        ValueError: they have another shape, or numbers that are not finite.
    """
    if not isinstance(prompts, Tensor) or prompts.dim() != 2 or prompts.shape[1] != blocks.hidden_size:
        raise ValueError(f"`prompts` must be a tensor of the shape [tokens, {blocks.hidden_size}].")
    _require_finite("prompts", prompts, blocks.dtype)


def prompts_by_sequence(block_prompts: object, blocks: RemoteSpan) -> list[Tensor]:
    """Prompts `[blocks, P, H]` for each sequence, or one tensor for all, contiguous on the CPU in the blocks' dtype.

    Args:
        block_prompts: `[blocks, P, H]` or `[blocks, B, P, H]`; the values are copied.

    Raises:
        ValueError: they have another shape, or numbers that are not finite.
    """
    num_blocks, width = len(blocks.span), blocks.hidden_size
    expected = (
        f"must be a tensor of the shape [{num_blocks}, tokens, {width}] or [{num_blocks}, batch, tokens, {width}]"
    )
    if not isinstance(block_prompts, Tensor):
        raise ValueError(f"`block_prompts` {expected}.")
    shape = tuple(block_prompts.shape)
    if len(shape) not in (3, 4) or 0 in shape or shape[0] != num_blocks or shape[-1] != width:
        raise ValueError(f"`block_prompts` {expected}, not {list(shape)}.")
    if shape[-2] > blocks.context_length:
        raise ValueError(f"`block_prompts` are for more positions than the model's {blocks.context_length}.")
    values = _require_finite("block_prompts", block_prompts, blocks.dtype)
    by_sequence = values[:, None] if values.dim() == 3 else values
    return [part.clone(memory_format=torch.contiguous_format) for part in by_sequence.unbind(1)]


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values on the CPU in the dtype that the blocks compute in."""
    converted = values.detach().to(device="cpu", dtype=dtype)
    if not converted.isfinite().all():
        raise ValueError(f"`{name}` must be finite in {dtype}.")
    return converted
