"""Serves AdminService, through which `corolla drain` makes a block server leave, on a port of its own."""

import asyncio

from corolla.chassis.audit import Caller
from corolla.chassis.handlers import Call
from corolla.chassis.lifecycle import ask_to_stop
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.rpc_server import RpcServer
from corolla.v1 import admin_pb2 as pb
from corolla.wire.network import Network

_SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
_FAREWELL_S = 1.0


class AdminEndpoint:
    """Serves AdminService if a port was given."""

    def __init__(self, host: str, port: int, metrics: RpcMetrics, network: Network) -> None:
        self._num_sessions_left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._host = host
        self._port = port
        self._metrics = metrics
        self._network = network
        self._rpc: RpcServer | None = None

    async def start(self) -> None:
        """Begins to serve. Raises StartupError if the port is taken."""
        if self._port:
            self._rpc = RpcServer(
                self._host,
                self._port,
                with_reflection=False,
                credentials=self._network.rpc_credentials(),
                metrics=self._metrics,
            )
            self._rpc.add(_SERVICE, self._network.service_handler(_SERVICE, self, self._metrics))
            await self._rpc.start()
            await self._rpc.ready()

    async def Drain(self, request: pb.DrainRequest, call: Call[Caller]) -> pb.DrainResponse:
        # A repeated call waits for the end of the drain that the first one began.
        ask_to_stop()
        return pb.DrainResponse(num_sessions_left=await asyncio.shield(self._num_sessions_left))

    async def stop(self, num_sessions_left: int) -> None:
        """Answers the calls of Drain that wait for the end of the drain, and stops serving."""
        if not self._num_sessions_left.done():
            self._num_sessions_left.set_result(num_sessions_left)
        if self._rpc is not None:
            await self._rpc.stop(_FAREWELL_S)
