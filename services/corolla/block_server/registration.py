"""Registers this server: the router assigns a span to it, and heartbeats renew its lease on the span."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from corolla.chassis import failpoints
from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.errors import CorollaError, SpanRefused, StartupError
from corolla.chassis.status import from_rpc_error
from corolla.v1 import common_pb2, router_pb2, router_pb2_grpc
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 2.0
_RETRY_INTERVAL_S = 0.5
_HURRIED_INTERVAL_S = 0.25
_MOST_HURRY = 6

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True)
class Order:
    """A router's order to hold another span; see `HeartbeatResponse` for `at_once`."""

    span: Span
    at_once: bool = False


@dataclass(eq=False, repr=False)
class Registration:
    """Registers the server, and renews its lease in the background.

    Each heartbeat contains all that a router needs to register this server again, in case the store has lost it.

    Args:
        router: the router's `host:port`.
        server: the description for the router; the same at each registration of this incarnation.
        load: returns the current load; called for each heartbeat.
        channels: opens channels to the router.
        interval_s: seconds between heartbeats, until a router answers with another interval.
        on_placement: is called with each placement that this server asked for.
        is_hurried: whether answers may wait for an order to this server. It then sends heartbeats every 0.25 s, but
            at most six times as often as the router asks.

    Attributes:
        state: the state that the next heartbeat reports.
    """

    router: str
    server: router_pb2.ServerDescription
    load: Callable[[], router_pb2.ServerLoad]
    channels: Channels = open_channel
    interval_s: float = 1.0
    on_placement: Callable[[router_pb2.Placement], None] = lambda placement: None
    is_hurried: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._channel = self.channels(self.router)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._span: Span | None = None
        self._soon = asyncio.Event()
        self.num_heartbeats = 0
        self._ordered: Order | None = None
        self._order_came = asyncio.Event()
        self.state: router_pb2.ServerState.ValueType = router_pb2.SERVER_STATE_JOINING

    async def register(self, span: Span | None) -> Span:
        """Waits for a router without a time limit, and returns the span that it assigned.

        Raises:
            StartupError: the router refuses this server.
        """
        request = router_pb2.RegisterServerRequest(server=self.server)
        if span is not None:
            request.span.CopyFrom(span.to_message())
        has_logged = False
        while True:
            try:
                answer = await self._call(self._stub.RegisterServer, request)
            except CorollaError as error:
                if isinstance(error, StartupError) or error.code is grpc.StatusCode.INVALID_ARGUMENT:
                    raise SpanRefused(error.message) from None
                if not has_logged:
                    log.warning(
                        "waiting until the router answers", extra={"router": self.router, "reason": error.reason}
                    )
                    has_logged = True
                await asyncio.sleep(_RETRY_INTERVAL_S)
                continue
            self.interval_s = answer.heartbeat_interval_ms / 1000
            self._span = Span.from_message(answer.span)
            return self._span

    async def run(self) -> None:
        """Sends heartbeats for ever. The data plane continues whatever the router answers, and if it fails."""
        reachable = True
        while True:
            # The event is cleared before the heartbeat is sent. If it is set meanwhile, the state has changed again
            # and needs another heartbeat.
            self._soon.clear()
            try:
                await self.send_heartbeat()
                if not reachable:
                    log.info("router is back", extra={"router": self.router})
                reachable = True
            except CorollaError as error:
                if reachable:
                    log.warning("a heartbeat failed; open streams continue", extra={"reason": error.reason})
                reachable = False
            with contextlib.suppress(TimeoutError):
                # After a failure the server retries soon, so that its routes return as soon as the router does.
                interval_s = self.next_interval_s
                async with asyncio.timeout(interval_s if reachable else min(interval_s, _RETRY_INTERVAL_S)):
                    await self._soon.wait()

    @property
    def next_interval_s(self) -> float:
        """Seconds until the next heartbeat, if the router answers."""
        if not self.is_hurried():
            return self.interval_s
        return min(self.interval_s, max(_HURRIED_INTERVAL_S, self.interval_s / _MOST_HURRY))

    async def order(self) -> Order:
        """Waits until the router orders this server to move to another span."""
        while self._ordered is None:
            await self._order_came.wait()
        return self._ordered

    async def still_ordered(self, order: Order) -> bool:
        """Sends a heartbeat to ask whether the order stands: the router withdraws orders when servers join or leave."""
        try:
            await self.send_heartbeat()
        except CorollaError:
            return False
        return self._ordered is not None and self._ordered.span == order.span

    def request_heartbeat(self) -> None:
        """Sends the next heartbeat at once, because the state has changed."""
        self._soon.set()

    async def send_heartbeat(self) -> None:
        """Sends one heartbeat with the current state and load."""
        request = router_pb2.HeartbeatRequest(
            model=self.server.model,
            server_id=self.server.server_id,
            state=self.state,
            load=self.load(),
            server=self.server,
        )
        if self._span is not None:
            request.span.CopyFrom(self._span.to_message())
        self.num_heartbeats += 1
        request.load.heartbeat_number = self.num_heartbeats
        failpoints.passed("before_lease")
        answer = await self._call(self._stub.Heartbeat, request)
        failpoints.passed("after_lease")
        if answer.HasField("move_to"):
            self._ordered = Order(Span.from_message(answer.move_to), answer.at_once)
            self._order_came.set()
        else:
            self._ordered = None
            self._order_came.clear()

    async def placement(self) -> Sequence[router_pb2.PlacedServer]:
        """Returns all servers of the model that the router knows. Raises the router's error, or RouterUnavailable."""
        request = router_pb2.GetPlacementRequest(model=self.server.model)
        placement = await self._call(self._stub.GetPlacement, request)
        self.on_placement(placement)
        return placement.servers

    async def report(self, server_id: str) -> None:
        """Tells the router that this server does not reach another one. Raises the errors of `placement`."""
        request = router_pb2.ReportServerRequest(model=self.server.model, server_id=server_id)
        await self._call(self._stub.ReportServer, request)

    async def move_session(self, session_id: bytes, tenant: str, hop: common_pb2.Hop) -> None:
        """Tells the router that an idle session moved from this server to `hop`. Raises the errors of `placement`."""
        request = router_pb2.MoveSessionRequest(
            model=self.server.model, session_id=session_id.hex(), tenant=tenant, server_id=self.server.server_id,
            hop=hop,
        )  # fmt: skip
        await self._call(self._stub.MoveSession, request)

    async def deregister(self, num_moved_sessions: int = 0, num_left_sessions: int = 0) -> None:
        """Gives the lease back. If no router answers, the lease runs out by itself."""
        request = router_pb2.DeregisterServerRequest(
            model=self.server.model, server_id=self.server.server_id,
            num_moved_sessions=num_moved_sessions, num_left_sessions=num_left_sessions,
        )  # fmt: skip
        try:
            failpoints.passed("before_deregister")
            await self._call(self._stub.DeregisterServer, request)
            failpoints.passed("after_deregister")
        except CorollaError:
            log.warning("could not deregister; the router removes this server when its lease ends")

    async def close(self) -> None:
        await self._channel.close(None)

    async def _call(self, method: Callable[..., Awaitable[Reply]], request: Message) -> Reply:
        try:
            return await method(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from None
