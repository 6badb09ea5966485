"""How a process reaches the others and they reach it: in the clear, or with certificates of both ends."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.handlers import MAX_CONTROL_REQUEST_BYTES, Call, service_handler
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.tasks import TaskGroup
from corolla.trust.authorisation import AUDITED, FRAMES, check_method
from corolla.trust.capabilities import Capabilities
from corolla.trust.channels import renewed_channels
from corolla.trust.credentials import Credentials, workload_of_call
from corolla.trust.standing_calls import end_once_unbelieved
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.renewal import RenewedStream
from corolla.wire.stream import Connect, StreamListener, StreamTrust, connect

_SERVERS: Final = frozenset({Role.BLOCK})


@dataclass(frozen=True)
class Network:
    """What a composition root hands to its parts.

    Attributes:
        channels: opens gRPC channels to routers.
        connect: begins streams to block servers.
        listen: takes a port for streams.
        credentials: of this process; None: everything goes in the clear, and nobody is asked who they are.
    """

    channels: Channels = open_channel
    connect: Connect = connect
    listen: Callable[[str, int], StreamListener] = StreamListener
    credentials: Credentials | None = None

    @classmethod
    def of(cls, tls_dir: Path | None) -> Self:
        """Raises SettingsError when the folder does not hold what it should."""
        if tls_dir is None:
            return cls()
        credentials = Credentials(tls_dir)
        streams = partial(RenewedStream, trust=StreamTrust(credentials, _SERVERS))
        return cls(renewed_channels(credentials), streams, credentials=credentials)

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A gRPC channel with the certificates of now."""
        return open_channel(address, self.credentials.for_channels() if self.credentials is not None else None)

    def rpc_credentials(self) -> grpc.ServerCredentials | None:
        """For the gRPC servers of this process."""
        return self.credentials.for_rpc_servers() if self.credentials is not None else None

    def service_handler(
        self,
        service: ServiceDescriptor,
        servicer: object,
        metrics: RpcMetrics,
        *,
        max_request_bytes: int = MAX_CONTROL_REQUEST_BYTES,
    ) -> grpc.GenericRpcHandler:
        """Handlers of a service between services: each method is for the roles that `trust/authorisation` lists."""
        return service_handler(
            service,
            servicer,
            metrics,
            max_request_bytes=max_request_bytes,
            authenticate=self._check_role,
            audited=AUDITED,
            traced=True,
        )

    def capabilities(self, fingerprint: str) -> Capabilities | None:
        """Of the sessions of a model; None where nobody is asked who they are."""
        return Capabilities(self.credentials, fingerprint) if self.credentials is not None else None

    def start_renewal(self, tasks: TaskGroup) -> None:
        """From now on, changed certificates are taken, and what stands goes on with them."""
        if self.credentials is not None:
            tasks.start_restartable(self.credentials.files.run, "watched_files")

    @property
    def servers(self) -> StreamTrust | None:
        """Whom streams may lead to."""
        return StreamTrust(self.credentials, _SERVERS) if self.credentials is not None else None

    @property
    def callers(self) -> StreamTrust | None:
        """Who may begin streams to a block server."""
        return StreamTrust(self.credentials, FRAMES[pb.Hello]) if self.credentials is not None else None

    async def _check_role(self, call: Call[Any]) -> None:
        """Finds out who calls. Raises RoleDenied: they may not."""
        if self.credentials is not None:
            end_once_unbelieved(call, self.credentials.witness_call(call.context.auth_context()))
            caller = workload_of_call(call.context.auth_context())
            if caller is not None:
                call.caller = caller
            check_method(call.method, caller if self.credentials.knows(caller) else None)
