"""What sessions have on the hops of a chain."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corolla.chassis.errors import HopSessionLost
from corolla.client.chain.reservations import OpenOptions
from corolla.client.chain.rows import RowGroup, RowStep
from corolla.client.chain.session import SessionIdentity
from corolla.hf.connection import Connection
from corolla.wire.span import Span


@dataclass(frozen=True, slots=True)
class RemoteBlockRun:
    """Consecutive blocks of one model, on whatever block servers.

    Attributes:
        connection: to the model's servers.
        span: the blocks.
        hidden_size: width of hidden states.
        dtype: of hidden states on their way.
        tenant: who owns the sessions.
        context_length: the longest sequence that the model takes.
    """

    connection: Connection
    span: Span
    hidden_size: int
    dtype: torch.dtype
    tenant: str
    context_length: int


class HopPlaces:
    """What a session has on the hops: one place for each row. Knows nothing of what the rows hold.

    A session that needs more is opened again on the same hops with the next epoch, and they keep what they hold.
    """

    def __init__(self, blocks: RemoteBlockRun) -> None:
        self._blocks = blocks
        self._group: RowGroup | None = None
        self._capacity = 0

    def needs_more(self, num_rows: int, num_positions: int) -> bool:
        return self._group is None or num_rows > len(self._group.identities) or num_positions > self._capacity

    def grow(self, num_rows: int, capacity: int) -> None:
        capacity = max(capacity, self._capacity)
        options = OpenOptions(max_tokens=capacity, transient=True, blocks=self._blocks.span)
        identities: list[SessionIdentity] = []
        if self._group is not None:
            identities = [replace(identity, epoch=identity.epoch + 1) for identity in self._group.identities]
            options = replace(options, recorded=self._group.chain, chain=self._group.chain)
        identities += _new_identities(
            num_rows - len(identities), identities[0].epoch if identities else 1, self._blocks.tenant
        )
        self._group = self._blocks.connection.call(self._blocks.connection.open_rows(identities, options))
        self._capacity = capacity

    def step(self, steps: Sequence[RowStep]) -> list[Tensor]:
        if self._group is None:
            raise HopSessionLost("the session was not opened")
        return self._blocks.connection.call(self._group.step(steps))

    def free(self) -> None:
        if self._group is not None:
            self._blocks.connection.post(self._group.close)


def _new_identities(num_rows: int, epoch: int, tenant: str) -> Iterator[SessionIdentity]:
    return (SessionIdentity(secrets.token_bytes(16), epoch, tenant) for _ in range(num_rows))
