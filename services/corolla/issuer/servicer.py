"""Answers machines that join: what the authority is, and a certificate for those with a token or a known key.

A machine that has one also learns whether others reach it.
A pod shows the token of its role each time. Its name follows from its key, so the issuer keeps nothing of pods.
"""

import asyncio
import datetime
import secrets
import ssl
import time
from collections.abc import Sequence
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from corolla.chassis.audit import Caller
from corolla.chassis.errors import InvalidRequest, QueueFull, StartupError, StoreUnavailable, Unauthenticated
from corolla.chassis.handlers import Call
from corolla.issuer.attempts import Attempts
from corolla.issuer.register import CERTIFICATE_LIFETIME_S, MachineRecord, digest_of
from corolla.issuer.register_file import RegisterFile
from corolla.issuer.role_tokens import RoleTokens
from corolla.issuer.settings import IssuerSettings
from corolla.trust.addresses import CallerAddress
from corolla.trust.enrolment import RELEASE, checked_key, public_der
from corolla.trust.join_token import MAX_TOKEN_CHARS, JoinToken
from corolla.trust.workload import Role, Workload
from corolla.v1 import issuer_pb2 as pb

MAX_REQUEST_BYTES: Final = 1024
AUDITED: Final = frozenset({"IssuerService/Enrol"})
_MOST_WAITING: Final = 64
_REACH_S: Final = 3.0


class IssuerServicer:
    """Answers calls of IssuerService. Enrolments take turns, since each may change the register."""

    def __init__(self, settings: IssuerSettings, file: RegisterFile, role_tokens: RoleTokens) -> None:
        self._settings = settings
        self._file = file
        self._role_tokens = role_tokens
        self._attempts = Attempts()
        self._turns = asyncio.Lock()
        self._num_waiting = 0

    async def GetTrust(self, request: pb.GetTrustRequest, call: Call[Caller]) -> pb.GetTrustResponse:
        return pb.GetTrustResponse(
            authority=self._file.authority.certificate_pem, revocations=self._file.revocations(),
            now_s=int(time.time()), version=RELEASE,
        )  # fmt: skip

    async def Enrol(self, request: pb.EnrolRequest, call: Call[Caller]) -> pb.EnrolResponse:
        address = self._admitted(call)
        # The work goes on when its caller leaves, so its place and its attempt count until it has ended.
        machine = await asyncio.shield(self._in_turn(request, address))
        settings = self._settings
        call.describe(lambda: {"workload": str(self._workload(machine)), "machine": machine.id, "token": machine.token})
        return pb.EnrolResponse(
            certificate=machine.certificate.encode(), role=machine.role.value, router=settings.router,
            model=settings.model, dtype=settings.dtype, quantization=settings.quantization,
            manifest=bytes.fromhex(settings.manifest.stem) if settings.manifest is not None else b"",
        )  # fmt: skip

    async def Reach(self, request: pb.ReachRequest, call: Call[Caller]) -> pb.ReachResponse:
        address = self._admitted(call)
        try:
            key = await asyncio.to_thread(self._known_key, request)
            met = await self._meets(key, address, request.port)
        except StartupError as failure:
            raise StoreUnavailable(failure.message) from None
        finally:
            self._num_waiting -= 1
        if met:
            self._attempts.take_back(address)
        return pb.ReachResponse(host=address, met=met)

    def _known_key(self, request: pb.ReachRequest) -> ec.EllipticCurvePublicKey:
        if not 0 < request.port < 2**16:
            raise InvalidRequest("port", "must be a port")
        if self._file.register().known(request.public_key, int(time.time())) is None:
            raise Unauthenticated("this stack does not know the machine; join with a token: corolla tokens new")
        return checked_key(request, self._file.authority.digest)

    async def _meets(self, key: ec.EllipticCurvePublicKey, host: str, port: int) -> bool:
        """A process at this address shows a certificate of the authority for this key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.load_verify_locations(cadata=self._file.authority.certificate_pem.decode())
        try:
            async with asyncio.timeout(_REACH_S):
                _, writer = await asyncio.open_connection(host, port, ssl=context)
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            own = x509.load_der_x509_certificate(shown).public_key()
            return isinstance(own, ec.EllipticCurvePublicKey) and public_der(own) == public_der(key)
        except (OSError, ValueError):  # nothing answers there in time, or something else does
            return False

    def _admitted(self, call: Call[Caller]) -> str:
        """Counts a call, and returns the address that it comes from. Raises QueueFull if there are too many."""
        address = CallerAddress.from_call({}, call.context.peer()).host
        try:
            if self._num_waiting >= _MOST_WAITING:
                raise QueueFull("too many machines enrol at the same time")
            self._attempts.begin(address, time.monotonic())
        except QueueFull:
            call.is_recorded = False  # a flood must not fill the disk
            raise
        self._num_waiting += 1
        return address

    async def _in_turn(self, request: pb.EnrolRequest, address: str) -> MachineRecord:
        try:
            async with self._turns:
                machine = await asyncio.to_thread(self._enrol, request)
        except StartupError as failure:
            self._attempts.take_back(address)
            raise StoreUnavailable(failure.message) from None
        finally:
            self._num_waiting -= 1
        self._attempts.take_back(address)
        return machine

    def _enrol(self, request: pb.EnrolRequest) -> MachineRecord:
        """Returns the machine with a certificate that has half of its life left."""
        token = JoinToken.parse(request.token) if len(request.token) <= MAX_TOKEN_CHARS else None
        # What costs least comes first: no signature is verified without a token of this stack or a key that joined.
        if request.token and (token is None or token.authority != self._file.authority.digest):
            raise Unauthenticated("this is no token of this stack; copy it again, or ask for a new one")
        if token is not None and (role := self._role_tokens.role_of(token)) is not None:
            return self._pod(request, role, token)
        now, register = int(time.time()), self._file.register()
        if token is not None:
            register.checked(token, now)
        elif register.known(request.public_key, now) is None:
            raise Unauthenticated("this stack does not know the machine; join with a token: corolla tokens new")
        key = checked_key(request, self._file.authority.digest)
        machine = register.known(request.public_key, now)
        if machine is not None and machine.is_fresh(now):
            return machine
        with self._file.changing() as changed:
            # Another process may have changed the file meanwhile.
            if token is not None:
                machine = changed.accept(request.public_key, token, secrets.token_hex(8), now)
            elif (machine := changed.known(request.public_key, now)) is None:
                raise Unauthenticated("this stack does not know the machine any more; join with a token")
            self._sign(machine, key, now)
        return machine

    def _pod(self, request: pb.EnrolRequest, role: Role, token: JoinToken) -> MachineRecord:
        """Returns a pod of a role, with a new certificate. The register does not learn of it."""
        key, digest = checked_key(request, self._file.authority.digest), digest_of(request.public_key)
        pod = MachineRecord(id=digest[:32], key=digest, token=token.id, role=role, name=digest[:32])
        self._sign(pod, key, int(time.time()), self._settings.names_of(role))
        return pod

    def _sign(
        self, machine: MachineRecord, key: ec.EllipticCurvePublicKey, now: int, names: Sequence[str] = ()
    ) -> None:
        ends = datetime.datetime.fromtimestamp(now + CERTIFICATE_LIFETIME_S, datetime.UTC)
        certificate = self._file.authority.sign(key, self._workload(machine), names, ends)
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        machine.signed(certificate.serial_number, now + CERTIFICATE_LIFETIME_S, pem, now)

    def _workload(self, machine: MachineRecord) -> Workload:
        return Workload(self._settings.trust_domain, machine.role, machine.name)
