"""The issuer signs for machines with a token and for known keys; strangers, thieves and impostors get nothing."""

import asyncio
import errno
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from corolla.chassis.errors import (
    CorollaError,
    InvalidRequest,
    MessageTooLarge,
    QueueFull,
    ReleaseMismatch,
    ServiceUnavailable,
    StartupError,
    StoreUnavailable,
    Unauthenticated,
)
from corolla.chassis.settings import load
from corolla.cli.enrolment import enrolled
from corolla.issuer.attempts import MOST_REFUSALS, Attempts
from corolla.issuer.register import CERTIFICATE_LIFETIME_S, Register
from corolla.issuer.register_file import RegisterFile
from corolla.issuer.role_tokens import ROLES, RoleTokens
from corolla.issuer.service import IssuerProcess
from corolla.issuer.servicer import IssuerServicer
from corolla.issuer.settings import IssuerSettings
from corolla.local.issuer_client import IssuerClient, showing_certificate
from corolla.local.membership import Membership
from corolla.local.ports import Ports
from corolla.sdk.transport import error_of
from corolla.trust.authority import Authority
from corolla.trust.certificate_verifier import CertificateVerifier, PresentedCertificate
from corolla.trust.credentials import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOCATIONS_FILE,
    workload_of_certificate,
)
from corolla.trust.enrolment import enrolment_request
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role, Workload
from corolla.v1 import issuer_pb2 as pb
from corolla.v1.issuer_pb2_grpc import IssuerServiceStub
from corolla.wire.network import Network
from tests.integration.waiting import until


class Place:
    """A running issuer, and its state folder."""

    def __init__(self, folder: Path, role: Role = Role.ISSUER, pods_dir: Path | None = None, port: int = 0) -> None:
        self._folder = folder
        self.state = folder / "state"
        self.file = RegisterFile(self.state, None if pods_dir is None else Authority.read_from(pods_dir))
        tls_dir = None
        if role is not Role.ISSUER:
            tls_dir = folder / "tls"
            self.file.authority.issue(tls_dir, Workload("local", role, "own"), ("127.0.0.1", "localhost"))
        settings = load(
            IssuerSettings, host="127.0.0.1", port=port, metrics_host="127.0.0.1", tls_dir=tls_dir,
            authority_dir=self.state, router="192.168.1.10:50050", pods_dir=pods_dir, redis="redis",
        )  # fmt: skip
        self.process = IssuerProcess(settings)
        self.address = f"127.0.0.1:{self.process.port}"

    def membership(self, name: str = "machine") -> Membership:
        return Membership(self.address, self._folder / name)

    async def client(self) -> IssuerClient:
        return await asyncio.to_thread(IssuerClient.connect, self.address, self.file.authority.digest)

    async def refused(self, token: JoinToken | None, kind: type[CorollaError] = Unauthenticated) -> str:
        """Asks with a new key, which must be refused. Returns why."""
        client = await self.client()
        try:
            with pytest.raises(kind) as refusal:
                await asyncio.to_thread(client.enrol, new_key(), token)
        finally:
            client.close()
        return refusal.value.message


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    await place.process.start()
    yield place
    await place.process.stop()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def forged(token: JoinToken, **changes: Any) -> JoinToken:
    return JoinToken(**{"authority": token.authority, "id": token.id, "secret": token.secret, **changes})


async def test_a_machine_joins_and_comes_back_without_its_token(place: Place) -> None:
    token, machine = place.file.new_token(uses=1), place.membership()
    answer = await asyncio.to_thread(machine.enrol, token)
    with pytest.raises(StartupError, match=r"joins .* already"):
        place.membership()
    own = workload_of_certificate(x509.load_pem_x509_certificate(answer.certificate))
    assert own is not None
    assert (own.trust_domain, own.role) == ("local", Role.BLOCK)
    assert answer.router == "192.168.1.10:50050"
    assert Network.from_folder(machine.folder).credentials is not None
    machine.close()
    again = place.membership()
    assert again.exists
    # The certificate has more than half of its life left, so it is the same; no use of the token is spent.
    assert (await asyncio.to_thread(again.enrol)).certificate == answer.certificate
    assert [each.uses for each in place.file.register().tokens] == [0]
    again.close()


async def test_tokens_that_are_replayed_tried_or_harvested_give_nothing(place: Place) -> None:
    token = place.file.new_token(uses=1)
    first = place.membership("first")
    await asyncio.to_thread(first.enrol, token)
    first.close()
    assert "spent" in await place.refused(token)
    unknown = await place.refused(forged(token, secret=bytes(32)))
    assert unknown == await place.refused(forged(token, id="0" * 16))
    # What lies in the state folder, but for the authority's key, opens nothing.
    stored = place.file.register().tokens[0].sha256
    assert unknown == await place.refused(forged(place.file.new_token(), secret=bytes.fromhex(stored)))
    assert unknown == await place.refused(forged(token, secret=bytes.fromhex(stored)))


async def test_a_key_that_is_unknown_or_not_ones_own_gets_nothing(place: Place) -> None:
    machine = place.membership()
    await asyncio.to_thread(machine.enrol, place.file.new_token())
    machine.close()
    assert "does not know the machine" in await place.refused(None)
    certificate = x509.load_pem_x509_certificate((machine.folder / CERTIFICATE_FILE).read_bytes())
    stolen = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = place.file.authority.digest
    requests = {
        "another's public key": pb.EnrolRequest(
            public_key=stolen, signature=enrolment_request(new_key(), digest).signature
        ),
        "a signature for another stack": enrolment_request(new_key(), bytes(32), place.file.new_token().written),
        "a key that is no key": pb.EnrolRequest(
            public_key=b"x" * 91, signature=b"x" * 64, token=place.file.new_token().written
        ),
        "a key on another curve": enrolment_request(
            ec.generate_private_key(ec.SECP384R1()), digest, place.file.new_token().written
        ),
        "an RSA key": pb.EnrolRequest(
            public_key=rsa.generate_private_key(65537, 1024)
            .public_key()
            .public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
            signature=b"x",
            token=place.file.new_token().written,
        ),
    }  # fmt: skip
    for what, request in requests.items():
        assert isinstance(await outcome(place, request), InvalidRequest), what
    assert isinstance(await outcome(place, pb.EnrolRequest(token="x" * 512)), Unauthenticated)
    assert isinstance(await outcome(place, pb.EnrolRequest(token="x" * 1500)), MessageTooLarge)
    assert len(place.file.register().machines) == 1


async def outcome(place: Place, request: pb.EnrolRequest) -> CorollaError | None:
    """The error with which the issuer answers a request; None: it signed."""
    authority = place.file.authority.certificate_pem
    async with grpc.aio.secure_channel(place.address, grpc.ssl_channel_credentials(authority)) as channel:
        try:
            await IssuerServiceStub(channel).Enrol(request, timeout=10)
        except grpc.RpcError as failure:
            return error_of(failure, place.address)
    return None


async def test_a_revoked_machine_is_out_and_gets_no_other_certificate(place: Place) -> None:
    token, machine = place.file.new_token(), place.membership()
    certificate = (await asyncio.to_thread(machine.enrol, token)).certificate
    stolen = (machine.folder / KEY_FILE).read_bytes()
    with place.file.changing() as register:
        assert register.revoke(token.id, with_machines=True) == 1
    with pytest.raises(Unauthenticated, match="was revoked"):
        await asyncio.to_thread(machine.follow)
    verifier = CertificateVerifier(
        place.file.authority.certificate_pem, (machine.folder / REVOCATIONS_FILE).read_bytes()
    )
    assert not verifier.is_valid(PresentedCertificate(certificate))
    thief = place.membership("thief")
    (thief.folder / KEY_FILE).write_bytes(stolen)
    with pytest.raises(Unauthenticated, match="revoked"):
        await asyncio.to_thread(thief.enrol, place.file.new_token())
    with pytest.raises(Unauthenticated, match="revoked"):
        await asyncio.to_thread(machine.enrol, token)
    assert (machine.folder / KEY_FILE).read_bytes() == stolen
    # The owner of the machine may join again, as another one.
    await asyncio.to_thread(machine.enrol, place.file.new_token())
    assert (machine.folder / KEY_FILE).read_bytes() != stolen
    for each in (machine, thief):
        each.close()


async def test_a_flood_of_tries_is_turned_away_before_work(place: Place) -> None:
    token = place.file.new_token()
    client = await place.client()
    for _ in range(MOST_REFUSALS):
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(client.enrol, new_key(), forged(token, secret=bytes(32)))
    with pytest.raises(QueueFull) as full:
        await asyncio.to_thread(client.enrol, new_key(), token)
    assert full.value.retry_after_s is not None
    assert 0 < full.value.retry_after_s <= 60
    client.close()
    assert place.file.register().machines == []


async def test_false_signatures_and_callers_that_leave_count_as_refused_and_fill_no_log(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    authority = place.file.authority
    false = enrolment_request(new_key(), bytes(32), place.file.new_token().written)
    assert isinstance(await outcome(place, false), InvalidRequest)
    runs, goes_on, all_wait = threading.Event(), threading.Event(), asyncio.Event()
    load, begin, begun, started = RegisterFile.register, Attempts.begin, list[str](), list[RegisterFile]()

    def noted(attempts: Attempts, address: str, now_s: float) -> None:
        begin(attempts, address, now_s)
        begun.append(address)
        if len(begun) == MOST_REFUSALS - 1:
            all_wait.set()

    def slow(file: RegisterFile) -> Register:
        started.append(file)
        runs.set()
        goes_on.wait(10)
        return load(file)

    monkeypatch.setattr(Attempts, "begin", noted)
    monkeypatch.setattr(RegisterFile, "register", slow)
    async with grpc.aio.secure_channel(
        place.address, grpc.ssl_channel_credentials(authority.certificate_pem)
    ) as channel:
        stub = IssuerServiceStub(channel)
        calls = [stub.Enrol(false, timeout=10) for _ in range(MOST_REFUSALS - 1)]
        await asyncio.to_thread(runs.wait, 10)
        # All of them wait behind the first one, whose thread does not end with its caller.
        await asyncio.wait_for(all_wait.wait(), 10)
        *left, stays = calls
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert "INVALID_REQUEST" in outcomes(caplog)
        while outcomes(caplog).count("CANCELLED") < len(left):
            assert isinstance(await outcome(place, false), QueueFull)
        assert isinstance(await outcome(place, false), QueueFull)
        assert len(started) == 1
        goes_on.set()
        with pytest.raises(grpc.RpcError):
            await stays
    assert "QUEUE_FULL" not in outcomes(caplog)


def outcomes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The outcomes that the audit log has."""
    return [getattr(each, "outcome", "") for each in caplog.records]


@pytest.mark.parametrize("role", [Role.BLOCK, Role.ROUTER, Role.CLIENT, Role.OPERATOR])
async def test_nothing_else_of_the_stack_plays_the_issuer(tmp_path: Path, role: Role) -> None:
    impostor = Place(tmp_path, role)
    await impostor.process.start()
    try:
        token = impostor.file.new_token()
        with pytest.raises(ServiceUnavailable, match="nothing was sent"):
            await asyncio.to_thread(impostor.membership().enrol, token)
        assert [each.uses for each in impostor.file.register().tokens] == [16]
    finally:
        await impostor.process.stop()


@pytest.mark.parametrize("is_own_first", [False, True])
async def test_an_authority_that_is_sent_along_is_not_trusted(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own_first: bool
) -> None:
    """The authority's certificate is public, so an impostor can send it, together with one of its own."""
    file = RegisterFile(tmp_path / "impostor" / "state")
    both = [place.file.authority.certificate_pem, file.authority.certificate_pem]

    async def both_authorities(*_: object) -> pb.GetTrustResponse:
        return pb.GetTrustResponse(authority=b"".join(reversed(both) if is_own_first else both))

    token = place.file.new_token()
    monkeypatch.setattr(IssuerServicer, "GetTrust", both_authorities)
    impostor = Place(tmp_path / "impostor")
    await impostor.process.start()
    try:
        machine = impostor.membership()
        with pytest.raises(StartupError, match="another stack"):
            await asyncio.to_thread(machine.enrol, token)
        assert [each.name for each in machine.folder.iterdir()] == ["join.lock"]
    finally:
        await impostor.process.stop()


async def test_a_revocation_list_counts_only_if_the_authority_signed_it(place: Place) -> None:
    machine = place.membership()
    await asyncio.to_thread(machine.enrol, place.file.new_token())
    own = (machine.folder / REVOCATIONS_FILE).read_bytes()
    (place.state / REVOCATIONS_FILE).write_bytes(Authority().revocations([]))
    with pytest.raises(ServiceUnavailable, match="has not signed"):
        await asyncio.to_thread(machine.follow)
    assert (machine.folder / REVOCATIONS_FILE).read_bytes() == own


async def test_a_machine_outlives_a_full_disk_and_says_when_the_stack_is_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = place.membership()
    certificate = (await asyncio.to_thread(machine.enrol, place.file.new_token())).certificate

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Half of the certificate's life is over, by the clocks of issuer and machine.
    later_s = time.time() + CERTIFICATE_LIFETIME_S / 2 + 120
    monkeypatch.setattr(time, "time", lambda: later_s)
    with monkeypatch.context() as patched:
        patched.setattr("corolla.local.membership.write_private", full)
        with pytest.raises(StoreUnavailable, match="No space left"):
            await asyncio.to_thread(machine.follow)
    await asyncio.to_thread(machine.follow)
    newer = (machine.folder / CERTIFICATE_FILE).read_bytes()
    assert newer != certificate
    await asyncio.to_thread(machine.follow)
    assert (machine.folder / CERTIFICATE_FILE).read_bytes() == newer
    (machine.folder / AUTHORITY_FILE).write_bytes(Authority().certificate_pem)
    machine.close()
    again = place.membership()
    with pytest.raises(StartupError, match="another stack"):
        await asyncio.to_thread(again.follow)


async def test_a_token_goes_to_no_issuer_of_another_stack(place: Place, tmp_path: Path) -> None:
    other = RegisterFile(tmp_path / "other").new_token()
    with pytest.raises(StartupError, match="another stack"):
        await asyncio.to_thread(place.membership().enrol, other)
    closed = Membership("127.0.0.1:1", tmp_path / "closed")
    with pytest.raises(ServiceUnavailable, match="refused"):
        await asyncio.to_thread(closed.enrol, other)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Place]:
    """An issuer with the authority and the tokens of a release."""
    RoleTokens.make(tmp_path / "pods")
    place = Place(tmp_path, pods_dir=tmp_path / "pods")
    await place.process.start()
    yield place
    await place.process.stop()


def token_of(place: Place, role: Role) -> JoinToken:
    token = JoinToken.parse((place.state.parent / "pods" / f"{role.value}.token").read_text())
    assert token is not None
    return token


def names_in(certificate: bytes) -> tuple[Workload | None, list[str]]:
    found = x509.load_pem_x509_certificate(certificate)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return workload_of_certificate(found), names.get_values_for_type(x509.DNSName)


async def test_the_token_of_a_role_gives_certificates_of_that_role_for_ever(
    cluster: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ROLES:
        token, pod = token_of(cluster, role), cluster.membership(role.value)
        await asyncio.to_thread(pod.enrol_pod, token)
        first = (pod.folder / CERTIFICATE_FILE).read_bytes()
        own, names = names_in(first)
        assert own is not None
        assert own.role is role
        # An address in digits is none of DNS.
        assert names == (["redis"] if role is Role.REDIS else [])
        key = (pod.folder / KEY_FILE).read_bytes()
        await asyncio.to_thread(pod.follow, token)
        assert (pod.folder / CERTIFICATE_FILE).read_bytes() == first
        # A renewal, also after a new start, keeps name and key, so that one file changes.
        with monkeypatch.context() as later:
            later_s = time.time() + CERTIFICATE_LIFETIME_S / 2 + 120
            later.setattr(time, "time", lambda later_s=later_s: later_s)
            await asyncio.to_thread(pod.follow, token)
        second = (pod.folder / CERTIFICATE_FILE).read_bytes()
        assert second != first
        assert names_in(second)[0] == own
        assert (pod.folder / KEY_FILE).read_bytes() == key
        another = cluster.membership(f"another-{role.value}")
        other, _ = names_in((await asyncio.to_thread(another.enrol, token)).certificate)
        assert other is not None
        assert (other.role, other.name == own.name) == (role, False)
        for each in (pod, another):
            each.close()
    # Pods come and go without end, so the issuer keeps nothing of them.
    assert cluster.file.register().machines == []


async def test_a_changed_token_of_a_role_counts_at_once_and_the_old_one_no_longer(cluster: Place) -> None:
    old = token_of(cluster, Role.BLOCK)
    assert "does not know the token" in await cluster.refused(forged(old, secret=bytes(32)))
    assert "does not know the token" in await cluster.refused(forged(old, id="0" * 16))
    file = cluster.state.parent / "pods" / "block.token"
    file.unlink()
    RoleTokens.make(file.parent)
    assert "does not know the token" in await cluster.refused(old)
    new = token_of(cluster, Role.BLOCK)
    assert new.authority == old.authority
    pod = cluster.membership()
    assert (await asyncio.to_thread(pod.enrol, new)).role == "block"
    pod.close()
    # A key without a token is not known, though it has a certificate.
    with pytest.raises(Unauthenticated):
        await asyncio.to_thread(pod.enrol)


async def test_a_pod_waits_for_its_issuer_once_and_starts_without_it_later(
    cluster: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "tls"
    folder.parent.mkdir()
    threads, enrol_pod = set[str](), Membership.enrol_pod

    def noted(pod: Membership, token: JoinToken) -> None:
        threads.add(threading.current_thread().name)
        enrol_pod(pod, token)

    monkeypatch.setattr(Membership, "enrol_pod", noted)
    monkeypatch.setenv("COROLLA_JOIN_TOKEN_FILE", str(tmp_path / "pods" / "client.token"))
    monkeypatch.setenv("COROLLA_TLS_DIR", str(folder))
    port, address = cluster.process.port, cluster.address
    await cluster.process.stop()
    waiting = asyncio.create_task(asyncio.to_thread(enrolled, address))
    await until(lambda: folder.exists())
    assert not waiting.done()
    with monkeypatch.context() as others:
        others.delenv("COROLLA_TLS_DIR")
        cluster = Place(tmp_path, pods_dir=tmp_path / "pods", port=port)
    await cluster.process.start()
    (await waiting).close()
    certificate = (folder / CERTIFICATE_FILE).read_bytes()
    await cluster.process.stop()
    (await asyncio.to_thread(enrolled, address)).close()
    assert (folder / CERTIFICATE_FILE).read_bytes() == certificate
    # A signal that ends the start does not come within gRPC.
    assert threads == {"apart from signals"}
    with monkeypatch.context() as patched:
        patched.setenv("COROLLA_JOIN_TOKEN_FILE", str(tmp_path / "nowhere"))
        with pytest.raises(StartupError, match="cannot be read"):
            await asyncio.to_thread(enrolled, address)


async def test_the_issuer_replaces_its_own_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.issuer.service.LOOK_INTERVAL_S", 0.05)
    place = Place(tmp_path)
    await place.process.start()
    machine = place.membership()
    try:
        own = place.state / "issuer" / CERTIFICATE_FILE
        first = own.read_bytes()
        assert names_in(first)[0] == Workload("local", Role.ISSUER, "issuer")
        await asyncio.to_thread(machine.enrol, place.file.new_token())
        # A machine that slept for half a day has another time, while its loops have not moved.
        slept_s = time.time() + CERTIFICATE_LIFETIME_S / 2 + 1
        with monkeypatch.context() as later:
            later.setattr("corolla.issuer.service.time", SimpleNamespace(time=lambda: slept_s))
            await until(lambda: own.read_bytes() != first)
        # Machines that trusted the certificate before reach the issuer with their next question.
        await place.process.stop()
        place = Place(tmp_path, port=place.process.port)
        await place.process.start()
        await asyncio.to_thread(machine.follow)
    finally:
        machine.close()
        await place.process.stop()


async def test_tokens_stand_in_no_log(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token, machine = place.file.new_token(uses=1), place.membership()
    await asyncio.to_thread(machine.enrol, token)
    machine.close()
    await place.refused(token)
    written = "\n".join(f"{each.getMessage()} {vars(each)}" for each in caplog.records)
    assert "IssuerService/Enrol" in written
    assert token.written.rpartition(".")[2] not in written
    assert token.secret.hex() not in written


async def test_the_issuer_says_whether_it_met_the_machine_at_its_address(place: Place) -> None:
    machine, ports = place.membership(), Ports()
    await asyncio.to_thread(machine.enrol, place.file.new_token())
    port = ports.free()
    await asyncio.to_thread(machine.check_reach, "127.0.0.1", port)
    await asyncio.to_thread(machine.check_reach, "localhost", port)
    with pytest.raises(StartupError, match=r"sees this one at 127\.0\.0\.1, not at 192\.0\.2\.7.*overlay"):
        await asyncio.to_thread(machine.check_reach, "192.0.2.7", port)
    other = place.membership("other")
    await asyncio.to_thread(other.enrol, place.file.new_token())
    # Another machine's certificate does not count, and neither does a port where nothing is.
    assert not await met(place, machine, port, shown=other)
    assert not await met(place, machine, port)
    for each in (machine, other):
        each.close()
    ports.close()


async def met(place: Place, machine: Membership, port: int, shown: Membership | None = None) -> bool:
    """Whether the issuer meets a machine at a port where it shows the certificate of `shown`, if any does."""
    client, key = await place.client(), load_pem_private_key((machine.folder / KEY_FILE).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)

    def ask() -> str:
        try:
            with nullcontext() if shown is None else showing_certificate("127.0.0.1", port, shown.folder):
                client.check_reach(key, "127.0.0.1", port)
        except StartupError as failure:
            return failure.message
        finally:
            client.close()
        return ""

    said = await asyncio.to_thread(ask)
    assert said == "" or f"cannot reach this one at port {port}" in said
    return not said


async def test_strangers_have_the_issuer_connect_nowhere(place: Place) -> None:
    client, joined = await place.client(), place.membership()
    await asyncio.to_thread(joined.enrol, place.file.new_token())
    with pytest.raises(Unauthenticated, match="does not know"):
        await asyncio.to_thread(client.check_reach, new_key(), "127.0.0.1", 9)
    key = load_pem_private_key((joined.folder / KEY_FILE).read_bytes(), None)
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    forged_request = pb.ReachRequest(public_key=der, signature=b"x" * 64, port=9)
    authority = place.file.authority.certificate_pem
    async with grpc.aio.secure_channel(place.address, grpc.ssl_channel_credentials(authority)) as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            await IssuerServiceStub(channel).Reach(forged_request, timeout=10)
    assert isinstance(error_of(refusal.value, place.address), InvalidRequest)
    client.close()
    joined.close()


async def test_wrong_clocks_and_other_releases_are_said_and_no_token_is_spent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, machine = place.file.new_token(), place.membership()
    for seconds, says in ((3600, "60 minutes behind"), (-1800, "30 minutes ahead of")):
        with monkeypatch.context() as patched:
            patched.setattr("corolla.issuer.servicer.time", shifted(seconds))
            with pytest.raises(ServiceUnavailable, match=f"this machine's clock is {says}"):
                await asyncio.to_thread(machine.enrol, token)
        machine.close()
        machine = place.membership()
    monkeypatch.setattr("corolla.issuer.servicer.RELEASE", "9.9")
    with pytest.raises(ReleaseMismatch, match=r"the stack runs Corolla 9\.9"):
        await asyncio.to_thread(machine.enrol, token)
    machine.close()
    assert [each.uses for each in place.file.register().tokens] == [16]


def shifted(seconds: float) -> SimpleNamespace:
    """A clock that is ahead."""
    return SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic)
