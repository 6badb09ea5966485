"""The router as a client service sees it."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.errors import RouterUnavailable
from corolla.chassis.status import from_rpc_error
from corolla.v1 import router_pb2 as pb
from corolla.v1 import router_pb2_grpc

CALL_TIMEOUT_S: Final = 2.0

Reply = TypeVar("Reply", bound=Message)


class ControlPlane:
    """Calls to the router. Each raises an error of the tree: the router's own, or RouterUnavailable."""

    def __init__(self, router: str, model: str, channels: Channels = open_channel) -> None:
        self.model = model
        self._channel = channels(router)
        self.stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def plan_chain(
        self, *, fingerprint: str, num_tokens: int, session_id: str = "", excluded: frozenset[str] = frozenset()
    ) -> pb.PlanChainResponse:
        request = pb.PlanChainRequest(
            model=self.model,
            fingerprint=fingerprint,
            session_id=session_id,
            num_tokens=num_tokens,
            excluded_server_ids=sorted(excluded),
        )
        return await self._call(self.stub.PlanChain, request)

    async def report_server(self, server_id: str) -> None:
        """Tells that a server failed; chains avoid it until it is heard of again."""
        await self._call(self.stub.ReportServer, pb.ReportServerRequest(model=self.model, server_id=server_id))

    async def create_session(self, record: pb.SessionRecord, ttl_ms: int) -> pb.SessionRecord:
        return await self._call(
            self.stub.CreateSessionRecord, pb.CreateSessionRecordRequest(record=record, ttl_ms=ttl_ms)
        )

    async def get_session(self, session_id: str, tenant: str) -> pb.SessionRecord:
        request = pb.GetSessionRecordRequest(model=self.model, session_id=session_id, tenant=tenant)
        return await self._call(self.stub.GetSessionRecord, request)

    async def delete_session(self, session_id: str, tenant: str) -> pb.SessionRecord:
        request = pb.DeleteSessionRecordRequest(model=self.model, session_id=session_id, tenant=tenant)
        return await self._call(self.stub.DeleteSessionRecord, request)

    async def begin_turn(self, session_id: str, tenant: str, turn_id: str, lock_ms: int) -> pb.SessionRecord:
        request = pb.BeginTurnRequest(
            model=self.model, session_id=session_id, tenant=tenant, turn_id=turn_id, lock_ms=lock_ms
        )
        return await self._call(self.stub.BeginTurn, request)

    async def renew_turn(self, session_id: str, turn_id: str, lock_ms: int) -> None:
        request = pb.RenewTurnRequest(model=self.model, session_id=session_id, turn_id=turn_id, lock_ms=lock_ms)
        await self._call(self.stub.RenewTurn, request)

    async def end_turn(self, record: pb.SessionRecord, turn_id: str, ttl_ms: int, *, discard: bool) -> None:
        request = pb.EndTurnRequest(record=record, turn_id=turn_id, ttl_ms=ttl_ms, discard=discard)
        await self._call(self.stub.EndTurn, request)

    async def close(self) -> None:
        await self._channel.close(None)

    async def _call(self, method: Callable[..., Awaitable[Reply]], request: Message) -> Reply:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure, RouterUnavailable)
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                error = RouterUnavailable("the router does not answer")
            raise error from None
