"""gRPC channels that outlive the certificates with which they were opened."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple, cast

import grpc

from corolla.chassis.channels import Channels, open_channel
from corolla.trust.credentials import Credentials

_GRACE_S: Final = 60.0
_LOOK_INTERVAL_S: Final = 0.5


class _Opened(NamedTuple):
    """A channel, and the version of the certificates that it uses."""

    version: int
    channel: grpc.aio.Channel


def renewed_channels(credentials: Credentials) -> Channels:
    """Returns a function that opens channels, which switch to new certificates when the files change."""
    return lambda address: cast(grpc.aio.Channel, _RenewedChannel(address, credentials))


class _RenewedChannel:
    """A channel that replaces its gRPC channel when the certificates change, which gRPC channels cannot do themselves.

    The new gRPC channel takes over as soon as it is connected. Calls on the old one have `_GRACE_S` to end, but
    streaming calls end soon, and their callers begin them anew. This class has the methods of a channel that stubs use.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._current = self._following = self._open()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return lambda *arguments, **of_call: self._newest().unary_unary(*method, **options)(*arguments, **of_call)

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., AsyncIterator[Any]]:
        async def watch(*arguments: Any, **of_call: Any) -> AsyncIterator[Any]:
            channel = self._newest()
            call = channel.unary_stream(*method, **options)(*arguments, **of_call)
            reading = asyncio.ensure_future(call.read())
            try:
                while self._newest() is channel:
                    await asyncio.wait({reading}, timeout=_LOOK_INTERVAL_S)
                    if reading.done():
                        if (message := reading.result()) is grpc.aio.EOF:
                            return
                        yield message
                        reading = asyncio.ensure_future(call.read())
            finally:
                call.cancel()
                reading.add_done_callback(lambda read: read.cancelled() or read.exception())

        return watch

    async def close(self, grace_s: float | None = None) -> None:
        for task in self._closing:
            task.cancel()
        if self._following is not self._current:
            await self._following.channel.close(None)
        await self._current.channel.close(grace_s)

    def _newest(self) -> grpc.aio.Channel:
        """Returns the current channel, after replacing it if one with newer certificates has connected."""
        if self._current.version != self._credentials.version:
            if self._following.version != self._credentials.version:
                if self._following is not self._current:
                    self._leave(self._following)
                self._following = self._open()
            if self._following.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
                self._leave(self._current)
                self._current = self._following
        return self._current.channel

    def _leave(self, opened: _Opened) -> None:
        task = asyncio.get_running_loop().create_task(opened.channel.close(_GRACE_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open(self) -> _Opened:
        # The version is read first: if the files change meanwhile, the channel only counts as older than it is.
        version = self._credentials.version
        return _Opened(version, open_channel(self._address, self._credentials.for_channels()))
