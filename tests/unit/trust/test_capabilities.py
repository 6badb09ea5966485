"""What a hop accepts about who opened a session for whom, and what it refuses."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from corolla.block_server.frame_checks import FrameChecks, Identity
from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.peers import Peer
from corolla.chain.identity import SessionIdentity
from corolla.chain.reservations import ChainBinding, OpenOptions
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CapabilityDenied, RoleDenied, SettingsError
from corolla.chassis.tasks import TaskGroup
from corolla.trust import credentials
from corolla.trust.authority import Authority
from corolla.trust.capabilities import GRACE_MS, RENEWAL_S, Capabilities
from corolla.trust.credentials import (
    CERTIFICATE_FILE,
    KEY_FILE,
    MAX_CERTIFICATES,
    Credentials,
    Signer,
    workload_of_certificate,
)
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.span import Span
from tests.identities import TRUST_DOMAIN, Identities

FINGERPRINT = "weights"
LEASE_MS = 60_000
FOREIGN = Workload("elsewhere", Role.CLIENT, "rogue")


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def hop(identities: Identities) -> Capabilities:
    return of(identities, Role.BLOCK, "1")


def of(identities: Identities, role: Role, name: str, **options: Any) -> Capabilities:
    return Capabilities(Credentials(identities.folder_of(role, name)), FINGERPRINT, **options)


def an_open(**changes: Any) -> pb.Open:
    opening = {
        "session_id": b"s" * 16, "epoch": 3, "tenant": "acme", "blocks": common_pb2.BlockSpan(start=2, end=5),
        "max_tokens": 40, "lease_ms": LEASE_MS, **changes,
    }  # fmt: skip
    return pb.Open(**opening)


def signed_by(capabilities: Capabilities, **changes: Any) -> pb.Open:
    opening = an_open(**changes)
    capabilities.sign(opening)
    return opening


def with_certificate_of(folder: Path, opening: pb.Open) -> pb.Open:
    """The capability, signed anew by the key in a folder, whichever workload's that is."""
    signer = Signer((folder / CERTIFICATE_FILE).read_bytes(), (folder / KEY_FILE).read_bytes())
    opening.capability.signature = signer.sign(b"corolla capability 1\0" + opening.capability.capability)
    opening.capability.certificates[:] = signer.certificates
    return opening


def test_what_a_client_service_and_a_library_sign_is_theirs(identities: Identities, hop: Capabilities) -> None:
    for role, name in ((Role.CLIENT, "1"), (Role.LIBRARY, "acme")):
        opening = signed_by(of(identities, role, name))
        assert hop.verify(opening) == Workload("test", role, name)
        handed_over = pb.Handover(
            session_id=opening.session_id, epoch=3, tenant="acme", blocks=common_pb2.BlockSpan(start=3, end=4),
            max_tokens=39, capability=opening.capability,
        )  # fmt: skip
        assert hop.verify(handed_over) == Workload("test", role, name)


@pytest.mark.parametrize(
    "changes",
    [
        {"session_id": b"o" * 16}, {"epoch": 2}, {"epoch": 4}, {"tenant": "victim"}, {"tenant": ""}, {"max_tokens": 41},
        {"blocks": common_pb2.BlockSpan(start=1, end=5)}, {"blocks": common_pb2.BlockSpan(start=2, end=6)},
    ],
    ids=str,
)  # fmt: skip
def test_it_is_for_one_session_only(identities: Identities, hop: Capabilities, changes: dict[str, Any]) -> None:
    capability = signed_by(of(identities, Role.CLIENT, "1")).capability
    with pytest.raises(CapabilityDenied, match="does not cover"):
        hop.verify(an_open(**changes, capability=capability))


def test_it_is_for_one_model_only(identities: Identities) -> None:
    opening = signed_by(of(identities, Role.CLIENT, "1"))
    with pytest.raises(CapabilityDenied, match="does not cover"):
        Capabilities(Credentials(identities.folder_of(Role.BLOCK, "1")), "other weights").verify(opening)


def test_altered_forged_and_missing_ones_are_worth_nothing(identities: Identities, hop: Capabilities) -> None:
    good = signed_by(of(identities, Role.CLIENT, "1")).capability
    other = signed_by(of(identities, Role.CLIENT, "2")).capability
    altered = pb.Capability.FromString(good.capability)
    altered.tenant = "victim"

    def changed(**changes: Any) -> pb.SignedCapability:
        parts = {"capability": good.capability, "signature": good.signature, "certificates": good.certificates}
        return pb.SignedCapability(**{**parts, **changes})

    for capability in (
        pb.SignedCapability(),
        changed(capability=altered.SerializeToString()),
        changed(signature=b""),
        changed(signature=good.signature[:-1] + bytes([good.signature[-1] ^ 1])),
        changed(signature=other.signature),
        changed(certificates=[]),
        changed(certificates=other.certificates),
        changed(certificates=[b"no certificate"]),
        changed(certificates=[good.certificates[0][:-1]]),
        changed(certificates=list(good.certificates) * (MAX_CERTIFICATES + 1)),
        changed(certificates=[good.certificates[0], bytes(1 << 20)]),
    ):
        with pytest.raises(CapabilityDenied):
            hop.verify(an_open(capability=capability))
    assert hop.verify(an_open(capability=good)).role is Role.CLIENT


def test_what_was_signed_for_another_purpose_is_no_capability(identities: Identities, hop: Capabilities) -> None:
    opening = signed_by(of(identities, Role.CLIENT, "1"))
    credentials = Credentials(identities.folder_of(Role.CLIENT, "1"))
    assert credentials.signer is not None
    opening.capability.signature = credentials.signer.sign(opening.capability.capability)
    with pytest.raises(CapabilityDenied):
        hop.verify(opening)


def test_it_expires(identities: Identities) -> None:
    opening = signed_by(of(identities, Role.CLIENT, "1", clock=lambda: 1000.0))
    end_s = 1000.0 + (LEASE_MS + GRACE_MS) / 1000
    of(identities, Role.BLOCK, "1", clock=lambda: end_s - 1).verify(opening)
    with pytest.raises(CapabilityDenied, match="expired"):
        of(identities, Role.BLOCK, "1", clock=lambda: end_s).verify(opening)


async def test_a_session_that_goes_on_can_be_handed_over_with_its_fresh_capability(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, sent = [1000.0], list[pb.Credit]()
    client, hop = (of(identities, role, "1", clock=lambda: now_s[0]) for role in (Role.CLIENT, Role.BLOCK))
    checks, opening = FrameChecks(cast(Identity, None), capabilities=hop), signed_by(client)
    request = OpenRequest(
        opening.session_id, opening.epoch, opening.tenant, bytes(16), False, opening.max_tokens, Span(2, 5),
        LEASE_MS / 1000, True, owner=Workload(TRUST_DOMAIN, Role.CLIENT, "1").owner, capability=opening.capability,
    )  # fmt: skip
    peer, stranger = (cast(Peer, SimpleNamespace(owner=owner)) for owner in (request.owner, "another"))
    plane = DataPlane(FINGERPRINT, TaskGroup(), capabilities=client)
    monkeypatch.setattr(plane, "notify", lambda address, frame: sent.append(frame))
    end_s = now_s[0] + (LEASE_MS + GRACE_MS) / 1000
    now_s[0] = end_s - 1
    identity = SessionIdentity(request.session_id, request.epoch, request.tenant)
    plane.renew([common_pb2.Hop(address="b:1", span=opening.blocks)], identity, request.max_tokens, LEASE_MS)
    (credit,) = sent
    assert (credit.session_id, credit.epoch, credit.end) == (request.session_id, request.epoch, 0)
    fresh = checks.renewed(request, credit.capability, peer)
    now_s[0] = end_s
    offer: dict[str, Any] = {
        "session_id": request.session_id, "epoch": request.epoch, "tenant": request.tenant, "blocks": opening.blocks,
        "max_tokens": request.max_tokens,
    }  # fmt: skip
    with pytest.raises(CapabilityDenied, match="expired"):
        hop.verify(pb.Handover(**offer, capability=request.capability))
    hop.verify(pb.Handover(**offer, capability=fresh.capability))
    for wrong, sender in (
        (request, stranger),
        (replace(request, max_tokens=request.max_tokens + 1), peer),
        (replace(request, epoch=request.epoch + 1), peer),
        (replace(request, owner="another"), peer),
    ):
        with pytest.raises(CapabilityDenied):
            checks.renewed(wrong, credit.capability, sender)


def test_capabilities_are_renewed_while_they_are_good_and_not_with_each_step() -> None:
    identity = SessionIdentity(bytes(16), 1, "tenant")
    binding = ChainBinding((identity,), common_pb2.Chain(), OpenOptions(8, transient=True), 8, renew_at_s=RENEWAL_S)
    times_s = (0.0, RENEWAL_S, RENEWAL_S + 1, 2 * RENEWAL_S)
    assert [binding.must_renew(each) for each in times_s] == [False, True, False, True]
    assert RENEWAL_S < GRACE_MS / 1000
    binding.raise_epoch([0])
    assert not binding.must_renew(9 * RENEWAL_S), "the hops do not have it open in this epoch"


@pytest.mark.parametrize("role", [Role.BLOCK, Role.ROUTER, Role.OPERATOR])
def test_who_opens_no_sessions_signs_for_none(identities: Identities, hop: Capabilities, role: Role) -> None:
    with pytest.raises(RoleDenied):
        of(identities, role, "1").sign(an_open())
    opening = with_certificate_of(identities.folder_of(role, "1"), signed_by(of(identities, Role.CLIENT, "1")))
    with pytest.raises(CapabilityDenied, match="may not open sessions"):
        hop.verify(opening)


def test_a_library_signs_for_its_own_tenant_only(identities: Identities, hop: Capabilities) -> None:
    opening = signed_by(of(identities, Role.LIBRARY, "mallory"), tenant="victim")
    with pytest.raises(RoleDenied, match="library"):
        hop.verify(opening)


def test_another_authority_and_another_trust_domain_are_strangers(
    identities: Identities, hop: Capabilities, tmp_path: Path
) -> None:
    strangers = Identities(tmp_path / "strangers")
    with pytest.raises(CapabilityDenied):
        hop.verify(signed_by(of(strangers, Role.CLIENT, "1")))
    identities.authority.issue(tmp_path / "foreign", FOREIGN, ())
    with pytest.raises(CapabilityDenied, match="may not open sessions"):
        hop.verify(signed_by(Capabilities(Credentials(tmp_path / "foreign"), FINGERPRINT)))


def test_a_block_server_cannot_sign_certificates_of_others(
    identities: Identities, hop: Capabilities, tmp_path: Path
) -> None:
    folder = identities.folder_of(Role.BLOCK, "rogue")
    own_key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
    own = x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
    client = x509.load_pem_x509_certificate((identities.folder_of(Role.CLIENT, "1") / CERTIFICATE_FILE).read_bytes())
    assert isinstance(own_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(client.subject)
        .issuer_name(own.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(own.not_valid_before_utc)
        .not_valid_after(own.not_valid_after_utc)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own_key.public_key()), critical=False)
    )
    for extension in client.extensions:
        if not isinstance(extension.value, x509.SubjectKeyIdentifier | x509.AuthorityKeyIdentifier):
            builder = builder.add_extension(extension.value, extension.critical)
    minted = tmp_path / "minted"
    minted.mkdir()
    pem = serialization.Encoding.PEM
    (minted / CERTIFICATE_FILE).write_bytes(builder.sign(own_key, hashes.SHA256()).public_bytes(pem))
    (minted / KEY_FILE).write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    opening = with_certificate_of(minted, signed_by(of(identities, Role.CLIENT, "1")))
    for others in ([], [own.public_bytes(serialization.Encoding.DER)]):
        opening.capability.certificates[1:] = others
        with pytest.raises(CapabilityDenied, match="not signed by a workload"):
            hop.verify(opening)


def test_a_certificate_that_has_ended_and_one_of_an_authority_that_went_sign_no_more(
    identities: Identities, tmp_path: Path
) -> None:
    credentials = Credentials(identities.folder_of(Role.BLOCK, "1"))
    hop = Capabilities(credentials, FINGERPRINT)
    opening = signed_by(of(identities, Role.CLIENT, "1"))
    hop.verify(opening)
    old, new = identities.authority, Authority()
    identities.trust(old, new)
    identities.replace(new)
    credentials.files.refresh()
    hop.verify(opening)
    identities.trust(new)
    credentials.files.refresh()
    with pytest.raises(CapabilityDenied):
        hop.verify(opening)


def test_chains_are_verified_once_until_they_end(
    identities: Identities, hop: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[Workload | None] = []

    def workload_of(certificate: x509.Certificate) -> Workload | None:
        verified.append(workload_of_certificate(certificate))
        return verified[-1]

    client = of(identities, Role.CLIENT, "1")
    monkeypatch.setattr(credentials, "workload_of_certificate", workload_of)
    for number in range(1000):
        hop.verify(signed_by(client, epoch=number + 1))
    assert verified == [Workload("test", Role.CLIENT, "1")]


def test_an_open_costs_little(identities: Identities, hop: Capabilities) -> None:
    """Little more than one signature and its verification, which take as long as the machine lets them."""
    client = of(identities, Role.CLIENT, "1")
    opening = signed_by(client)
    hop.verify(opening)
    key, algorithm, data = ec.generate_private_key(ec.SECP256R1()), ec.ECDSA(hashes.SHA256()), bytes(100)
    public_key, signature = key.public_key(), key.sign(data, algorithm)

    def took_s(work: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    works: list[Callable[[], object]] = [
        lambda: client.sign(an_open()),
        lambda: hop.verify(opening),
        lambda: key.sign(data, algorithm),
        lambda: public_key.verify(signature, data, algorithm),
    ]
    # The works take turns: what slows one for a while slows all of them.
    times_s = [list(map(took_s, works)) for _ in range(300)]
    signing_s, verifying_s, *bare_s = map(min, zip(*times_s, strict=True))
    assert signing_s + verifying_s < 2.3 * sum(bare_s)


def test_who_opens_sessions_needs_a_key_that_signs(identities: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have any that shakes hands."""
    key = rsa.generate_private_key(65537, 2048)
    monkeypatch.setattr("corolla.trust.authority.ec.generate_private_key", lambda curve: key)
    for role in (Role.CLIENT, Role.LIBRARY):
        with pytest.raises(SettingsError, match="ECDSA"):
            Credentials(identities.folder_of(role, "1"))
    assert Credentials(identities.folder_of(Role.BLOCK, "1")).signer is None


def test_who_was_revoked_signs_no_more(identities: Identities) -> None:
    revoked = identities.folder_of(Role.CLIENT, "revoked")
    opening = signed_by(Capabilities(Credentials(revoked), FINGERPRINT))
    other = signed_by(of(identities, Role.CLIENT, "other"))
    hop_folder = identities.folder_of(Role.BLOCK, "1")
    identities.revoke(revoked)
    hop = Capabilities(Credentials(hop_folder), FINGERPRINT)
    with pytest.raises(CapabilityDenied, match="is not trusted any more"):
        hop.verify(opening)
    assert hop.verify(other).name == "other"
