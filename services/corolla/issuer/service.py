"""The issuer as a table of its parts. Its port takes TLS without a client certificate, and serves enrolment alone."""

import asyncio
import datetime
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from corolla.chassis.channels import CallerBounds
from corolla.chassis.errors import SettingsError
from corolla.chassis.handlers import service_handler
from corolla.chassis.lifecycle import fail, run_service
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, TaskMetrics, new_registry
from corolla.chassis.parts import Part, Parts
from corolla.chassis.private_files import make_private_folder
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.issuer.register import CERTIFICATE_LIFETIME_S, MOST_MACHINES
from corolla.issuer.register_file import RegisterFile
from corolla.issuer.role_tokens import RoleTokens
from corolla.issuer.servicer import AUDITED, MAX_REQUEST_BYTES, IssuerServicer
from corolla.issuer.settings import IssuerSettings
from corolla.trust.authority import Authority
from corolla.trust.credentials import PublicCertificate
from corolla.trust.workload import Role, Workload
from corolla.v1 import issuer_pb2

log = logging.getLogger(__name__)

_SERVICE = issuer_pb2.DESCRIPTOR.services_by_name["IssuerService"]
_NAMES: Final = ("localhost", "127.0.0.1")
"""Machines ask for the first name wherever the issuer is, since they trust the one certificate that they checked."""
_OWN_FOLDER: Final = "issuer"
LOOK_INTERVAL_S: Final = 60.0
# Each machine keeps a connection.
_BOUNDS: Final = CallerBounds(MAX_REQUEST_BYTES, max_connections=MOST_MACHINES, max_connection_age_s=600.0)


class IssuerProcess:
    """The issuer in this process.

    Raises:
        StartupError: A port is taken, or a folder holds no authority or certificate.
    """

    def __init__(self, settings: IssuerSettings) -> None:
        registry = new_registry()
        rpc_metrics = RpcMetrics(registry)
        pods_dir, folder = settings.pods_dir, settings.authority_dir
        try:
            make_private_folder(folder)
        except OSError as failure:
            raise SettingsError(f"cannot keep the register in {folder}: {failure.strerror}") from None
        file = RegisterFile(folder, Authority.read_from(pods_dir) if pods_dir is not None else None)
        file.write_revocations()
        self._is_given = settings.tls_dir is not None
        self._sign = partial(_sign_own, file.authority, folder / _OWN_FOLDER, settings.trust_domain)
        if not self._is_given:
            self._signed_s = self._sign()
        self._certificate = certificate = PublicCertificate(settings.tls_dir or folder / _OWN_FOLDER)
        self._tasks = TaskGroup(lambda: fail(self._rpc.not_ready), TaskMetrics(registry))
        self._rpc = RpcServer(
            settings.host, settings.port, with_reflection=False, callers=_BOUNDS,
            credentials=certificate.for_rpc_servers(), metrics=rpc_metrics,
        )  # fmt: skip
        self._rpc.add(
            _SERVICE,
            service_handler(
                _SERVICE, IssuerServicer(settings, file, RoleTokens(pods_dir)), rpc_metrics,
                max_request_bytes=MAX_REQUEST_BYTES, audited=AUDITED,
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
        if not self._is_given:
            self._tasks.start_restartable(self._sign_again, "own_certificate")

    async def _sign_again(self) -> None:
        """Replaces the issuer's own certificate at half of its life, for ever.

        It goes by the clock that certificates go by, since others stand still while a machine sleeps.
        """
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self._signed_s <= time.time() < self._signed_s + CERTIFICATE_LIFETIME_S / 2:
                continue
            try:
                self._signed_s = await asyncio.to_thread(self._sign)
            except SettingsError as failure:
                # A full disk, for example, has half of the certificate's life to become free.
                log.warning("the issuer's certificate cannot be replaced: %s", failure.message)

    async def stop(self) -> None:
        """Sets health to NOT_SERVING, lets running calls finish and closes everything."""
        await self._parts.stop()


def _sign_own(authority: Authority, folder: Path, trust_domain: str) -> float:
    """Signs the certificate that the issuer shows, into a folder. Returns the time. Raises SettingsError."""
    now_s = time.time()
    ends = datetime.datetime.fromtimestamp(now_s + CERTIFICATE_LIFETIME_S, datetime.UTC)
    try:
        authority.issue(folder, Workload(trust_domain, Role.ISSUER, "issuer"), _NAMES, ends)
    except OSError as failure:
        raise SettingsError(f"cannot write {folder}: {failure.strerror}") from None
    return now_s


def run(**overrides: Any) -> int:
    """Runs an issuer until a signal; `overrides` win over the environment. Returns the exit status."""
    return run_service(IssuerSettings, IssuerProcess, **overrides)
