"""The issuer as a table of its parts. Its port takes TLS without a client certificate, and serves enrolment alone."""

import asyncio
import logging
from typing import Any, Final

from corolla.chassis.channels import CallerBounds
from corolla.chassis.errors import SettingsError
from corolla.chassis.handlers import service_handler
from corolla.chassis.lifecycle import fail, run_service
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, TaskMetrics, new_registry
from corolla.chassis.parts import Part, Parts
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.issuer.register import MOST_MACHINES
from corolla.issuer.register_file import RegisterFile
from corolla.issuer.servicer import AUDITED, MAX_REQUEST_BYTES, IssuerServicer
from corolla.issuer.settings import IssuerSettings
from corolla.trust.credentials import PublicCertificate
from corolla.v1 import issuer_pb2

log = logging.getLogger(__name__)

_SERVICE = issuer_pb2.DESCRIPTOR.services_by_name["IssuerService"]
# Each machine keeps a connection.
_BOUNDS: Final = CallerBounds(MAX_REQUEST_BYTES, max_connections=MOST_MACHINES, max_connection_age_s=600.0)


class IssuerProcess:
    """The issuer in this process.

    Raises:
        StartupError: A port is taken, or a folder holds no authority or certificate.
    """

    def __init__(self, settings: IssuerSettings) -> None:
        if settings.tls_dir is None:
            raise SettingsError("set COROLLA_TLS_DIR: the issuer shows its own certificate to machines that join")
        registry = new_registry()
        rpc_metrics = RpcMetrics(registry)
        file = RegisterFile(settings.authority_dir)
        file.write_revocations()
        self._certificate = certificate = PublicCertificate(settings.tls_dir)
        self._tasks = TaskGroup(lambda: fail(self._rpc.not_ready), TaskMetrics(registry))
        self._rpc = RpcServer(
            settings.host, settings.port, with_reflection=False, callers=_BOUNDS,
            credentials=certificate.for_rpc_servers(), metrics=rpc_metrics,
        )  # fmt: skip
        self._rpc.add(
            _SERVICE,
            service_handler(
                _SERVICE, IssuerServicer(settings, file), rpc_metrics, max_request_bytes=MAX_REQUEST_BYTES,
                audited=AUDITED,
            ),
        )  # fmt: skip
        self._metrics_endpoint = MetricsEndpoint(
            registry, settings.metrics_host, settings.metrics_port, lambda: self._rpc.is_serving
        )
        self._parts = Parts(
            Part("metrics port", stop=lambda: asyncio.to_thread(self._metrics_endpoint.close)),
            Part("grpc port", stop=lambda: self._rpc.stop(settings.grace_s)),
            Part("tasks", stop=self._tasks.close),
            Part("metrics", self._metrics_endpoint.start, ["metrics port"]),
            Part("certificate", self._renew_certificate, ["tasks"]),
            Part("calls", self._rpc.start, ["grpc port"]),
            Part("readiness", self._rpc.ready, ["calls", "certificate"], self._rpc.not_ready),
        )

    @property
    def port(self) -> int:
        return self._rpc.port

    async def start(self) -> None:
        """Starts the issuer, which then serves."""
        await self._parts.start()
        log.info("issuer serves", extra={"port": self.port})

    def _renew_certificate(self) -> None:
        self._tasks.start_restartable(self._certificate.files.run, "watched_files")

    async def stop(self) -> None:
        """Sets health to NOT_SERVING, lets running calls finish and closes everything."""
        await self._parts.stop()


def run(**overrides: Any) -> int:
    """Runs an issuer until a signal; `overrides` win over the environment. Returns the exit status."""
    return run_service(IssuerSettings, IssuerProcess, **overrides)
