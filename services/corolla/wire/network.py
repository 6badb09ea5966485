"""Makes and accepts the connections of a process to other processes, in plain text or with mutual TLS."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.handlers import MAX_CONTROL_REQUEST_BYTES, Call, Check, service_handler
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.trust.authorisation import AUDITED, FRAMES, check_method
from corolla.trust.capabilities import Capabilities
from corolla.trust.channels import renewed_channels
from corolla.trust.credentials import Credentials, workload_of_call
from corolla.trust.running_calls import end_when_invalid
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.renewal import RenewedStream
from corolla.wire.stream import Connect, StreamListener, StreamTrust, connect

_SERVERS: Final = frozenset({Role.BLOCK})


@dataclass(frozen=True)
class Network:
    """The connections that a process can make and accept. The process passes one object of this class to its parts.

    Attributes:
        channels: opens gRPC channels to routers.
        connect: begins streams to block servers.
        listen: binds a port for streams.
        credentials: the certificate and key of this process; None without mutual TLS.
    """

    channels: Channels = open_channel
    connect: Connect = connect
    listen: Callable[[str, int], StreamListener] = StreamListener
    credentials: Credentials | None = None

    @classmethod
    def from_folder(cls, tls_dir: Path | None) -> Self:
        """Makes a network from a folder of certificates; None: without TLS. Raises SettingsError for wrong files."""
        if tls_dir is None:
            return cls()
        credentials = Credentials(tls_dir)
        streams = partial(RenewedStream, trust=StreamTrust(credentials, _SERVERS))
        return cls(renewed_channels(credentials), streams, credentials=credentials)

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Opens a gRPC channel with the current certificates."""
        return open_channel(address, self.credentials.for_channels() if self.credentials is not None else None)

    def rpc_server(self, host: str, port: int, metrics: RpcMetrics, *, with_reflection: bool) -> RpcServer:
        """Makes a gRPC server for other processes of Corolla. Raises StartupError if the port is taken."""
        credentials = self.credentials.for_rpc_servers() if self.credentials is not None else None
        return RpcServer(host, port, with_reflection=with_reflection, credentials=credentials, metrics=metrics)

    def service_handler(
        self,
        service: ServiceDescriptor,
        servicer: object,
        metrics: RpcMetrics,
        *,
        max_request_bytes: int = MAX_CONTROL_REQUEST_BYTES,
        check: Check = lambda request: None,
    ) -> grpc.GenericRpcHandler:
        """Makes the handlers of an internal service. Methods admit only the roles that `trust/authorisation` lists."""
        return service_handler(
            service,
            servicer,
            metrics,
            max_request_bytes=max_request_bytes,
            check=check,
            authenticate=self._check_role,
            audited=AUDITED,
            traced=True,
        )

    def capabilities(self, fingerprint: str) -> Capabilities | None:
        """Returns what signs and verifies the capabilities of a model's sessions; None without mutual TLS."""
        return Capabilities(self.credentials, fingerprint) if self.credentials is not None else None

    def start_renewal(self, tasks: TaskGroup) -> None:
        """Begins to watch the certificate files, so that open connections also change to new certificates."""
        if self.credentials is not None:
            tasks.start_restartable(self.credentials.files.run, "watched_files")

    @property
    def servers(self) -> StreamTrust | None:
        """The trust for streams from this process: it admits block servers only. None without mutual TLS."""
        return StreamTrust(self.credentials, _SERVERS) if self.credentials is not None else None

    @property
    def callers(self) -> StreamTrust | None:
        """The trust for streams to this process: it admits the roles that may send Hello. None without mutual TLS."""
        return StreamTrust(self.credentials, FRAMES[pb.Hello]) if self.credentials is not None else None

    async def _check_role(self, call: Call[Any]) -> None:
        """Reads the caller's identity, and watches its certificate during the call.

        Raises RoleDenied if the caller's role may not call the method, and Unauthenticated for an invalid certificate.
        """
        if self.credentials is not None:
            end_when_invalid(call, self.credentials.caller_validity(call.context.auth_context()))
            caller = workload_of_call(call.context.auth_context())
            if caller is not None:
                call.caller = caller
            check_method(call.method, caller if self.credentials.knows(caller) else None)
