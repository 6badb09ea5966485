"""The calls of a client service to the router."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from corolla.chassis.channels import Channels, open_channel, unreached
from corolla.chassis.errors import CorollaError, RouterUnavailable
from corolla.chassis.status import from_rpc_error, status_of
from corolla.chassis.tracing.carriers import trace_metadata
from corolla.v1 import router_pb2 as pb
from corolla.v1 import router_pb2_grpc

_PLAN_TIMEOUT_S: Final = 2.0
"""Short, because a client service can also plan on the placement that was pushed last."""
RECORD_TIMEOUT_S = 5.0
"""Longer, because only a router has the records of sessions."""

Reply = TypeVar("Reply", bound=Message)


class ControlPlane:
    """Makes calls to the router. A call that fails raises a CorollaError: the router's own, or RouterUnavailable.

    Args:
        record_timeout_s: how long a call about a session record waits; None: RECORD_TIMEOUT_S.
    """

    def __init__(
        self, router: str, model: str, channels: Channels = open_channel, record_timeout_s: float | None = None
    ) -> None:
        self.model = model
        self._router = router
        self._record_timeout_s = RECORD_TIMEOUT_S if record_timeout_s is None else record_timeout_s
        self._channel = channels(router)
        self.stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def plan_chain(self, fingerprint: str, num_tokens: int, excluded: frozenset[str]) -> pb.PlanChainResponse:
        """The cheapest chain of servers with these weights. They need room for a session of so many tokens."""
        request = pb.PlanChainRequest(
            model=self.model, fingerprint=fingerprint, num_tokens=num_tokens, excluded_server_ids=sorted(excluded)
        )
        return await self._call(self.stub.PlanChain, request, _PLAN_TIMEOUT_S)

    async def report_server(self, server_id: str, *, slow: bool = False) -> None:
        """Reports that a server failed, so that chains avoid it until its next heartbeat.

        With `slow`, it reports instead that chains with the server are far slower than their servers claim.
        """
        request = pb.ReportServerRequest(model=self.model, server_id=server_id, slow=slow)
        await self._call(self.stub.ReportServer, request, _PLAN_TIMEOUT_S)

    async def get_placement(self) -> pb.Placement:
        """All servers of the model that the router knows now."""
        return await self._call(self.stub.GetPlacement, pb.GetPlacementRequest(model=self.model), _PLAN_TIMEOUT_S)

    async def take_quotas(self, request: pb.TakeQuotasRequest, timeout_s: float) -> pb.TakeQuotasResponse:
        return await self._call(self.stub.TakeQuotas, request, timeout_s)

    async def close(self) -> None:
        await self._channel.close(None)

    async def call(self, method: Callable[..., Awaitable[Reply]], request: Message) -> Reply:
        """Calls a method of `stub` that reads or changes session records, and waits `record_timeout_s` for it."""
        return await self._call(method, request, self._record_timeout_s)

    async def _call(self, method: Callable[..., Awaitable[Reply]], request: Message, timeout_s: float) -> Reply:
        try:
            return await method(request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.RpcError as failure:
            raise self._error(failure) from None

    def _error(self, failure: grpc.RpcError) -> CorollaError:
        """The router's own error, or one that names the address and what answered there."""
        error = from_rpc_error(failure)
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return RouterUnavailable(f"the router at {self._router} does not answer")
        if not isinstance(error, RouterUnavailable) or status_of(failure) is not None:
            return error
        details = (failure.details() or "") if isinstance(failure, grpc.aio.AioRpcError) else ""
        if isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RouterUnavailable(f"another gRPC service than a router answers at {self._router}")
        return unreached(RouterUnavailable, "router", self._router, details)
