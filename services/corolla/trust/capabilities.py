"""Signs and verifies capabilities: permissions to hold a session for a tenant. Each hop of a session verifies one.

The process that opens a session signs its capability. So a hop need not believe another hop about the tenant: it trusts
the key in the certificate of a client service or library.
"""

import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from corolla.chassis.errors import CapabilityDenied, RoleDenied
from corolla.trust.credentials import Credentials
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb

_PURPOSE: Final = b"corolla capability 1\0"
"""The prefix of the signed bytes. It sets them apart from TLS handshakes, which the same key signs."""
_SIGNERS: Final = frozenset({Role.CLIENT, Role.LIBRARY})
GRACE_MS: Final = 3_600_000
"""The time for which a capability outlasts the session's lease. While steps renew the lease, it is renewed, too."""
RENEWAL_S: Final = 1800.0
"""After so many seconds, a session that goes on gets fresh capabilities. With an expired one it cannot be handed over;
another server then computes it again, with the same tokens."""


class Capabilities:
    """Signs and verifies the capabilities of one model's sessions.

    Args:
        clock: A function that returns the Unix time in seconds.
    """

    def __init__(self, credentials: Credentials, fingerprint: str, clock: Callable[[], float] = time.time) -> None:
        self._credentials = credentials
        self._fingerprint = fingerprint
        self._clock = clock

    def sign(self, opening: pb.Open) -> None:
        """Adds the capability that `opening` needs. Raises RoleDenied in a process that may not open sessions."""
        signer = self._credentials.signer
        if signer is None:
            raise RoleDenied("this process opens no sessions")
        capability = pb.Capability(
            fingerprint=self._fingerprint,
            session_id=opening.session_id,
            epoch=opening.epoch,
            tenant=opening.tenant,
            blocks=opening.blocks,
            max_tokens=opening.max_tokens,
            expires_at_ms=self._now_ms() + opening.lease_ms + GRACE_MS,
        ).SerializeToString()
        signed = pb.SignedCapability(
            capability=capability, signature=signer.sign(_PURPOSE + capability), certificates=signer.certificates
        )
        opening.capability.CopyFrom(signed)

    def verify(self, asked: pb.Open | pb.Handover) -> Workload:
        """Verifies the capability of an open or handover, and returns the workload that opened the session.

        Raises:
            CapabilityDenied: The capability is invalid or expired, its signer may not open sessions, or it does not
                cover this session, tenant, epoch, blocks and tokens.
            RoleDenied: A library signed it for a tenant that is not its own.
        """
        signed = asked.capability
        holder = self._credentials.certificate_holders.find(signed.certificates)
        if holder is None or not holder.has_signed(signed.signature, _PURPOSE + signed.capability):
            raise CapabilityDenied("the session's capability is not signed by a workload that this server knows")
        workload = holder.workload
        if not self._credentials.is_valid(signed.certificates[0]):
            raise CapabilityDenied(
                "the certificate that signed for the session has expired, was revoked or is not trusted any more"
            )
        if not self._credentials.knows(workload) or workload.role not in _SIGNERS:
            raise CapabilityDenied("the workload that signed for the session has a role that may not open sessions")
        try:
            capability = pb.Capability.FromString(signed.capability)
        except DecodeError:
            raise CapabilityDenied("the signed message is not a capability") from None
        if workload.role is Role.LIBRARY and workload.name != capability.tenant:
            raise RoleDenied("a library may open sessions only for the tenant that its certificate names")
        if self._now_ms() >= capability.expires_at_ms:
            raise CapabilityDenied("the capability of the session has expired")
        if capability.fingerprint != self._fingerprint or not _covers(capability, asked):
            raise CapabilityDenied(
                "the session's capability does not cover what was asked (model, session, epoch, tenant, span or tokens)"
            )
        return workload

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _covers(capability: pb.Capability, asked: pb.Open | pb.Handover) -> bool:
    is_same = (capability.session_id, capability.epoch, capability.tenant) == (
        asked.session_id, asked.epoch, asked.tenant,
    )  # fmt: skip
    blocks = capability.blocks
    is_within = blocks.start <= asked.blocks.start and asked.blocks.end <= blocks.end
    return is_same and is_within and asked.max_tokens <= capability.max_tokens
