"""gRPC channels that live longer than the certificates they were opened with."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import grpc

from corolla.chassis.channels import Channels, open_channel
from corolla.trust.credentials import Credentials

_GRACE_S: Final = 60.0

_Call = Callable[..., Any]


def renewed_channels(credentials: Credentials) -> Channels:
    """What opens channels that go on with new certificates once there are some."""
    return lambda address: cast(grpc.aio.Channel, _RenewedChannel(address, credentials))


class _RenewedChannel:
    """A gRPC channel cannot take other certificates. So calls that begin after a change go through a new one.

    It has what stubs ask of a channel. Calls that run have `_GRACE_S` to end; a watch that does not is begun anew.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._version = 0
        self._channel = self._open()
        self._leaving: set[asyncio.Task[None]] = set()

    def unary_unary(self, *method: Any, **options: Any) -> _Call:
        return self._calls(lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> _Call:
        return self._calls(lambda channel: channel.unary_stream(*method, **options))

    async def close(self, grace_s: float | None = None) -> None:
        for task in self._leaving:
            task.cancel()
        await self._channel.close(grace_s)

    def _calls(self, make: Callable[[grpc.aio.Channel], _Call]) -> _Call:
        channel, method = self._channel, make(self._channel)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal channel, method
            if self._current() is not channel:
                channel, method = self._channel, make(self._channel)
            return method(*arguments, **options)

        return call

    def _current(self) -> grpc.aio.Channel:
        if self._version != self._credentials.version:
            task = asyncio.get_running_loop().create_task(self._channel.close(_GRACE_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            self._channel = self._open()
        return self._channel

    def _open(self) -> grpc.aio.Channel:
        self._version = self._credentials.version
        return open_channel(self._address, self._credentials.for_channels())
