"""gRPC channels that live longer than the certificates they were opened with."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast

import grpc

from corolla.chassis.channels import Channels, open_channel
from corolla.trust.credentials import Credentials
from corolla.trust.renewals import Renewals

_GRACE_S: Final = 60.0

_Call = Callable[..., Any]
_Watch = grpc.aio.UnaryStreamCall[Any, Any]


class _Opened(NamedTuple):
    """A channel, and which certificates it shows."""

    version: int
    channel: grpc.aio.Channel


def renewed_channels(credentials: Credentials, renewals: Renewals) -> Channels:
    """What opens channels that go on with new certificates once there are some."""
    return lambda address: cast(grpc.aio.Channel, _RenewedChannel(address, credentials, renewals))


class _RenewedChannel:
    """A gRPC channel cannot take other certificates. So another one takes its place, as soon as that is connected.

    It has what stubs ask of a channel. Calls that run on the old one have `_GRACE_S` to end; watches go over.
    """

    def __init__(self, address: str, credentials: Credentials, renewals: Renewals) -> None:
        self._address = address
        self._credentials = credentials
        self._renewals = renewals
        self._current = self._open()
        self._following: _Opened | None = None
        self._renewed = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        renewals.add(self)

    def unary_unary(self, *method: Any, **options: Any) -> _Call:
        return self._calls(lambda channel: channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., AsyncIterator[Any]]:
        begin = self._calls(lambda channel: channel.unary_stream(*method, **options))
        return lambda *arguments, **of_call: self._watch(partial(begin, *arguments, **of_call))

    def renew(self) -> None:
        version = self._credentials.version
        if self._current.version == version:
            return
        if self._following is None or self._following.version != version:
            if self._following is not None:
                self._leave(self._following.channel)
            self._following = self._open()
        if self._following.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            self._leave(self._current.channel)
            self._current, self._following = self._following, None
            renewed, self._renewed = self._renewed, asyncio.Event()
            renewed.set()

    async def close(self, grace_s: float | None = None) -> None:
        self._renewals.discard(self)
        for task in self._leaving:
            task.cancel()
        if self._following is not None:
            await self._following.channel.close(None)
        await self._current.channel.close(grace_s)

    def _calls(self, make: Callable[[grpc.aio.Channel], _Call]) -> _Call:
        channel, method = self._current.channel, make(self._current.channel)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal channel, method
            if self._current.channel is not channel:
                channel, method = self._current.channel, make(self._current.channel)
            return method(*arguments, **options)

        return call

    async def _watch(self, begin: Callable[[], _Watch]) -> AsyncIterator[Any]:
        """What a watch says first is all there is. So another call may take the place of one, once it has said that."""
        calls: list[_Watch] = []
        try:
            while True:
                renewed, call = self._renewed, begin()
                calls.append(call)
                while (message := await _read(call, renewed)) is not None:
                    if message is grpc.aio.EOF:
                        return
                    for earlier in calls[:-1]:
                        earlier.cancel()
                    del calls[:-1]
                    yield message
        finally:
            for call in calls:
                call.cancel()

    def _leave(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(_GRACE_S))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _open(self) -> _Opened:
        # The version first: where the files change in between, the channel only counts as older than it is.
        version = self._credentials.version
        return _Opened(version, open_channel(self._address, self._credentials.for_channels()))


async def _read(call: _Watch, renewed: asyncio.Event) -> Any:
    """What a watch says next; None once its channel is renewed. Cancelling the call ends what still reads it."""
    reading, renewing = asyncio.ensure_future(call.read()), asyncio.ensure_future(renewed.wait())
    reading.add_done_callback(lambda read: read.cancelled() or read.exception())
    try:
        await asyncio.wait({reading, renewing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        renewing.cancel()
    return reading.result() if reading.done() else None
